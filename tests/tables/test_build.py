"""Recipe and claims against each other: what would be without effect is refused, and names who asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recpipe.common.files import lock_run_dir
from recpipe.distributed.ranks import Emulation, Ranks
from recpipe.errors import UserError
from recpipe.plugin.api import Contribution
from recpipe.plugin.assembly import Assembly, assemble
from recpipe.plugin.calls import Origin
from recpipe.plugin.context import GroupInfo, TableInfo
from recpipe.plugin.errors import PluginConflict, PluginError
from recpipe.plugin.policy import Cache, RowSpace
from recpipe.plugin.quantizer import Quantizer
from recpipe.plugin.tables import TableOptimizer, TableSet
from recpipe.tables.build import WIDEST, Place, build_tables, require_kernels
from recpipe.tables.config import TierConfig
from recpipe.tables.groups import ModelTables
from recpipe.tables.inputs import Inputs
from recpipe.tables.owners import GroupOwner, group_owners, warn_of_unused
from recpipe.tables.sharding.claims import wire_codecs
from recpipe.tables.sharding.plan import Shard, ShardPlan, TablePlan
from recpipe.tables.tiers.policies import Lru
from tests.pipeline.test_skipping import Odd
from tests.plugin.samples import ACME, Good, merged
from tests.tables.samples import CPU, DIM, FEATURES, table_set
from tests.tables.sharded_groups import SkipSmall

TIERS = TierConfig("resident", "host", "25%", None, prefetch=True, sharded=False)


class Kept(Cache):
    def __init__(self, tables: str) -> None:
        self.tables = tables

    def policy(self, space: RowSpace) -> Lru:
        return Lru(space)


class Sent(Quantizer):
    def codecs(self) -> dict[Any, Any]:
        return wire_codecs("fp16", "fp16")


def assembly(quantizer: Quantizer | None = None, cache: Sequence[Cache] = ()) -> Assembly:
    info = {f.name: TableInfo(f.name, f.rows, DIM) for f in FEATURES}
    return assemble([(Origin("acme"), Good(), Contribution(quantizer=quantizer, cache=cache))], info)


NOTHING = assembly()
TABLES = ModelTables.single(table_set())


@pytest.mark.parametrize(
    ("setting", "said"), [({"kernel": "uvm"}, "kernel=uvm"), ({"split_rows": True}, "split_rows=true")]
)
def test_settings_of_sharded_tables_need_sharded_tables(setting: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=rf"tiers.{said} is about sharded tables, and this run shards none"):
        group_owners(replace(TIERS, **setting), NOTHING, TABLES)
    group_owners(replace(TIERS, **setting, sharded=True), NOTHING, TABLES)


def test_a_slower_network_is_not_played_to_sharded_tables() -> None:
    emulated = replace(TIERS, emulate=Emulation(latency_us=5))
    group_owners(emulated, NOTHING, TABLES)
    with pytest.raises(UserError, match="tiers.emulate delays recpipe's own messages and not TorchRec's"):
        group_owners(replace(emulated, sharded=True), NOTHING, TABLES)


@pytest.mark.parametrize(
    ("config", "parts", "who"),
    [
        (replace(TIERS, sharded=True), NOTHING, "tiers.sharded=true"),
        (replace(TIERS, plan="plan.json"), NOTHING, "tiers.plan"),
        (TIERS, assembly(Sent()), r"plugin acme \(.*\), part acme.Sent,"),
    ],
)
def test_a_cache_of_whole_tables_and_shards_are_refused(
    config: TierConfig, parts: Assembly, who: str
) -> None:
    """Policies that decide from what they are shown are not: recpipe's own, and a plugin's that says so."""
    assert [o.name for o in group_owners(replace(config, policy="lru"), parts, TABLES)] == ["lru"]
    cached = replace(parts, caches=assembly(cache=[Kept("*")]).caches)
    with pytest.raises(PluginConflict, match=rf"{who} shards tables, but .*part acme.Kept, a cache, decides"):
        group_owners(config, cached, TABLES)
    shared = Kept("*")
    shared.by_shards = True
    cached = replace(parts, caches=assembly(cache=[shared]).caches)
    assert [o.name for o in group_owners(config, cached, TABLES)] == ["acme"]


@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_a_skipper_that_looks_at_residents_is_refused_over_shards(policy: str) -> None:
    """No rank knows them. One that does not look works, in tiers or not."""
    config = replace(TIERS, policy=policy)
    for skipper, looks in ((SkipSmall(), False), (Odd(), True)):
        parts = merged((ACME, Contribution(skipper=skipper)))
        group_owners(config, parts, TABLES)
        if not looks:
            group_owners(replace(config, sharded=True), parts, TABLES)
            continue
        with pytest.raises(
            PluginConflict, match=r"plugin acme \(.*\), part acme.Odd, a skipper, looks at which"
        ):
            group_owners(replace(config, sharded=True), parts, TABLES)


def test_tiers_of_shards_have_one_place_for_cold_rows() -> None:
    for key, value in (("store", "holders"), ("kernel", "uvm")):
        config = replace(TIERS, sharded=True, policy="lru", **{key: value})
        with pytest.raises(UserError, match=f"tiers.{key}={value} is another way to keep rows than tiers of"):
            group_owners(config, NOTHING, TABLES)


def test_every_group_has_its_own_owner() -> None:
    """A claim of some tables leaves the others to ``tiers.policy``; their rows keep their first values."""
    parts = assembly(cache=[Kept("b")])
    split = TABLES.split(lambda table: table in parts.caches)
    assert [group.tables.layout.tables for group in split.groups] == [("a", "c"), ("b",)]
    owners = group_owners(TIERS, parts, split)
    assert [owner.name for owner in owners] == ["resident", "acme"]
    assert [owner.slots for owner in owners] == [100, 150]
    assert [owner.name for owner in group_owners(replace(TIERS, policy="lfu"), parts, split)] == [
        "lfu",
        "acme",
    ]
    for group in split.groups:
        for name in group.tables.layout.tables:
            np.testing.assert_array_equal(
                group.tables.fill(name, 0, 10), TABLES.groups[0].tables.fill(name, 0, 10)
            )


def test_slots_are_what_a_cache_leaves_of_the_budget() -> None:
    class Buffered(Kept):
        def __init__(self, share: float) -> None:
            super().__init__("*")
            self.share = share

        def beside(self, group: GroupInfo) -> int:
            return int(self.share * group.slots * group.record_bytes)

    (whole,) = group_owners(TIERS, assembly(cache=[Buffered(0.0)]), TABLES)
    (part,) = group_owners(TIERS, assembly(cache=[Buffered(0.3)]), TABLES)
    assert (part.slots, part.resident_bytes) == (int(whole.slots * 0.7), whole.resident_bytes)
    with pytest.raises(
        PluginError, match=r"plugin acme .*keeps .* bytes beside the rows of a, b, c, of a budget"
    ):
        group_owners(TIERS, assembly(cache=[Buffered(1.1)]), TABLES)


def test_a_cache_of_all_tables_and_a_policy_are_refused() -> None:
    with pytest.raises(
        PluginConflict, match=r"part acme.Kept, decides which rows are resident, and so does tiers"
    ):
        group_owners(replace(TIERS, policy="lru"), assembly(cache=[Kept("*")]), TABLES)


@pytest.mark.parametrize(
    ("overrides", "owners", "said"),
    [
        (["optim=sgd", "tiers=ssd", "tiers.resident_bytes=10%"], ["resident"], True),
        (["tiers.store=host"], ["resident", "resident"], True),
        (["tiers=ssd"], ["resident", "lru"], False),
        (["tiers.prefetch=false"], ["resident"], False),
    ],
)
def test_a_budget_that_nothing_uses_is_said(
    overrides: list[str], owners: list[str], said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_unused(overrides, [GroupOwner(name, 1, 1) for name in owners])
    asked = " ".join(word for word in overrides if word.startswith("tiers"))
    assert [r.getMessage().startswith(f"{asked} changes nothing") for r in caplog.records] == [True] * said


def test_a_budget_of_no_row_is_refused(tmp_path: Path) -> None:
    config = replace(TIERS, policy="lru", resident_bytes=1)
    inputs = Inputs(TABLES, [[("sparse",)]])
    with (
        lock_run_dir(tmp_path) as run_dir,
        pytest.raises(UserError, match="leaves not even one row, of 36 bytes"),
    ):
        build_tables(inputs, group_owners(config, NOTHING, TABLES), Place(config, CPU, run_dir, Ranks(), 32))


# -- kernels -----------------------------------------------------------------------------------------


GPU, WIDE = torch.device("cuda", 0), 2 * WIDEST


def of_width(dim: int) -> ModelTables:
    return ModelTables.single(TableSet.one_each(FEATURES, dim, TableOptimizer("sgd", 0.1), seed=0))


def cut_into(columns: int) -> ShardPlan:
    """Each table's columns in equal parts, on one rank."""

    def of(rows: int) -> TablePlan:
        shards = tuple(Shard(0, 0, column, rows, columns) for column in range(0, WIDE, columns))
        return TablePlan("column_wise", "fused", rows, WIDE, (0,), shards)

    return ShardPlan(1, {feature.name: of(feature.rows) for feature in FEATURES})


@pytest.mark.parametrize(("tables", "plan"), [(WIDEST + 4, None), (WIDE, WIDE)], ids=["whole", "a shard"])
def test_rows_wider_than_a_gpus_kernels_take_are_refused(tables: int, plan: int | None) -> None:
    name = FEATURES[0].name
    said = rf"table '{name}' has rows of {tables:,} values, and FBGEMM's kernels for a GPU take at most 2,048"
    with pytest.raises(UserError, match=said):
        require_kernels(of_width(tables), GPU, Ranks(), None if plan is None else cut_into(plan))


def test_rows_as_wide_as_kernels_take_are_not_refused() -> None:
    require_kernels(of_width(WIDEST), GPU, Ranks())
    require_kernels(of_width(WIDE), CPU, Ranks())
    require_kernels(of_width(WIDE), GPU, Ranks(), cut_into(WIDEST))
    require_kernels(of_width(WIDE), GPU, Ranks(0, 2, (0, 1), (0, 1)))  # replicas use torch's operators
