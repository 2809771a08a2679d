"""One training step up to the dense optimizer's update, with any tiers, micro-batches and cores.

Cores that share a batch each take their own samples through the whole dense part. With OpenMP, cores share
every operator: they meet at the end of each, fetch what the others have just computed from their caches, and
wait while one looks up rows, updates tables or runs Python. Here they meet only twice::

    this core     look up | forward, and all the way back | update the tables
    other cores   forward ........ | and all the way back ..................

when the rows are looked up, and when the gradients of all rows are computed. Sums over the batch are made in
another order, which is always the same for a given number of cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from recpipe.common.device import in_this_thread, keep_to_one_core, one_thread
from recpipe.common.timing import Spans, mark, phase, watched
from recpipe.distributed.ranks import Channel
from recpipe.errors import UserError
from recpipe.pipeline.batch import InFlight, TableWorkers, nothing
from recpipe.pipeline.placed import PlacedModel
from recpipe.pipeline.step_graph import StepGraph
from recpipe.tables.group_rows import GroupRows, Scale

FirstShare = Callable[[int], float | None]
"""For a number of samples, the first core's fraction of an equal share; None: cores do not share the
batch."""
Settle = Callable[[InFlight, torch.Tensor], tuple[torch.Tensor, Scale]]
"""Called with the loss when all gradients are known and no table is updated: the loss of all ranks, whose
dense gradients it has added up, and what the tables' gradients are multiplied by."""
ROWS = 16
"""Shares are multiples of this, the number of rows that oneDNN's kernels process at a time."""


