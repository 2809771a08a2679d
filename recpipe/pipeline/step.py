"""One training step up to the dense optimizer's update, with any tiers, micro-batches and cores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

import torch

from recpipe.common.device import in_this_thread
from recpipe.common.timing import Mark, Spans, mark, phase, watched
from recpipe.errors import UserError
from recpipe.pipeline.batch import Handed, InFlight, nothing
from recpipe.pipeline.cores import Cores
from recpipe.pipeline.placed import PlacedModel
from recpipe.pipeline.step_graph import StepGraph
from recpipe.tables.front import Front
from recpipe.tables.group_rows import GroupRows
from recpipe.tables.workers import TableWorkers


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
    batch: InFlight,
    times: StepTimes,
    cores: Cores | None = None,
    workers: TableWorkers | None = None,
    graph: StepGraph | None = None,
) -> torch.Tensor:
    """Run the forward and the backward pass of one batch; returns the mean loss, detached.

    On return the dense gradients are those of the mean loss over the whole batch, and the tables have made
    their fused update (or begun it in ``workers``, whose ``finish`` waits for it). If several ranks train,
    loss and dense gradients are this rank's contributions to the sums. On a CPU with one trainer, a loss that
    is not finite leaves the tables unchanged.

    Every tier is looked up once, before any update. Micro-batches follow one another; with ``cores``, each is
    shared among them. ``graph`` trains the dense part of whole batches.
    """
    model.take(batch)
    try:
        return _Step(model, batch, times, cores, workers, graph).run()
    finally:
        batch.release()


class _Step:
    def __init__(
        self,
        model: PlacedModel,
        batch: InFlight,
        times: StepTimes,
        cores: Cores | None,
        workers: TableWorkers | None,
        graph: StepGraph | None,
    ) -> None:
        self.model, self.batch, self.times = model, batch, times
        self.cores, self.workers = cores, workers
        self.dense = [p for p in model.dense if p.requires_grad]
        self.looked_up = False
        # On a GPU one backward pass starts sooner than two. A trace tells both passes apart.
        whole = len(batch.bounds) < 2 and batch.alone and cores is None and workers is None
        batch.attached = whole and times.device.type == "cuda" and not watched()
        self.graph = graph if whole and batch.size and not watched() else None
        self._late_calls = model.late_calls
        self._shared: list[tuple[list[_CorePart], list[Future[None]]]] = []
        """The cores' parts, and the results of the other cores' parts."""

    def run(self) -> torch.Tensor:
        batch = self.batch
        timed = bool(batch.bounds)  # whether there are micro-batches
        started = self.times.now() if timed else 0.0
        low, losses = 0, []
        for number, high in enumerate(batch.bounds or (batch.size,)):
            waits = self.looked_up and not batch.cold_is_here and number >= batch.cold_from
            if waits and batch.moving:
                self.times.before.add(started, self.times.now())
                batch.wait_for_cold()
                started = self.times.now()
            losses.append(self._micro_batch(low, high))
            low = high
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        # Not checked on a GPU, which would have to wait, or with several ranks, which must all do the same.
        trained = loss.device.type != "cpu" or not batch.alone or math.isfinite(loss.item())
        reduced = self._reduce_dense()
        # The tables' update leaves cores free for the reader; operators that use all cores would wait for it.
        batch.read_next()
        batch.read_next = nothing  # it references all later batches
        if trained:
            self._update_tables()
        if reduced is not None:
            with phase("dense backward"):
                reduced.result()
            self._shared.clear()  # its parts reference this step
        if timed:
            spans = self.times.after if batch.cold_is_here else self.times.before
            spans.add(started, self.times.now())
        return loss

    def _update_tables(self) -> None:
        late = self.model.late_calls != self._late_calls
        self.batch.backward(workers=None if late else self.workers)
        if late:
            self.model.update_late(self.batch)

    # -- rows --------------------------------------------------------------------------------

    def _look_up(self, shared: bool = False) -> None:
        """Look up what the first micro-batch needs, then send the numbers of the next batch's ids."""
        batch = self.batch
        wait = bool(batch.moving) and (not batch.bounds or batch.cold_from == 0)
        by_graph = self.graph is not None and self.graph.takes_tables
        batch.look_up(wait, shared, self.workers, by_graph)
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
        if self.cores is not None:
            shares = self.cores.shares(high - low)
            if len(shares) > 1:
                return self._on_cores(self.cores, low, [low + end for end in shares])
        if not self.looked_up:
            self._look_up()
        if low == high:
            self._overlap_next_batch()
            return self._nothing_trained()
        if self.graph is not None:
            loss = self.graph.train(self.batch)
            if loss is not None:
                self._overlap_next_batch()
                return loss
            self.batch.look_up_left()
        loss, _ = self._forward(low, high)
        self._overlap_next_batch()
        with phase("dense backward"), in_this_thread():
            torch.autograd.backward(loss)
        return loss.detach()

    def _nothing_trained(self) -> torch.Tensor:
        """A step without samples. It still updates the tables, since other ranks wait for the messages."""
        # That of its rows, as the other ranks' loss: tensors on a CPU and on a GPU go by different backends.
        there = [*(rows.warm for rows in self.batch.rows), *self.dense]
        return torch.zeros((), device=there[0].device if there else None)

    def _forward(self, low: int, high: int) -> tuple[torch.Tensor, Mapping[Front, Handed]]:
        """The contribution of samples [low, high) to the batch's mean loss, and what they were handed."""
        handed, samples = self.model.part(self.batch, low, high)
        return self.model.train_part(handed, samples, (high - low) / self.batch.total), handed

    def _on_cores(self, cores: Cores, low: int, bounds: list[int]) -> torch.Tensor:
        """Train the cores' shares, which end at ``bounds``; the first one in this thread.

        On return the gradients of all rows are complete; those of the dense parameters are after
        ``_reduce_dense``.
        """
        starts = [low, *bounds[:-1]]
        parts = [_CorePart(self, *part) for part in zip(starts, bounds, strict=True)]
        with cores.shared():
            if self.looked_up:
                self.batch.share()
            self._shared.append((parts, [cores.submit(part.train) for part in parts[1:]]))
            if not self.looked_up:
                self._look_up(shared=True)
            self._overlap_next_batch()
            parts[0].train()
            with phase("dense backward"):
                loss = torch.stack([part.rows_done.result() for part in parts]).sum()
        if self.model.late_calls != self._late_calls:
            raise UserError(
                "the model looks rows up by ids of its own making, but did not for the first samples; cores "
                "that share a batch cannot train such rows: set trainer.backend=plain"
            )
        return loss

    def _reduce_dense(self) -> Future[None] | None:
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
        loss, handed = self.step._forward(self.low, self.high)
        every = [pair for part in handed.values() for pair in part.each()]
        pairs = [(rows, leaf) for rows, leaf in every if leaf.requires_grad]
        leaves = [leaf for _, leaf in pairs]
        waited = len(leaves)

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
                found = torch.autograd.grad(loss, [*leaves, *self.step.dense], allow_unused=True)
        finally:
            for hook in hooks:  # they and their leaves reference each other
                hook.remove()
        self.gradients = list(found[len(leaves) :])
        if not self.rows_done.done():
            self.rows_done.set_result(loss.detach())
