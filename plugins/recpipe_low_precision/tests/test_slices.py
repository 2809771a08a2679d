"""Evaluations from kept rows are those of the whole model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from recpipe_low_precision import debugger
from recpipe_low_precision.checkpoint import put_rows, write_quantized
from recpipe_low_precision.row_types import FLOAT, Choice
from recpipe_low_precision.slices import used_rows

import recpipe
from recpipe.answers.trained import open_trained
from recpipe.model.metrics import judged

KINDS = {"a": "int8", "b": "int4", "c": "fp16", "d": "int2"}
MIXED = {table: Choice(kind) for table, kind in KINDS.items()}


class Quiet:
    """A meter that shows nothing."""

    due = False


def test_scores_have_the_bits_of_the_model_that_is_written(slice_of, source, tmp_path: Path) -> None:
    slice_ = slice_of(100, 700)
    kept = slice_.evaluate(MIXED)
    write_quantized(tmp_path / "q", source, KINDS)
    whole = slice_.evaluate_called(open_trained(tmp_path / "q").called)
    assert np.array_equal(kept.logits, whole.logits)
    assert not np.array_equal(kept.logits, slice_.evaluate(dict.fromkeys(KINDS, FLOAT)).logits)


def test_float32_is_the_checkpoint_itself(slice_of, checkpoint: Path) -> None:
    slice_ = slice_of(0, 500)
    found = slice_.evaluate(dict.fromkeys(slice_.tables, FLOAT))
    model = recpipe.load(checkpoint)
    with torch.no_grad():
        expected = [model(b.dense_features, b.sparse).flatten() for b in slice_.batches]
    logits = torch.cat(expected)
    assert np.allclose(found.logits[:, 0], logits.numpy(), atol=1e-5)
    ne = found.losses[:, 0].mean() / slice_.base_entropy[0]
    assert ne == pytest.approx(judged("clicks", slice_.labels[:, 0], logits)["ne"], rel=1e-6)


def test_a_small_cache_gives_the_same_bits(slice_of) -> None:
    roomy, small = slice_of(0, 600), slice_of(0, 600, cache_bytes=1)
    for assignment in (MIXED, dict.fromkeys(KINDS, FLOAT), MIXED):
        assert np.array_equal(roomy.evaluate(assignment).logits, small.evaluate(assignment).logits)


def test_slices_are_apart(slice_of) -> None:
    assert len(slice_of(0, 330).labels) == 330
    both = np.concatenate((slice_of(0, 330).labels, slice_of(330, 600).labels))
    assert np.array_equal(both, slice_of(0, 600).labels)


def test_pruned_rows_are_those_that_training_never_looked_up(slice_of, source, tmp_path: Path) -> None:
    dataset = open_trained(source.directory).dataset
    batches = list(dataset.batches("train", 250))
    used = used_rows(source, batches, len(batches), Quiet())  # type: ignore[arg-type]
    seen = np.unique(np.concatenate([b.sparse["d"].values().numpy() for b in batches]))
    assert np.array_equal(np.flatnonzero(used["d"]), seen)
    assert len(seen) < 4000
    slice_ = slice_of(0, 600, used=used)
    chosen = {table: Choice(kind, table in ("d", "a")) for table, kind in KINDS.items()}
    write_quantized(tmp_path / "q", source, KINDS, {table: used[table] for table in ("d", "a")})
    whole = slice_.evaluate_called(open_trained(tmp_path / "q").called)
    assert np.array_equal(slice_.evaluate(chosen).logits, whole.logits)


# -- the numeric debugger ----------------------------------------------------------------------


def debugged(slice_, source, folder: Path, harm=lambda module: None) -> list[debugger.Compared]:
    write_quantized(folder, source, KINDS)
    called = source.called()
    put_rows(called.module, folder)
    with torch.no_grad():
        harm(called.module)
    return debugger.compare(slice_, called)


def test_nothing_breaks_in_a_sound_model(slice_of, source, tmp_path: Path) -> None:
    found = {part.name: part for part in debugged(slice_of(0, 600), source, tmp_path / "q")}
    assert not any(part.breaks for part in found.values())
    assert set(KINDS) < set(found)
    assert found["a"].snr > found["b"].snr > found["d"].snr
    assert found["a"].saturated == pytest.approx(0, abs=0.01)
    assert found["a"].range_used is not None
    assert found["a"].range_used > 0.95
    layers = [part for part in found.values() if part.downstream is not None]
    assert len(layers) == 4
    assert all(part.error == 0 for part in layers), "their weights are float32"
    assert any(part.downstream > 0 for part in layers), "and their inputs are not"


def test_a_broken_scale_is_named(slice_of, source, tmp_path: Path) -> None:
    path = next(iter({place.collection for place in source.places.values()}))

    def harm(module: torch.nn.Module) -> None:
        rows = module.get_submodule(path).rows_of("b")
        rows[:, :2] = (rows[:, :2].contiguous().view(torch.float16) / 4).view(torch.uint8)

    found = debugged(slice_of(0, 600), source, tmp_path / "q", harm)
    assert found[0].name == "b"
    assert [part.name for part in found if part.breaks] == ["b"]
    assert found[0].saturated is not None
    assert found[0].saturated > 0.3


def test_a_broken_layer_is_named_and_not_those_behind_it(slice_of, source, tmp_path: Path) -> None:
    name = "dense_arch.model._mlp.0._linear"

    def harm(module: torch.nn.Module) -> None:
        module.get_submodule(name).weight[3] *= 1.5

    found = debugged(slice_of(0, 600), source, tmp_path / "q", harm)
    assert [part.name for part in found if part.breaks] == [name]
    behind = [part for part in found if part.downstream is not None and part.name != name]
    assert all(part.error == 0 for part in behind)
    assert any(part.downstream > 0.01 for part in behind)
