"""Tables of several trainers; each holds replicas of the rows that it will use soon."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.kit import Channel, HoldersStore, RowBags, RowCollection, evaluated, row_bags
from recpipe.plugin import Batch, Region, TierFigures, TierParts, TierTimes, UserError, Values
from recpipe_bagpipe.oracle import Rows, plan
from recpipe_bagpipe.reading import ReadAhead, Waiting
from recpipe_bagpipe.steps import Step, step_of
from recpipe_bagpipe.sync import Replica, Rounds, RowSync

NONE: Rows = np.empty(0, np.int64)
Lookups = tuple[Rows, ...]
"""For each trainer, the rows that its share of a batch looks up."""


class Ahead(ReadAhead):
    """One stream of batches: ``batches`` yields them to training, ``steps`` yields this trainer's part of
    their plans, which ``plans`` makes in the thread that reads.

    Different threads read the two.
    """

    def __init__(
        self,
        source: Iterator[Batch],
        lookups: Callable[[Batch], Lookups],
        plans: Callable[[Iterator[Lookups]], Iterator[Step]],
        slack: int,
    ) -> None:
        """``slack``: how many planned batches may wait to be asked for before the oracle pauses."""
        super().__init__(source)
        self._lookups, self._plans, self._slack = lookups, plans, slack
        self._unplanned: deque[Waiting] = deque()
        self._steps: deque[Step] = deque()

    def steps(self, accept: Callable[[Step], bool]) -> Iterator[Step]:
        """The next steps, up to the first that is not accepted; waits for them."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._steps or self._done)
                if not self._steps:
                    self._check()
                    return
                if not accept(self._steps[0]):
                    return
                step = self._steps.popleft()
                self._changed.notify_all()
            yield step

    def _read(self) -> None:
        for step in self._plans(self._reading()):
            with self._changed:
                self._changed.wait_for(lambda: len(self._steps) < self._slack or self._stopped)
                self._batches.append(self._unplanned.popleft())
                self._steps.append(step)
                self._changed.notify_all()
            if self._stopped:
                break

    def _reading(self) -> Iterator[Lookups]:
        for batch in self._source:
            if self._stopped:
                return
            self._unplanned.append(self._waits(batch, small=False))
            yield self._lookups(batch)


@dataclass(frozen=True)
class _Fetching:
    """A batch whose gate is open; ``records`` (float32 [n, width]) are valid once ``landed`` is done."""

    step: Step
    records: torch.Tensor
    landed: Future[None] | None


