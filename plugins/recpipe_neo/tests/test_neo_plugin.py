"""Neo as users meet it: conformance, knobs, limits of the planner, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from recpipe_neo.plugin import Neo
from recpipe_neo.tests.rig import measure_little
from recpipe_perf_model.testing import CostsSuite

from recpipe.config.compose import compose
from recpipe.plugin.api import Invariant
from recpipe.plugin.context import TableInfo
from recpipe.plugin.errors import PluginConflict, PluginError
from recpipe.plugin.load import activate, installed
from recpipe.run import run
from recpipe.tasks.plugins import SAMPLE, default_knobs
from recpipe.testing import SMALL, PluginSuite, Trained

KNOBS: dict[str, Any] = {
    "planner": "torchrec",
    "sharding": None,
    "forward_precision": "fp32",
    "backward_precision": "fp32",
    "table_precision": "fp32",
    "stochastic_rounding": False,
    "profile_dir": None,
}
TABLE = TableInfo("C1", 100, 16)


def neo(**knobs: Any) -> Neo:
    return Neo(**(KNOBS | knobs))


@pytest.fixture(autouse=True, scope="module")
def _few_measurements() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        measure_little(patch)
        yield


class TestNeo(PluginSuite, CostsSuite):
    plugin = "neo"
    beside: ClassVar = ("quantize",)  # tests/test_pairs.py has the other pairs
    knobs: ClassVar = {"planner": "karmarkar_karp"}  # the default would measure this machine first
    soak: ClassVar = {
        "test_trains_other_tables_under_adagrad": "tests/any_model, on two ranks",
        "test_resumes_as_if_it_had_never_stopped": "test_neo_ranks.py",
        "test_leaves_the_process_as_it_was_when_resumed": "hotline's suite has it",
        "test_trains_beside_each_other_plugin": "tests/checkpoint/test_read_once.py has quantize over shards",
        "test_trains_alike_on_several_ranks": "test_neo_ranks.py trains on two",
    }

    def test_tables_are_sharded_and_nothing_is_altered(self, trained: Trained) -> None:
        assert trained.report["assembly"]["sharded"]
        assert trained.report["assembly"]["shards"]["world"] == 1
        assert trained.report["altered"] == []


@pytest.mark.parametrize(
    ("knob", "value", "said"),
    [
        ("planner", "measure", "planner=measure is unknown; did you mean measured"),
        ("sharding", "rowwise", "sharding.*=rowwise is unknown; did you mean row_wise"),
        ("sharding", {"C1": ["table_wise", "nosuch"]}, "sharding.C1=nosuch is unknown; choose one of"),
        (
            "forward_precision",
            "fp8",
            "forward_precision=fp8 is unknown; choose one of fp32, fp16",
        ),
        ("backward_precision", "half", "backward_precision=half is unknown"),
        ("table_precision", "int8", "table_precision=int8 is unknown"),
        ("table_precision", "bf16", "table_precision=bf16 is unknown; did you mean fp16"),
    ],
)
def test_unknown_values_are_refused(knob: str, value: Any, said: str) -> None:
    with pytest.raises(PluginError) as caught:
        neo(**{knob: value})
    assert f"plugins.neo.{said}" in str(caught.value)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"table_precision": "fp16", "stochastic_rounding": True}, "ignores the wish on a CPU"),
        ({"sharding": {"nosuch*": "row_wise"}}, "no table is called 'nosuch"),
    ],
)
def test_what_would_be_ignored_is_refused(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(PluginError, match=said):
        neo(**knobs).contribute(SAMPLE)


def test_a_gpu_may_round_at_random() -> None:
    gpu = replace(SAMPLE, device="cuda:0")
    part = neo(table_precision="fp16", stochastic_rounding=True).contribute(gpu)
    assert part.planner is not None
    limits = part.planner.constrain(TABLE)
    assert limits is not None
    assert limits.stochastic_rounding is True
    assert part.quantizer is not None
    assert part.quantizer.storage(TABLE) == "fp16"


def test_the_first_pattern_that_matches_counts() -> None:
    plugin = neo(sharding={"C1": "row_wise", "C*": ["table_wise", "row_wise"]})
    limits = {name: plugin.limits(replace(TABLE, name=name), 2) for name in ("C1", "C2", "user")}
    assert {n: found and found.sharding_types for n, found in limits.items()} == {
        "C1": ["row_wise"],
        "C2": ["table_wise", "row_wise"],
        "user": None,
    }


@pytest.mark.parametrize(("dim", "ranks", "width"), [(16, 2, 8), (16, 4, 4), (16, 8, 4), (128, 3, 44)])
def test_named_types_may_cut_columns_for_every_rank(dim: int, ranks: int, width: int) -> None:
    limits = neo(sharding="column_wise").limits(replace(TABLE, dim=dim), ranks)
    assert limits is not None
    assert limits.min_partition == width
    assert neo().limits(TABLE, ranks).min_partition is None


def test_int8_keeps_rows_whole_and_refuses_what_splits_them() -> None:
    limits = neo(forward_precision="int8").limits(TABLE, 2)
    assert limits is not None
    assert limits.sharding_types is not None
    assert not {"row_wise", "table_row_wise", "grid_shard"} & set(limits.sharding_types)
    with pytest.raises(PluginError, match="'C1' is to be row_wise, but TorchRec has no int8 reduce-scatter"):
        neo(forward_precision="int8", sharding="row_wise").limits(TABLE, 2)


@pytest.mark.parametrize(
    ("knobs", "altered"),
    [
        ({}, set()),
        ({"forward_precision": "fp16"}, {Invariant.EXACT_GRADIENT}),
        ({"table_precision": "fp16"}, {Invariant.EXACT_GRADIENT, Invariant.TABLE_LAYOUT}),
    ],
)
def test_lower_precision_is_declared(knobs: dict[str, Any], altered: set[Invariant]) -> None:
    assert neo(**knobs).alters == altered
    quantizer = neo(**knobs).contribute(SAMPLE).quantizer
    assert bool(quantizer) == bool(knobs)
    if quantizer is not None:
        assert bool(quantizer.codecs()) == ("forward_precision" in knobs)
        assert quantizer.storage(TABLE) == knobs.get("table_precision")


@pytest.mark.parametrize("other", ["bagpipe", "slipstream"])
def test_tables_in_lower_precision_conflict_with_who_relies_on_their_layout(other: str) -> None:
    """Only what these knobs make of Neo counts: with float32 tables nothing of that is altered."""
    theirs = default_knobs(installed()[other])
    assert activate({"neo": KNOBS | {"forward_precision": "fp16"}, other: theirs})
    for order in (("neo", other), (other, "neo")):
        knobs = {"neo": KNOBS | {"table_precision": "fp16"}, other: theirs}
        with pytest.raises(
            PluginConflict, match=f"'{other}' relies on this: tables keep the rows.*'neo' alters"
        ):
            activate({name: knobs[name] for name in order})


def test_a_plan_from_a_file_names_no_planner(tmp_path: Path) -> None:
    recipe = [*SMALL, "task=plan", "+plugin=neo", "plugins.neo.planner=torchrec"]
    assert run(compose(recipe), tmp_path)["planner"] == "neo"
    by_file = [*recipe, f"tiers.plan={tmp_path / 'plan.json'}"]
    assert run(compose(by_file), tmp_path / "again")["planner"] is None
