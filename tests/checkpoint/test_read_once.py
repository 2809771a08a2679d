"""Tables that start from a checkpoint or a file are made of its rows, which are read once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import recpipe
from recpipe.answers.plain import unshard
from recpipe.checkpoint.table_files import open_tables
from recpipe.common.tensors import TensorFiles
from recpipe.config.compose import compose
from recpipe.plugin.tables import TableSet
from recpipe.run import run
from recpipe.tables.sharding import tables as shard_files
from recpipe.tables.stores.aio import Requests
from recpipe.tables.stores.ssd import SsdStore
from tests.resuming import before_training, going_on, saved

LRU = ("tiers.policy=lru", "tiers.resident_bytes=30%")
ROWS = {"a": 300, "b/c": 80}
ROUNDED = (*LRU, "+plugin=quantize", "plugins.quantize.cold=int8")
KINDS: dict[str, Sequence[str]] = {
    "resident": ("tiers.policy=resident",),
    "resident with a state for each weight": ("tiers.policy=resident", "optim.tables.name=adagrad"),
    "no cache": ("tiers.policy=nocache",),
    "host": (*LRU, "tiers.store=host"),
    "ssd": (*LRU, "tiers.store=ssd"),
    "ssd with a state for each weight": (*LRU, "tiers.store=ssd", "optim.tables.name=adagrad"),
    "partly frozen": (*LRU, "tiers.store=ssd", "optim.by_table={a: {lr: 0}}"),
    "rounded": ROUNDED,
    "in 16 bits": (*LRU, "+plugin=quantize", "plugins.quantize.storage=fp16"),
    "rounded and frozen": (*ROUNDED, "optim.tables.lr=0"),
    "sharded": ("tiers.sharded=true",),
    "sharded in tiers": ("tiers.sharded=true", *LRU, "tiers.store=ssd"),
    "sharded, rounded": ("tiers.sharded=true", *ROUNDED),
    "holders": (*LRU, "tiers.store=holders"),
    "bagpipe": (*LRU[1:], "+plugin=bagpipe"),
    "fae": (*LRU[1:], "+plugin=fae"),
    "het": (*LRU[1:], "+plugin=het"),
    "hotline": (*LRU[1:], "+plugin=hotline"),
    "slipstream": (*LRU[1:], "+plugin=slipstream"),
}
TWICE = ("rounded", "in 16 bits", "sharded, rounded")
"""Resident rows are read again: their store has fewer bits than they had."""
ELSEWHERE = ("resident", "no cache", "bagpipe", "fae", "hotline", "slipstream")
"""Resumed with the same bits in tests/training/test_trainer, in quantize's tests, and in the plugins' own."""
LIKE = (
    *("host", "ssd with a state for each weight", "resident with a state for each weight", "in 16 bits"),
    *("rounded and frozen", "sharded", "sharded, rounded"),
)
"""Resumed as "ssd", as "rounded" and "partly frozen", and as "sharded in tiers"."""


@pytest.fixture(scope="module")
def runs() -> dict[str, Path]:
    """The checkpoints that tests here have left, by kind."""
    return {}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts rows read by tensor, tables loaded by the library, first values made, and bytes written to an
    ssd store."""
    found: Counter[str] = Counter()
    rows, drawn, move = TensorFiles.rows, TableSet._drawn, SsdStore._move
    load = shard_files.load

    def read(self: TensorFiles, name: str, start: int, stop: int) -> NDArray[np.float32]:
        found[name] += stop - start
        return rows(self, name, start, stop)

    def made(self: TableSet, index: int, start: int, stop: int) -> NDArray[np.float32]:
        found["first values"] += stop - start
        return drawn(self, index, start, stop)

    def moved(self: SsdStore, blocks: Any, slots: Any, *, write: bool) -> None:
        requests: Requests = self._map.requests(blocks, slots, self._fds)
        found["bytes written"] += int(requests.lengths.sum()) * write
        move(self, blocks, slots, write=write)

    def loaded(tensors: dict[str, Any], **others: Any) -> None:
        found.update(dict.fromkeys(tensors, 0))
        found.update({name: ROWS[name.rpartition(".")[0]] for name in tensors})
        load(tensors, **others)

    monkeypatch.setattr(TensorFiles, "rows", read)
    monkeypatch.setattr(TableSet, "_drawn", made)
    monkeypatch.setattr(SsdStore, "_move", moved)
    monkeypatch.setattr(shard_files, "load", loaded)
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.soak] * (kind in LIKE)) for kind in KINDS]
)
def test_a_resumed_run_reads_each_row_once_and_makes_no_first_value(
    tmp_path: Path, kind: str, counted: Counter[str], runs: dict[str, Path]
) -> None:
    checkpoint = runs[kind] = saved(tmp_path / "run", KINDS[kind])
    assert counted["first values"] == sum(ROWS.values()), "a new run makes them"
    counted.clear()
    files = open_tables(checkpoint / "tables")

    def work(module: Any, io: Any) -> None:
        io.load_checkpoint(checkpoint)
        of_file, written = dict(counted), counted.pop("bytes written", 0)
        found, embeddings = dict(of_file), module.model.embeddings
        found.pop("bytes written", None)
        once = {name: ROWS[name.rpartition(".")[0]] for name in files.pieces}
        if kind in TWICE:
            assert found.keys() == once.keys()
            assert all(once[name] <= found[name] <= 2 * once[name] for name in once)
        else:
            assert found == once
        if "ssd" in " ".join(KINDS[kind]):
            assert written == embeddings.tier_figures().cold_bytes
        for region in embeddings.regions():
            weights, state = embeddings.read(region)
            if kind in TWICE or "rounded" in kind:
                continue  # rows in the store have fewer bits, as at first
            name, rows = region.table, (region.start, region.stop)
            np.testing.assert_array_equal(weights, files.rows(f"{name}.weight", *rows))
            if state.shape[1]:
                np.testing.assert_array_equal(state, files.rows(f"{name}.state", *rows))

    before_training(tmp_path / "on", [*KINDS[kind], f"resume={checkpoint}"], work)


