"""Checkpoints of earlier versions, with tables in .npy files: resumed from, loaded, exported, refused."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import recpipe
from recpipe.answers.plain import unshard
from recpipe.checkpoint import manifest
from recpipe.checkpoint import table_io as checkpoint
from recpipe.checkpoint.table_files import check_tables
from recpipe.checkpoint.table_io import TableCheckpointIO
from recpipe.config.compose import compose
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.run import run
from recpipe.tables.resident import ResidentCollection
from tests.checkpoint.older import as_npy
from tests.mutations import reseal
from tests.resuming import STEP, going_on, saved
from tests.tables.samples import CPU, dump, identical, stream, table_set, tiers, train
from tests.tables.sharded import Case, build, contents
from tests.tables.sharded import table_set as wide_tables


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """For disks."""
    for module in (checkpoint, manifest):
        monkeypatch.setattr(module, "sync", lambda path: None)


def io_of(collection) -> TableCheckpointIO:
    return TableCheckpointIO(collection, collection.tables.shapes())


@pytest.fixture(params=["sgd", "rowwise_adagrad", "adagrad"])
def older(request, tmp_path) -> tuple[ResidentCollection, Path]:
    """A collection that has been trained, and a checkpoint of it."""
    collection = ResidentCollection(table_set(request.param), CPU)
    train(collection, stream(4, True))
    path = tmp_path / "step-4.ckpt"
    io_of(collection).save_checkpoint({"global_step": 4}, path)
    return collection, as_npy(path)


ADAGRAD = pytest.mark.parametrize("older", ["adagrad"], indirect=True)


def test_rows_are_read_into_memory_and_tiers(older, tmp_path) -> None:
    collection, path = older
    assert len(list((path / "tables").iterdir())) == 6
    tables = table_set(collection.tables.optimizer.name, seed=77)
    for other in (ResidentCollection(tables, CPU), tiers(tables, "lru", tmp_path / "x")):
        assert not identical(dump(other), dump(collection))
        io_of(other).load_checkpoint(path)
        assert identical(dump(other), dump(collection))


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_rows_are_read_into_shards(tmp_path, optimizer) -> None:
    whole = ResidentCollection(wide_tables(optimizer), CPU)
    for region in whole.regions():
        values = whole.read(region)
        whole.write(region, tuple(np.random.default_rng(0).random(v.shape, np.float32) for v in values))
    io_of(whole).save_checkpoint({"global_step": 4}, tmp_path / "step-4.ckpt")
    shards = build(Case(optimizer, {"*": "row_wise"}), Ranks())
    io_of(shards).load_checkpoint(as_npy(tmp_path / "step-4.ckpt"))
    expected = contents(whole)
    for name, values in contents(shards).items():
        for read, written in zip(values, expected[name], strict=True):
            np.testing.assert_array_equal(read, written)


@pytest.mark.parametrize("part", ["weight", "state"])
@ADAGRAD
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (np.asfortranarray, r"<f4 \(600, 8\) in Fortran order"),
        (lambda a: a.astype(np.float64), r"<f8 \(600, 8\)"),
        (lambda a: a.astype(">f4"), r">f4 \(600, 8\)"),
        (lambda a: a.astype(object), r"\|O \(600, 8\)"),
        (lambda a: a.ravel(), r"<f4 \(4800,\)"),
        (lambda a: np.float32(1), r"<f4 \(\)"),
        (lambda a: a[:-1], r"is \(599, 8\), but the recipe's is \(600, 8\)"),
    ],
)
def test_another_array_in_a_tables_place_is_refused(older, part, make, words) -> None:
    """The manifest fits it, so that only what is in the file can tell."""
    collection, path = older
    file = path / "tables" / f"b.{part}.npy"
    np.save(file, make(np.load(file)), allow_pickle=True)
    reseal(path, 4)
    before = dump(collection)
    with pytest.raises(UserError, match=rf"b\.{part}\.npy.*{words}"):
        io_of(collection).load_checkpoint(path)
    assert identical(dump(collection), before), "other tables were read before"


@ADAGRAD
def test_an_array_that_is_cut_off_or_has_no_header_is_refused(older) -> None:
    collection, path = older
    file = path / "tables" / "b.weight.npy"
    data = file.read_bytes()
    for bad in (
        data[:-4],
        data + b"1234",
        b"",
        data[:9],
        data[:10] + b"(" * 118 + data[128:],
        b"\x93NUMPY\x09\x00",
    ):
        file.write_bytes(bad)
        reseal(path, 4)
        with pytest.raises(UserError, match=r"b\.weight\.npy is no table file of a checkpoint"):
            io_of(collection).load_checkpoint(path)


@ADAGRAD
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: (d / "b.weight.npy").unlink(), "table 'b' lacks its weights or its state"),
        (lambda d: (d / "b.state.npy").unlink(), "table 'b' lacks its weights or its state"),
        (lambda d: [f.unlink() for f in d.glob("b.*")], "tables has no 'b.weight'"),
        (lambda d: shutil.copy(d / "b.state.npy", d / "b.npy"), r"b\.npy: 'b' is of no table"),
        (lambda d: (d / "b.safetensors").touch(), r"holds \.npy and \.safetensors files"),
        (lambda d: shutil.copy(d / "b.state.npy", d / "%62.state.npy"), "'b.state' do not cover"),
    ],
)
def test_files_that_are_missing_or_too_many_are_refused(older, change, words) -> None:
    collection, path = older
    change(path / "tables")
    reseal(path, 4)
    with pytest.raises(UserError, match=words):
        io_of(collection).load_checkpoint(path)


@ADAGRAD
def test_another_models_tables_are_refused(older) -> None:
    _, path = older
    for optimizer, words in (
        ("sgd", "'a.state', which the recipe's tables have not"),
        ("rowwise_adagrad", r"a\.state\.npy: 'a.state' is \(10, 8\), but the recipe's is \(10, 1\)"),
    ):
        with pytest.raises(UserError, match=words):
            check_tables(path / "tables", table_set(optimizer).shapes())


# -- runs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run's checkpoint as it is now, and as it would have been."""
    now = saved(tmp_path_factory.mktemp("now"), ())
    copied = Path(shutil.copytree(now, tmp_path_factory.mktemp("older") / now.name))
    return now, as_npy(copied)


