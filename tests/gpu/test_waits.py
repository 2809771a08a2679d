"""What a GPU is not waited for, and what is not copied to it.

A pretended GPU keeps the account of most waits (``devices.WAITS``); torch warns of a real one's.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import recpipe
from recpipe.common.device import in_this_thread
from recpipe.config.compose import compose
from recpipe.data.dataset import Dataset
from recpipe.private_api import HostIds
from recpipe.run import run
from recpipe.training.recorder import Intervals
from tests.any_model.runs import left_by
from tests.any_model.test_loop import TECHNIQUES
from tests.any_model.zoo import OPTIMIZERS, OVERRIDES, ROWS, Events, TwoTower, by_hand, events, furthest, make
from tests.gpu.conftest import WHERE
from tests.gpu.test_runs import SMALL
from tests.pretend_gpu import devices


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """In the block, why this thread waits for the GPU, or would wait for a real one."""
    found: Counter[str] = Counter()
    here = threading.current_thread()
    if WHERE != "cuda":
        devices.WAITS.clear()
        yield found
        found.update(why for name, why in devices.WAITS if name == here.name)
        return

    def noted(message: Any, category: Any, file: str, line: int, *_: Any) -> None:
        if threading.current_thread() is here and "synchronizing CUDA" in str(message):
            found[f"{message} at {Path(file).name}:{line}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = noted
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def words(technique: str) -> tuple[str, ...]:
    """``codec``: cold rows are rounded, and so are those that the next batch needs again."""
    own = ("+plugin=quantize", "tiers.policy=nocache") if technique == "codec" else TECHNIQUES[technique]
    return (*OVERRIDES["sgd"], *own, "tiers.store=host", "tiers.resident_bytes=20%")


@pytest.mark.parametrize("technique", ["lru", "hotline"])
def test_a_loop_of_ones_own_does_not_wait(criteo: Dataset, technique: str) -> None:
    """With means, which read how many ids there are, and with micro-batches, which cut ids."""
    model, batches = make("two_tower"), events(criteo, 5)
    with recpipe.place(model, batches, *words(technique), "optim.tables.lr=0.2") as placed:
        dense = torch.optim.SGD(model.parameters(), lr=0.2)
        for _ in range(3):
            with waits() as found:
                for batch in placed.loader:
                    loss, _ = model(batch)
                    dense.zero_grad()
                    (loss / 2).backward()
                    dense.step()
        trained = left_by(model)
    assert not found, "what the model reads of ids has been copied ahead since it did so first"
    assert furthest(trained, by_hand(make("two_tower"), batches * 3, "sgd")) < 1e-6


class Reads(TwoTower):
    """Reads ids itself: one of each sample, how many it has in lists, and the lists' first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Embedding(ROWS, 1)

    def of_item(self, batch: Events) -> torch.Tensor:
        lists = batch.lists.to_dict()
        first = torch.zeros_like(batch.labels)
        some = lists["carted"].lengths() > 0
        first[some] = lists["carted"].values()[lists["carted"].offsets()[:-1][some]] / ROWS
        counts = batch.lists.lengths().view(2, -1).sum(0) + batch.lists.stride() / len(some)
        bias = self.bias(batch.sparse_features["c5"].values()) + (first + counts).unsqueeze(1) / 10
        return super().of_item(batch) + bias


def reads() -> Reads:
    torch.manual_seed(7)
    return Reads()


@pytest.mark.parametrize("technique", ["lru", "hotline"])
def test_a_model_that_reads_ids_gets_them(criteo: Dataset, technique: str) -> None:
    model, batches = reads(), events(criteo, 5)
    with recpipe.place(model, batches, *words(technique)) as placed:
        dense = OPTIMIZERS["sgd"][1](model.parameters())
        for _ in range(2):
            for batch in placed.loader:
                loss, _ = model(batch)
                dense.zero_grad()
                loss.backward()
                dense.step()
        trained = left_by(model)
    assert furthest(trained, by_hand(reads(), batches * 2, "sgd")) < 1e-6


def test_ids_that_nothing_reads_are_not_copied(criteo: Dataset, device: torch.device) -> None:
    model, batches = make("dlrm"), events(criteo, 4)
    with recpipe.place(model, batches, *words("lru")) as placed:
        dense = OPTIMIZERS["sgd"][1](model.parameters())
        for batch in placed.loader:
            logits = model(batch.dense_features, batch.sparse_features)
            dense.zero_grad()
            binary_cross_entropy_with_logits(logits.squeeze(1), batch.labels).backward()
            dense.step()
            assert batch.sparse_features.device() == batch.labels.device == device
            if device.type == "cuda":
                assert isinstance(batch.sparse_features, HostIds)
                assert not batch.sparse_features._read
        trained = left_by(model)
    assert furthest(trained, by_hand(make("dlrm"), batches, "sgd")) < 1e-6


@pytest.mark.parametrize("technique", ["lru", "hotline", "codec"])
def test_a_run_does_not_wait_more_for_more_steps(tmp_path: Path, technique: str) -> None:
    # The series of the report is read at its end.
    lines, first = inspect.getsourcelines(Intervals.series)
    at_end = tuple(f" at recorder.py:{line}" for line in range(first, first + len(lines)))
    found = []
    for steps in (6, 12):
        with waits() as waited:
            run(compose([*SMALL, *words(technique), f"trainer.max_steps={steps}"]), tmp_path / str(steps))
        found.append(Counter({why: count for why, count in waited.items() if not why.endswith(at_end)}))
    assert found[0] or WHERE == "cpu"
    assert not found[1] - found[0]


@pytest.mark.cuda
def test_a_backward_pass_is_not_handed_to_another_thread() -> None:
    def ran_in() -> int:
        leaf, seen = torch.ones(2, device="cuda", requires_grad=True), list[int]()
        rows = leaf * 2
        rows.register_hook(lambda _: seen.append(threading.get_ident()))  # type: ignore[no-untyped-call]
        torch.autograd.backward(rows, torch.ones_like(rows))
        return seen[0]

    with in_this_thread():
        assert ran_in() == threading.get_ident()
    assert ran_in() != threading.get_ident(), "torch does so by itself"
