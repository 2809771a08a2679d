"""Orders of epochs: every sample once, another order each, any place without the ones before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recpipe.data import shuffle
from recpipe.data.config import FilesConfig, SyntheticConfig, parse_config
from recpipe.data.dataset import NumberedDataset
from recpipe.data.make import open_dataset
from recpipe.data.shuffle import Shuffled
from recpipe.errors import UserError
from recpipe.plugin.batch import Batch, BatchShare, total_weight

SIZE, TRAIN = 500, 400
FEATURES = {
    "labels": ["click"],
    "weight": "w",
    "features": [
        {"name": "user", "rows": 50},
        {"name": "word", "rows": 60},
        {"name": "seen", "kind": "sequence", "rows": 70},
        {"name": "number", "kind": "dense"},
    ],
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and windows of which a few hundred samples have several."""
    monkeypatch.setattr(shuffle, "BLOCK", 8)
    monkeypatch.setattr(shuffle, "WINDOW", 64)


def test_an_order_is_what_a_loop_makes_of_blocks_and_windows(small: None) -> None:
    order = Shuffled(203, seed=5, epoch=2)
    blocks, turn = order._drawn("blocks", 25).tolist(), order._key("turn") % 203
    wanted = []
    for window in range(4):
        size = min(64, 203 - 64 * window)
        for place in order._drawn(f"window {window}", size).tolist():
            block, offset = divmod(64 * window + place, 8)
            block = blocks[block] if block < 25 else block
            wanted.append((8 * block + offset + turn) % 203)
    assert order.between(0, 203).tolist() == wanted
    assert sorted(wanted) == list(range(203))


