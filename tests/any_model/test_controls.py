"""What a step does, by keys of the recipe, under every technique: as in a loop by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import recpipe
from recpipe.data.dataset import Dataset
from recpipe.plugin.tables import TableOptimizer
from recpipe.report.record import write_json
from recpipe.tables.groups import collections_of, group_tables
from recpipe.tables.sharding.plan import Shard, ShardPlan, TablePlan
from tests.any_model.runs import Job, all_on_two_ranks, furthest_left, train
from tests.any_model.zoo import TECHNIQUES, Events, Trained, by_hand, events, furthest, make

BATCHES = 8
BOUND = 1e-5
SHARDED = {"sharded": ("tiers.sharded=true",), "sharded_lru": ("tiers.sharded=true", "tiers.policy=lru")}
IN_ORDER = {name: words for name, words in {**TECHNIQUES, **SHARDED}.items() if name != "fae"}
SCHEDULES = (
    "optim.dense.schedule={name: polynomial, warmup_steps: 2, decay_start_step: 3, decay_steps: 4}",
    "optim.tables.schedule={name: cosine, warmup_steps: 3, decay_steps: 6, min_lr: 0.001}",
)


@pytest.fixture(scope="module")
def batches(criteo: Dataset) -> list[Events]:
    return events(criteo, BATCHES)


def scheduled(step: int, optimizers: list[torch.optim.Optimizer]) -> None:
    """``SCHEDULES``, step by step; both rates are 0.05."""
    dense = [0.5, 1, 1, 0.75**2, 0.5**2, 0.25**2, 0.25**2, 0.25**2][step - 1]
    tables = step / 3 if step < 3 else (1 + math.cos(math.pi * min(step - 3, 6) / 6)) / 2
    optimizers[0].param_groups[0]["lr"] = 0.05 * dense
    optimizers[1].param_groups[0]["lr"] = 0.05 * tables if step < 3 else 0.001 + 0.049 * tables


@pytest.fixture(scope="module")
def with_schedules(batches: list[Events]) -> Trained:
    return by_hand(make("two_tower"), batches, "rowwise_adagrad", scheduled)


@pytest.mark.parametrize("technique", IN_ORDER)
def test_each_step_has_the_rates_of_its_number(batches, with_schedules, technique) -> None:
    mine = train(make("two_tower"), batches, "rowwise_adagrad", *IN_ORDER[technique], *SCHEDULES)
    assert furthest(mine, with_schedules) < BOUND


def test_replicated_tables_of_a_sharded_model_have_them_too(batches, with_schedules, tmp_path: Path) -> None:
    tables = group_tables(collections_of(make("two_tower")), lambda *_: TableOptimizer("sgd", 0.1), seed=1)
    made = {
        table: TablePlan("data_parallel", "dense", rows, dim, (0,), (Shard(0, 0, 0, rows, dim),))
        for table, (rows, dim, _) in tables.shapes().items()
    }
    write_json(tmp_path / "plan.json", ShardPlan(1, made).to_dict())
    words = (*SHARDED["sharded"], f"tiers.plan={tmp_path / 'plan.json'}", *SCHEDULES)
    mine = train(make("two_tower"), batches, "rowwise_adagrad", *words)
    assert furthest(mine, with_schedules) < BOUND


def test_without_schedules_it_is_another_training(batches, with_schedules) -> None:
    assert furthest(train(make("two_tower"), batches, "rowwise_adagrad"), with_schedules) > 1e-2
    for one in SCHEDULES:
        assert furthest(train(make("two_tower"), batches, "rowwise_adagrad", one), with_schedules) > 1e-3


OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "momentum": ("optim=sgd", "optim.tables.momentum=0.9"),
    "adam": ("optim=adam", "optim.tables.eps=1e-3"),
    "partial_rowwise_adam": ("optim=adam", "optim.tables.name=partial_rowwise_adam", "optim.tables.eps=1e-3"),
    "lamb": ("optim=lamb", "optim.tables.eps=1e-3", "optim.tables.weight_decay=0.01"),
    "ftrl": ("optim=ftrl", "optim.tables.l1=0.01"),
    "clipped": ("optim.tables.clip_row_norm=0.002",),
}
SGD = ("optim.dense={name: SGD, lr: 0.05}", "optim.tables.lr=0.05")


@pytest.mark.parametrize("name", ["adam", pytest.param("ftrl", marks=pytest.mark.soak)])
@pytest.mark.parametrize("way", SHARDED)
def test_shards_are_updated_by_any_optimizer(batches, tmp_path: Path, name: str, way: str) -> None:
    """And go on from a checkpoint, in shards and without."""
    words = (*OPTIMIZERS[name], *SGD)
    whole = train(make("two_tower"), batches, "rowwise_adagrad", *words)
    shards = (*SHARDED[way], *words)
    kept = (f"trainer.checkpoint_dir={tmp_path}", "trainer.checkpoint_every=5", "trainer.max_steps=5")
    assert furthest(train(make("two_tower"), batches, "rowwise_adagrad", *shards), whole) < 1e-6
    train(make("two_tower"), batches, "rowwise_adagrad", *shards, *kept)
    for later in (shards, words):
        mine = train(make("two_tower"), batches, "rowwise_adagrad", *later, f"resume={tmp_path}")
        assert furthest(mine, whole) < 1e-6


@pytest.mark.soak
def test_shards_on_two_ranks_are_updated_by_any_optimizer(batches, tmp_path: Path) -> None:
    """State moves from the shards of two ranks into one process without shards."""
    jobs: dict[str, Job] = {}
    for name, own in OPTIMIZERS.items():
        for way, words in SHARDED.items():
            label = f"{name}-{way}"
            saved = f"trainer.checkpoint_dir={tmp_path / label / 'kept'}"
            jobs[label] = ("two_tower", (*words, *own, *SGD, saved, "trainer.checkpoint_every=5"))
    all_on_two_ranks(tmp_path, batches, jobs)
    plain = by_hand(make("two_tower"), batches, "rowwise_adagrad")
    for label in jobs:
        words = (*OPTIMIZERS[label.split("-")[0]], *SGD)
        whole = train(make("two_tower"), batches, "rowwise_adagrad", *words)
        assert furthest_left(tmp_path / label, whole) < BOUND, label
        assert furthest_left(tmp_path / label, plain) > 1e-3, label
        (first, *_) = sorted((tmp_path / label / "kept").glob("step-*.ckpt"))
        alone = train(make("two_tower"), batches, "rowwise_adagrad", *words, f"resume={first}")
        assert furthest(alone, whole) < BOUND, label


LIMIT = 0.05
CLIPPINGS: dict[str, tuple[str, ...]] = {
    "dense": (f"trainer.gradient_clip_val={LIMIT}",),
    "value": ("trainer.gradient_clip_val=0.001", "trainer.gradient_clip_algorithm=value"),
    "rows": ("optim.tables.clip_row_norm=0.002",),
    "all": (f"trainer.gradient_clip_val={LIMIT}", "trainer.gradient_clip_over=all"),
}


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def clipped(kind: str, optimizers: list[torch.optim.Optimizer]) -> None:
    """By torch's own functions; rows of tables each as a parameter."""
    dense, tables = (parameters_of(each) for each in optimizers)
    if kind == "dense":
        torch.nn.utils.clip_grad_norm_(dense, LIMIT)
    elif kind == "value":
        torch.nn.utils.clip_grad_value_(dense, 0.001)
    elif kind == "all":
        torch.nn.utils.clip_grad_norm_([*dense, *tables], LIMIT)
    else:
        for table in tables:
            for row in table.grad:
                row *= min(1.0, 0.002 / (float(row.norm()) + 1e-6))