class Replicas(RowCollection):
    """This trainer's replicas, driven by the oracle's plans of the stream that ``stream`` wraps.

    ``lookahead``, ``cleanup``, ``increase`` and ``decrease`` are as ``oracle.plan`` takes them. ``early``
    moves the prefetch gate by so many batches; it is for tests, and any value but 0 is wrong.
    """

    whole_updates = "several trainers update some rows of a batch while the next one trains"

    def __init__(
        self,
        parts: TierParts,
        store: HoldersStore,
        channels: tuple[Channel, Channel],
        *,
        lookahead: int,
        cleanup: int,
        increase: int = 1,
        decrease: int = 2,
        early: int = 0,
    ) -> None:
        super().__init__(parts.tables)
        layout = parts.tables.layout
        self.times = TierTimes()
        self.replica = Replica(min(parts.slots, layout.total_rows), layout.total_rows, layout.width)
        self.rounds = Rounds(store, self.times)
        self.sync = RowSync(self.replica, parts.tables.optimizer, parts.tables.dim, *channels)
        self.rows_expired = 0
        self.rows_fetched = 0
        self.lookups = 0
        """The lookups of this trainer's shares of training batches, including repeats."""
        self.hits = 0
        """Those whose row some trainer held when the batch was planned, so that the batch fetches nothing for
        it; a copy that comes from the trainer that held it is a hit."""
        self._parts, self._ranks = parts, parts.ranks
        self._lookahead, self._cleanup = lookahead, cleanup
        self._increase, self._decrease = increase, decrease
        self._early = early
        self._ahead: Ahead | None = None
        self._running: Ahead | None = None
        self._peak_bytes = 0
        self._next = 0
        self._peak_fetched = 0
        self._opened: deque[_Fetching] = deque()
        self._anchor = torch.zeros(0, requires_grad=True)

    # -- the stream --------------------------------------------------------------------------

    def stream(self, source: Iterator[Batch], around: int = 0) -> Iterator[Batch]:
        """The batches of ``source`` (whole batches of all trainers), read and planned ahead; ``around`` other
        streams read from this one."""
        # Each of the streams around reads a window ahead of training and lets some planned batches wait too.
        slack = 2 * self._cleanup + around * (self._lookahead + 3 * self._cleanup + 2)
        self._ahead = Ahead(source, self._lookups, self._plans, slack)
        return self._ahead.batches()

    def _lookups(self, batch: Batch) -> Lookups:
        """The rows that each trainer's share looks up."""
        bags = self._parts.lookups(batch)
        shares = self._ranks.shares(0, bags.batch_size)
        return tuple(bags.permuted(np.arange(part.start, part.stop)).indices for part in shares)

    def _plans(self, lookups: Iterator[Lookups]) -> Iterator[Step]:
        """This trainer's part of the plan of each batch."""
        trainer, trainers = self._ranks.trainer, len(self._ranks.trainers)
        adapted = {"increase": self._increase, "decrease": self._decrease}
        window = self._lookahead, self._cleanup
        for made in plan(lookups, *window, trainers, self._parts.slots, **adapted):
            yield step_of(made, trainer, trainers)

    # -- a batch -----------------------------------------------------------------------------

    def lookup(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Rows of this trainer's share; with gradients enabled, the backward pass updates the tables."""
        bags = row_bags(self.tables, sparse)
        if torch.is_grad_enabled():
            step = self._begin()
            if not np.array_equal(bags.distinct, step.mine):
                raise UserError(
                    f"batch {step.number} looks up other rows than were planned for it: bagpipe over several "
                    "trainers needs the batches as they were read; drop the plugin that changes them"
                )
            fetched = np.isin(step.mine, step.fetch, assume_unique=True)[bags.which.numpy()]
            self.lookups += len(fetched)
            self.hits += len(fetched) - int(fetched.sum())
            rows: torch.Tensor = _Lookup.apply(self._anchor, self, step, bags)  # type: ignore[no-untyped-call]
            return rows
        return bags.pooled(evaluated(self.tables, self._read(bags.distinct)).contiguous())

    def _begin(self) -> Step:
        """Everything between the last batch's backward and the next one's lookups."""
        self.rounds.check()
        if self._ahead is not self._running:
            self._empty()
            self._running = self._ahead
        if self._running is None:
            raise RuntimeError("bagpipe: a batch trains that did not come through the planned stream")
        number, self._next = self._next, self._next + 1
        # The delayed rows of the previous batch are neither in this batch nor in this cleanup.
        self._wait(lambda: self.sync.join(number - 2))
        # If the budget is tight, there are also rounds in between.
        if number % self._cleanup == 0 or not self._opened or self._opened[0].step.cleanup.rows:
            self._clean(self._running, number)
        fetching = self._opened.popleft()
        step = fetching.step
        assert step.number == number, (step.number, number)
        if fetching.landed is not None:
            self._wait(fetching.landed.result)
        self.replica.put(step.fetch, fetching.records)
        self.sync.hand_over(step.handover)
        return step

    def _clean(self, ahead: Ahead, number: int) -> None:
        """The round before batch ``number``: write expired rows, and fetch rows of batches whose gate
        opens."""
        more = self._early

        def opens(step: Step) -> bool:
            nonlocal more
            if step.fetch_after <= number:
                return True
            more -= 1
            return more >= 0

        opened = list(ahead.steps(opens))
        cleanup = (self._opened[0].step if self._opened else opened[0]).cleanup
        # The store has a frozen table's rows as they are.
        written = NONE if self.tables.optimizer.frozen else cleanup.write
        records = self.replica.take(written)
        self.replica.release(cleanup.free)
        read = np.concatenate([NONE, *(step.fetch for step in opened)])
        into = np.empty((len(read), self.tables.layout.width), np.float32)
        landed = None
        if cleanup.rows or any(step.fetched for step in opened):
            landed = self.rounds.start(written, records, read, into)
        start = 0
        for step in opened:
            stop = start + len(step.fetch)
            self._opened.append(_Fetching(step, torch.from_numpy(into[start:stop]), landed))
            start = stop
        self.rows_expired += cleanup.rows
        self.rows_fetched += sum(step.fetched for step in opened)
        under_way = sum(fetching.records.nbytes for fetching in self._opened)
        self._peak_fetched = max(self._peak_fetched, under_way)

    def _wait(self, action: Callable[[], None]) -> None:
        start = perf_counter()
        action()
        self.times.wait += perf_counter() - start

    # -- rows as they are between two batches ------------------------------------------------

    def _read(self, rows: Rows) -> torch.Tensor:
        """Records of distinct ``rows`` after the last batch, float32 [n, width]. Every trainer calls it, each
        with its own rows. Changed rows are written first and stay resident."""
        self.sync.join()
        changed = self.replica.flushed()
        return torch.from_numpy(self.rounds.now(changed, self.replica.take(changed), rows))

    def _empty(self) -> None:
        """Write what has changed and forget all rows, including those being fetched. The next batch must be
        the first of a new stream, whose oracle knows no resident rows."""
        self._read(NONE)
        self.replica.clear()
        self._opened.clear()
        self._next = 0
        self._peak_bytes = self._lookahead_bytes
        if self._ahead is self._running:
            self._ahead = None
        self._running = None

    def read(self, region: Region) -> Values:
        """Current weights and optimizer state of ``region``, on every trainer."""
        records = self._read(self.rows_of(region)).numpy()
        return records[:, : self.tables.dim], records[:, self.tables.dim :]

    def write(self, region: Region, values: Values) -> None:
        """Replace weights and optimizer state of ``region``, between two streams; trainer 0 sends them."""
        self._empty()
        chosen = slice(None) if self._ranks.trainer == 0 else slice(0)
        records = torch.from_numpy(np.concatenate(values, axis=1)[chosen])
        self.rounds.now(self.rows_of(region)[chosen], records, NONE)

    # -- the rest ----------------------------------------------------------------------------

    def tier_figures(self) -> TierFigures:
        """This trainer's traffic, times, memory, lookups and hits."""
        store = self.rounds.store
        return TierFigures(
            self.rounds.counters,
            self.times,
            store.direct,
            self.replica.records.nbytes,
            store.cold_bytes,
            self.replica.overhead_bytes + store.overhead_bytes + self._lookahead_bytes + self._peak_fetched,
            False,
            self.lookups,
            self.hits,
        )

    @property
    def _lookahead_bytes(self) -> int:
        """The most that batches read ahead have taken."""
        return max(self._peak_bytes, 0 if self._running is None else self._running.peak_bytes)

    def figures(self) -> dict[str, int]:
        """The plugin's figures for the report; rows and bytes are those of all trainers together."""
        return {
            "replicas": len(self._ranks.trainers),
            "rows_fetched": self.rows_fetched,
            "rows_expired": self.rows_expired,
            "lookahead_bytes": self._lookahead_bytes,
            "buffer_bytes": self._peak_fetched,
            **asdict(self.sync.figures),
        }

    def write_back(self) -> None:
        """Write what has changed; every trainer calls it."""
        self._read(NONE)

    def close(self) -> None:
        """Write what has changed, and release the store and the threads; every trainer calls it."""
        try:
            self._read(NONE)
        finally:
            self.sync.close()
            self.rounds.close()


class _Lookup(torch.autograd.Function):
    """Pooling whose backward pass updates the replicas. The anchor makes autograd call it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tables: Replicas, step: Step, bags: RowBags) -> torch.Tensor:
        ctx.call = (tables, step, bags)
        return bags.pooled(tables.replica.take(step.mine)[:, : tables.tables.dim].contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        tables, step, bags = ctx.call
        # One optimizer step from the gradients of all trainers.
        tables.sync.update(step, bags.gradients(gradient.contiguous(), tables.tables.dim))
        return None, None, None, None
