"""Recipe and claims against each other: what would be without effect is refused, and names who asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recpipe.common.run_dir import hold
from recpipe.distributed.ranks import Emulation, Ranks
from recpipe.errors import UserError
from recpipe.plugin.api import Aspect, Contribution, Origin, TableClaim, TableInfo, TablePolicy
from recpipe.plugin.assembly import Assembly, assemble
from recpipe.plugin.errors import PluginConflict, PluginError
from recpipe.tables.build import TierConfig, build_embeddings, cache_owner
from recpipe.tables.groups import ModelTables
from recpipe.tables.inputs import Inputs
from recpipe.tables.resident import ResidentCollection
from tests.plugin.samples import Good
from tests.tables.samples import CPU, DIM, FEATURES, table_set

TIERS = TierConfig("resident", "host", "25%", None, prefetch=True, sharded=False)


class Cached(TablePolicy):
    def cache(self, space: Any) -> Any:
        raise AssertionError("nothing is built here")


class Half(TablePolicy):
    def data_type(self, name: str) -> str:
        return "fp16"


class Wrapped(ResidentCollection):
    """Counts how often it was put around other tables."""


class Rewrites(TablePolicy):
    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def rewrite(self, module: Any, tables: Sequence[str]) -> Any:
        self.asked.append(tuple(tables))
        return Wrapped(table_set(), CPU)


class Returns(TablePolicy):
    def rewrite(self, module: Any, tables: Sequence[str]) -> Any:
        return module


class Chooses(Returns):
    def data_type(self, name: str) -> str | None:
        return None


def assembly(policy: TablePolicy, *claims: tuple[str, Aspect]) -> Assembly:
    info = {f.name: TableInfo(f.name, f.rows, DIM) for f in FEATURES}
    tables = [TableClaim(glob, frozenset({aspect}), policy) for glob, aspect in claims]
    return assemble([(Origin("acme"), Good(), Contribution(tables=tables))], info)


NOTHING = assembly(TablePolicy())
TABLES = ModelTables.single(table_set())


def build(parts: Assembly, folder: Path) -> object:
    """The only group's collection."""
    with hold(folder) as run_dir:
        made = build_embeddings(Inputs(TABLES, [[("sparse",)]]), TIERS, parts, CPU, run_dir, 32, Ranks())
    return made.collections[0]


@pytest.mark.parametrize(
    ("setting", "said"), [({"kernel": "uvm"}, "kernel=uvm"), ({"split_rows": True}, "split_rows=true")]
)
def test_settings_of_sharded_tables_need_sharded_tables(setting: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=rf"tiers.{said} is about sharded tables, and this run shards none"):
        cache_owner(replace(TIERS, **setting), NOTHING, TABLES)
    cache_owner(replace(TIERS, **setting, sharded=True), NOTHING, TABLES)


def test_a_slower_network_is_not_played_to_sharded_tables() -> None:
    emulated = replace(TIERS, emulate=Emulation(latency_us=5))
    cache_owner(emulated, NOTHING, TABLES)
    with pytest.raises(UserError, match="tiers.emulate delays recpipe's own messages and not TorchRec's"):
        cache_owner(replace(emulated, sharded=True), NOTHING, TABLES)


@pytest.mark.parametrize(
    ("config", "parts", "who"),
    [
        (replace(TIERS, sharded=True), NOTHING, "tiers.sharded=true"),
        (replace(TIERS, plan="plan.json"), NOTHING, "tiers.plan"),
        (TIERS, assembly(Half(), ("*", "precision")), r"plugin acme \(.*\) shards tables and"),
    ],
)
def test_sharded_tables_and_a_cache_are_refused(config: TierConfig, parts: Assembly, who: str) -> None:
    with pytest.raises(PluginConflict, match=f"{who} keeps all rows resident, but lru decides"):
        cache_owner(replace(config, policy="lru"), parts, TABLES)


def test_a_cache_of_some_tables_is_refused() -> None:
    with pytest.raises(PluginConflict, match=r"acme \(.*\) claims the cache of b alone.*must claim '\*'"):
        cache_owner(TIERS, assembly(Cached(), ("b", "cache")), TABLES)
    assert cache_owner(TIERS, assembly(Cached(), ("*", "cache")), TABLES) == "acme"


def test_a_policy_rewrites_once_for_all_that_it_claims(tmp_path: Path) -> None:
    policy = Rewrites()
    made = build(assembly(policy, ("b", "update"), ("*", "precision")), tmp_path)
    assert isinstance(made, Wrapped)
    assert policy.asked == [("a", "b", "c")]


@pytest.mark.parametrize("aspect", ["precision", "update"])
def test_a_rewrite_that_changes_nothing_is_refused(aspect: Aspect, tmp_path: Path) -> None:
    with pytest.raises(
        PluginError, match=rf"acme \(.*\) claims the {aspect} of tables, but its rewrite\(\) ret"
    ):
        build(assembly(Returns(), ("*", aspect)), tmp_path)


def test_a_policy_that_leaves_tables_in_float32_need_not_rewrite_them(tmp_path: Path) -> None:
    assert isinstance(build(assembly(Chooses(), ("*", "precision")), tmp_path), ResidentCollection)
