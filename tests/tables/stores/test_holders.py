"""Rows partitioned over ranks: real processes over gloo, and the partition itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recpipe.distributed.ranks import Ranks
from recpipe.plugin.store import Records, StoreLayout
from recpipe.tables.stores.holders import HoldersStore, part_fill, part_layout
from recpipe.tables.stores.local import HostStore
from tests.processes import start_ranks
from tests.ranks import joined

LAYOUT = StoreLayout(("a", "b", "tiny"), (50, 33, 2), 5)


def fill(table: str, start: int, stop: int) -> Records:
    base = dict(zip(LAYOUT.tables, LAYOUT.bases, strict=False))[table]
    rows = np.arange(base + start, base + stop, dtype=np.float32)
    return np.repeat(rows[:, None], LAYOUT.width, axis=1)


@pytest.mark.parametrize("holders", [1, 2, 3])
def test_the_parts_are_a_partition_of_the_rows(holders: int) -> None:
    seen = []
    for rank in range(holders):
        ranks = Ranks(rank, holders, (0,), tuple(range(holders)))
        part, make = part_layout(LAYOUT, ranks), part_fill(LAYOUT, fill, ranks)
        starts = range(0, part.total_rows, 7)
        records = np.concatenate([make("rows", low, min(low + 7, part.total_rows)) for low in starts])
        assert np.array_equal(records[:, 0], np.arange(rank, LAYOUT.total_rows, holders))
        seen += records[:, 0].astype(int).tolist()
    assert sorted(seen) == list(range(LAYOUT.total_rows))


def test_one_process_is_a_group_of_one() -> None:
    store = HoldersStore(LAYOUT, fill, Ranks(), HostStore)
    rows = np.array([84, 3, 50])
    out = np.empty((3, 5), np.float32)
    store.gather(rows, out)
    assert out[:, 0].tolist() == [84, 3, 50]
    store.exchange_rows(rows, -out, rows, out)
    assert out[:, 0].tolist() == [-84, -3, -50], "a round writes before it reads"
    assert store.channel.traffic.messages == 0
    store.close()


def _trainer(
    rank: int, world: int, meeting: str, holders: tuple[int, ...], trainers: tuple[int, ...]
) -> None:
    with joined(rank, world, meeting) as _:
        ranks = Ranks(rank, world, trainers, holders)
        store = HoldersStore(LAYOUT, fill, ranks, HostStore)
        if not ranks.trains:
            store.serve()
            return
        rng = np.random.default_rng(7)
        truth = np.arange(LAYOUT.total_rows, dtype=np.float32)
        nothing = np.empty((0, 5), np.float32)
        for step in range(20):
            # Every trainer knows what all write: each writes its share, and reads rows of its own choice.
            written = rng.permutation(LAYOUT.total_rows)[: rng.integers(0, 30)]
            values = rng.normal(size=len(written)).astype(np.float32)
            share = slice(ranks.trainer, None, len(trainers))
            mine = np.repeat(values[share, None], 5, axis=1)
            read = np.unique(np.random.default_rng(step * 10 + rank).integers(0, LAYOUT.total_rows, rank * 9))
            out = np.empty((len(read), 5), np.float32)
            if step % 2:
                store.exchange_rows(written[share], mine, read, out)
            else:
                store.scatter(written[share], mine)
                store.gather(read, out)
            truth[written] = values
            assert np.array_equal(out, np.repeat(truth[read, None], 5, axis=1)), step
        store.scatter(np.empty(0, np.int64), nothing)
        assert store.channel.traffic.bytes_sent > 0
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize(("holders", "trainers"), [((0, 1), (0, 1)), ((2,), (0, 1)), ((0, 2), (0, 1))])
def test_rounds_over_processes(holders: tuple[int, ...], trainers: tuple[int, ...], tmp_path: Path) -> None:
    world = max(*holders, *trainers) + 1
    start_ranks(_trainer, (world, str(tmp_path / "meet"), holders, trainers), world)
