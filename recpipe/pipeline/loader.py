"""The pipeline in front of Lightning: a sized iterable of batches that are ready to train.

While batch b trains, one worker thread reads batch b + 1, runs it through the plugins' chains, plans
its tiers and starts fetching its rows. Where a GPU finds the rows that planning is about, another thread
reads batch b + 2 and waits for that. No batch is dropped at the epoch's end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from threading import Event
from time import perf_counter
from typing import Any
from weakref import ref

import numpy as np
import torch

from recpipe.access.sample import AccessSample
from recpipe.common.device import Aside, threads_for
from recpipe.common.timing import phase, settled
from recpipe.data.dataset import Dataset, SplitName
from recpipe.data.parts import Asked, batch_size, keeping_ids, leaves, on_device, on_gpu
from recpipe.data.select import between, select
from recpipe.distributed.ranks import Ranks
from recpipe.errors import DataError
from recpipe.pipeline.sample_filter import SampleFilter
from recpipe.pipeline.share import cut
from recpipe.pipeline.source import BatchSource
from recpipe.pipeline.splitting import Splitting
from recpipe.pipeline.step import StagedBatch
from recpipe.plugin.batch import Batch, BatchShare
from recpipe.plugin.splitter import Split
from recpipe.tables.inputs import GroupIds, Inputs, count_ids
from recpipe.tables.tiers.batch import BatchPlan, Found, Tiers

WAITED = 1e-3
"""A batch counts as waited for if training waited so many seconds for it."""
SLOW = 8
"""If training waits for more than one batch in so many, the next ones are read earlier."""


class TrainLoader:
    """Yields one epoch of staged training batches; a resumed epoch begins at number ``first``."""

    def __init__(
        self,
        source: BatchSource,
        inputs: Inputs,
        tiers: Tiers | None,
        device: torch.device,
        ranks: Ranks | None = None,
        sends_ahead: bool = False,
        sample_filter: SampleFilter | None = None,
        splitting: Splitting | None = None,
        accesses: AccessSample | None = None,
    ) -> None:
        self.source = source
        self.inputs = inputs
        self.tiers = tiers
        """The tiers of all groups of tables; None if all rows are resident."""
        self.device = device
        self.ranks = ranks or Ranks()
        self.sends_ahead = sends_ahead
        """Whether each batch is to send the ids of the next one over the ranks (sharded tables)."""
        self.sample_filter = sample_filter
        self.splitting = splitting
        self.accesses = accesses
        """Keeps some batches' ids."""
        self._aside = Aside(device)
        by_slots = device.type == "cuda" and tiers is not None and tiers.of_all
        self._asked: Asked | None = {} if by_slots else None
        """What the model itself reads of ids on the GPU, if rows are looked up there by slots."""
        self._epoch: Callable[[], Generator[StagedBatch] | None] = lambda: None
        """The newest epoch if somebody still holds it; one that nobody holds has ended its threads."""
        self.first = 0
        self.handed_out = 0
        """How many batches training has got over all epochs, including those before a resume."""
        self.left = 0
        """How many batches of the epoch training has not got yet."""
        self.lookups = 0
        """How many ids training has got on this rank since this loader was made."""

    def __len__(self) -> int:
        return len(self.source)

    def end_epoch(self) -> None:
        """End the epoch after the last batch that is trained of it; may be called again.

        ``PluginError`` if training had all its batches, and a plugin has lost or repeated samples.
        """
        self.source.end_epoch(self.left == 0)

    def close(self) -> None:
        """End the threads of an epoch that was left early, once they have done what they are doing; may be
        called again. With several ranks that may need the others."""
        epoch = self._epoch()
        if epoch is not None:
            epoch.close()

    @property
    def _part(self) -> tuple[int, int] | None:
        """This rank's part of every batch, if nothing in the run needs whole batches."""
        skips = self.sample_filter is not None and self.sample_filter.looks_at_batches
        unseen = not skips and self.splitting is None and self.tiers is None
        return self.ranks.part if unseen and self.source.gives_parts else None

    def __iter__(self) -> Iterator[StagedBatch]:
        epoch = self._batches()
        self._epoch = ref(epoch)
        return epoch

    def _batches(self) -> Generator[StagedBatch]:
        first, self.first = self.first, 0
        self.left = len(self) - first
        if self.sample_filter is not None:  # an epoch left early had read batches that were not trained
            self.sample_filter.begin_epoch(self.handed_out)
        if self.splitting is not None:
            self.splitting.begin_epoch(self.handed_out)
        try:
            with self.source.epoch(first, self._part) as batches, self._reads(batches) as reads:
                with threads_for(self.device, 1, "recpipe-loader") as worker:
                    ready = (self._linked if self.sends_ahead else self._planned)(worker, reads)
                    for staged in ready if self.splitting is None else self._timed(ready, self.splitting):
                        assert staged.ids is not None, "staged with its ids"
                        self.lookups += count_ids(staged.ids)
                        self.handed_out += 1
                        self.left -= 1
                        staged.arrive()
                        yield staged
                self.end_epoch()
        finally:
            if self.tiers is not None:
                self.tiers.forget()

    @contextmanager
    def _reads(self, batches: Iterator[Batch]) -> Iterator[Iterator[_Read]]:
        """In the block, ``batches`` as they are read; by a thread, one ahead, where a GPU is waited for and
        no plugin's part sees what has been trained."""
        reads = iter(partial(self._read, batches), None)
        feed = self.source.feed
        seen = self.sample_filter is not None or feed.order is not None or bool(feed.batch)
        if self.tiers is None or not self.tiers.finds_ahead or seen:
            yield reads
            return
        with threads_for(self.device, 1, "recpipe-reader") as reader:
            yield _ahead(reader, reads)

    def _planned(self, worker: ThreadPoolExecutor, reads: Iterator[_Read]) -> Iterator[StagedBatch]:
        """Yield each batch in turn. The next batch is planned while this one's rows are moved, and its rows
        are fetched after that.

        Without tiers the next batch is read while this one's tables are updated, because two threads that run
        Python slow each other down. If training had to wait for more than one batch in ``SLOW``, it is read
        already during the backward pass.
        """
        upcoming, yielded, waits = cache(partial(worker.submit, self._stage, reads)), 0, 0
        staged = _waited(upcoming())
        while staged is not None:
            moved = Event()
            upcoming = cache(partial(worker.submit, self._stage, reads, moved))
            if self.tiers is not None and staged.plan is not None:
                self.tiers.begin(staged.plan)
                upcoming()
                try:
                    self.tiers.advance(staged.plan)
                finally:
                    moved.set()
            else:
                staged.stage_next, staged.next_is_slow = upcoming, waits * SLOW > yielded
            yield staged
            asked = perf_counter()
            staged = _waited(upcoming())
            yielded, waits = yielded + 1, waits + (perf_counter() - asked > WAITED)

    def _linked(self, worker: ThreadPoolExecutor, reads: Iterator[_Read]) -> Iterator[StagedBatch]:
        """Yield each batch with the next one; the one after that is read while this batch trains.

        A fault in reading a batch is raised one batch early.
        """
        staged = self._stage(reads)
        pending = worker.submit(self._stage, reads)
        while staged is not None:
            staged.upcoming = _waited(pending)
            pending = worker.submit(self._stage, reads)
            yield staged
            staged = staged.upcoming

    def _read(self, batches: Iterator[Batch]) -> _Read | None:
        """The next batch with its ids; None at the epoch's end. On a GPU on a stream of its own."""
        batch = next(batches, None)
        if batch is None:
            return None
        # What a source has made on the GPU itself must be done before it is used here.
        with self._aside.stream(after=any(map(on_gpu, leaves(batch)))):
            return self._known(batch)

    def _known(self, batch: Any) -> _Read:
        if isinstance(batch, BatchShare):
            return _Read(batch, self.inputs.each(batch), batch.total, batch.total)
        consumed = batch_size(batch)
        batch = self.source.transform(batch)
        size, skipped = batch_size(batch) if self.source.feed.batch else consumed, 0
        if not size:
            raise DataError("a plugin's batch transform returned a batch without samples; it must leave one")
        if self.sample_filter is not None:
            batch, skipped = self.sample_filter.kept(batch, size)
            size -= skipped
        each = self.inputs.each(batch)
        found = None if self.tiers is None else self.tiers.find(each)
        return _Read(batch, each, size, consumed, skipped, found)

    def _stage(self, reads: Iterator[_Read], moved: Event | None = None) -> StagedBatch | None:
        """The next batch, ready to train; None at the epoch's end. Runs in the worker thread, and on a GPU on
        a stream of its own. ``moved``: set once the batch before has sent away what leaves its tiers."""
        read = next(reads, None)
        if read is None:
            return None
        with self._aside.stream():
            staged = self._staged(read, moved)
            staged.copied = self._aside.mark()
        return staged

    def _staged(self, read: _Read, moved: Event | None) -> StagedBatch:
        batch, each = read.batch, read.each
        plan = None
        if self.tiers is not None:
            plan = self.tiers.plan(batch, each, read.found)  # checks the ids
        else:
            self.inputs.require_ids(each)
        self._count(each)
        if isinstance(batch, BatchShare):
            there, ids = self._moved(batch, batch, each)
            return StagedBatch(there, total=batch.total, alone=False, ids=ids)
        staged = self._share(batch, read.size, plan, each)
        staged.consumed, staged.skipped = read.consumed, read.skipped
        if self.tiers is not None and self.tiers.prefetches and plan is not None:
            if moved is not None:
                moved.wait()
            self.tiers.prefetch(plan)
        return staged

    def _count(self, each: GroupIds) -> None:
        if self.accesses is not None:
            self.accesses.add(each)

    def _moved(self, mine: Any, batch: Any, each: GroupIds) -> tuple[Any, GroupIds]:
        """``mine``, this rank's samples of ``batch``, on the device; and its ids in order, which are ``each``
        if it is all of ``batch``. This is done here because the training thread has more to do.

        Where rows are looked up by slots, ids stay in host memory unless the model itself reads them.
        """
        if self._asked is None:
            there = looked_up = on_device(mine, self.device)
        else:
            there, looked_up = on_device(keeping_ids(mine, self._asked), self.device), mine
        return there, each if looked_up is batch else self.inputs.each(looked_up)

    def _passes_by(self, splitting: Splitting) -> bool:
        """Whether the next batch is trained whole without a look at its samples, which waits for a GPU."""
        if self.device.type == "cpu" or splitting.looks():
            return False
        splitting.pass_by()
        return True

    def _timed(self, ready: Iterator[StagedBatch], splitting: Splitting) -> Iterator[StagedBatch]:
        """``ready``, telling ``splitting`` how long each batch took until the next one. A GPU is waited for
        while steps are compared, since it works later than it is asked to."""
        started = 0.0
        for staged in ready:
            ended = settled(self.device) if splitting.compares else perf_counter()
            if started:
                splitting.trained(ended - started)
            started = perf_counter()
            yield staged

    def _share(self, batch: Any, size: int, plan: BatchPlan | None, each: GroupIds) -> StagedBatch:
        """What this rank trains of ``batch``, whose ids are ``each``, in micro-batches if there is a
        splitter."""
        alone, splitting = len(self.ranks.trainers) == 1, self.splitting
        if splitting is None and alone:
            there, ids = self._moved(batch, batch, each)
            return StagedBatch(there, plan, size=size, ids=ids)
        needs_cold, split = np.zeros(size, bool), None
        if not (alone and plan is not None and splitting is not None and self._passes_by(splitting)):
            needs_cold = needs_cold if plan is None else plan.needs_cold
            split = None if splitting is None else splitting.cut(batch, needs_cold)
        if split is None:
            if alone:  # there is nothing to put in order
                there, ids = self._moved(batch, batch, each)
                cold_from = 0 if plan is not None and plan.any_cold else 1
                return StagedBatch(there, plan, (size,), cold_from, size=size, ids=ids)
            split = Split(np.arange(size), (size,))
        mine = cut(split.order, split.bounds, needs_cold, self.ranks)
        if plan is not None:
            plan.arrange(mine.samples, mine.cold_first, alone)
        there, ids = self._moved(select(batch, mine.samples), batch, each)
        return StagedBatch(
            there,
            plan,
            () if splitting is None else mine.bounds,
            mine.cold_from,
            total=size,
            alone=alone,
            ids=ids,
        )


