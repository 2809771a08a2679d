"""One training step: micro-batches equal the whole batch, and a loss that is no number updates nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from recpipe.data.select import select
from recpipe.distributed.ranks import Ranks
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.splitting import share_of
from recpipe.pipeline.step import StepTimes, _Step, accumulate
from recpipe.plugin.batch import Batch
from recpipe.plugin.splitter import Split
from tests.pipeline.samples import (
    Listed,
    collection_of,
    furthest,
    loader_of,
    model_over,
    parameters_after,
    random_batch,
)
from tests.tables.samples import dump, identical

TOLERANCE = {"sgd": 1e-6, "rowwise_adagrad": 1e-5, "adagrad": 1e-5}
GPU = torch.device("cuda", 0)
POLICIES = ("resident", "nocache", "lru", "lfu", "hot")


class AnySplit:
    """Random orders, random bounds; ``popular_first``: samples without cold rows lead, as in Hotline."""

    def __init__(self, seed: int, popular_first: bool) -> None:
        self.rng, self.popular_first = np.random.default_rng(seed), popular_first
        self.parts = 0

    def __call__(self, batch: Batch, needs_cold: np.ndarray) -> Split:
        order = self.rng.permutation(batch.size)
        bounds = set(
            self.rng.choice(np.arange(1, batch.size), min(3, batch.size - 1), replace=False).tolist()
        )
        if self.popular_first:
            order = order[np.argsort(needs_cold[order], kind="stable")]
            bounds |= {int((~needs_cold).sum())} - {0}
        bounds = (*sorted(bounds - {batch.size}), batch.size)
        self.parts += len(bounds)
        return Split(order, bounds)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """``whole(optimizer)``: parameters of the run with resident tables and whole batches."""
    known: dict[str, dict[str, np.ndarray]] = {}

    def of(optimizer: str) -> dict[str, np.ndarray]:
        if optimizer not in known:
            known[optimizer] = parameters_after("resident", optimizer, tmp_path_factory.mktemp("r"), Listed())
        return known[optimizer]

    return of


@pytest.mark.parametrize("popular_first", [False, True])
@pytest.mark.parametrize("optimizer", TOLERANCE)
@pytest.mark.parametrize("policy", POLICIES)
def test_micro_batches_equal_the_whole_batch(whole, tmp_path, policy, optimizer, popular_first) -> None:
    splitter = AnySplit(1, popular_first)
    values = parameters_after(policy, optimizer, tmp_path, Listed(), splitter=splitter)
    assert splitter.parts > 20
    assert furthest(values, whole(optimizer)) < TOLERANCE[optimizer]


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_tiers_equal_resident_tables(whole, tmp_path, policy) -> None:
    values = parameters_after(policy, "adagrad", tmp_path, Listed())
    assert furthest(values, whole("adagrad")) < 1e-6


@pytest.mark.parametrize("optimizer", TOLERANCE)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_backward_pass_for_everything_changes_nothing(tmp_path, monkeypatch, policy, optimizer) -> None:
    """As on a GPU, whose times alone tell that this is one."""
    passes = []
    backward = torch.autograd.backward

    def counted(*arguments: Any, **named: Any) -> None:
        passes.append(1)
        backward(*arguments, **named)

    def in_one_pass(model, staged, times):
        accumulate(model, staged, StepTimes(GPU))

    monkeypatch.setattr(torch.autograd, "backward", counted)
    apart = parameters_after(policy, optimizer, tmp_path / "apart", Listed())
    apart_passes = len(passes)
    at_once = parameters_after(policy, optimizer, tmp_path / "at once", Listed(), in_one_pass)
    assert (apart_passes >= 20, len(passes) - apart_passes) == (True, 10)
    assert identical(at_once, apart)


def test_one_update_per_micro_batch_is_wrong(whole, tmp_path) -> None:
    """The naive way: the tables' fused optimizer steps once for each part."""

    def naive(model, staged, times):
        low = 0
        for high in staged.bounds:
            part = select(staged.batch, np.arange(low, high))
            accumulate(model, InFlight(part, total=staged.size), times)
            low = high

    splitter = AnySplit(1, False)
    values = parameters_after("resident", "rowwise_adagrad", tmp_path, Listed(), naive, splitter=splitter)
    assert furthest(values, whole("rowwise_adagrad")) > 1e-2


