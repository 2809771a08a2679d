"""One training step up to the dense optimizer's update, with any tiers, micro-batches and cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from recpipe.common.device import arrived, in_this_thread
from recpipe.common.timing import Mark, Spans, mark, phase, watched
from recpipe.data.parts import batch_size, leaves, on_gpu
from recpipe.data.select import between
from recpipe.errors import UserError
from recpipe.pipeline.cores import Cores
from recpipe.pipeline.placed import PlacedModel
from recpipe.pipeline.step_graph import StepGraph
from recpipe.tables.beside import Beside
from recpipe.tables.front import Front
from recpipe.tables.group_lookup import GroupLookup
from recpipe.tables.inputs import GroupIds
from recpipe.tables.lookups import BatchLookups, Part
from recpipe.tables.tiers.batch import BatchPlan


def _nothing() -> None:
    pass


@dataclass
class StagedBatch:
    """A batch ready for training: on the device, planned, with samples in micro-batch order."""

    batch: Any
    plan: BatchPlan | None = None
    """Its plan for the tiers; None if all rows are resident."""
    bounds: tuple[int, ...] = ()
    """Where its micro-batches end; empty if nothing in the run cuts batches."""
    cold_from: int = 0
    """The first micro-batch that waits for cold rows."""
    total: int = 0
    """Number of samples of the whole batch, of which ``batch`` is this rank's share (0: ``batch`` is all of
    it)."""
    consumed: int = 0
    """Number of samples read for it, of which plugins may have left some out (0: none were read for it)."""
    skipped: int = 0
    """How many of them a skipper has left out."""
    alone: bool = True
    """Whether no other rank trains a share of it."""
    ids: GroupIds | None = None
    """Its ids for each group; None: they have not been put in order yet."""
    sent: Mapping[int, Any] = field(default_factory=dict)
    """Its ids being sent to the ranks that hold the rows, by group; empty if rows are not sharded."""
    stage_next: Callable[[], object] = _nothing
    """Starts to read the next batch; further calls return the same one."""
    next_is_slow: bool = False
    """Whether reading the next batch takes longer than the tables' update, judged by earlier batches."""
    upcoming: StagedBatch | None = None
    """The next batch, whose ids are sent while this one trains; None at the epoch's end or without sending
    ahead."""
    size: int = 0
    """Number of samples of ``batch`` (0: not counted yet)."""
    copied: torch.cuda.Event | None = None
    """The end of its copy to a GPU, on the loader's stream; None: there is nothing to wait for."""

    def __post_init__(self) -> None:
        self.size = self.size or batch_size(self.batch)
        self.total = self.total or self.size
        self.consumed = self.consumed or self.total

    def arrive(self) -> None:
        """Let this thread's stream wait until the batch is on the GPU; call it before anything uses the
        batch."""
        copied, self.copied = self.copied, None
        if copied is not None:
            # Jagged parts keep all their tensors, also offsets that were computed on the way.
            arrived(copied, [part for part in leaves((self.batch, self.ids)) if on_gpu(part)])