@pytest.mark.parametrize("overrides", [(), ("tiers.sharded=true",)], ids=["whole", "sharded"])
def test_a_run_goes_on_from_it(both, tmp_path, overrides: Sequence[str]) -> None:
    for folder, found in zip((tmp_path / "now", tmp_path / "older"), both, strict=True):
        export = f"task.export_parameters={folder / 'parameters'}"
        report = run(compose(going_on([*overrides, f"resume={found}", export])), folder)
        assert report["resumed"]["step"] == STEP
    names = sorted(file.name for file in (tmp_path / "now" / "parameters").iterdir())
    assert "b%2Fc.state.npy" in names
    for name in names:
        one, other = (tmp_path / kind / "parameters" / name for kind in ("now", "older"))
        assert one.read_bytes() == other.read_bytes() or name == "dense.npz", name
    (left,) = (tmp_path / "older" / "checkpoints").glob("*/tables/a.*") if not overrides else (None,)
    assert left is None or left.name == "a.safetensors", "what it saves itself is of now"


def test_it_is_loaded_and_exported(both, tmp_path) -> None:
    states = [recpipe.load(found).state_dict() for found in both]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert value.equal(states[1][name]), name
    tensors = []
    for found in both:
        unshard(found, tmp_path / "all.safetensors", overwrite=True)
        tensors.append(load_file(tmp_path / "all.safetensors"))
    assert tensors[0].keys() == tensors[1].keys() >= {"a", "b/c"}
    for name, value in tensors[0].items():
        np.testing.assert_array_equal(value, tensors[1][name])
