"""What task=plan tells of tiers is what a run then takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recpipe.config.compose import compose
from recpipe.distributed.ranks import Ranks
from recpipe.run import run
from recpipe.tables.config import TierConfig
from recpipe.tables.group_memory import group_memory
from recpipe.tables.owners import GroupOwner
from recpipe.tables.stores import make_store
from recpipe.tables.tiers.policies import BYTES_BESIDE
from tests.tables.samples import SLOTS, table_set, tiers

RECIPE = (
    "data.samples=1500",
    "data.batch_size=128",
    "data.tables={a: 3000, b: 801, c: 50}",
    "model.bottom=[8]",
    "model.top=[8]",
    "tiers.resident_bytes=10%",
    "trainer.max_steps=2",
    "trainer.progress=false",
    "trainer.logger=null",
)


@pytest.mark.parametrize("store", ["host", "ssd"])
@pytest.mark.parametrize("policy", BYTES_BESIDE)
def test_maps_policies_and_buffers_are_what_tiers_make(tmp_path: Path, policy: str, store: str) -> None:
    tables = table_set("adagrad")
    slots = 0 if policy == "nocache" else SLOTS
    batch_size = 6000  # more than a staging area has at least
    owner = GroupOwner(policy, slots, slots * tables.record_bytes)
    told = group_memory(
        tables, owner, TierConfig(policy, store, "10%", None, True, False), Ranks(), None, batch_size
    )
    cold = make_store(
        store, tables.layout, tables.fill, directory=tmp_path, staging_bytes=batch_size * 3 // 2 * 4096
    )
    made = tiers(tables, policy, tmp_path, cold, slots=slots)
    assert told.cold_bytes is not None
    assert sum(told.cold_bytes.values()) == made.store.cold_bytes
    figures, slab = made.tier_figures(), made.layout.slab
    slab_bytes = slab.weights.nbytes + slab.state.nbytes
    assert told.map_bytes + told.buffer_bytes == figures.overhead_bytes - slab_bytes
    assert told.resident_bytes == figures.resident_bytes
    made.close()


@pytest.mark.parametrize(
    ("dim", "more"),
    [
        (16, ["tiers.policy=lru", "tiers.store=ssd"]),
        # As two blocks to a row.
        pytest.param(516, ["tiers.policy=lfu", "tiers.store=ssd"], marks=pytest.mark.soak),
        (1032, ["tiers.policy=nocache", "tiers.store=ssd"]),
        # Without blocks there is nothing to tell but rows; as under the codec, beside which it lies.
        pytest.param(16, ["tiers.policy=lru", "tiers.store=host"], marks=pytest.mark.soak),
        (16, ["tiers.policy=lru", "tiers.store=ssd", "+plugin=quantize", "plugins.quantize.tables=a"]),
        (516, ["tiers.policy=lru", "tiers.store=holders", "tiers.holder_store=ssd"]),
        (516, ["tiers.policy=lru", "tiers.store=ssd", "tiers.sharded=true"]),
    ],
    ids=["small", "one to a block", "two blocks", "host", "codec", "holders", "sharded"],
)
def test_a_plan_tells_the_cold_bytes_of_the_run(tmp_path: Path, dim: int, more: list[str]) -> None:
    recipe = [*RECIPE, f"model.embedding_dim={dim}", *more]
    plan = run(compose([*recipe, "task=plan"]), tmp_path / "plan")["tiers"]
    memory = run(compose(recipe), tmp_path / "run")["memory"]
    assert plan["cold_bytes"] == memory["cold_bytes"]
    assert sum(table["cold_bytes"] for table in memory["tables"]) == pytest.approx(
        memory["cold_bytes"], abs=3
    )
    if dim == 516:  # of 516 words, a state and a checksum; as records alone they were half of this
        assert plan["cold_bytes"] == pytest.approx(3851 * 4096, abs=2 * 4096)
    assert 0 < plan["beside_bytes"] <= memory["tier_overhead_bytes"]


def test_each_holder_has_its_own_blocks() -> None:
    tables = table_set()
    owner = GroupOwner("lru", SLOTS, SLOTS * tables.record_bytes)
    config = TierConfig("lru", "holders", "10%", None, True, False, holder_store="ssd")
    three = Ranks(rank=0, world=3, trainers=(0,), holders=(0, 1, 2))
    told = group_memory(tables, owner, config, three, None, 32)
    assert told.cold_bytes is not None
    # 700 rows of 10 words (8, a state, a checksum), 102 to a block: 234, 233 and 233 rows of each holder.
    assert sum(told.cold_bytes.values()) == pytest.approx(3 * 3 * 4096, abs=2)
    assert told.cold_bytes == group_memory(tables, owner, config, replace(three, rank=2), None, 32).cold_bytes


def test_the_plan_says_what_is_beside_the_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = [*RECIPE, "model.embedding_dim=16", "tiers.policy=lfu", "tiers.store=host", "task=plan"]
    told = run(compose(ask), tmp_path)["tiers"]
    # 4 bytes a row for where it is or how often it was looked up, and 20 for each of 10% of slots
    assert told["beside_bytes"] == 4 * 3851 + 20 * told["resident_rows"]
    assert told["cold_rows"] == 3851
    printed = " ".join(capsys.readouterr().out.split())
    assert "beside the tiers" in printed
    assert "6 bytes a row" in printed