def trained(folder: Path, overrides: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    export = f"task.export_parameters={folder / 'parameters'}"
    run(compose([*going_on(overrides), export]), folder)
    found = {file.stem: np.load(file) for file in (folder / "parameters").glob("*.npy")}
    return found | dict(np.load(folder / "parameters" / "dense.npz"))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.soak] * (kind in (*ELSEWHERE, *LIKE)))
        for kind in KINDS
        if kind != "het"
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_went_on(
    tmp_path: Path, kind: str, runs: dict[str, Path]
) -> None:
    checkpoint = runs.get(kind) or saved(tmp_path / "run", KINDS[kind])
    whole = trained(tmp_path / "whole", KINDS[kind])
    resumed = trained(tmp_path / "on", [*KINDS[kind], f"resume={checkpoint}"])
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


def test_an_evaluation_reads_each_row_once(tmp_path: Path, counted: Counter[str]) -> None:
    checkpoint = saved(tmp_path / "run", KINDS["ssd"])
    counted.clear()
    recpipe.evaluate(checkpoint, None, quiet=True)
    written = counted.pop("bytes written")
    assert counted == {f"{name}.{part}": rows for name, rows in ROWS.items() for part in ("weight", "state")}
    assert 0 < written < 2 * 4096 * len(ROWS) * 300 // 31


def test_of_a_file_its_tables_alone_are_read(tmp_path: Path, counted: Counter[str]) -> None:
    checkpoint = saved(tmp_path / "run", ())
    unshard(checkpoint, tmp_path / "all.safetensors")
    tensors = load_file(tmp_path / "all.safetensors")
    save_file({"a": tensors["a"]}, tmp_path / "a.safetensors")
    counted.clear()
    words = [*LRU, f"model.pretrained={tmp_path / 'a.safetensors'}", "optim.tables.lr=1e-30"]
    found = trained(tmp_path / "on", words)
    counted.pop("bytes written")
    assert counted == {"a": ROWS["a"], "first values": ROWS["b/c"]}
    np.testing.assert_array_equal(found["a"], tensors["a"])
