"""One training step up to the dense optimizer's update, whatever tiers and micro-batches there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from recpipe.data.batch import Batch
from recpipe.embedding.capabilities import Planned
from recpipe.embedding.planner import TierPlan
from recpipe.embedding.shard import Sent
from recpipe.model.ranker import Ranker
from recpipe.phases import phase
from recpipe.threads import one_thread


def _nothing() -> None:
    pass


@dataclass
class StagedBatch:
    """A batch as the pipeline hands it to training: on the device, planned, samples in micro-batch order."""

    batch: Batch
    plan: TierPlan | None = None
    """What it does to the tiers; None when all rows are resident."""
    bounds: tuple[int, ...] = ()
    """Where its micro-batches end; empty for one."""
    cold_from: int = 0
    """The first micro-batch that waits for cold rows."""
    total: int = 0
    """Samples of the whole batch, of which ``batch`` is this rank's share (0: all of them)."""
    consumed: int = 0
    """Samples read for it, of which a plugin may have left some out (0: none)."""
    alone: bool = True
    """Whether no other rank trains a share of it."""
    sent: Sent | None = None
    """Its ids on their way to the ranks that hold their rows; None before, and where rows are not sharded."""
    stage_next: Callable[[], object] = _nothing
    """Starts to read the batch after it; called once this one is in long kernels."""
    upcoming: StagedBatch | None = None
    """The batch after it, whose ids are sent while this one trains; None at the epoch's end, or unsent."""

    def __post_init__(self) -> None:
        self.total = self.total or self.batch.size
        self.consumed = self.consumed or self.total


@dataclass
class StepTimes:
    """Seconds of host time in micro-batches before and after the wait for cold rows."""

    before_cold: float = 0.0
    after_cold: float = 0.0


def accumulate(ranker: Ranker, staged: StagedBatch, times: StepTimes) -> tuple[torch.Tensor, torch.Tensor]:
    """Forward and backward of one batch; returns (mean loss, logits [B]), both detached.

    On return the tables have made their fused update and the dense gradients are those of the mean
    loss over the whole batch. Where several ranks train, loss and dense gradients are this rank's
    addends. On a CPU with one trainer, a loss that is not finite leaves the tables as they were.
    """
    if staged.bounds:
        return _micro_batches(ranker, staged, times)
    pooled = look_up(ranker, staged)
    leaf = pooled.detach().requires_grad_()
    logits, loss = _score(ranker, staged, leaf, 0, staged.batch.size)
    _send_upcoming(staged)
    staged.stage_next()
    if usable(staged, loss):
        torch.autograd.backward(loss)
        update_tables(staged, pooled, leaf.grad)
    return loss.detach(), logits.detach()


def look_up(ranker: Ranker, staged: StagedBatch) -> torch.Tensor:
    """Pooled rows of a whole batch as ``Ranker.pooled`` gives them, from whatever tiers they lie in."""
    return _resident(ranker, staged) if staged.plan is None else _pooled(ranker, staged.plan)