@pytest.fixture(scope="module")
def with_clipping(batches: list[Events]) -> dict[str, Trained]:
    return {
        kind: by_hand(
            make("two_tower"),
            batches,
            "sgd",
            lambda _, optimizers, kind=kind: clipped(kind, optimizers),  # type: ignore[misc]
        )
        for kind in CLIPPINGS
    }


@pytest.mark.parametrize("kind", CLIPPINGS)
@pytest.mark.parametrize("technique", ["resident", "lru_ssd", "hotline"])
def test_gradients_are_clipped_as_torch_does(batches, with_clipping, kind, technique) -> None:
    mine = train(make("two_tower"), batches, "sgd", *IN_ORDER[technique], *CLIPPINGS[kind])
    assert furthest(mine, with_clipping[kind]) < 2e-6


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["rows", "all"])
@pytest.mark.parametrize(
    "technique", [name for name in IN_ORDER if name not in ("resident", "lru_ssd", "hotline")]
)
def test_and_under_each_other_technique(batches, with_clipping, kind, technique) -> None:
    mine = train(make("two_tower"), batches, "sgd", *IN_ORDER[technique], *CLIPPINGS[kind])
    assert furthest(mine, with_clipping[kind]) < 2e-6


def test_each_clipping_is_another_training(batches, with_clipping) -> None:
    every = [by_hand(make("two_tower"), batches, "sgd"), *with_clipping.values()]
    for number, one in enumerate(every):
        for other in every[:number]:
            assert furthest(one, other) > 1e-4


