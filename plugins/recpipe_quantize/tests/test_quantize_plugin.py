"""The plugin as users meet it: conformance, every owner of the cache, resuming, figures, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from recpipe_perf_model.testing import CostsSuite
from recpipe_quantize.plugin import Metered, Quantize
from safetensors.numpy import load_file

from recpipe.config.compose import compose
from recpipe.plugin.api import Invariant
from recpipe.plugin.errors import PluginConflict, PluginError
from recpipe.plugin.load import activate, installed
from recpipe.run import run
from recpipe.tasks.plugins import SAMPLE, default_knobs, listed
from recpipe.testing import SMALL, PluginSuite, Trained, train
from tests.resuming import RECIPE

KNOBS = {"cold": "fp32", "storage": "fp32", "forward": "fp32", "backward": "fp32", "tables": "*"}
ROWS, RECORD = 380, 28
"""Of ``RECIPE``: rows of all tables, and bytes of an encoded one (16 weights, scale, bias, one state)."""
OWNERS = {
    "nocache": ("tiers.policy=nocache",),
    "lru": ("tiers.policy=lru",),
    "lfu": ("tiers.policy=lfu",),
    **{n: (f"+plugin=[{n},quantize]",) for n in ("hotline", "fae", "slipstream", "bagpipe", "het")},
}


def quantize(**knobs: str) -> Quantize:
    return Quantize(**(KNOBS | knobs))


def recipe(owner: str, *more: str) -> list[str]:
    mine = OWNERS[owner]
    plugin = () if any("quantize" in word for word in mine) else ("+plugin=quantize",)
    quiet = ("tiers=host", "tiers.resident_bytes=30%", "trainer.checkpoint_every=null")
    return [*RECIPE, "data.samples=700", *quiet, *plugin, *mine, *more]


class TestQuantize(PluginSuite, CostsSuite):
    plugin = "quantize"
    beside: ClassVar = ("hotline",)  # the others' suites have it beside them
    soak: ClassVar = {
        "test_trains_beside_each_other_plugin": "hotline's suite has it beside it",
        "test_trains_alike_on_several_ranks": "test_quantize_ranks.py trains on two",
        "test_trains_other_tables_under_adagrad": "hotline's suite, and tests/any_model, have other tables",
        "test_resumes_as_if_it_had_never_stopped": "this file resumes, bitwise, under several owners",
        "test_leaves_the_process_as_it_was_when_resumed": "hotline's suite has it",
    }

    def test_rows_are_rounded_and_told_of(self, trained: Trained, baseline: Trained) -> None:
        shown = trained.report["plugins"]["quantize"]
        assert shown["cold_bytes"] == trained.report["memory"]["cold_bytes"]
        rows = trained.report["assembly"]["tiers"]["rows"]
        assert shown["float32_cold_bytes"] == pytest.approx(rows * shown["float32_record_bytes"])
        assert shown["saved_share"] == pytest.approx(
            1 - shown["record_bytes"] / shown["float32_record_bytes"]
        )
        assert shown["sampled_rows"] > 10
        assert 0 < shown["rounding_error_mean"] < shown["rounding_error_largest"] < 0.1
        assert shown["rounding_error_mean"] < shown["sampled_weight_mean"] / 50
        assert trained.report["altered"] == ["EXACT_GRADIENT"]
        io = trained.report["io"]
        assert 0 < io["bytes_read"] < 0.7 * io["rows_read"] * shown["float32_record_bytes"]
        for name, value in baseline.report["quality"].items():
            assert trained.report["quality"][name] == pytest.approx(value, abs=0.01)


@pytest.mark.parametrize("owner", OWNERS)
def test_under_every_owner_of_the_cache(owner: str, tmp_path: Path) -> None:
    report = run(compose(recipe(owner)), tmp_path)
    assert report["memory"]["cold_bytes"] == ROWS * RECORD
    shown = report["plugins"]["quantize"]
    assert shown["record_bytes"] == RECORD
    assert shown["sampled_rows"] > 0, "no row was written back"
    assert 0 < shown["rounding_error_largest"] < 0.01
    if owner != "het":  # whose bytes are those of its messages
        io = report["io"]
        assert io["bytes_read"] == io["rows_read"] * RECORD > 0
    owned = {"cold": "quantize", **({"cache": owner} if owner in report["plugins"] else {})}
    assert report["assembly"]["tables"]["a"].items() >= owned.items()


def test_on_an_ssd(tmp_path: Path) -> None:
    """Blocks hold more rows, and fewer are read."""
    plain, coded = (
        run(compose([*recipe("hotline", "tiers.store=ssd"), *knobs]), tmp_path / name)
        for name, knobs in (("plain", ["plugins.quantize.cold=fp32"]), ("coded", []))
    )
    assert plain["altered"] == []
    assert plain["plugins"]["quantize"] == {}
    assert coded["io"]["rows_read"] == plain["io"]["rows_read"] > 0
    assert coded["io"]["bytes_read"] < plain["io"]["bytes_read"]
    assert coded["memory"]["cold_bytes"] < plain["memory"]["cold_bytes"]


OWNERS_RESUMED = [
    *("lru", "hotline"),
    *(pytest.param(owner, marks=pytest.mark.soak) for owner in ("nocache", "slipstream", "het")),  # alike
]


@pytest.mark.parametrize("owner", OWNERS_RESUMED)
def test_resumed_is_bitwise_the_run_that_never_stopped(owner: str, tmp_path: Path) -> None:
    """BagPipe's window starts anew, so that its rows are written back, and rounded, at other times."""
    words = [word for word in recipe(owner) if "checkpoint_every" not in word]
    ends = [*words, "trainer.eval_every=1.0", "trainer.checkpoint_every=4"]
    export = "task.export_parameters="
    run(compose([*ends, "trainer.max_steps=8", f"{export}{tmp_path / 'whole'}"]), tmp_path / "a")
    run(compose([*ends, "trainer.max_steps=4"]), tmp_path / "b")
    rest = ["trainer.max_steps=8", f"resume={tmp_path / 'b'}", f"{export}{tmp_path / 'rest'}"]
    run(compose([*ends, *rest]), tmp_path / "c")
    files = sorted(file.name for file in (tmp_path / "whole").glob("*.np?"))
    assert files
    for name in files:
        whole, later = (np.load(tmp_path / end / name) for end in ("whole", "rest"))
        parts = whole.files if name.endswith("z") else [None]
        for part in parts:
            one, other = (whole, later) if part is None else (whole[part], later[part])
            assert np.array_equal(one, other), (name, part)