class StepTimes:
    """Seconds in micro-batches before and after the wait for cold rows. On a GPU it is the time of its
    kernels, and reading it waits for them."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.before, self.after = Spans(), Spans()

    @property
    def before_cold(self) -> float:
        """Seconds before the wait."""
        return self.before.total()

    @property
    def after_cold(self) -> float:
        """Seconds after it."""
        return self.after.total()

    def now(self) -> Mark:
        """The point that training has reached."""
        return mark(self.device)


def accumulate(
    model: PlacedModel,
    staged: StagedBatch,
    times: StepTimes,
    cores: Cores | None = None,
    lookups: BatchLookups | None = None,
    beside: Beside | None = None,
    graph: StepGraph | None = None,
) -> torch.Tensor:
    """Run the forward and the backward pass of one batch; returns the mean loss, detached.

    On return the dense gradients are those of the mean loss over the whole batch, and the tables have made
    their fused update (or begun it, ``beside``, whose ``finish`` waits for it). If several ranks train, loss
    and dense gradients are this rank's contributions to the sums. On a CPU with one trainer, a loss that is
    not finite leaves the tables unchanged.

    Every tier is looked up once, before any update. Micro-batches follow one another; with ``cores``, each is
    shared among them. ``lookups``: the batch's lookups if they are in other tables than the model's own.
    ``graph`` trains the dense part of whole batches.
    """
    if lookups is None:
        lookups = model.lookups(staged.batch, staged.plan, staged.sent, staged.ids)
    return _Step(model, staged, times, cores, lookups, beside, graph).run()


class _Step:
    def __init__(
        self,
        model: PlacedModel,
        staged: StagedBatch,
        times: StepTimes,
        cores: Cores | None,
        lookups: BatchLookups,
        beside: Beside | None,
        graph: StepGraph | None,
    ) -> None:
        self.model, self.staged, self.times, self.cores = model, staged, times, cores
        self.lookups, self.beside = lookups, beside
        self.dense = [p for p in model.dense if p.requires_grad]
        self.looked_up = False
        # On a GPU one backward pass starts sooner than two. A trace tells both passes apart.
        whole = len(staged.bounds) < 2 and staged.alone and cores is None and beside is None
        lookups.attached = whole and times.device.type == "cuda" and not watched()
        self.graph = graph if whole and staged.size and not watched() else None
        self._late_calls = model.late_calls
        self._shared: list[tuple[list[_CorePart], list[Future[None]]]] = []
        """The cores' parts, and the results of the other cores' parts."""

    def run(self) -> torch.Tensor:
        staged, bounds = self.staged, self.staged.bounds or (self.staged.size,)
        started, low, losses = self._now(), 0, []
        for number, high in enumerate(bounds):
            if self.looked_up and not self.lookups.cold_is_here and number >= staged.cold_from:
                started = self._cold_comes(started)
            losses.append(self._micro_batch(low, high))
            low = high
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        trained = usable(staged, loss)
        added = self._adding_up()
        # The tables' update leaves cores free for the reader; operators that use all cores would wait for it.
        staged.stage_next()
        staged.stage_next = _nothing  # it references all later batches
        if trained:
            self._update_tables()
        if added is not None:
            with phase("dense backward"):
                added.result()
            self._shared.clear()  # its parts reference this step
        self._count(started)
        return loss

    def _update_tables(self) -> None:
        late = self.model.late_calls != self._late_calls
        self.lookups.backward(self.staged.alone, beside=None if late else self.beside)
        if late:
            self.model.update_late(self.lookups)

    # -- rows --------------------------------------------------------------------------------

    def _look_up(self, shared: bool = False) -> None:
        """Look up what the first micro-batch needs, then send the numbers of the next batch's ids."""
        staged = self.staged
        wait = staged.plan is not None and (not staged.bounds or staged.cold_from == 0)
        by_graph = self.graph is not None and self.graph.takes_tables
        self.lookups.look_up(wait, shared, self.beside, by_graph)
        self.looked_up = True
        if staged.upcoming is not None:
            staged.upcoming.arrive()
            staged.upcoming.sent = self.model.send(staged.upcoming.batch, staged.upcoming.ids)

    def _cold_comes(self, started: Mark) -> Mark:
        if self.staged.plan is None:
            return started
        self.times.before.add(started, self.times.now())
        self.lookups.wait_for_cold()
        return self.times.now()

    def _now(self) -> Mark:
        """The point that training has reached, if there are micro-batches."""
        return self.times.now() if self.staged.bounds else 0.0

    def _count(self, started: Mark) -> None:
        """Add the time to the figures, if there are micro-batches."""
        if self.staged.bounds:
            spans = self.times.after if self.lookups.cold_is_here else self.times.before
            spans.add(started, self._now())

    def _go_on(self) -> None:
        """After a forward pass: the next batch's ids go out, their rows are fetched, and a slow one is read,
        in the backward pass. So is any, if that one includes the tables' update."""
        staged = self.staged
        if staged.next_is_slow or self.lookups.attached:
            staged.stage_next()
        upcoming = staged.upcoming.sent.values() if staged.upcoming is not None else ()
        for sent in upcoming:
            sent.send_ids()
        for sent in upcoming:
            sent.fetch_rows()

    # -- the model ---------------------------------------------------------------------------

    def _micro_batch(self, low: int, high: int) -> torch.Tensor:
        """Train samples [low, high); returns their contribution to the batch's mean loss, detached."""
        shares = [high - low]
        if self.cores is not None:
            shares = self.cores.shares(high - low)
        if len(shares) > 1:
            assert self.cores is not None, "one core does not share"
            return self._on_cores(self.cores, low, [low + end for end in shares])
        if not self.looked_up:
            self._look_up()
        if low == high:
            self._go_on()
            return self._nothing_trained()
        if self.graph is not None:
            loss = self.graph.train(self.lookups, self.staged.batch)
            if loss is not None:
                self._go_on()
                return loss
            self.lookups.look_up_left()
        loss = self._forward(*self._part(low, high))
        self._go_on()
        with phase("dense backward"), in_this_thread():
            torch.autograd.backward(loss)
        return loss.detach()

    def _nothing_trained(self) -> torch.Tensor:
        """A step without samples. It still updates the tables, since other ranks wait for the messages."""
        # That of its rows, as the other ranks' loss: tensors on a CPU and on a GPU go by different backends.
        there = [*(lookup.warm for lookup in self.lookups.all), *self.dense]
        return torch.zeros((), device=there[0].device if there else None)

    def _part(self, low: int, high: int) -> tuple[Mapping[Front, Part], Any, int]:
        batch = between(self.staged.batch, low, high)
        return self.model.part(self.lookups, batch, low, high), batch, high - low

    def _forward(self, parts: Mapping[Front, Part], batch: Any, samples: int) -> torch.Tensor:
        """These samples' contribution to the batch's mean loss."""
        return self.model.train_part(parts, batch, samples / self.staged.total)

    def _on_cores(self, cores: Cores, low: int, bounds: list[int]) -> torch.Tensor:
        """Train the cores' shares, which end at ``bounds``; the first one in this thread.

        On return the gradients of all rows are complete; those of the dense parameters are after
        ``_adding_up``.
        """
        starts = [low, *bounds[:-1]]
        parts = [_CorePart(self, *part) for part in zip(starts, bounds, strict=True)]
        with cores.shared():
            if self.looked_up:
                self.lookups.share()
            self._shared.append((parts, [cores.submit(part.train) for part in parts[1:]]))
            if not self.looked_up:
                self._look_up(shared=True)
            self._go_on()
            parts[0].train()
            with phase("dense backward"):
                loss = torch.stack([part.rows_done.result() for part in parts]).sum()
        if self.model.late_calls != self._late_calls:
            raise UserError(
                "the model looks rows up by ids of its own making, but did not for the first samples; cores "
                "that share a batch cannot train such rows: set trainer.backend=plain"
            )
        return loss

    def _adding_up(self) -> Future[None] | None:
        """Let another core add up the dense gradients, always in the order of the samples."""
        if self.cores is None or not self._shared:
            return None

        def add_up() -> None:
            for parts, ends in self._shared:
                for end in ends:
                    end.result()
                for part in parts:
                    self._add(part.gradients)

        return self.cores.submit(add_up)

    def _add(self, gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self.dense, gradients, strict=True):
            if gradient is not None:
                # Not in place: autograd may return one tensor for two parameters, or an expanded one.
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class _CorePart:
    """One core's samples and their results."""

    def __init__(self, step: _Step, low: int, high: int) -> None:
        self.step, self.low, self.high = step, low, high
        self.rows_done: Future[torch.Tensor] = Future()
        """The contribution to the loss, set when the gradients of all its rows are computed."""
        self.gradients: list[torch.Tensor | None] = []
        """The gradients of the dense parameters."""

    def train(self) -> None:
        """Run the forward and the backward pass."""
        try:
            self._train()
        except BaseException as fault:
            if not self.rows_done.done():
                self.rows_done.set_exception(fault)
            raise

    def _train(self) -> None:
        parts, batch, samples = self.step._part(self.low, self.high)
        loss = self.step._forward(parts, batch, samples)
        handed = [(part, *each) for part in parts.values() for each in part.each()]
        rows = [row for row in handed if row[-1].requires_grad]
        leaves = [leaf for _, _, leaf in rows]
        waited = len(leaves)

        def arrived(part: Part, lookup: GroupLookup, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
            nonlocal waited
            lookup.keep(part.low, part.high, leaf, gradient)
            waited -= 1
            if not waited:
                self.rows_done.set_result(loss.detach())

        hooks = [
            row[-1].register_hook(partial(arrived, *row))  # type: ignore[no-untyped-call]
            for row in rows
        ]
        try:
            with phase("dense backward"):
                found = torch.autograd.grad(loss, [*leaves, *self.step.dense], allow_unused=True)
        finally:
            for hook in hooks:  # they and their leaves reference each other
                hook.remove()
        self.gradients = list(found[len(leaves) :])
        if not self.rows_done.done():
            self.rows_done.set_result(loss.detach())


def usable(staged: StagedBatch, loss: torch.Tensor) -> bool:
    """Whether to update from ``loss``. It is not checked on a GPU, which would have to wait, or with several
    ranks, which must all do the same."""
    return loss.device.type != "cpu" or not staged.alone or math.isfinite(loss.item())
