"""Linear layers: ranges, what is chosen, what stays in float32, and what the debugger shows of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from recpipe_low_precision import debugger, dense
from recpipe_low_precision.checkpoint import put_rows, read_manifest, write_quantized
from recpipe_low_precision.dense import Inputs, calibrate, weight_scales
from recpipe_low_precision.layers import Layer
from recpipe_low_precision.opened import open_quantized
from recpipe_low_precision.row_types import FLOAT, Choice
from recpipe_low_precision.slices import LAYER

import recpipe
from recpipe.answers.trained import open_trained
from recpipe.errors import UserError
from recpipe.plugin.errors import PluginError

BOTTOM = "dense_arch.model._mlp.0._linear"
WITH = ("+plugin=low_precision", "plugins.low_precision.types=[fp16]")


def inputs_of(x: torch.Tensor) -> Inputs:
    found = Inputs()
    found.widen(x)
    found.count(x)
    return found


def error(x: torch.Tensor, scale: float, zero: int, most: int) -> float:
    codes = (x / scale).round().add(zero).clamp(0, most)
    return float(((codes - zero) * scale - x).square().sum())


@pytest.mark.parametrize("most", [127, 255])
def test_ranges_make_the_smallest_error_and_cut_rare_values_off(most: int) -> None:
    torch.manual_seed(0)
    rare = torch.randn(1_000_000)
    rare[:3] = 40.0
    heavy = torch.distributions.StudentT(3.0).sample((20_000,))
    for x in (rare, heavy, heavy.relu(), -heavy.relu()):
        low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
        whole = (high - low) / most
        scale, zero = inputs_of(x).coded(most)
        least, by_ends = error(x, scale, zero, most), error(x, whole, round(-low / whole), most)
        assert least <= by_ends
        assert x is not rare or least < 0.8 * by_ends
        assert all(least < error(x, part * scale, zero, most) for part in (0.8, 1.25))


def test_ranges_of_nothing_and_of_what_is_not_finite() -> None:
    assert inputs_of(torch.zeros(5)).coded(255) == (1.0, 0)
    assert not inputs_of(torch.tensor([1.0, torch.inf])).finite
    scale, zero = inputs_of(torch.full((10,), 3.0)).coded(255)
    assert error(torch.full((10,), 3.0), scale, zero, 255) < 1e-3


def test_a_large_weight_does_not_coarsen_its_output() -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, 4000)
    weight[0, 7], weight[1] = 9.0, 0.0
    scales = weight_scales(weight)
    assert float(scales[0]) < 9 / 127
    assert float(scales[1]) == 1.0


@pytest.fixture
def layers(slice_of):
    slice_ = slice_of(0, 600)
    return slice_, calibrate(slice_, dict.fromkeys(slice_.tables, FLOAT), ["bfloat16", "int8"], 127)


def test_every_layer_has_its_error_and_its_range(layers) -> None:
    slice_, found = layers
    assert len(found) == 4
    for linear in found.values():
        assert 1e-4 < linear.errors["bfloat16"] < linear.errors["int8"] < 0.1
    own = found[f"{LAYER}{BOTTOM}"].low.layers["int8"]
    given = torch.cat([batch.dense_features for batch in slice_.batches])
    assert own.low >= float(given.min()) - own.scale
    assert own.high <= float(given.max()) + own.scale
    assert own.most == 127


def test_an_assignment_of_layers_is_what_is_written(layers, source, tmp_path: Path) -> None:
    slice_, found = layers
    base = dict.fromkeys(slice_.tables, FLOAT)
    exact = slice_.evaluate(base).logits
    assignment = base | {name: Choice("int8") for name in found}
    low = slice_.evaluate(assignment).logits
    assert 1e-4 < np.abs(low - exact).max() < 0.5
    assert np.array_equal(slice_.evaluate(base).logits, exact), "layers are in float32 again"
    kept = {linear.path: (linear.low.layers["int8"], linear.low.scales) for linear in found.values()}
    write_quantized(tmp_path / "q", source, dict.fromkeys(source.shapes, "fp32"), layers=kept)
    assert np.array_equal(slice_.evaluate_called(open_trained(tmp_path / "q").called).logits, low)


def test_a_layer_stays_in_float32_for_its_error_or_its_time(layers) -> None:
    _, found = layers
    linear = found[f"{LAYER}{BOTTOM}"]
    assert linear.fits(Choice("int8"), 0.1)
    assert not linear.fits(Choice("int8"), linear.errors["int8"] / 2)
    timed = replace(linear, seconds={"fp32": 1.0, "int8": 0.95, "bfloat16": 0.5})
    assert not timed.fits(Choice("int8"), 0.1)
    assert timed.fits(Choice("bfloat16"), 0.1)


@pytest.mark.parametrize(("wrong", "saturates"), [(0.1, True), (30.0, False)])
def test_a_broken_scale_of_a_layer_is_named(
    layers, source, tmp_path: Path, wrong: float, saturates: bool
) -> None:
    slice_, found = layers
    kept = {linear.path: (linear.low.layers["int8"], linear.low.scales) for linear in found.values()}
    write_quantized(tmp_path / "q", source, dict.fromkeys(source.shapes, "fp32"), layers=kept)
    called = source.called()
    put_rows(called.module, tmp_path / "q")
    sound = debugger.compare(slice_, called)
    assert not any(part.breaks for part in sound)
    assert {part.name for part in sound if part.kind == "int8"} == {linear.path for linear in found.values()}
    layer = called.module.get_submodule(BOTTOM)
    layer.layers["int8"] = replace(layer.layers["int8"], scale=wrong * layer.layers["int8"].scale)
    parts = debugger.compare(slice_, called)
    assert parts[0].name == BOTTOM
    assert [part.name for part in parts if part.breaks] == [BOTTOM]
    assert (parts[0].saturated > 0.1) == saturates
    assert (parts[0].range_used < 0.2) == (not saturates)


def test_the_checkpoint_and_the_report_have_the_layers(checkpoint: Path, tmp_path: Path) -> None:
    words = (*WITH, "plugins.low_precision.dense=int8", "plugins.low_precision.model_bound=0.05")
    report = recpipe.quantize(checkpoint, None, *words, output=tmp_path, quiet=True)
    told = report["dense"]["layers"]
    assert {layer["type"] for layer in told.values()} == {"int8"}
    assert report["dense"]["calibration"]["upper"] <= 0.05
    manifest = read_manifest(tmp_path / "quantized")
    assert set(manifest.layers) == set(told)
    assert all(layer.type == "int8" for layer in manifest.layers.values())
    shown = {part["name"]: part for part in report["numerics"]}
    assert all(shown[path]["kind"] == "int8" and shown[path]["range_used"] > 0.3 for path in told)
    assert "Dense part" in (tmp_path / "report.html").read_text()
    assert report["test"]["ne_difference"]["value"] != 0
    assert isinstance(open_quantized(tmp_path / "quantized").get_submodule(BOTTOM).layers["int8"], Layer)


def test_no_layer_is_changed_beyond_the_bounds(checkpoint: Path, tmp_path: Path) -> None:
    words = (*WITH, "plugins.low_precision.dense=int8", "plugins.low_precision.layer_error=1e-6")
    report = recpipe.quantize(checkpoint, None, *words, output=tmp_path, quiet=True)
    assert {layer["type"] for layer in report["dense"]["layers"].values()} == {"fp32"}
    assert all("error" in layer["why"] for layer in report["dense"]["layers"].values())
    content = json.loads((tmp_path / "quantized" / "manifest.json").read_text())
    assert content["layers"] == {}
    assert not (tmp_path / "quantized" / "layers.safetensors").exists()


def test_words_that_are_refused(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match="dense=int9: choose auto, float32, bfloat16 or int8"):
        recpipe.quantize(
            checkpoint, None, *WITH, "plugins.low_precision.dense=int9", output=tmp_path, quiet=True
        )
    monkeypatch.setattr(dense, "bfloat16_has_units", lambda: False)
    assert dense.types_for("auto") == ["int8"]
    with pytest.raises(UserError, match="this CPU has no bfloat16 units"):
        dense.types_for("bfloat16")
    monkeypatch.setattr(dense, "int8_adds_up", lambda: False)
    assert [dense.largest_code(knob) for knob in (None, True, False)] == [127, 127, 255]
