"""What FAE learns before training, once, when it is first needed: the hot set and the samples' classes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import Batch, HotSet, group_rows, load_profile, table_bases, top_rows
from recpipe.plugin import Cache, CachePolicy, Context, EpochOrder, RowIds, RowSpace
from recpipe_fae.classify import Classes, class_batches, classify
from recpipe_fae.schedule import Scheduler, plan

CHUNK = 65_536
"""How many rows enter the hot set per batch, unless the first cold segment is too short for that."""


@dataclass(frozen=True)
class HotRule:
    """``threshold`` None: the top K rows over all tables. Otherwise it is the least share of its table's
    lookups that makes a row hot."""

    sample: float
    threshold: float | None


def choose(counts: NDArray[np.int32], bases: RowIds, threshold: float | None, slots: int) -> RowIds:
    """The hot rows, sorted; ties go to lower global numbers, and rows never sampled are not hot."""
    if threshold is not None:
        per_table = np.add.reduceat(np.append(counts.astype(np.int64), 0), bases[:-1])
        counts = np.where(counts >= threshold * np.repeat(per_table, np.diff(bases)), counts, 0)
    return top_rows(counts, slots)


class Preparation:
    """The profile, the hot rows and the classes of one run."""

    def __init__(self, ctx: Context, rule: HotRule) -> None:
        self.ctx, self.rule = ctx, rule
        self.hot_rows: RowIds = np.empty(0, np.int64)
        self.reused = False
        self.profile_seconds = self.classify_seconds = 0.0
        self._classes: Classes | None = None

    def prepare(self) -> None:
        """Choose the hot rows, for each group at most as many as it has slots, and classify all samples."""
        start = time.perf_counter()
        bases = table_bases(self.ctx)
        profile = load_profile(self.ctx, self.rule.sample)
        self.reused = profile.reused
        counts = profile.dense(int(bases[-1]))
        chosen, first = [], 0
        for number, group in enumerate(self.ctx.groups):
            rows, last = group_rows(self.ctx, number), first + len(group.tables)
            own = bases[first : last + 1] - rows.start
            chosen.append(rows.start + choose(counts[rows], own, self.rule.threshold, group.slots))
            first = last
        self.hot_rows = np.concatenate(chosen)
        middle = time.perf_counter()
        self._classes = classify(self.ctx, self.hot_rows)
        self.profile_seconds, self.classify_seconds = middle - start, time.perf_counter() - middle

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

    @property
    def classes(self) -> Classes:
        """The samples' classes."""
        if self._classes is None:
            self.prepare()
        assert self._classes is not None
        return self._classes


class HotTables(Cache):
    """The cache whose resident rows are the hot set; it is filled before the first hot mini-batch."""

    def __init__(self, prepared: Preparation, scheduler: Scheduler) -> None:
        self.prepared, self.scheduler = prepared, scheduler

    def policy(self, space: RowSpace) -> CachePolicy:
        """The policy for ``space``."""
        classes = self.prepared.classes
        rows = self.prepared.rows_of(space.group)
        first = plan([self.scheduler.start], classes.batches(False), classes.batches(True))
        cold = first[0].stop if first and not first[0].hot else 1
        return HotSet(space, rows, max(CHUNK, -(-len(rows) // cold)))


class HotAndCold(EpochOrder):
    """Cold and hot mini-batches in the scheduler's segments; within a class, samples keep their order."""

    def __init__(self, prepared: Preparation, scheduler: Scheduler) -> None:
        self.prepared, self.scheduler = prepared, scheduler

    def __len__(self) -> int:
        classes = self.prepared.classes
        return classes.batches(False) + classes.batches(True)

    def batches(self, first: int) -> Iterator[Batch]:
        """Mini-batches from number ``first`` on; waits if a segment's rate is not decided yet."""
        classes, ctx = self.prepared.classes, self.prepared.ctx
        readers: dict[bool, Iterator[Batch]] = {}
        position = number = 0
        while position < len(self):
            sizes = (classes.batches(False), classes.batches(True))
            segment = self.scheduler.segment(number, position, *sizes)
            if segment is None:
                return
            number += 1
            size = segment.stop - segment.start
            skipped = min(size, max(0, first - position))
            if skipped < size and segment.hot not in readers:
                readers[segment.hot] = class_batches(ctx, classes, segment.hot, segment.start + skipped)
            for _ in range(skipped, size):
                yield next(readers[segment.hot])
            position += size
