"""One safetensors file out of a checkpoint, and runs that start from such a file."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from recpipe.answers.plain import unshard, unshard_command
from recpipe.common import meter
from recpipe.common.tensors import TensorFiles
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.run import run
from tests.mutations import reseal

RECIPE = (
    "data.samples=3000",
    "data.batch_size=128",
    "data.tables={a: 3000, b/c: 80, d.e: 60}",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.eval_every=1.0",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``saved`` checkpoints, ``parameters`` and ``all.safetensors`` of one short run."""
    folder = tmp_path_factory.mktemp("trained")
    saved = f"trainer.checkpoint_dir={folder / 'saved'}"
    run(compose([*RECIPE, saved, f"task.export_parameters={folder / 'parameters'}"]), folder)
    unshard(folder / "saved", folder / "all.safetensors")
    return folder


def start(folder: Path, file: Path, *overrides: str) -> dict[str, np.ndarray]:
    """The tables after one step with hardly any learning rate, from ``file``."""
    still = ("optim.tables.lr=1e-30", "optim.dense.lr=1e-30", "trainer.max_steps=1", "trainer.eval_every=1")
    export = f"task.export_parameters={folder / 'parameters'}"
    run(compose([*RECIPE, *still, f"model.pretrained={file}", export, *overrides]), folder)
    return {
        "a": np.load(folder / "parameters" / "a.npy"),
        "b/c": np.load(folder / "parameters" / "b%2Fc.npy"),
    }


def test_the_file_has_all_tables_and_dense_parameters_by_name(trained: Path) -> None:
    tensors = load_file(trained / "all.safetensors")
    np.testing.assert_array_equal(tensors["a"], np.load(trained / "parameters" / "a.npy"))
    np.testing.assert_array_equal(tensors["b/c"], np.load(trained / "parameters" / "b%2Fc.npy"))
    dense = np.load(trained / "parameters" / "dense.npz")
    assert tensors.keys() == {"a", "b/c", "d.e", *dense}
    for name in dense:
        np.testing.assert_array_equal(tensors[name], dense[name])
    assert not list(trained.glob(".unshard*")), "temporary files are gone"


@pytest.mark.parametrize("overrides", [(), ("tiers.policy=lru",), ("tiers.sharded=true",)], ids="".join)
def test_a_run_starts_from_it(trained: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    found = start(tmp_path, trained / "all.safetensors", *overrides)
    for name, expected in load_file(trained / "all.safetensors").items():
        if name in found:
            np.testing.assert_array_equal(found[name], expected)


def test_rows_that_are_written_are_shown(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meter, "LINE_SECONDS", 0.0)
    assert unshard_command([str(trained / "saved"), str(tmp_path / "all.safetensors")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"\d\d:\d\d:\d\d  writing rows  3,140/3,140", lines[-2])
    assert lines[-1].startswith("wrote ")


def test_tables_keep_their_names_through_sharding(tmp_path: Path) -> None:
    """A checkpoint of sharded tables, unsharded, and gone on from by whole tables."""
    parts = [f"trainer.checkpoint_dir={tmp_path / 'saved'}", "trainer.checkpoint_every=10"]
    export = [f"task.export_parameters={tmp_path / 'parameters'}"]
    run(compose([*RECIPE, "tiers.sharded=true", "trainer.max_steps=10", *parts, *export]), tmp_path)
    unshard(tmp_path / "saved", tmp_path / "all.safetensors")
    tensors = load_file(tmp_path / "all.safetensors")
    for name, file in (("a", "a"), ("b/c", "b%2Fc"), ("d.e", "d.e")):
        np.testing.assert_array_equal(tensors[name], np.load(tmp_path / "parameters" / f"{file}.npy"))
    report = run(compose([*RECIPE, "trainer.max_steps=12", f"resume={tmp_path / 'saved'}"]), tmp_path / "on")
    assert report["quality"]["auc"] is not None


def test_what_the_file_lacks_keeps_its_first_values(trained: Path, tmp_path: Path) -> None:
    tensors = load_file(trained / "all.safetensors")
    save_file({"b/c.weight": tensors["b/c"]}, tmp_path / "one.safetensors")
    found = start(tmp_path / "some", tmp_path / "one.safetensors")
    np.testing.assert_array_equal(found["b/c"], tensors["b/c"])
    assert not np.array_equal(found["a"], tensors["a"])


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"nosuch": (80, 16)}, "'nosuch' is neither a table nor a dense parameter"),
        ({"a": (3000, 8)}, r"'a' is \(3000, 8\), but this model's is \(3000, 16\)"),
        ({"dense_arch.x": (1,)}, "neither a table nor"),
        ({}, "holds no tensors"),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, tensors: dict, words: str) -> None:
    save_file({n: np.zeros(shape, np.float32) for n, shape in tensors.items()}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=words):
        start(tmp_path, tmp_path / "x.safetensors")


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UserError, match=r"x\.safetensors is no safetensors file"):
        start(tmp_path, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"absent is no safetensors file"):
        start(tmp_path, tmp_path / "absent")


def test_numbers_that_are_no_floats_are_refused(tmp_path: Path) -> None:
    save_file({"a": np.zeros((3000, 16), np.int32)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"x\.safetensors is no safetensors file \('a' is I32, not F32 or"):
        TensorFiles.single(tmp_path / "x.safetensors")
    save_file({"a": np.ones((30, 16), np.float16)}, tmp_path / "x.safetensors")
    assert (TensorFiles.single(tmp_path / "x.safetensors").rows("a", 2, 5) == 1).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("state_dict"), "it lacks 'state_dict'"),
        (lambda t: t.update(state_dict=[1]), r"state_dict is \[1\], not a mapping"),
        (lambda t: t["state_dict"].update(x=torch.zeros(3).to_sparse()), "x is Tensor torch.float32"),
        (lambda t: t["state_dict"].update(x="y"), "state_dict.x is 'y', not Tensor"),
        (None, r"tables has 'a\.state' and not that table's weights"),
    ],
)
def test_a_checkpoint_that_lacks_something_is_refused(
    trained: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any] | None, words: str
) -> None:
    (checkpoint,) = (trained / "saved").glob("*.ckpt")
    broken = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    content = torch.load(broken / "trainer.pt", weights_only=True)
    if change is None:
        file = broken / "tables" / "a.safetensors"
        save_file({"a.state": load_file(file)["a.state"]}, file)
    else:
        change(content)
        torch.save(content, broken / "trainer.pt")
    reseal(broken, content["global_step"])
    with pytest.raises(UserError, match=words):
        unshard(broken, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def test_damaged_or_absent_checkpoints_are_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no whole checkpoint there"):
        unshard(tmp_path, tmp_path / "x.safetensors")
    (checkpoint,) = (trained / "saved").glob("*.ckpt")
    broken = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, broken)
    (broken / "tables" / "a.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match=r"a\.safetensors is damaged or missing"):
        unshard(broken, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()
