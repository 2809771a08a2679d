"""A stream that one rank reads for all: the parts of the trainers are the batches of the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from recpipe.data.config import StreamConfig
from recpipe.data.dataset import Dataset, WaitingStopped
from recpipe.data.select import join
from recpipe.data.stream import dealt
from recpipe.data.stream.dealt import Dealt
from recpipe.data.stream.stream import Stream
from recpipe.distributed import mail
from recpipe.distributed.launch import ProcessRank
from recpipe.errors import DataError, UserError
from recpipe.plugin.batch import BatchShare
from tests.data.test_stream import FEATURES, alike, lines, rows

FEW = {**FEATURES, "weight": "w"}


def config(folder: Path, **keys: Any) -> StreamConfig:
    own = {"path": str(folder), "features": FEATURES, "settle": 0.0, "end": "stop", "idle": 0.15, **keys}
    return StreamConfig(**own)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    content, made = [{**row, "w": n % 5} for n, row in enumerate(rows())], tmp_path / "incoming"
    made.mkdir()
    for number, low in enumerate(range(0, len(content), 40)):
        (made / f"{number}.jsonl").write_text(lines(content[low : low + 40]))
    return made


Open = Callable[[int, StreamConfig], Dealt]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Open:
    """The data of a rank, in one process: what rank 0 leaves stays there."""
    store = HashStore()
    monkeypatch.setattr(mail, "run_store", lambda: store)
    monkeypatch.setattr(dealt, "PATIENCE", 0.1)

    def made(rank: int, own: StreamConfig) -> Dealt:
        monkeypatch.setattr(ProcessRank, "current", lambda: ProcessRank(rank, 3, rank, 0))
        return Dealt(lambda: Stream(own))

    return made


def trained(found: Dataset, size: int, first: int = 0, part: Any = None) -> list[Any]:
    return [*found.of_epoch(0).batches("train", size, first, part)]


@pytest.mark.parametrize("keys", [{}, {"features": FEW}, {"negatives": {"feature": "user"}}])
def test_the_trainers_parts_are_the_batches_of_the_stream(
    keys: dict[str, Any], folder: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail, "PIECE", 1000)  # a message of several values
    if "negatives" in keys:
        keys = {"negatives": {"feature": "user", "sampling": "in_batch"}}
    own = config(folder, **keys)
    wanted = [*(alone := Stream(own)).batches("train", 32)]
    assert [len(batch.labels) for batch in wanted] == [32, 32, 32, 32, 17]
    ranks = [opened(rank, own) for rank in range(3)]
    assert {found.fingerprint for found in ranks} == {alone.fingerprint}
    assert [found.schema for found in ranks] == [alone.schema] * 3
    parts = [trained(found, 32, part=(rank, 3)) for rank, found in enumerate(ranks)]
    for whole, shares in zip(wanted, zip(*parts, strict=True), strict=True):
        assert all(isinstance(share, BatchShare) and share.total == len(whole.labels) for share in shares)
        assert [len(share.labels) for share in shares] == [
            len(each) for each in np.array_split(np.arange(len(whole.labels)), 3)
        ]
        together = join([replace(share) for share in shares])
        assert alike(together, whole)
        for name in ("weights", "log_q"):
            there = getattr(whole, name)
            assert there is None or bool((torch.cat([getattr(s, name) for s in shares]) == there).all())
    assert wanted[0].weights is not None if "features" in keys else wanted[0].weights is None
    assert (wanted[0].log_q is None) == ("negatives" not in keys)
    assert {found.last_batch for found in ranks} == {5}
    assert ranks[0].position_after(3) == {"2.jsonl": 16}
    assert ranks[0].missing == alone.missing != {}
    whole_ones = [trained(found, 32) for found in ranks[:2]]  # as tables that grow need them
    assert all(alike(*pair) for pair in zip(whole_ones[0], whole_ones[1], strict=True))


def test_looks_before_training_ask_nobody(folder: Path, opened: Open) -> None:
    first, other = opened(0, config(folder, end="wait")), opened(1, config(folder, end="wait"))
    looks = [next(found.batches("train", 30)) for found in (other, first, first)]
    assert len(looks[0].labels) == 30
    assert all(alike(look, looks[0]) for look in looks)
    assert len(next(first.batches("train", 500)).labels) == 40, "what is there"


def test_a_dealt_stream_goes_on_at_a_position(folder: Path, opened: Open) -> None:
    own = config(folder)
    wanted = [*Stream(own).batches("train", 32)]
    ranks = [opened(rank, own) for rank in range(2)]
    for found in ranks:
        found.resume_at(3, {"2.jsonl": 16})
    for found in ranks:
        assert all(alike(*pair) for pair in zip(trained(found, 32, 3), wanted[3:], strict=True))


def test_all_ranks_stop_at_one_batch(folder: Path, opened: Open) -> None:
    """Whichever is asked to; where rank 0 has left, the others do not wait."""
    ranks = [opened(rank, config(folder, end="wait")) for rank in range(2)]
    for asked in ranks:
        reads: list[Iterator[Any]] = [found.of_epoch(0).batches("train", 32) for found in ranks]
        for read in reads:
            for _ in range(4):
                next(read)
        asked.interrupt()
        for read in reads:
            with pytest.raises(WaitingStopped):
                next(read)
    with closing(ranks[0].of_epoch(0).batches("train", 32)) as read:  # an epoch that is left early
        next(read)
    with pytest.raises(WaitingStopped):
        trained(ranks[1], 32)
    Timer(0.1, ranks[1].interrupt).start()
    with pytest.raises(WaitingStopped):  # rank 0 is gone, and says nothing
        trained(ranks[1], 32)


def test_an_error_is_that_of_rank_0(folder: Path, opened: Open) -> None:
    (folder / "9.jsonl").write_text(lines([{**rows()[1], "click": 7}]))
    ranks = [opened(rank, config(folder)) for rank in range(2)]
    with pytest.raises(DataError) as own:
        trained(ranks[0], 32)
    with pytest.raises(UserError) as told:
        trained(ranks[1], 32)
    assert str(told.value) == str(own.value)
    assert "9.jsonl, row 1, column click: 7" in str(own.value)


def test_a_stream_that_cannot_be_opened_is_told_to_all(tmp_path: Path, opened: Open) -> None:
    for rank in range(2):
        with pytest.raises(UserError, match="nowhere: no such folder"):
            opened(rank, config(tmp_path / "nowhere"))