def test_float32_everywhere_is_the_run_without_it(tmp_path: Path) -> None:
    knobs = [f"plugins.quantize.{knob}=fp32" for knob in ("cold", "storage", "forward", "backward")]
    small = [*SMALL, "tiers.policy=lru"]
    mine, plain = train([*small, "+plugin=quantize", *knobs], tmp_path / "a"), train(small, tmp_path / "b")
    assert mine.report["altered"] == []
    assert mine.report["plugins"] == {"quantize": {}}
    for name, values in plain.parameters.items():
        assert np.array_equal(mine.parameters[name], values)


@pytest.mark.parametrize("owner", ["resident", "lru"])
def test_weights_of_16_bits(owner: str, tmp_path: Path) -> None:
    """Half as many bytes of weights: more rows in the same budget. The tables are not sharded for it."""
    words = [*SMALL, "tiers=host", f"tiers.policy={owner}", "tiers.resident_bytes=20000"]
    knobs = ("+plugin=quantize", "plugins.quantize.cold=fp32", "plugins.quantize.storage=fp16")
    plain, half = train(words, tmp_path / "a"), train([*words, *knobs], tmp_path / "b")
    assert half.report["altered"] == ["EXACT_GRADIENT", "TABLE_LAYOUT"]
    assert not half.report["assembly"]["sharded"]
    told, theirs = half.report["assembly"]["tiers"], plain.report["assembly"]["tiers"]
    assert (told["record_bytes"], theirs["record_bytes"]) == (2 * 8 + 4, 36)
    memory = half.report["memory"]
    if owner == "resident":
        assert memory["resident_bytes"] == plain.report["memory"]["resident_bytes"] * 20 / 36
    else:
        assert told["resident_rows"] > 1.7 * theirs["resident_rows"]
        assert memory["cold_bytes"] == told["rows"] * 20
    for name, values in half.parameters.items():
        if name.startswith("C"):  # a table; of the others Adam makes steps of one size
            np.testing.assert_allclose(values, plain.parameters[name], atol=0.02)


