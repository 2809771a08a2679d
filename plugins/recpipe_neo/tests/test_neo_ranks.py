"""Runs of several processes on real rows, started as a user starts them; checkpoints that move."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from recpipe_het.tests.conftest import criteo  # noqa: F401
from safetensors.numpy import load_file

from recpipe.answers.plain import unshard
from tests.distributed.test_torchrun import SMALL, alone, difference, together
from tests.processes import run_ranks

NEO = ("+plugin=neo", "plugins.neo.planner=torchrec", "optim=sgd")
COMMON = ("trainer.logger=null", "trainer.eval_every=1.0", "trainer.checkpoint_every=null")
SAVED = ("trainer.checkpoint_every=15", "trainer.checkpoint_dir=saved")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_ranks_are_one_process_and_their_checkpoint_moves(
    criteo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
    ranks: int,
) -> None:
    """Two epochs, 62 steps; the checkpoint in their middle goes on in one process, under lru and as shards.
    Resident tables go on from it in tests/any_model/test_sharded.py."""
    real = (*criteo, *COMMON, "optim=sgd", "trainer.max_epochs=2")
    whole = alone(tmp_path / "one", base=real)
    steps = whole["history"][-1]["step"]
    assert steps >= 50
    types = "plugins.neo.sharding={C1*: row_wise, C2*: table_wise, *: [data_parallel, table_row_wise]}"
    report = together(
        tmp_path / "many", ranks, *NEO, types, *SAVED, "trainer.checkpoint_every=0.5", base=real
    )
    assert difference(tmp_path / "one", tmp_path / "many") < 1e-5
    assert report["quality"] == pytest.approx(whole["quality"], abs=1e-4)
    assert report["altered"] == []
    shards = report["assembly"]["shards"]["tables"]
    assert {t["sharding"] for t in shards.values()} >= {"row_wise", "table_wise"}
    assert report["ranks"]["collectives"]["all_to_all_single"]["bytes_sent"] > 0

    saved = sorted((tmp_path / "many" / "saved").glob("*.ckpt"))
    middle = f"resume={saved[-2]}"
    for name, recipe in {"lru": ("tiers.policy=lru",), "sharded": NEO}.items():
        alone(tmp_path / name, *recipe, middle, base=real)
        assert difference(tmp_path / "many", tmp_path / name) < 1e-5, name
    unshard(saved[-1], tmp_path / "all.safetensors")
    tensors = load_file(tmp_path / "all.safetensors")
    for table in shards:
        expected = np.load(tmp_path / "many" / "parameters" / f"{table}.npy")
        np.testing.assert_array_equal(tensors[table], expected)


@pytest.mark.soak  # tests/tables/test_tiered_shards.py has them, and tests/any_model by plans of all kinds
def test_rows_of_shards_lie_in_tiers(tmp_path: Path) -> None:
    """Two ranks are one process; their checkpoint goes on with the same bits, and in one process whole."""
    whole = alone(tmp_path / "one")
    tiers = ("tiers.policy=lru", "tiers.store=ssd", "tiers.resident_bytes=10%")
    types = "plugins.neo.sharding={C1*: row_wise, C2*: table_wise, *: data_parallel}"
    sharded = (*NEO, types, *tiers)
    report = together(
        tmp_path / "many", 2, *sharded, *SAVED, "trainer.checkpoint_every=8", "trainer.eval_every=5"
    )
    assert difference(tmp_path / "one", tmp_path / "many") < 1e-5
    assert report["quality"] == pytest.approx(whole["quality"], abs=1e-4)
    assert (report["altered"], report["assembly"]["cache"]) == ([], "lru")
    ranks, memory = report["assembly"]["shards"]["ranks"], report["memory"]
    assert (
        memory["resident_bytes"]
        < 0.2 * ranks[0]["tiered_bytes"] + ranks[0]["bytes"] - ranks[0]["tiered_bytes"]
    )
    assert memory["cold_bytes"] >= ranks[0]["tiered_bytes"] > 0
    assert report["io"]["rows_read"] > 0 < report["io"]["rows_written"]

    saved = sorted((tmp_path / "many" / "saved").glob("*.ckpt"))
    again = together(tmp_path / "again", 2, *sharded, f"resume={saved[0]}")
    assert again["resumed"]["step"] == 8
    assert difference(tmp_path / "many", tmp_path / "again") == 0
    assert again["io"]["rows_read"] < report["io"]["rows_read"]
    alone(tmp_path / "alone", f"resume={saved[0]}")
    assert difference(tmp_path / "many", tmp_path / "alone") < 1e-5


@pytest.mark.soak
@pytest.mark.parametrize(("one", "other"), [(1, 4), (4, 2), (2, 1), (1, 2)])
def test_checkpoints_move_between_numbers_of_ranks(
    criteo: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
    one: int,
    other: int,
) -> None:
    real = (*criteo, *COMMON, "+plugin=neo", "plugins.neo.planner=torchrec", "trainer.max_epochs=2")
    real = (*real, "optim=adagrad", "optim.tables.eps=1e-3", "+optim.dense.eps=1e-3")
    together(tmp_path / "straight", one, base=real)
    together(tmp_path / "first", one, *SAVED, "trainer.max_steps=40", base=real)
    together(tmp_path / "second", other, f"resume={tmp_path / 'first' / 'saved'}", base=real)
    assert difference(tmp_path / "straight", tmp_path / "second") < 1e-5


@pytest.mark.slow
def test_a_plan_is_made_kept_and_trained_by(tmp_path: Path) -> None:
    """task=plan for two ranks in one process; a run by it, pipelined and not, ends with the same bits."""
    tables = "data.tables={a: 3000, b: 800, c: 50}"
    recipe = (tables, "optim=sgd", "data.samples=3000")
    alone(tmp_path, *NEO, *recipe, "task=plan", "task.ranks=2")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["world"] == 2
    by_plan = (*recipe, f"tiers.plan={tmp_path / 'plan.json'}", "trainer.eval_every=20")
    report = together(tmp_path / "two", 2, *by_plan)
    kinds = {name: table["sharding"] for name, table in plan["tables"].items()}
    shards = report["assembly"]["shards"]["tables"]
    assert {name: table["sharding"] for name, table in shards.items()} == kinds
    together(tmp_path / "plain", 2, *by_plan, "tiers.prefetch=false")
    assert difference(tmp_path / "two", tmp_path / "plain") == 0
    ended = run_ranks(tmp_path / "three", 3, *SMALL, *by_plan)
    assert [rank.returncode for rank in ended] == [2] * 3
    said = "".join(rank.stderr for rank in ended)
    assert said.count("error: the plan is for 2 ranks and this run has 3; plan anew with task=plan") == 1