@pytest.mark.parametrize("samples", [1, 2, 7, 8, 63, 64, 65, 203, 512])
@pytest.mark.parametrize("within", [None, 2, 10, 1000])
def test_every_sample_comes_once_and_any_place_is_known(
    small: None, samples: int, within: int | None
) -> None:
    whole = Shuffled(samples, 1, 0, within).between(0, samples)
    assert np.array_equal(np.sort(whole), np.arange(samples))
    for low, high in ((0, 0), (samples // 3, samples), (samples // 2, samples // 2 + 1)):
        assert np.array_equal(Shuffled(samples, 1, 0, within).between(low, high), whole[low:high])
    if within is not None:
        assert np.array_equal(whole // within, np.arange(samples) // within), "neighbours alone are mixed"


def test_seeds_and_epochs_have_orders_of_their_own(small: None) -> None:
    orders = [Shuffled(300, seed, epoch, within).between(0, 300).tobytes()
              for seed in (0, 1) for epoch in (0, 1, 2) for within in (None, 100)]  # fmt: skip
    assert len(set(orders)) == len(orders)


def test_a_sample_comes_anywhere(small: None) -> None:
    """Over many epochs, about as often in each quarter; neighbours are seldom together."""
    places = np.empty((400, 256), np.int64)
    for epoch in range(400):
        places[epoch, Shuffled(256, 3, epoch).between(0, 256)] = np.arange(256)
    quarters = np.stack([(places // 64 == n).mean(0) for n in range(4)])
    assert quarters.min() > 0.15
    assert quarters.max() < 0.35
    apart = np.abs(np.diff(places, axis=1))
    assert (apart == 1).mean() < 0.05


def rows() -> pa.Table:
    rng = np.random.default_rng(4)
    return pa.table(
        {
            "click": rng.integers(0, 2, SIZE),
            "w": rng.integers(1, 9, SIZE) / 4,
            "user": [None if n % 9 == 0 else n % 40 for n in range(SIZE)],
            "word": [f"word {n % 31}" for n in range(SIZE)],
            "seen": [rng.integers(0, 99, n % 4).tolist() for n in range(SIZE)],
            "number": np.arange(SIZE, dtype=np.float64),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shuffle")
    pq.write_table(rows(), made / "rows.parquet")
    return made


def opened(folder: Path, seed: int = 7, **settings: object) -> NumberedDataset:
    made = {"eval_fraction": 0.2, "cache_dir": str(folder / "cache"), "features": FEATURES, **settings}
    dataset = open_dataset(FilesConfig(path=str(folder / "rows.parquet"), **made), seed)
    assert isinstance(dataset, NumberedDataset)
    return dataset


def numbers(batch: Batch) -> list[int]:
    return [int(value) for value in batch.dense[:, 0].tolist()]


def as_rows(batch: Batch) -> list[tuple[object, ...]]:
    """Each sample's values."""
    bags = []
    for feature in batch.sparse.to_dict().values():
        bags.append([part.tolist() for part in feature.values().split(feature.lengths().tolist())])
    assert batch.weights is not None
    return list(zip(numbers(batch), batch.labels.tolist(), batch.weights.tolist(), *bags, strict=True))


def test_shuffled_samples_are_those_of_the_file(folder: Path, small: None) -> None:
    plain, mixed = opened(folder), opened(folder, shuffle="all")
    known = {row[0]: row for batch in plain.batches("train", 64) for row in as_rows(batch)}
    assert len(known) == TRAIN
    orders = []
    for epoch in range(3):
        found = [row for batch in mixed.of_epoch(epoch).batches("train", 64) for row in as_rows(batch)]
        assert sorted(row[0] for row in found) == list(range(TRAIN))
        assert all(row == known[row[0]] for row in found)
        orders.append([row[0] for row in found])
        assert orders[-1] == Shuffled(TRAIN, 7, epoch).between(0, TRAIN).tolist()
    assert orders[0] != orders[1] != orders[2] != orders[0] != sorted(orders[0])
    assert [numbers(b) for b in mixed.batches("eval", 64)] == [numbers(b) for b in plain.batches("eval", 64)]
    assert [numbers(b) for b in mixed.of_epoch(2).batches("train", 64, 3)] == [
        orders[2][low : low + 64] for low in range(192, TRAIN, 64)
    ]


@pytest.mark.parametrize("count", [1, 3])
def test_ranks_share_the_same_batches(folder: Path, small: None, count: int) -> None:
    mixed = opened(folder, shuffle=100).of_epoch(1)
    whole = list(mixed.batches("train", 70))
    shares = [list(mixed.batches("train", 70, part=(n, count))) for n in range(count)]
    for number, batch in enumerate(whole):
        own = [part[number] for part in shares]
        assert [row for share in own for row in as_rows(share)] == as_rows(batch)
        for share in own:
            assert isinstance(share, BatchShare)
            assert (share.total, share.whole_weight) == (batch.size, total_weight(batch.weights))


def test_fingerprints_tell_orders_apart(folder: Path) -> None:
    found = [opened(folder, seed, shuffle=how).fingerprint for seed in (0, 1) for how in ("none", "all", 90)]
    assert len(set(found)) == 5
    assert found[0] == found[3], "without shuffling the seed does not matter"


def test_a_source_without_samples_by_number_is_shuffled_by_its_runs(small: None) -> None:
    settings = {"samples": 300, "eval_fraction": 0.0, "tables": {"a": 30, "b": 40}, "pooling": [1, 3]}
    plain, mixed = (open_dataset(SyntheticConfig(shuffle=how, **settings), 3) for how in ("none", 50))
    (all_rows,) = plain.batches("train", 300)
    order = Shuffled(300, 3, 0, 50).between(0, 300)
    found = torch.cat([batch.dense for batch in mixed.batches("train", 64)])
    assert torch.equal(found, all_rows.dense[torch.from_numpy(order)])
    assert sum(batch.sparse.values().numel() for batch in mixed.batches("train", 64)) == (
        all_rows.sparse.values().numel()
    )


def test_a_dropped_short_batch_is_not_mixed_in(folder: Path, small: None) -> None:
    mixed = opened(folder, shuffle="all", last_batch="drop", batch_size=64)
    assert sorted(n for b in mixed.batches("train", 64) for n in numbers(b)) == list(range(TRAIN // 64 * 64))


@pytest.mark.parametrize("how", ["some", 1, 0, -5, 2.5])
def test_what_is_no_order_is_one_line(folder: Path, how: object) -> None:
    values = {"name": "files", "path": str(folder), "features": FEATURES, "shuffle": how}
    with pytest.raises(UserError, match=r"^data\.shuffle="):
        parse_config(values)