@pytest.mark.parametrize(
    ("knob", "value", "said"),
    [
        ("cold", "int4", "cold=int4 is unknown; did you mean int8"),
        ("storage", "int8", "storage=int8 is unknown; choose one of fp32, fp16"),
        ("storage", "bf16", "storage=bf16 is unknown"),
        ("forward", "half", "forward=half is unknown"),
        ("backward", "fp8", "backward=fp8 is unknown"),
    ],
)
def test_unknown_values_are_refused(knob: str, value: str, said: str) -> None:
    with pytest.raises(PluginError, match=f"plugins.quantize.{said}"):
        quantize(**{knob: value})


@pytest.mark.parametrize(
    ("knobs", "altered"),
    [
        ({}, set()),
        ({"cold": "fp16"}, {Invariant.EXACT_GRADIENT}),
        ({"backward": "bf16"}, {Invariant.EXACT_GRADIENT}),
        ({"storage": "fp16"}, {Invariant.EXACT_GRADIENT, Invariant.TABLE_LAYOUT}),
    ],
)
def test_what_is_altered_is_declared(knobs: dict[str, str], altered: set[Invariant]) -> None:
    assert quantize(**knobs).alters == altered
    assert (quantize(**knobs).contribute(SAMPLE).quantizer is None) == (not altered)


def test_who_relies_on_the_tables_layout_takes_cold_rows_of_8_bits_alone() -> None:
    theirs = default_knobs(installed()["bagpipe"])
    assert activate({"quantize": KNOBS | {"cold": "int8"}, "bagpipe": theirs})
    with pytest.raises(PluginConflict, match="'bagpipe' relies on this: tables keep the rows.*'quantize'"):
        activate({"quantize": KNOBS | {"storage": "fp16"}, "bagpipe": theirs})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "is to quantize cold rows, but all rows of its tables are resident in this run"),
        (
            ("tiers.policy=lru", "plugins.quantize.tables=x*"),
            r"quantizes tables 'x\*', but the model has: a, b/c",
        ),
    ],
)
def test_what_would_be_without_effect_is_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=rf"quantize \(.*{said}"):
        run(compose([*RECIPE, "+plugin=quantize", *words]), tmp_path)


def test_two_quantizers_are_told_apart(tmp_path: Path) -> None:
    """Neo's tables of 16 bits leave cold rows alone, and say so."""
    words = ("+plugin=[neo,quantize]", "plugins.neo.table_precision=fp16", "plugins.quantize.storage=fp16")
    with pytest.raises(PluginConflict, match=r"neo \(.*quantize \(.* both want to decide the storage"):
        run(compose([*RECIPE, *words]), tmp_path)


def test_some_tables_alone(tmp_path: Path) -> None:
    """Two groups: one of encoded rows, one of float32; the plan says so, too."""
    report = run(compose(recipe("lru", "plugins.quantize.tables=a")), tmp_path)
    groups = report["assembly"]["tiers"]["groups"]
    assert [(g["tables"], g["cold_record_bytes"]) for g in groups] == [(["a"], RECORD), (["b/c"], 68)]
    assert report["memory"]["cold_bytes"] == 300 * RECORD + 80 * 68
    assert report["assembly"]["tables"] == {"a": {"cold": "quantize"}}
    assert report["plugins"]["quantize"]["cold_bytes"] == 300 * RECORD


def test_it_is_listed_with_what_it_owns() -> None:
    found = listed(installed()["quantize"])
    assert not found.fault
    assert "quantizer (quantize.FewerBits: cold)" in found.uses


def test_an_optimizers_state_that_is_not_exact_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with a state of 8 bits the rows of a checkpoint do not hold what training left."""

    def states(folder: Path) -> np.ndarray:
        words = recipe("nocache", "optim.tables.lr=1e-30", "trainer.max_steps=4")
        words[words.index("trainer.checkpoint_every=null")] = "trainer.checkpoint_every=4"
        run(compose(words), folder)
        (file,) = folder.glob("checkpoints/*/tables/a.safetensors")
        return load_file(file)["a.state"]

    exact = states(tmp_path / "exact")
    assert exact.any()
    again = states(tmp_path / "again")
    assert np.array_equal(exact, again)
    decode = Metered.decode

    def coarse(self: Metered, encoded: Any, out: Any) -> None:
        decode(self, encoded, out)
        out[:, self.layout.dim :] = out[:, self.layout.dim :].astype(np.float16)

    monkeypatch.setattr(Metered, "decode", coarse)
    assert not np.array_equal(states(tmp_path / "coarse"), exact)
