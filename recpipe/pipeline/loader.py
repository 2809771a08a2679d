"""The pipeline in front of Lightning: a sized iterable of batches that are ready to train.

While batch b trains, one worker thread reads batch b + 1, runs it through the plugins' chains, plans
its tiers and starts fetching its rows. Nothing is drained and nothing is lost at the epoch's end.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from time import perf_counter
from typing import Any

import numpy as np
import torch

from recpipe.common.phases import phase
from recpipe.data.ahead import read_ahead
from recpipe.data.batch import Batch, BatchShare
from recpipe.data.dataset import Dataset, SplitName
from recpipe.data.parts import batch_size
from recpipe.data.select import between, select
from recpipe.distributed.ranks import Ranks
from recpipe.errors import DataError
from recpipe.pipeline.order_check import OrderCheck
from recpipe.pipeline.share import cut, in_steps
from recpipe.pipeline.step import StagedBatch
from recpipe.plugin.assembly import Assembly
from recpipe.plugin.errors import PluginError
from recpipe.plugin.splitter import micro_batch_step
from recpipe.tables.inputs import GroupIds, Inputs, count_ids
from recpipe.tables.skipping import described
from recpipe.tables.tiers.batch import BatchPlan, Tiers
from recpipe.tables.view import RowView

WAITED = 1e-3
"""Seconds of waiting for a batch from which on it counts as waited for."""
SLOW = 8
"""One batch in so many may be waited for before the next ones are read earlier."""


class TrainLoader:
    """One epoch of staged training batches; ``first`` is where a resumed epoch goes on."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        assembly: Assembly,
        inputs: Inputs,
        tiers: Tiers | None,
        device: torch.device,
        ranks: Ranks | None = None,
        sends_ahead: bool = False,
        view: RowView | None = None,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.ranks = ranks or Ranks()
        self.sends_ahead = sends_ahead
        """Whether each batch is to send the ids of the next one over the ranks (sharded tables)."""
        self.assembly = assembly
        self.inputs = inputs
        self.tiers = tiers
        """The tiers of all groups of tables; None where all rows are resident."""
        self.device = device
        self.view = view
        """What a skipper is shown of the rows."""
        self.order_check = OrderCheck.of(dataset, batch_size, assembly)
        self.first = 0
        self.handed_out = 0
        """Batches handed to training over all epochs, those before a resume included."""
        self._number = 0
        self._begun = False
        self.lookups = 0
        """Ids handed to training, on this rank, since this loader was made."""

    def __len__(self) -> int:
        if self.assembly.order is not None:
            return len(self.assembly.order.part)
        return self.dataset.num_batches("train", self.batch_size)

    def end_epoch(self) -> None:
        """The epoch's last batch has been trained; may be called again.

        ``PluginError`` where a plugin's order did not hold every sample once.
        """
        if self.order_check is not None:
            self.order_check.end()

    def _batches(self, first: int) -> Iterator[Batch]:
        """The epoch's batches from ``first`` on, in the data module's order or a plugin's."""
        if self.assembly.order is not None:
            ordered = self.assembly.order.part.batches(first)
            return ordered if self.order_check is None or first else self.order_check.watched(ordered)
        batches = self.dataset.batches("train", self.batch_size, first, self._part)
        return read_ahead(batches, self.dataset.read_ahead) if self.dataset.read_ahead else batches

    @property
    def _part(self) -> tuple[int, int] | None:
        """This rank's part of every batch, where nothing in the run looks at whole batches."""
        plugins = self.assembly
        skipper = plugins.skipper if plugins.skipper is not None and plugins.skipper.part.keeps else None
        lookers = [plugins.order, *plugins.stream, *plugins.batch, skipper, plugins.splitter, self.tiers]
        unseen = self.dataset.gives_parts and all(looker is None for looker in lookers)
        return self.ranks.part if unseen else None

    def __iter__(self) -> Iterator[StagedBatch]:
        first, self.first = self.first, 0
        self._begin()
        batches = self._batches(first)
        source = self.assembly.wrap_stream(batches)
        try:
            with ThreadPoolExecutor(1, "recpipe-loader") as worker:
                for staged in (self._linked if self.sends_ahead else self._planned)(worker, source):
                    assert staged.ids is not None, "staged with its ids"
                    self.lookups += count_ids(staged.ids)
                    self.handed_out += 1
                    yield staged
            self.end_epoch()
        finally:
            if isinstance(batches, Generator):
                batches.close()
            if self.tiers is not None:
                self.tiers.forget()

    def _planned(self, worker: ThreadPoolExecutor, source: Iterator[Batch]) -> Iterator[StagedBatch]:
        """Each batch as its turn comes; the next one is planned once this one's rows are on their way.

        Without tiers it is read while this one's tables are updated, or already in its backward pass as long
        as training had to wait for more than one in ``SLOW``: two threads that run Python hold each other up.
        """
        upcoming, batches, waits = cache(partial(worker.submit, self._stage, source)), 0, 0
        staged = _waited(upcoming())
        while staged is not None:
            upcoming = cache(partial(worker.submit, self._stage, source))
            if self.tiers is not None and staged.plan is not None:
                self.tiers.advance(staged.plan)
                upcoming()
            else:
                staged.stage_next, staged.next_is_slow = upcoming, waits * SLOW > batches
            yield staged
            asked = perf_counter()
            staged = _waited(upcoming())
            batches, waits = batches + 1, waits + (perf_counter() - asked > WAITED)

    def _linked(self, worker: ThreadPoolExecutor, source: Iterator[Batch]) -> Iterator[StagedBatch]:
        """Each batch with the one after it; the second after it is read while this one trains.

        A fault in reading a batch comes out one batch early.
        """
        staged = self._stage(source)
        pending = worker.submit(self._stage, source)
        while staged is not None:
            staged.upcoming = _waited(pending)
            pending = worker.submit(self._stage, source)
            yield staged
            staged = staged.upcoming

    def _stage(self, source: Iterator[Batch]) -> StagedBatch | None:
        """The next batch, ready to train; None at the epoch's end. Runs in the worker thread."""
        batch = next(source, None)
        if batch is None:
            return None
        if isinstance(batch, BatchShare):
            each = self.inputs.each(batch)
            self.inputs.require_ids(each)
            staged = StagedBatch(on_device(batch, self.device), total=batch.total, alone=False)
            return self._with_ids(staged, batch, each)
        consumed = batch_size(batch)
        batch = self.assembly.transform(batch)
        size = batch_size(batch) if self.assembly.batch else consumed
        if not size:
            raise DataError("a plugin's batch transform returned a batch without samples; it must leave one")
        batch, skipped = self._skip(batch, size)
        size -= skipped
        plan, each = None, self.inputs.each(batch)
        if self.tiers is not None:
            plan = self.tiers.plan(batch, each)  # checks the ids
        else:
            self.inputs.require_ids(each)
        staged = self._share(batch, size, plan)
        staged.consumed, staged.skipped = consumed, skipped
        self._with_ids(staged, batch, each)
        if self.tiers is not None and self.tiers.prefetches and plan is not None:
            self.tiers.prefetch(plan)
        return staged

    def _begin(self) -> None:
        """An epoch begins, perhaps after one that was left early: what was read ahead was not trained."""
        self._number = self.handed_out
        if self.assembly.skipper is not None and not self._begun:
            assert self.view is not None, "whoever has a skipper gives a view"
            self.assembly.skipper.part.begin(self.view)
        self._begun = True

    def _skip(self, batch: Any, size: int) -> tuple[Any, int]:
        """``batch``, of so many samples, without those that the skipper leaves out, and how many these are;
        all of it where nothing would be left."""
        number, self._number = self._number, self._number + 1
        skipper = self.assembly.skipper
        if skipper is None or not skipper.part.keeps:
            return batch, 0
        kept = skipper.part.keep(batch, number)
        if kept is None:
            return batch, 0
        if not isinstance(kept, np.ndarray) or (kept.dtype, kept.shape) != (np.dtype(bool), (size,)):
            raise PluginError(
                f"plugin {skipper.origin}: keep() of its skipper returned {described(kept)}; it must be a "
                f"numpy array of bool [{size}], one for each sample of the batch, or None"
            )
        samples = np.flatnonzero(kept)
        if len(samples) in (0, size):
            return batch, 0
        return select(batch, samples), size - len(samples)

    def _with_ids(self, staged: StagedBatch, batch: Any, each: GroupIds) -> StagedBatch:
        """``staged`` with its ids in order, which are ``each`` if it is ``batch`` itself: here and not in the
        training thread, which has more to do."""
        staged.ids = each if staged.batch is batch else self.inputs.each(staged.batch)
        return staged

    def _share(self, batch: Any, size: int, plan: BatchPlan | None) -> StagedBatch:
        """What this rank trains of ``batch``, in the splitter's micro-batches if there is one."""
        splitter, alone = self.assembly.splitter, len(self.ranks.trainers) == 1
        if splitter is None and alone:
            return StagedBatch(on_device(batch, self.device), plan, size=size)
        needs_cold = plan.needs_cold if plan is not None else np.zeros(size, bool)
        order = np.arange(size)
        bounds: tuple[int, ...] = (size,)
        if splitter is not None:
            split = splitter.part.split(batch, needs_cold)
            order, bounds = split.order, in_steps(split.bounds, micro_batch_step(self.batch_size))
        mine = cut(order, bounds, needs_cold, self.ranks)
        if plan is not None:
            plan.arrange(mine.samples, mine.cold_first, alone)
        return StagedBatch(
            on_device(select(batch, mine.samples), self.device),
            plan,
            mine.bounds if splitter is not None else (),
            mine.cold_from,
            total=size,
            alone=alone,
        )


def _waited(pending: Future[StagedBatch | None]) -> StagedBatch | None:
    with phase("input"):
        return pending.result()


class EvalLoader:
    """This rank's share of the held-out split's batches (it may be empty), in order, on the device."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        inputs: Inputs,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.dataset = dataset
        self.batch_size = batch_size
        self.inputs = inputs
        self.device = device

    def __len__(self) -> int:
        return self.dataset.num_batches("eval", self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        split: SplitName = "eval"
        for batch in self.dataset.batches(split, self.batch_size, part=self.ranks.part):
            if not self.dataset.gives_parts:
                own = self.ranks.shares(0, batch_size(batch))[self.ranks.trainer]
                batch = between(batch, own.start, own.stop)
            self.inputs.require_ids(self.inputs.each(batch))
            yield on_device(batch, self.device)


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch, which is ``Pipelineable``, on ``device``; to a GPU through page-locked memory, without
    waiting for the copy."""
    if device.type == "cpu":
        return batch
    pinned = batch.pin_memory() if hasattr(batch, "pin_memory") else batch
    return pinned.to(device, non_blocking=True)
