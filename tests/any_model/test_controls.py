"""What a step does, by keys of the recipe, under every technique: as in a loop by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from recpipe.data.dataset import Dataset
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


def test_without_schedules_it_is_another_training(batches, with_schedules) -> None:
    assert furthest(train(make("two_tower"), batches, "rowwise_adagrad"), with_schedules) > 1e-2
    for one in SCHEDULES:
        assert furthest(train(make("two_tower"), batches, "rowwise_adagrad", one), with_schedules) > 1e-3


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
    if kind == "rows" and technique in SHARDED:
        pytest.skip("shards have FBGEMM's optimizers")
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
        if kind != "rows" or name not in SHARDED
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