def test_micro_batches_see_every_sample_once(tmp_path) -> None:
    dataset = Listed(count=3)
    embeddings = collection_of("lru", "sgd", tmp_path)
    model = model_over(embeddings)
    parts: list[torch.Tensor] = []
    for staged, batch in zip(
        loader_of(dataset, embeddings, splitter=AnySplit(3, True)), dataset.lists["train"], strict=True
    ):
        expected = model.eval()(staged.batch).detach()
        model.train()
        parts.clear()
        with model.module.register_forward_hook(lambda *call: parts.append(call[2].detach().squeeze(1))):
            loss = accumulate(model, staged, StepTimes())
        assert len(parts) == len(staged.bounds) > 1
        logits = torch.cat(parts)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
        mean = binary_cross_entropy_with_logits(logits, staged.batch.labels)
        torch.testing.assert_close(loss, mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(staged.batch.dense.sum(0).round(decimals=3), batch.dense.sum(0).round(decimals=3))
        assert not loss.requires_grad
    embeddings.close()


@pytest.mark.parametrize("bounds", [(), (10, 32)])
@pytest.mark.parametrize("policy", ["resident", "lru", "hot"])
def test_a_loss_that_is_no_number_changes_nothing(tmp_path, policy, bounds) -> None:
    embeddings = collection_of(policy, "adagrad", tmp_path)
    model = model_over(embeddings)
    before = dump(embeddings)
    batch = random_batch(np.random.default_rng(0), 32, True)
    batch.dense[3, 1] = float("nan")
    loss = accumulate(model, InFlight(batch, bounds=bounds), StepTimes())
    assert torch.isnan(loss)
    assert identical(dump(embeddings), before)
    good = random_batch(np.random.default_rng(1), 32, True)
    accumulate(model, InFlight(good, bounds=bounds), StepTimes())
    assert not identical(dump(embeddings), before), "the check must see an update"


def test_times_are_split_where_cold_rows_are_waited_for(tmp_path) -> None:
    embeddings = collection_of("hot", "sgd", tmp_path)
    model, times = model_over(embeddings), StepTimes()
    for staged in loader_of(Listed(), embeddings, splitter=AnySplit(3, True)):
        accumulate(model, staged, times)
    assert times.before_cold.total() > 0
    assert times.after_cold.total() > 0
    embeddings.close()


def test_first_cold_is_the_start_of_a_micro_batch() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        size = int(rng.integers(1, 12))
        needs_cold = rng.random(size) < rng.choice([0.0, 0.1, 0.7])
        inner = rng.choice(np.arange(1, size), rng.integers(0, size), replace=False) if size > 1 else []
        bounds = (*sorted(int(b) for b in inner), size)
        _, ends, cold_from = share_of(Split(np.arange(size), bounds), needs_cold, Ranks())
        first = (0, *ends)[cold_from]
        assert first in (0, *bounds)
        assert not needs_cold[:first].any()
        following = next((b for b in bounds if b > first), size)
        assert first == size or needs_cold[first:following].any()


def test_the_loss_of_no_samples_is_where_that_of_others_is() -> None:
    """Also without dense parameters: the ranks add their losses up, on the GPU or on the host alike."""
    rows: Any = SimpleNamespace(warm=torch.empty((0, 4), device="meta"))
    step: Any = SimpleNamespace(
        batch=SimpleNamespace(rows=[rows]),
        model=SimpleNamespace(dense=[]),
        looked_up=True,
        _overlap_next_batch=lambda: None,
    )
    assert _Step._micro_batch(step, 0, 0).device.type == "meta"
