"""Quantized checkpoints: what is written is what is opened, and nothing half-written or altered is."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from recpipe_low_precision import checkpoint as quantized
from recpipe_low_precision.checkpoint import DIGEST, read_manifest, seal, write_quantized
from recpipe_low_precision.format import MANIFEST
from recpipe_low_precision.opened import open_quantized

import recpipe
from recpipe.answers.row_types import decode_rows, encode_rows
from recpipe.answers.stored import FloatCheckpoint
from recpipe.answers.trained import open_trained
from recpipe.cli import main
from recpipe.data.make import open_dataset
from recpipe.errors import UserError
from tests.quantizing import small_checkpoint

KINDS = {"a": "int8", "b": "int4", "c": "fp16", "d": "int2"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def source(checkpoint: Path) -> FloatCheckpoint:
    return open_trained(checkpoint).source()


def batch(checkpoint: Path):
    trained = open_trained(checkpoint)
    return next(open_dataset(trained.cfg.data, trained.cfg.seed).batches("eval", 250))


def test_scores_are_those_of_the_decoded_rows(
    checkpoint: Path, source: FloatCheckpoint, tmp_path: Path
) -> None:
    manifest = write_quantized(tmp_path / "q", source, KINDS, figures={"note": 1})
    assert {name: table.type for name, table in manifest.tables.items()} == KINDS
    assert read_manifest(tmp_path / "q") == manifest
    float_model = recpipe.load(checkpoint)
    with torch.no_grad():
        for name, parameter in float_model.named_parameters():
            table = name.rpartition("embedding_bags.")[2].partition(".")[0]
            if table in KINDS:
                kind = KINDS[table]
                parameter.copy_(decode_rows(encode_rows(parameter, kind), kind, 16))
    one = batch(checkpoint)
    with torch.no_grad():
        expected = float_model(one.dense_features, one.sparse).flatten()
        found = open_quantized(tmp_path / "q")(one.dense_features, one.sparse).flatten()
        exact = recpipe.load(checkpoint)(one.dense_features, one.sparse).flatten()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found - exact).abs().max() > 1e-4, "or rows were not quantized at all"


def test_its_bytes_are_those_it_says(source: FloatCheckpoint, tmp_path: Path) -> None:
    manifest = write_quantized(tmp_path / "q", source, KINDS)
    for name, table in manifest.tables.items():
        file = tmp_path / "q" / "tables" / f"{name}.safetensors"
        assert table.bytes <= file.stat().st_size <= table.bytes + 512


def test_pruned_rows_are_left_out(checkpoint: Path, source: FloatCheckpoint, tmp_path: Path) -> None:
    one = batch(checkpoint)
    asked = one.sparse["d"].values().numpy()
    kept = np.ones(4000, bool)
    kept[asked[0]] = False
    whole, pruned = (
        write_quantized(tmp_path / name, source, KINDS, left)
        for name, left in (("whole", None), ("pruned", {"d": kept}))
    )
    assert whole.tables["d"].kept is None
    assert pruned.tables["d"].kept == 3999
    with torch.no_grad():
        before, after = (
            open_quantized(tmp_path / name)(one.dense_features, one.sparse).flatten()
            for name in ("whole", "pruned")
        )
    touched = torch.from_numpy(asked == asked[0])
    assert (before != after)[touched].all()
    assert torch.equal(before[~touched], after[~touched])


def test_a_fault_leaves_nothing_and_an_older_one_as_it_was(
    source: FloatCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "q"
    first = write_quantized(target, source, KINDS)

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantized, "encode_rows", broken)
    with pytest.raises(KeyboardInterrupt):
        write_quantized(target, source, KINDS)
    assert [path.name for path in tmp_path.iterdir()] == ["q"]
    assert read_manifest(target) == first


def test_a_full_disk_is_said_in_one_line(
    source: FloatCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "DENSE", "/dev/full")
    with pytest.raises(UserError, match=r"cannot write .*: No space left.*; free space, or .*output="):
        write_quantized(tmp_path / "q", source, KINDS)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_other_files_is_not_replaced(source: FloatCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(UserError, match="holds other files"):
        write_quantized(tmp_path, source, KINDS)


@pytest.mark.parametrize("name", ["tables/b.safetensors", "dense.safetensors", "manifest.json"])
@pytest.mark.parametrize("harm", ["altered", "cut", "gone"])
def test_what_is_damaged_is_refused_and_named(
    source: FloatCheckpoint, tmp_path: Path, name: str, harm: str
) -> None:
    write_quantized(tmp_path / "q", source, KINDS)
    file = tmp_path / "q" / name
    content = bytearray(file.read_bytes())
    if harm == "gone":
        file.unlink()
    elif harm == "cut":
        file.write_bytes(content[:-3])
    else:
        content[-9] ^= 0x10
        file.write_bytes(content)
    with pytest.raises(UserError, match=file.name):
        open_quantized(tmp_path / "q")


def test_names_in_the_manifest_lead_nowhere_else(source: FloatCheckpoint, tmp_path: Path) -> None:
    write_quantized(tmp_path / "q", source, KINDS)
    file = tmp_path / "q" / "manifest.json"
    content = json.loads(file.read_text())
    content["files"]["../secret"] = content["files"].pop("dense.safetensors")
    file.write_text(json.dumps(content))
    seal(tmp_path / "q")
    with pytest.raises(UserError, match="other files than"):
        open_quantized(tmp_path / "q")


def test_the_manifest_is_covered_by_a_digest(source: FloatCheckpoint, tmp_path: Path) -> None:
    write_quantized(tmp_path / "q", source, KINDS)
    file, digest = tmp_path / "q" / MANIFEST, tmp_path / "q" / DIGEST
    whole = file.read_text()
    assert read_manifest(tmp_path / "q").step > 1
    file.write_text(re.sub(r'"step": \d+', '"step": 1', whole))
    with pytest.raises(
        UserError, match=r"manifest.json is damaged \(it is not as it was written, manifest.b2sum"
    ):
        read_manifest(tmp_path / "q")
    file.write_text(whole)
    for text in (b"", b"\xff", b"0" * 200):
        digest.write_bytes(text)
        with pytest.raises(UserError, match="manifest.json is damaged"):
            read_manifest(tmp_path / "q")
    digest.unlink()
    with pytest.raises(UserError, match="manifest.json is damaged"):
        read_manifest(tmp_path / "q")
    file.write_text(whole.replace('"schema": 2', '"schema": 1'))  # of an earlier version, which wrote none
    assert read_manifest(tmp_path / "q").schema == 1


def test_it_is_called_as_training_called_it(
    checkpoint: Path, source: FloatCheckpoint, tmp_path: Path
) -> None:
    write_quantized(tmp_path / "q", source, KINDS)
    one = batch(checkpoint)
    called = open_trained(tmp_path / "q").called
    assert called.kind == "clicks"
    with torch.no_grad():
        judged = called.judge(one)
    (scored,) = judged.tasks.values()
    assert scored is not None
    assert scored[0].shape == (one.size,)
    assert torch.isfinite(judged.losses).all()


def test_it_is_evaluated_and_predicted_as_a_checkpoint_is(source: FloatCheckpoint, tmp_path: Path) -> None:
    write_quantized(tmp_path / "q", source, KINDS)
    found = recpipe.evaluate(tmp_path / "q", None, "split=eval", quiet=True)
    whole = recpipe.evaluate(source.directory, None, "split=eval", quiet=True)
    apart = abs(found["loss"] - whole["loss"])
    assert 0 < apart < 0.02
    scores = recpipe.predict(tmp_path / "q", None, "scores=raw", quiet=True)
    assert scores.shape == (6000,)
    called, one = open_trained(tmp_path / "q").called, batch(source.directory)
    with torch.no_grad():
        assert np.array_equal(scores[4800:5050], called.predict(one).numpy())


@pytest.mark.soak  # places that are taken are tested alone
def test_the_command_replaces_no_quantized_checkpoint_unless_told(
    source: FloatCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    target = tmp_path / "q"
    write_quantized(target, source, KINDS)
    before = {file: file.read_bytes() for file in target.rglob("*") if file.is_file()}

    def said(status: int, *more: str) -> str:
        words = (str(source.directory), "+plugin=low_precision", f"output={target}", *more)
        monkeypatch.setattr(sys, "argv", ["recpipe", "quantize", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        told = str(capsys.readouterr().err)
        assert stop.value.code == status, told
        return told

    monkeypatch.chdir(tmp_path)
    whole = f"error: output={target}: exists already; choose another directory, or pass overwrite=true\n"
    assert said(2).endswith(whole)
    assert said(2, "overwrite=false").endswith(whole)
    assert before == {file: file.read_bytes() for file in target.rglob("*") if file.is_file()}
    said(0, "overwrite=true")
    assert before != {file: file.read_bytes() for file in target.rglob("*") if file.is_file()}
    assert read_manifest(target).judged


def test_it_is_not_quantized_again(source: FloatCheckpoint, tmp_path: Path) -> None:
    write_quantized(tmp_path / "q", source, KINDS)
    with pytest.raises(UserError, match="is quantized already"):
        recpipe.quantize(tmp_path / "q", None, "+plugin=low_precision", output=tmp_path / "r", quiet=True)


def test_without_the_package_a_line_names_it(source, tmp_path: Path, monkeypatch) -> None:
    write_quantized(tmp_path / "q", source, dict.fromkeys(source.shapes, "int8"))
    monkeypatch.setenv("RECPIPE_BLOCK", "low_precision")
    with pytest.raises(UserError) as error:
        open_trained(tmp_path / "q")
    assert str(error.value) == (
        f"{tmp_path / 'q'} is a quantized checkpoint, which needs the package recpipe_low_precision, "
        "which is blocked (RECPIPE_BLOCK)"
    )
