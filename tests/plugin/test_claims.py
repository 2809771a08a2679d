"""Tables of one model under several owners: two plugins' policies, and those that nobody has claimed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recpipe.config.compose import compose
from recpipe.kit import Lfu, Lru
from recpipe.plugin import Cache, CachePolicy, Context, Contribution, Figure, Plugin, RowSpace, RunFigures
from recpipe.run import run
from recpipe.tasks.compare_judge import parameter_difference

RECIPE = (
    "data.samples=6000",
    "data.batch_size=128",
    "data.tables={a: 3000, b: 800, c: 50}",
    "model.embedding_dim=8",
    "model.bottom=[16]",
    "model.top=[16]",
    "optim=sgd",
    "tiers.resident_bytes=10%",
    "trainer.max_steps=24",
    "trainer.progress=false",
    "trainer.logger=null",
)


class Kept(Cache):
    def __init__(self, tables: str, kind: type[CachePolicy]) -> None:
        self.tables, self.kind = tables, kind
        self.groups: list[int] = []

    def policy(self, space: RowSpace) -> CachePolicy:
        self.groups.append(space.group)
        return self.kind(space)


class One(Plugin):
    """Keeps some tables' rows by some policy."""

    api = (2, 0)
    kept = ("a", Lru)

    def contribute(self, ctx: Context) -> Contribution:
        cache = Kept(*self.kept)

        def figures(run: RunFigures) -> dict[str, Figure]:
            (group,) = cache.groups
            return {"tables": ", ".join(ctx.groups[group].tables), "slots": ctx.groups[group].slots}

        return Contribution(cache=[cache], report=[figures])


class Two(One):
    """Keeps others by another one."""

    kept = ("b", Lfu)


@pytest.fixture
def offered(offer: Callable[[str, str, object], None]) -> None:
    offer("plugin", "one", One)
    offer("plugin", "two", Two)


def trained(folder: Path, *more: str) -> dict[str, Any]:
    export = f"task.export_parameters={folder / 'parameters'}"
    return run(compose([*RECIPE, export, *more]), folder)


@pytest.mark.usefixtures("offered")
def test_two_policies_and_resident_tables_train_as_resident_ones(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", "tiers.resident_bytes=100%")
    mixed = trained(tmp_path / "mixed", "+plugins.one={}", "+plugins.two={}")
    assert parameter_difference(tmp_path / "plain" / "parameters", tmp_path / "mixed" / "parameters") == 0
    described = json.loads((tmp_path / "mixed" / "assembly.json").read_text(encoding="utf-8"))
    owners = {table: group["cache"] for group in described["tiers"]["groups"] for table in group["tables"]}
    assert owners == {"a": "one", "b": "two", "c": "resident"}
    assert described["tables"] == {"a": {"cache": "one"}, "b": {"cache": "two"}}
    assert mixed["plugins"] == {"one": {"tables": "a", "slots": 300}, "two": {"tables": "b", "slots": 80}}
    assert mixed["io"]["rows_read"] > mixed["data"]["train_samples"] / 100
    assert plain["io"]["rows_read"] == 0
    # 8 weights and a checksum of 4 bytes each, 113 to a block
    assert described["tiers"]["cold_bytes"] == (-(-3000 // 113) - (-800 // 113)) * 4096


@pytest.mark.usefixtures("offered")
def test_a_run_with_several_owners_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    plugins = ("+plugins.one={}", "+plugins.two={}")
    whole = trained(tmp_path / "whole", *plugins)
    trained(tmp_path / "first", *plugins, "trainer.max_steps=11")
    resumed = trained(tmp_path / "second", *plugins, f"resume={tmp_path / 'first' / 'checkpoints'}")
    assert parameter_difference(tmp_path / "whole" / "parameters", tmp_path / "second" / "parameters") == 0
    assert 0 < resumed["io"]["rows_read"] < whole["io"]["rows_read"]


@pytest.mark.usefixtures("offered")
def test_what_nobody_has_claimed_is_the_recipes(tmp_path: Path) -> None:
    described = run(compose([*RECIPE, "+plugins.one={}", "tiers.policy=nocache", "task=plan"]), tmp_path)
    owners = {group["cache"]: group["tables"] for group in described["tiers"]["groups"]}
    assert owners == {"one": ["a"], "nocache": ["b", "c"]}
    assert described["cache"] == "one, nocache"