def update_tables(staged: StagedBatch, pooled: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """The tables' backward pass, which is their update.

    FBGEMM's CPU update enters a parallel region for every table, which costs more than its threads gain.
    Where several ranks train, torch's own operators make the update.
    """
    with phase("embedding backward and update"), one_thread() if staged.alone else nullcontext():
        torch.autograd.backward(pooled, gradient)


def _resident(ranker: Ranker, staged: StagedBatch) -> torch.Tensor:
    """Pooled rows where no tier is planned; then the numbers of the next batch's ids go out."""
    sparse, upcoming = staged.batch.sparse, staged.upcoming
    pooled = ranker.pooled(sparse) if staged.sent is None else ranker.arrived(staged.sent)
    if upcoming is not None:
        upcoming.sent = ranker.send(upcoming.batch.sparse)
    return pooled


def _send_upcoming(staged: StagedBatch) -> None:
    """The next batch's ids go out while this one's backward pass runs."""
    if staged.upcoming is not None and staged.upcoming.sent is not None:
        staged.upcoming.sent.send_ids()


def _score(
    ranker: Ranker, staged: StagedBatch, pooled: torch.Tensor, low: int, high: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of samples [low, high) with these pooled rows, and their part of the batch's mean loss."""
    batch = staged.batch
    if low == high:
        # The tables' backward must run all the same: other ranks wait for its messages.
        return pooled.new_zeros(0), pooled.sum()
    logits = ranker.score(batch.dense[low:high], pooled)
    labels = batch.labels[low:high]
    if high - low == staged.total:
        return logits, binary_cross_entropy_with_logits(logits, labels)
    return logits, binary_cross_entropy_with_logits(logits, labels, reduction="sum") / staged.total


def usable(staged: StagedBatch, loss: torch.Tensor) -> bool:
    """Whether to update from ``loss``. A GPU is not stopped at every step to look, nor are several ranks,
    which must all do the same."""
    return loss.device.type != "cpu" or not staged.alone or math.isfinite(loss.item())


def _tiers(ranker: Ranker) -> Planned:
    tiers = ranker.embeddings.offers(Planned)
    assert tiers is not None, "no batch has a plan otherwise"
    return tiers


def _pooled(ranker: Ranker, plan: TierPlan) -> torch.Tensor:
    """Pooled rows of both tiers of a whole batch, [B, F * dim]."""
    tiers = _tiers(ranker)
    with phase("embedding forward"):
        tiers.arrive()
        resident = tiers.lookup_resident(plan)
        return resident + tiers.lookup_slab(plan) if len(plan.slab) else resident


def _micro_batches(
    ranker: Ranker, staged: StagedBatch, times: StepTimes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact micro-batches under fused optimizers: every tier is looked up once, before any update.

    The micro-batches' backward passes end in detached copies of the pooled rows, with the sum of
    losses over the batch's full N; then each tier's backward runs once, on the whole batch, and so
    makes one optimizer step (two would be wrong for every optimizer with state).
    """
    batch, plan = staged.batch, staged.plan
    started = perf_counter()
    tables = _Lookups(ranker, staged)
    staged.stage_next()
    total = torch.zeros((), device=batch.labels.device)
    logits = []
    low = 0
    for number, high in enumerate(staged.bounds):
        if plan is not None and number >= staged.cold_from and not tables.cold_is_here:
            times.before_cold += perf_counter() - started
            tables.wait_for_cold()
            started = perf_counter()
        scores, loss = _score(ranker, staged, tables.leaf(low, high), low, high)
        torch.autograd.backward(loss)
        total += loss.detach()
        logits.append(scores.detach())
        low = high
    _send_upcoming(staged)
    if usable(staged, total):
        tables.backward()
    elapsed = perf_counter() - started
    if tables.cold_is_here:
        times.after_cold += elapsed
    else:
        times.before_cold += elapsed
    return total, torch.cat(logits)


class _Lookups:
    """Pooled rows of each tier, looked up once, and the leaves that micro-batches differentiate."""

    def __init__(self, ranker: Ranker, staged: StagedBatch) -> None:
        self.ranker, self.staged = ranker, staged
        self.cold_is_here = False
        self._cold: torch.Tensor | None = None
        self._leaves: list[torch.Tensor] = []
        plan = staged.plan
        if plan is None:
            self._warm = _resident(ranker, staged)
            return
        with phase("embedding forward"):
            if plan.fetches_residents:
                _tiers(ranker).arrive()
            self._warm = _tiers(ranker).lookup_resident(plan)

    def wait_for_cold(self) -> None:
        """Block until the slab holds this batch's rows, and look them up."""
        plan = self.staged.plan
        assert plan is not None
        with phase("embedding forward"):
            _tiers(self.ranker).arrive()
            self.cold_is_here = True
            if len(plan.slab):
                self._cold = _tiers(self.ranker).lookup_slab(plan)

    def leaf(self, low: int, high: int) -> torch.Tensor:
        """Pooled rows of samples [low, high) as a leaf of the graph, [high - low, F * dim]."""
        pooled = self._warm.detach()[low:high]
        if self._cold is not None:
            assert self.staged.plan is not None
            first = self.staged.plan.cold_first
            if low >= first and low < high:
                pooled = pooled + self._cold.detach()[low - first : high - first]
        self._leaves.append(pooled.requires_grad_())
        return pooled

    def backward(self) -> None:
        """One backward, and so one fused update, per tier."""
        if self.staged.plan is not None:
            _tiers(self.ranker).arrive()
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self._leaves]
        gradient = torch.cat(gradients)
        update_tables(self.staged, self._warm, gradient)
        if self._cold is not None:
            assert self.staged.plan is not None
            cold = gradient[self.staged.plan.cold_first :]
            update_tables(self.staged, self._cold, cold.view(self._cold.shape))
