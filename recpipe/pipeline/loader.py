"""The pipeline in front of Lightning: a sized iterable of batches that are ready to train.

While batch b trains, one worker thread reads batch b + 1, runs it through the plugins' chains, plans
its tiers and starts fetching its rows. Where a GPU finds the rows that planning is about, another thread
reads batch b + 2 and waits for that. No batch is dropped at the epoch's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from threading import Event
from time import perf_counter
from typing import Any
from weakref import ref

import numpy as np
import torch

from recpipe.access.sample import AccessSample
from recpipe.common.device import Aside, threads_for, using_threads
from recpipe.common.timing import phase, synchronized_time
from recpipe.data.dataset import Dataset, SplitName
from recpipe.data.parts import Asked, batch_size, changed_at, keeping_ids, leaves, on_device, on_gpu
from recpipe.data.select import between, select
from recpipe.distributed.ranks import Ranks
from recpipe.errors import DataError
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.source import BatchSource, SampleFilter
from recpipe.pipeline.splitting import Splitting, share_of
from recpipe.plugin.batch import Batch, BatchShare, scaled, total_weight
from recpipe.plugin.splitter import Split
from recpipe.tables.dynamic.growing import GrowingTables, Plan
from recpipe.tables.group_rows import GroupTables
from recpipe.tables.inputs import Inputs

WAITED = 1e-3
"""A batch counts as waited for if training waited so many seconds for it."""
WAITING = 0.1
"""Seconds from one call of ``while_waiting`` to the next."""
SLOW = 8
"""If training waits for more than one batch in so many, the next ones are read earlier."""


class TrainLoader:
    """Yields one epoch of staged training batches, the first one of a run that goes on from batch ``first``
    on."""

    def __init__(
        self,
        source: BatchSource,
        inputs: Inputs,
        tables: Sequence[GroupTables],
        device: torch.device,
        ranks: Ranks | None = None,
        sends_ahead: bool = False,
        sample_filter: SampleFilter | None = None,
        splitting: Splitting | None = None,
        accesses: AccessSample | None = None,
        growing: GrowingTables | None = None,
        label_weights: Sequence[str] = (),
    ) -> None:
        self.source = source
        self._label_weights = label_weights
        """Where batches of a user's own type have the weights of their labels, names one within another."""
        self.inputs = inputs
        self.tables = tables
        """The tables of each group."""
        self._bound = [each for number, each in enumerate(tables) if inputs.bound(number)]
        """Those whose ids the batches have."""
        self._tiers = [each for each in self._bound if each.moves]
        """The bound tables whose rows move between tiers."""
        self._finds_ahead = any(each.finds_ahead for each in self._tiers)
        self.device = device
        self.ranks = ranks or Ranks()
        self.sends_ahead = sends_ahead
        """Whether each batch is to send the ids of the next one over the ranks (sharded tables)."""
        self.sample_filter = sample_filter
        self.splitting = splitting
        self._alone = len(self.ranks.trainers) == 1
        self.accesses = accesses
        """Keeps some batches' ids."""
        self.growing = growing
        """The tables whose ids get rows as they come."""
        self._plans: deque[Plan] | None = None
        """Plans of batches that a plugin is ahead with; None: batches are planned as they are read."""
        if growing is not None and source.takes_rows is not None:
            self._plans = deque()
        self._aside = Aside(device)
        by_slots = device.type == "cuda" and bool(self._tiers) and self._tiers == self._bound
        self._asked: Asked | None = {} if by_slots else None
        """What the model itself reads of ids on the GPU, if rows are looked up there by slots."""
        self._epoch: Callable[[], Generator[InFlight] | None] = lambda: None
        """The newest epoch if somebody still holds it; one that nobody holds has ended its threads."""
        self.first = 0
        self.begun = 0
        """How many epochs have begun, those before a resume included, unless one goes on."""
        self.handed_out = 0
        """How many batches training has got over all epochs, including those before a resume."""
        self.left = 0
        """How many batches of the epoch training has not got yet."""
        self.lookups = 0
        """How many ids training has got on this rank since this loader was made."""
        self.while_waiting: Callable[[], None] | None = None
        """Called now and then, between two steps, while training waits for a batch; not where tables are
        sharded."""

    def __len__(self) -> int:
        return len(self.source)

    @property
    def epoch(self) -> int:
        """The number, from 0, of the epoch to which the next batch for training belongs."""
        return self.begun - (self.left > 0)

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

    def __iter__(self) -> Iterator[InFlight]:
        epoch = self._batches()
        self._epoch = ref(epoch)
        return epoch

    def _batches(self) -> Generator[InFlight]:
        first, self.first = self.first, 0
        number, self.begun = self.begun, self.begun + 1
        self.left = len(self) - first
        if self.sample_filter is not None:  # an epoch left early had read batches that were not trained
            self.sample_filter.begin_epoch(self.handed_out)
        if self.splitting is not None:
            self.splitting.begin_epoch(self.handed_out)
        try:
            # A rank reads its part of every batch alone if nothing in the run needs whole ones.
            skips = self.sample_filter is not None and self.sample_filter.looks_at_batches
            unseen = not (skips or self.splitting or self._tiers or self.growing)
            part = self.ranks.part if unseen and self.source.gives_parts else None
            ahead = None if self._plans is None else self._with_rows
            with self.source.epoch(first, part, number, ahead) as batches, self._reads(batches) as reads:
                with threads_for(self.device, 1, "recpipe-loader") as worker, ExitStack() as ending:
                    ending.callback(self.source.dataset.interrupt)  # the worker may wait for records
                    ready = (self._linked if self.sends_ahead else self._planned)(worker, reads)
                    for batch in ready if self.splitting is None else self._timed(ready, self.splitting):
                        for rows in batch.rows:
                            self.lookups += rows.ids.values().numel()
                        self.handed_out += 1
                        self.left -= 1
                        batch.arrive()
                        yield batch
                self.end_epoch()
        finally:
            for tables in self._tiers:
                tables.forget()
            if self.growing is not None:
                self.growing.forget()
            if self._plans is not None:
                self._plans.clear()

    def _begin(self, batch: InFlight) -> None:
        """The turn of ``batch`` has come."""
        if self.growing is not None:
            self.growing.begin(batch.growth)
        for rows in batch.moving:
            rows.tables.begin(rows)

    @contextmanager
    def _reads(self, batches: Iterator[Batch]) -> Iterator[Iterator[InFlight]]:
        """In the block, ``batches`` as they are read; by a thread, one ahead, where a GPU is waited for and
        no plugin's part sees what has been trained."""
        reads = iter(partial(self._read, batches), None)
        feed = self.source.feed
        seen = self.sample_filter is not None or feed.order is not None or bool(feed.batch)
        if seen or not self._finds_ahead:
            yield reads
            return
        with threads_for(self.device, 1, "recpipe-reader") as reader:
            yield _ahead(reader, reads)

    def _planned(self, worker: ThreadPoolExecutor, reads: Iterator[InFlight]) -> Iterator[InFlight]:
        """Yield each batch in turn. The next batch is planned while this one's rows are moved, and its rows
        are fetched after that.

        Without tiers the next batch is read while this one's tables are updated, because two threads that run
        Python slow each other down. If training had to wait for more than one batch in ``SLOW``, it is read
        already during the backward pass.
        """
        stage = partial(worker.submit, self._stage, reads)
        upcoming, yielded, waits = cache(stage), 0, 0
        threads = torch.get_num_threads()
        if self.device.type == "cpu":
            # Two cores plan and fetch while rows are moved; operators that use all would wait for them.
            threads = max(1, threads - 2)
        while True:
            asked = perf_counter()
            with phase("input"):
                batch = self._waited_for(upcoming())
            if batch is None:
                return
            waits += bool(yielded) and perf_counter() - asked > WAITED
            moved = Event()
            upcoming = cache(partial(stage, moved))
            self._begin(batch)
            if self._tiers:
                upcoming()
                try:
                    with using_threads(threads):
                        for rows in batch.moving:
                            rows.tables.advance(rows)
                finally:
                    moved.set()
            else:
                batch.read_next, batch.next_is_slow = upcoming, waits * SLOW > yielded
            yield batch
            yielded += 1

    def _waited_for(self, reading: Future[InFlight | None]) -> InFlight | None:
        while self.while_waiting is not None:
            if reading in wait((reading,), WAITING).done:
                break
            self.while_waiting()
        return reading.result()

    def _linked(self, worker: ThreadPoolExecutor, reads: Iterator[InFlight]) -> Iterator[InFlight]:
        """Yield each batch with the next one; the one after that is read while this batch trains.

        A fault in reading a batch is raised one batch early.
        """
        batch = self._stage(reads)
        pending = worker.submit(self._stage, reads)
        while batch is not None:
            with phase("input"):
                batch.upcoming = pending.result()
            pending = worker.submit(self._stage, reads)
            self._begin(batch)
            yield batch
            batch = batch.upcoming

    def _with_rows(self, batch: Batch) -> Batch:
        """``batch`` with rows in the place of keys, for a plugin that reads ahead, in its thread."""
        assert self.growing is not None
        assert self._plans is not None
        made, plan = self.growing.plan(batch)
        self._plans.append(plan)
        planned: Batch = made
        return planned

    def _read(self, batches: Iterator[Batch]) -> InFlight | None:
        """The next batch with its ids; None at the epoch's end. On a GPU on a stream of its own."""
        batch = next(batches, None)
        if batch is None:
            return None
        # What a source has made on the GPU itself must be done before it is used here.
        made_there = self.device.type == "cuda" and any(map(on_gpu, leaves(batch)))
        with self._aside.stream(after=made_there):
            if isinstance(batch, BatchShare):
                own, means = batch.scaled(), tuple(w / batch.total for w in batch.whole_weight)
                ids = self.inputs.each(own)
                return InFlight(own, total=batch.total, mean_weights=means, alone=False, ids=ids)
            size = consumed = batch_size(batch)
            if self.source.feed.batch:
                batch = self.source.transform(batch)
                size = batch_size(batch)
            if not size:
                raise DataError(
                    "a plugin's batch transform returned a batch without samples; it must leave one"
                )
            growth: Plan = []
            if self._plans is not None:
                growth = self._plans.popleft()
            elif self.growing is not None:  # before samples are left out: whoever does sees rows
                batch, growth = self.growing.plan(batch)
            skipped = 0
            if self.sample_filter is not None:
                batch, skipped = self.sample_filter.kept(batch, size)
            weights: tuple[float, ...] = ()
            if isinstance(batch, Batch):
                weights = tuple(total / max(1, size - skipped) for total in total_weight(batch.weights))
                batch = batch.scaled()
            elif self._label_weights:
                batch = changed_at(batch, self._label_weights, scaled)
            ids = self.inputs.each(batch)
            found = None
            if self._finds_ahead:
                pairs = zip(self.tables, ids, strict=True)
                found = [None if own is None else tables.find(own) for tables, own in pairs]
            return InFlight(
                batch,
                consumed=consumed,
                skipped=skipped,
                mean_weights=weights,
                ids=ids,
                found=found,
                growth=growth,
                size=size - skipped,
            )

    def _stage(self, reads: Iterator[InFlight], moved: Event | None = None) -> InFlight | None:
        """The next batch, ready to train; None at the epoch's end. Runs in the worker thread, and on a GPU on
        a stream of its own. ``moved``: set once the batch before has sent away what leaves its tiers."""
        batch = next(reads, None)
        if batch is None:
            return None
        with self._aside.stream():
            batch.take_in(self.tables)
            if self.accesses is not None and batch.ids is not None:
                self.accesses.add(batch.ids)
            # Moved to the device here because the training thread has more to do. Where rows are looked up by
            # slots, ids stay in host memory unless the model itself reads them.
            whole, cuts = batch.batch, self.splitting is not None or not self._alone
            mine = looked_up = self._arrange(batch) if cuts and batch.alone else whole
            if self._asked is None:
                batch.batch = looked_up = on_device(mine, self.device)
            else:
                batch.batch = on_device(keeping_ids(mine, self._asked), self.device)
            if looked_up is not whole:
                batch.ids = self.inputs.each(looked_up)
                for group, own in zip(batch.groups or (), batch.ids, strict=True):
                    if group is not None and own is not None:
                        group.ids = own
            fetching = [rows for rows in batch.moving if rows.tables.prefetches]
            if fetching and moved is not None:
                moved.wait()
            for rows in fetching:
                rows.tables.prefetch(rows)
            batch.copied = self._aside.mark()
        return batch

    def _arrange(self, batch: InFlight) -> Any:
        """Cut a whole batch into micro-batches, if there is a splitter, and into this rank's share of them;
        returns its samples, in the order of training."""
        alone, splitting, size = self._alone, self.splitting, batch.size
        needs_cold, split = np.zeros(size, bool), None
        # A look at the samples waits for a GPU: it is left out where the batch is trained whole anyway.
        passes_by = alone and splitting is not None and self.device.type != "cpu" and not splitting.looks()
        if splitting is not None and passes_by and batch.moving:
            splitting.pass_by()
        else:
            needs_cold = batch.needs_cold()
            split = None if splitting is None else splitting.cut(batch.batch, needs_cold)
        if split is None and alone:  # there is nothing to put in order
            batch.bounds, batch.cold_from = (size,), 1
            for rows in batch.moving:
                if rows.plan is not None and len(rows.plan.slab):
                    batch.cold_from = 0
            return batch.batch
        split = split or Split(np.arange(size), (size,))
        samples, bounds, batch.cold_from = share_of(split, needs_cold, self.ranks)
        for rows in batch.moving:
            rows.arrange(samples, (0, *bounds)[batch.cold_from])
        batch.bounds = () if splitting is None else bounds
        batch.size, batch.alone = len(samples), alone
        return select(batch.batch, samples)

    def _timed(self, ready: Iterator[InFlight], splitting: Splitting) -> Iterator[InFlight]:
        """``ready``, telling ``splitting`` how long each batch took until the next one. A GPU is waited for
        while steps are compared, since it works later than it is asked to."""
        started = 0.0
        for batch in ready:
            ended = synchronized_time(self.device) if splitting.trial.compares else perf_counter()
            if started:
                splitting.trained(ended - started)
            started = perf_counter()
            yield batch


def _ahead(worker: ThreadPoolExecutor, items: Iterator[InFlight]) -> Iterator[InFlight]:
    """``items``, each of which ``worker`` makes while the one before is used."""
    pending = worker.submit(next, items, None)
    while (item := pending.result()) is not None:
        pending = worker.submit(next, items, None)
        yield item


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
        growing: GrowingTables | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.split = split
        self.dataset = dataset
        self.batch_size = batch_size
        self.inputs = inputs
        self.device = device
        self.growing = growing

    def __len__(self) -> int:
        return self.dataset.num_batches(self.split, self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.dataset.batches(self.split, self.batch_size, part=self.ranks.part):
            if not self.dataset.gives_parts:
                own = self.ranks.shares(0, batch_size(batch))[self.ranks.trainer]
                batch = between(batch, own.start, own.stop)
            if self.growing is not None:
                batch = self.growing.rows_of(batch)
            self.inputs.require_ids(self.inputs.each(batch))
            yield on_device(batch, self.device)