@pytest.mark.soak
def test_two_ranks_clip_what_both_have_summed(batches, tmp_path: Path) -> None:
    techniques = ("resident", "lru_ssd", "bagpipe", "het", *SHARDED)
    jobs: dict[str, Job] = {
        f"{kind}-{name}": ("two_tower", (*IN_ORDER[name], *CLIPPINGS[kind]))
        for kind in ("dense", "all", "rows")
        for name in techniques
    }
    all_on_two_ranks(tmp_path, batches, jobs)
    for kind in ("dense", "all", "rows"):
        theirs = by_hand(
            make("two_tower"), batches, "rowwise_adagrad", lambda _, made, kind=kind: clipped(kind, made)
        )
        for label in jobs:
            if label.startswith(kind):
                assert furthest_left(tmp_path / label, theirs) < BOUND, label


@pytest.mark.soak
def test_two_ranks_have_the_rates_of_each_step(batches, with_schedules, tmp_path: Path) -> None:
    """Bagpipe's delayed updates and het's pushes are made in a later step than the one they come from."""
    techniques = ("resident", "lru_ssd", "bagpipe", "het", "hotline", *SHARDED)
    jobs: dict[str, Job] = {name: ("two_tower", (*IN_ORDER[name], *SCHEDULES)) for name in techniques}
    all_on_two_ranks(tmp_path, batches, jobs)
    apart = {name: furthest_left(tmp_path / name, with_schedules) for name in techniques}
    assert max(apart.values()) < BOUND, apart


@pytest.mark.soak
def test_cores_that_share_a_batch_wait_for_the_norm_over_all() -> None:
    words = ("data.samples=12000", "data.batch_size=2048", "data.table_scale=0.01", "model.embedding_dim=16")
    words = (*words, "model.top=[256]", "optim=sgd", "trainer.progress=false", "trainer.max_steps=4")
    found = []
    for own in ((), CLIPPINGS["all"], (*CLIPPINGS["all"], "trainer.backend=cpu")):
        with recpipe.train(None, None, "trainer.backend=plain", *words, *own, quiet=True) as run:
            found.append({name: value.clone() for name, value in run.model.state_dict().items()})
    free, plain, cores = found
    assert max(float((plain[name] - cores[name]).abs().max()) for name in plain) < 1e-6
    assert max(float((plain[name] - free[name]).abs().max()) for name in plain) > 1e-3