@dataclass
class StepTimes:
    """The time in micro-batches before and after the wait for cold rows. On a GPU it is that of its kernels,
    and reading it waits for them."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    before_cold: Spans = field(default_factory=Spans)
    after_cold: Spans = field(default_factory=Spans)


class Cores:
    """``count`` cores, of which one is the calling thread's."""

    def __init__(self, count: int, first_share: FirstShare) -> None:
        self.count, self._first_share = count, first_share
        self.others = ThreadPoolExecutor(count - 1, "recpipe-samples", keep_to_one_core)
        """A thread for each of the other cores."""
        self._shares: dict[int, list[int]] = {}

    def close(self) -> None:
        """End the other cores' threads."""
        self.others.shutdown()

    def shares(self, samples: int) -> list[int]:
        """The ends of the cores' shares of ``samples``; one share if sharing is not faster.

        The first share is the calling thread's, which alone works on the tables.
        """
        known = self._shares.get(samples)
        if known is not None:
            return known
        first, ends = self._first_share(samples), list[int]()
        if first is not None:
            own = int(samples * first / self.count) // ROWS * ROWS
            each = -(-(samples - own) // (self.count - 1) // ROWS) * ROWS
            ends = [own + each * number for number in range(self.count - 1)]
        self._shares[samples] = found = [*(end for end in ends if 0 < end < samples), samples]
        return found


def accumulate(
    model: PlacedModel,
    batch: InFlight,
    times: StepTimes,
    cores: Cores | None = None,
    workers: TableWorkers | None = None,
    graph: StepGraph | None = None,
    settle: Settle | None = None,
) -> torch.Tensor:
    """Run the forward and the backward pass of one batch; returns the mean loss, detached.

    On return the dense gradients are those of the mean loss over the whole batch, and the tables have made
    their fused update (or begun it in ``workers``, whose ``finish`` waits for it). If several ranks train,
    loss and dense gradients are this rank's contributions to the sums. On a CPU with one trainer, a loss that
    is not finite leaves the tables unchanged.

    Every tier is looked up once, before any update. Micro-batches follow one another; with ``cores``, each is
    shared among them. ``graph`` trains the dense part of whole batches. With ``settle``, which looks at all
    gradients before any update, it is not used.
    """
    model.take(batch)
    try:
        return _Step(model, batch, times, cores, workers, graph, settle).run()
    finally:
        batch.release()


@dataclass(eq=False)
class _Step:
    model: PlacedModel
    batch: InFlight
    times: StepTimes
    cores: Cores | None
    workers: TableWorkers | None
    graph: StepGraph | None
    settle: Settle | None
    looked_up: bool = False
    late_calls: int = 0
    """Those of the model before this step."""
    dense: list[nn.Parameter] = field(default_factory=list)
    """The dense parameters that cores train."""
    parts: list[_CorePart] = field(default_factory=list)
    """The cores' parts of all micro-batches, in the order of the samples."""

    def run(self) -> torch.Tensor:
        model, batch, times = self.model, self.batch, self.times
        # On a GPU one backward pass starts sooner than two. A trace tells both passes apart.
        whole = len(batch.bounds) < 2 and batch.alone and self.cores is None and self.workers is None
        whole = whole and self.settle is None
        batch.attached = whole and times.device.type == "cuda" and not watched()
        if not whole or not batch.size or watched():
            self.graph = None
        self.late_calls = model.late_calls
        timed = bool(batch.bounds)  # whether there are micro-batches
        started = mark(times.device) if timed else 0.0
        low, losses = 0, []
        for number, high in enumerate(batch.bounds or (batch.size,)):
            if self.looked_up and batch.moving and not batch.cold_is_here and number >= batch.cold_from:
                times.before_cold.add(started, mark(times.device))
                batch.wait_for_cold()
                started = mark(times.device)
            shares = () if self.cores is None else self.cores.shares(high - low)
            losses.append(self._on_cores(low, shares) if len(shares) > 1 else self._micro_batch(low, high))
            low = high
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        # Not checked on a GPU, which would have to wait, or with several ranks, which must all do the same.
        trained = loss.device.type != "cpu" or not batch.alone or math.isfinite(loss.item())
        reduced: Future[None] | None = None
        if self.cores is not None and self.parts:
            reduced = self.cores.others.submit(self._reduce_dense)
        # The tables' update leaves cores free for the reader; operators that use all cores would wait for it.
        batch.read_next()
        batch.read_next = nothing  # it references all later batches
        late = model.late_calls != self.late_calls
        scale: Scale = 1.0
        if self.settle is not None and trained:
            if late:
                raise UserError(
                    "trainer.gradient_clip_over=all: the model looks rows up by ids of its own making, whose "
                    "gradients are known too late: clip the dense part, trainer.gradient_clip_over=dense"
                )
            self._end_reduction(reduced)
            reduced = None
            loss, scale = self.settle(batch, loss)
        if trained:
            batch.backward(scale, workers=None if late else self.workers)
            if late:
                model.update_late(batch)
        self._end_reduction(reduced)
        if timed:
            spans = times.after_cold if batch.cold_is_here else times.before_cold
            spans.add(started, mark(times.device))
        return loss

    def _end_reduction(self, reduced: Future[None] | None) -> None:
        """Wait until the dense gradients are added up, if that was begun."""
        if reduced is not None:
            with phase("dense backward"):
                reduced.result()
            self.parts.clear()  # they reference this step

    # -- rows --------------------------------------------------------------------------------

    def _look_up(self, shared: bool = False) -> None:
        """Look up what the first micro-batch needs, then send the numbers of the next batch's ids."""
        batch = self.batch
        all_rows = bool(batch.moving) and (not batch.bounds or batch.cold_from == 0)
        by_graph = self.graph is not None and self.graph.takes_tables
        batch.look_up(all_rows, shared, self.workers, by_graph)
        self.looked_up = True
        if batch.upcoming is not None:
            batch.upcoming.arrive()
            for rows in batch.upcoming.rows:
                rows.send()

    def _overlap_next_batch(self) -> None:
        """After a forward pass: the next batch's ids go out, their rows are fetched, and a slow one is read,
        in the backward pass. So is any, if that one includes the tables' update."""
        batch = self.batch
        if batch.next_is_slow or batch.attached:
            batch.read_next()
        if batch.upcoming is not None:
            for rows in batch.upcoming.rows:
                rows.send_ids()
            for rows in batch.upcoming.rows:
                rows.fetch_rows()

    # -- the model ---------------------------------------------------------------------------

    def _micro_batch(self, low: int, high: int) -> torch.Tensor:
        """Train samples [low, high); returns their contribution to the batch's mean loss, detached."""
        batch = self.batch
        if not self.looked_up:
            self._look_up()
        if low == high:
            # The tables are updated all the same, since other ranks wait for the messages. Its loss is where
            # theirs are: tensors on a CPU and on a GPU are sent by different backends.
            self._overlap_next_batch()
            there = [*(rows.warm for rows in batch.rows), *self.model.dense]
            return torch.zeros((), device=there[0].device if there else None)
        if self.graph is not None:
            trained = self.graph.train(batch)
            if trained is not None:
                self._overlap_next_batch()
                return trained
            batch.look_up_left()
        handed, samples = self.model.part(batch, low, high)
        loss = self.model.train_part(handed, samples, (high - low) / batch.total)
        self._overlap_next_batch()
        with phase("dense backward"), in_this_thread():
            torch.autograd.backward(loss)
        return loss.detach()

    def _on_cores(self, low: int, shares: Sequence[int]) -> torch.Tensor:
        """Train the samples from ``low`` on in the cores' ``shares``; the first one in this thread.

        On return the gradients of all rows are complete; those of the dense parameters are after
        ``_reduce_dense``.
        """
        assert self.cores is not None, "they share the samples"
        self.dense = [p for p in self.model.dense if p.requires_grad]
        parts = [_CorePart(self, low + start, low + end) for start, end in pairwise((0, *shares))]
        self.parts += parts
        with one_thread():
            if self.looked_up:
                for rows in self.batch.rows:
                    rows.share()
            for part in parts[1:]:
                part.end = self.cores.others.submit(part.train)
            try:
                if not self.looked_up:
                    self._look_up(shared=True)
                self._overlap_next_batch()
                parts[0].train()
                with phase("dense backward"):
                    loss = torch.stack([part.rows_done.result() for part in parts]).sum()
            except BaseException as fault:
                # Not before the others have ended: one that has yet to ask for its rows would take those of
                # the batch's next try, once this one has let go of it.
                if not self.batch.looked_up.done():
                    self.batch.looked_up.set_exception(fault)
                wait([part.end for part in parts if part.end is not None])
                raise
        if self.model.late_calls != self.late_calls:
            raise UserError(
                "the model looks rows up by ids of its own making, but did not for the first samples; cores "
                "that share a batch cannot train such rows: set trainer.backend=plain"
            )
        return loss

    def _reduce_dense(self) -> None:
        """Add up the parts' dense gradients, always in the order of the samples; in another core's thread."""
        for part in self.parts:
            if part.end is not None:
                part.end.result()
        for part in self.parts:
            for parameter, gradient in zip(self.dense, part.gradients, strict=True):
                if gradient is not None:
                    # Not in place: autograd may return one tensor for two parameters, or an expanded one.
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@dataclass(eq=False)
class _CorePart:
    """One core's samples [low, high) and their results."""

    step: _Step
    low: int
    high: int
    end: Future[None] | None = None
    """The end of its training in another core's thread; None: it is this thread's."""
    rows_done: Future[torch.Tensor] = field(default_factory=Future)
    """The contribution to the loss, set when the gradients of all its rows are computed."""
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    """The gradients of the dense parameters."""

    def train(self) -> None:
        """Run the forward and the backward pass."""
        step = self.step
        try:
            handed, samples = step.model.part(step.batch, self.low, self.high)
            loss = step.model.train_part(handed, samples, (self.high - self.low) / step.batch.total)
            pairs = [
                (rows, leaf)
                for proxy, part in handed.items()
                for rows, leaf in zip(step.batch.proxies[proxy], part.leaves or (), strict=False)
                if leaf.requires_grad
            ]
            leaves, waited = [leaf for _, leaf in pairs], len(pairs)

            def arrived(rows: GroupRows, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
                nonlocal waited
                rows.keep(self.low, self.high, leaf, gradient)
                waited -= 1
                if not waited:
                    self.rows_done.set_result(loss.detach())

            hooks = [
                leaf.register_hook(partial(arrived, rows, leaf))  # type: ignore[no-untyped-call]
                for rows, leaf in pairs
            ]
            try:
                with phase("dense backward"):
                    found = torch.autograd.grad(loss, [*leaves, *step.dense], allow_unused=True)
            finally:
                for hook in hooks:  # they and their leaves reference each other
                    hook.remove()
            self.gradients = list(found[len(leaves) :])
            if not self.rows_done.done():
                self.rows_done.set_result(loss.detach())
        except BaseException as fault:
            if not self.rows_done.done():
                self.rows_done.set_exception(fault)
            raise


def add_up(
    trainers: Channel, parameters: Iterable[nn.Parameter], loss: torch.Tensor, stop: bool
) -> tuple[torch.Tensor, bool]:
    """Replace every gradient by the sum over ``trainers``, in their order: the same bits on each.

    Returns the sum of ``loss`` and whether any trainer was asked to stop.
    """
    trained = list(parameters)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    told = torch.tensor([float(loss), float(stop)], dtype=loss.dtype, device=loss.device)
    total = trainers.ordered_sum(torch.cat([g.reshape(-1) for g in gradients] + [told]))
    sizes = [g.numel() for g in gradients]
    for parameter, part in zip(trained, torch.split(total[:-2], sizes), strict=True):
        parameter.grad = part.view_as(parameter)
    return total[-2], bool(total[-1] > 0)
