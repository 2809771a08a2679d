"""What FAE learns before training, when it is first needed: the hot set, what separating mini-batches could
gain, and the samples' classes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import ChosenRows, HotSet, group_rows, load_profile, table_bases, top_rows
from recpipe.plugin import Batch, Cache, CachePolicy, Context, EpochOrder, Placement, RowIds, RowSpace, Slots
from recpipe_fae.classify import Classes, class_batches, classify, remaining
from recpipe_fae.estimate import Estimate, estimate
from recpipe_fae.schedule import Scheduler, Sizes

CHUNK = 65_536
"""How many rows enter the hot set per batch, unless the first cold segment is too short for that."""


def choose(counts: NDArray[np.int32], bases: RowIds, threshold: float | None, slots: int) -> RowIds:
    """The hot rows, sorted; ties go to lower global numbers, and rows never sampled are not hot.

    ``threshold`` None: the top K rows over all tables. Otherwise it is the least share of its table's lookups
    that makes a row hot.
    """
    if threshold is not None:
        per_table = np.add.reduceat(np.append(counts.astype(np.int64), 0), bases[:-1])
        counts = np.where(counts >= threshold * np.repeat(per_table, np.diff(bases)), counts, 0)
    return top_rows(counts, slots)


class Preparation:
    """The profile, the hot rows and, if mini-batches are separated, the classes of one run."""

    def __init__(
        self,
        ctx: Context,
        *,
        sample: float,
        threshold: float | None,
        phases: str,
        loss_samples: int | None,
    ) -> None:
        """``sample``: the share of the epoch whose lookups are counted; ``threshold``: see ``choose``."""
        self.ctx, self.phases = ctx, phases
        self.sample, self.threshold = sample, threshold
        batches = max(1, -(-ctx.epoch_samples // ctx.batch_size))
        slices = max(1, min(-(-(loss_samples or 0) // ctx.batch_size), batches // 10))
        self.slice_from = None if loss_samples is None else batches - slices
        """The first of the data module's batches whose samples are the slice; None: there is no slice."""
        self.reused = False
        self.profile_seconds = self.estimate_seconds = self.classify_seconds = 0.0

    @cached_property
    def hot_rows(self) -> RowIds:
        """The hot rows, for each group at most as many as it has slots."""
        start = time.perf_counter()
        bases = table_bases(self.ctx)
        profile = load_profile(self.ctx, self.sample)
        self.reused = profile.reused
        counts = profile.dense(int(bases[-1]))
        chosen, first = [], 0
        for number, group in enumerate(self.ctx.groups):
            rows, last = group_rows(self.ctx, number), first + len(group.tables)
            own = bases[first : last + 1] - rows.start
            chosen.append(rows.start + choose(counts[rows], own, self.threshold, group.slots))
            first = last
        self.profile_seconds = time.perf_counter() - start
        return np.concatenate(chosen)

    @cached_property
    def estimate(self) -> Estimate:
        """What separating mini-batches could gain."""
        hot_rows, start = self.hot_rows, time.perf_counter()
        found = estimate(self.ctx, hot_rows)
        self.estimate_seconds = time.perf_counter() - start
        return found

    @property
    def separates(self) -> bool:
        """Whether mini-batches are separated, at least until a trial says that it does not pay."""
        return self.phases == "always" or (self.phases == "auto" and self.estimate.can_pay)

    @cached_property
    def classes(self) -> Classes:
        """The samples' classes."""
        hot_rows, start = self.hot_rows, time.perf_counter()
        found = classify(self.ctx, hot_rows)
        self.classify_seconds = time.perf_counter() - start
        return found

    @cached_property
    def sizes(self) -> Sizes:
        """The classes' mini-batches."""
        return self.classes.sizes(self.slice_from)

    def rows_of(self, group: int) -> RowIds:
        """The hot rows of a group, numbered within it."""
        own = group_rows(self.ctx, group)
        low, high = np.searchsorted(self.hot_rows, (own.start, own.stop))
        rows: RowIds = self.hot_rows[low:high] - own.start
        return rows

    @property
    def hot_bytes(self) -> int:
        """Bytes of the hot rows' records."""
        return sum(len(self.rows_of(n)) * group.record_bytes for n, group in enumerate(self.ctx.groups))


class HotTables(Cache):
    """The cache whose resident rows are the hot set. It is filled before the first hot mini-batch or, where
    mini-batches are not separated, by the first batches that use the rows."""

    def __init__(self, prepared: Preparation, scheduler: Scheduler) -> None:
        self.prepared, self.scheduler = prepared, scheduler

    def policy(self, space: RowSpace) -> CachePolicy:
        """The policy for ``space``."""
        rows = self.prepared.rows_of(space.group)
        if not self.prepared.separates:
            return HotOnUse(space, rows)
        segments, _ = self.scheduler.plan(self.prepared.sizes)
        cold = segments[0].stop if segments and not segments[0].hot else 1
        return HotSet(space, rows, max(CHUNK, -(-len(rows) // cold)))


class HotAndCold(EpochOrder):
    """Cold and hot mini-batches in the scheduler's segments; within a class, samples keep their order."""

    def __init__(self, prepared: Preparation, scheduler: Scheduler) -> None:
        self.prepared, self.scheduler = prepared, scheduler

    def is_datas_own(self) -> bool:
        """Whether mini-batches are not separated at all."""
        return not self.prepared.separates

    def __len__(self) -> int:
        return self.prepared.sizes.all

    def batches(self, first: int) -> Iterator[Batch]:
        """Mini-batches from number ``first`` on; waits if a segment is not decided yet."""
        classes, ctx = self.prepared.classes, self.prepared.ctx
        readers: dict[bool, Iterator[Batch]] = {}
        done = {False: 0, True: 0}
        position = number = 0
        while position < len(self):
            segment = self.scheduler.segment(number, position, self.prepared.sizes)
            if segment is None:
                break
            number += 1
            skipped = min(len(segment), max(0, first - position))
            if skipped < len(segment) and segment.hot not in readers:
                readers[segment.hot] = class_batches(ctx, classes, segment.hot, segment.start + skipped)
            for _ in range(skipped, len(segment)):
                yield next(readers[segment.hot])
            done[segment.hot] = segment.stop
            position += len(segment)
        if position < len(self) and not self.scheduler.stopped:
            yield from remaining(ctx, classes, done, len(self) - position, max(0, first - position))


class HotOnUse(ChosenRows):
    """A fixed set of rows that stay resident once a batch has used them, so that none is fetched in advance
    or for nothing."""

    each_once = True

    def __init__(self, space: RowSpace, rows: RowIds) -> None:
        super().__init__(space)
        self.target = np.sort(rows)
        self._free: Slots | None = None
        """Slots without a row of the set, in order; None: not looked up yet."""

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """Place those of ``misses`` that are in the set."""
        if self._free is None:
            held = self.space.residents.row_of_slot
            self._free = np.flatnonzero(~np.isin(held, self.target)).astype(np.int32)
        place = np.searchsorted(self.target, misses)
        inside = place < len(self.target)
        inside[inside] = self.target[place[inside]] == misses[inside]
        rows = misses[inside]
        # A run resumed with another set has other rows in some slots, and this batch may use them.
        usable = ~np.isin(self._free, hits) if len(rows) else np.zeros(len(self._free), bool)
        chosen = np.flatnonzero(usable)[: len(rows)]
        slots = self._free[chosen]
        self._free = np.delete(self._free, chosen)
        return Placement(slots, rows[: len(slots)])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with that set."""
        self.target, self._free = state["target"], None