@dataclass
class _Read:
    """A batch that has been read."""

    batch: Any
    each: GroupIds
    """Its ids for each group."""
    size: int
    consumed: int
    """As in ``StagedBatch``."""
    skipped: int = 0
    found: Found | None = None
    """The result of ``Tiers.find``."""


def _ahead(worker: ThreadPoolExecutor, items: Iterator[_Read]) -> Iterator[_Read]:
    """``items``, each of which ``worker`` makes while the one before is used."""
    pending = worker.submit(next, items, None)
    while (item := pending.result()) is not None:
        pending = worker.submit(next, items, None)
        yield item


def _waited(pending: Future[StagedBatch | None]) -> StagedBatch | None:
    with phase("input"):
        return pending.result()


class EvalLoader:
    """This rank's share of the batches of one ``split``, the held-out one unless it is said, in order, on the
    device; it may be empty."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        inputs: Inputs,
        device: torch.device,
        ranks: Ranks | None = None,
        split: SplitName = "eval",
    ) -> None:
        self.ranks = ranks or Ranks()
        self.split = split
        self.dataset = dataset
        self.batch_size = batch_size
        self.inputs = inputs
        self.device = device

    def __len__(self) -> int:
        return self.dataset.num_batches(self.split, self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.dataset.batches(self.split, self.batch_size, part=self.ranks.part):
            if not self.dataset.gives_parts:
                own = self.ranks.shares(0, batch_size(batch))[self.ranks.trainer]
                batch = between(batch, own.start, own.stop)
            self.inputs.require_ids(self.inputs.each(batch))
            yield on_device(batch, self.device)
