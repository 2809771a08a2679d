"""One layout for the tables of all runs: whole tables and shards read what the other has saved."""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from recpipe.checkpoint import manifest
from recpipe.checkpoint import table_io as checkpoint
from recpipe.checkpoint.table_files import save_tables
from recpipe.checkpoint.table_io import TableCheckpointIO
from recpipe.common.files import lock_run_dir
from recpipe.common.tensors import new_tensors
from recpipe.distributed.ranks import Ranks
from recpipe.plugin.collection import TableCollection
from recpipe.plugin.tables import FILL_ROWS
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.sharding.own import TieredShard
from tests.tables import tiered_shards
from tests.tables.samples import CPU, table_set, tiers
from tests.tables.sharded import DIM, ROWS, Case, build, contents
from tests.tables.sharded import table_set as wide_tables

Contents = Mapping[str, tuple[np.ndarray, np.ndarray]]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """For disks."""
    for module in (checkpoint, manifest):
        monkeypatch.setattr(module, "sync", lambda path: None)


def io_of(collection: TableCollection) -> TableCheckpointIO:
    return TableCheckpointIO(collection, collection.tables.shapes())


def filled(collection: TableCollection) -> Contents:
    """Random rows in all tables; what it then holds."""
    rng = np.random.default_rng(0)
    for region in collection.regions():
        collection.write(region, tuple(rng.random(v.shape, np.float32) for v in collection.read(region)))
    return contents(collection)


def moved(one: TableCollection, other: TableCollection, folder: Path) -> tuple[Contents, Contents]:
    """What ``one`` holds, and ``other`` once it has read that."""
    written = filled(one)
    assert not alike(written, contents(other))
    io_of(one).save_checkpoint({"global_step": 4}, folder / "step-4.ckpt")
    io_of(other).load_checkpoint(folder / "step-4.ckpt")
    return written, contents(other)


def alike(one: Contents, other: Contents) -> bool:
    """In every bit."""
    assert one.keys() == other.keys()
    return all(np.array_equal(a, b) for n in one for a, b in zip(one[n], other[n], strict=True))


@pytest.mark.parametrize("back", [False, True], ids=["to shards", "from shards"])
@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        ("sgd", "column_wise"),
        ("adagrad", "column_wise"),
        ("rowwise_adagrad", "row_wise"),
        ("rowwise_adagrad", "data_parallel"),
    ],
)
def test_whole_tables_and_shards_read_what_the_other_saves(tmp_path, optimizer, kind, back) -> None:
    whole = ResidentCollection(wide_tables(optimizer), CPU)
    shards = build(Case(optimizer, {"*": kind}), Ranks())
    assert alike(*moved(shards, whole, tmp_path) if back else moved(whole, shards, tmp_path))


@pytest.mark.parametrize("back", [False, True], ids=["to shards", "from shards"])
def test_tiers_of_whole_tables_and_of_shards_read_what_the_other_saves(tmp_path, back) -> None:
    whole = tiers(wide_tables("adagrad"), "nocache", tmp_path / "store")
    case = tiered_shards.Case("adagrad", {"*": "column_wise"})
    with lock_run_dir(tmp_path / "run") as run_dir, tiered_shards.tiered(case, Ranks(), run_dir) as shards:
        assert alike(*moved(shards, whole, tmp_path) if back else moved(whole, shards, tmp_path))


@pytest.mark.parametrize("back", [False, True], ids=["to shards", "from shards"])
def test_the_one_state_of_rows_that_are_cut(tmp_path, back) -> None:
    """It is every part's, and of parts that differ their mean."""
    whole = ResidentCollection(wide_tables("rowwise_adagrad"), CPU)
    shards = build(Case("rowwise_adagrad", {"*": "column_wise"}), Ranks())
    if not back:
        assert len(shards.local["b"]) == 2
        written, _ = moved(whole, shards, tmp_path)
        for name in ROWS:
            for shard in shards.local[name]:
                weights, state = shard.read(0, ROWS[name])
                columns = slice(shard.column, shard.column + shard.shape[1])
                np.testing.assert_array_equal(weights, written[name][0][:, columns])
                np.testing.assert_array_equal(state, written[name][1])
        return
    filled(shards)
    for number, shard in enumerate(shards.local["b"]):
        weights, state = shard.read(0, ROWS["b"])
        shard.write(0, ROWS["b"], (weights, state + np.float32(number)))
    io_of(shards).save_checkpoint({"global_step": 4}, tmp_path / "step-4.ckpt")
    io_of(whole).load_checkpoint(tmp_path / "step-4.ckpt")
    expected = contents(shards)
    for name, (weights, state) in contents(whole).items():
        np.testing.assert_array_equal(weights, expected[name][0])
        np.testing.assert_allclose(state, expected[name][1], rtol=1e-6)
    again = build(Case("rowwise_adagrad", {"*": "column_wise"}), Ranks())
    again.load_tables(tmp_path / "step-4.ckpt" / "tables")
    for shard, mine in zip(shards.local["b"], again.local["b"], strict=True):
        np.testing.assert_array_equal(mine.read(0, ROWS["b"])[1], shard.read(0, ROWS["b"])[1])


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_the_library_reads_whole_tables(tmp_path, optimizer) -> None:
    """With its own reader and nothing of ours; a table has a file, and a state where there is one."""
    collection = ResidentCollection(table_set(optimizer), CPU)
    written = filled(collection)
    save_tables(tmp_path, collection, collection.tables.shapes())
    assert {file.name for file in tmp_path.iterdir()} == {f"{name}.safetensors" for name in "abc"}
    width = collection.tables.layout.width - collection.tables.dim
    with safe_open(tmp_path / "b.safetensors", framework="np") as opened:
        names = {"b.weight", *["b.state"] * width}
        assert set(opened.keys()) == names
        told = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
        assert told == {name: {"saved_offsets": [0, 0]} for name in names}
    empty = {f"{n}.weight": torch.empty(v[0].shape) for n, v in written.items()}
    empty |= {f"{n}.state": torch.empty(v[1].shape) for n, v in written.items() if width}
    load(empty, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    for name, (weights, state) in written.items():
        np.testing.assert_array_equal(empty[f"{name}.weight"].numpy(), weights)
        if width:
            np.testing.assert_array_equal(empty[f"{name}.state"].numpy(), state)


def test_tables_are_read_once_to_be_saved(tmp_path, monkeypatch) -> None:
    """Weights and state of a region together: they lie in one record, maybe on a disk."""
    asked: Counter[object] = Counter()
    collection = ResidentCollection(table_set("adagrad"), CPU)
    read = collection.read
    monkeypatch.setattr(collection, "read", lambda region: asked.update([region]) or read(region))
    save_tables(tmp_path, collection, collection.tables.shapes())
    assert asked == Counter(collection.regions())


def test_shards_in_tiers_are_read_once_to_be_saved(tmp_path, monkeypatch) -> None:
    asked: list[int] = []
    read = TieredShard.read
    monkeypatch.setattr(
        TieredShard, "read", lambda s, low, high: asked.append(high - low) or read(s, low, high)
    )
    case = tiered_shards.Case("adagrad", {"*": "row_wise"})
    with lock_run_dir(tmp_path / "run") as run_dir, tiered_shards.tiered(case, Ranks(), run_dir) as shards:
        shards.save_tables(tmp_path)
    assert sum(asked) == sum(ROWS.values())


def test_a_disk_that_is_full_is_no_signal(tmp_path) -> None:
    """What is written to a mapping there would end the process."""
    rows = np.zeros((FILL_ROWS, DIM), np.float32)
    with (
        pytest.raises(OSError, match="No space left") as raised,
        new_tensors(Path("/dev/full"), {"a": rows.shape}) as put,
    ):
        put("a", 0, rows)
    assert raised.value.errno == errno.ENOSPC
