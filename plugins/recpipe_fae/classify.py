"""Classifies samples as hot or cold, one bit per sample, and makes the classes' batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import batch_size, join, select, table_bases
from recpipe.plugin import Bags, Batch, Context, RowIds
from recpipe_fae.schedule import Sizes


@dataclass(frozen=True)
class Classes:
    """The epoch's samples in two classes; ``packed[i]`` has the bits for the data module's batch i."""

    packed: NDArray[np.uint8]
    ends: dict[bool, NDArray[np.int64]]
    """For hot (True) and cold (False): how many samples of the class come before each of the data module's
    batches."""
    batch_size: int
    lookups: int
    hot_lookups: int

    def samples(self, hot: bool) -> int:
        """The number of samples of the class."""
        return int(self.ends[hot][-1])

    def batches(self, hot: bool) -> int:
        """The number of mini-batches of the class, including a short last one."""
        return -(-self.samples(hot) // self.batch_size)

    def sizes(self, slice_from: int | None = None) -> Sizes:
        """The classes' mini-batches, those with samples of the data module's batches from ``slice_from`` on
        last."""
        tails = [0, 0]
        if slice_from is not None:
            for hot in (False, True):
                before = int(self.ends[hot][slice_from])
                if self.samples(hot) > before:
                    tails[hot] = self.batches(hot) - before // self.batch_size
        return Sizes(self.batches(False), self.batches(True), *tails)

    @cached_property
    def digest(self) -> str:
        """A digest that is equal if all samples have equal classes."""
        return blake2b(self.packed.tobytes(), digest_size=16).hexdigest()

    def members(self, number: int, size: int, hot: bool) -> NDArray[np.int64]:
        """The samples of the data module's batch ``number`` that are in the class."""
        bits = np.unpackbits(self.packed[number], count=size).astype(bool)
        return np.flatnonzero(bits == hot)


def sample_of(bags: Bags) -> NDArray[np.int64]:
    """The sample that each lookup belongs to, int64 [L]."""
    lengths = np.diff(bags.offsets)
    return np.repeat(np.arange(len(lengths)), lengths) % max(1, bags.batch_size)


def hot_samples(bags: Bags, found: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which samples have only lookups that are ``found`` (bool [L]) resident, bool [B]; a sample without
    lookups is hot."""
    hot = np.ones(bags.batch_size, bool)
    hot[sample_of(bags)[~found]] = False
    return hot


def residents(ctx: Context, hot_rows: RowIds) -> NDArray[np.bool_]:
    """Which of all tables' rows are hot, bool [rows]."""
    resident = np.zeros(int(table_bases(ctx)[-1]), bool)
    resident[hot_rows] = True
    return resident


def classify(ctx: Context, hot_rows: RowIds) -> Classes:
    """Classify all samples in one full pass over the epoch."""
    resident = residents(ctx, hot_rows)
    packed, hot, sizes = [], [0], [0]
    lookups = hot_lookups = 0
    width = -(-ctx.batch_size // 8)
    for batch in ctx.batches(0):
        bags = ctx.lookups(batch)
        found = resident[bags.rows]
        bits = hot_samples(bags, found)
        row = np.zeros(width, np.uint8)
        row[: -(-bags.batch_size // 8)] = np.packbits(bits)
        packed.append(row)
        hot.append(int(bits.sum()))
        sizes.append(bags.batch_size)
        lookups += len(found)
        hot_lookups += int(found.sum())
    counts, total = np.cumsum(hot), np.cumsum(sizes)
    table = np.array(packed, np.uint8).reshape(-1, width)
    return Classes(table, {True: counts, False: total - counts}, ctx.batch_size, lookups, hot_lookups)


def class_batches(ctx: Context, classes: Classes, hot: bool, first: int) -> Iterator[Batch]:
    """The class's mini-batches from number ``first`` on, samples in the data module's order."""
    size, samples = classes.batch_size, classes.samples(hot)

    def members(number: int, there: int) -> NDArray[np.int64]:
        return classes.members(number, there, hot)

    sizes = cut(samples - first * size, size, classes.batches(hot) - first)
    return _read(ctx, classes.ends[hot], members, first * size, sizes)


def remaining(
    ctx: Context, classes: Classes, done: dict[bool, int], batches: int, first: int
) -> Iterator[Batch]:
    """The samples after the ``done`` first mini-batches of each class, in the data module's order, in so many
    ``batches``, from number ``first`` on."""
    size = classes.batch_size
    before = {hot: np.maximum(classes.ends[hot] - done[hot] * size, 0) for hot in (False, True)}
    ends = before[False] + before[True]

    def members(number: int, there: int) -> NDArray[np.int64]:
        own = [classes.members(number, there, hot) for hot in (False, True)]
        skipped = [max(0, done[hot] * size - int(classes.ends[hot][number])) for hot in (False, True)]
        return np.sort(np.concatenate([m[s:] for m, s in zip(own, skipped, strict=True)]))

    sizes = cut(int(ends[-1]), size, batches)
    return _read(ctx, ends, members, sum(sizes[:first]), sizes[first:])


def cut(samples: int, size: int, batches: int) -> list[int]:
    """The sizes of so many ``batches`` of ``samples``, full ones first; the classes may need one batch more
    than their samples together, and then the short last one becomes two."""
    sizes = [size] * (samples // size) + [samples % size] * (samples % size > 0)
    if len(sizes) < batches:
        last = sizes.pop()
        sizes += [last - last // 2, last // 2]
    return sizes


def _read(
    ctx: Context,
    ends: NDArray[np.int64],
    members: Callable[[int, int], NDArray[np.int64]],
    skip: int,
    sizes: Sequence[int],
) -> Iterator[Batch]:
    """Batches of ``sizes`` from the ``members`` of the data module's batches. ``ends`` counts the members
    before each of those; ``skip`` of them are left out."""
    if not sizes:
        return
    wanted = iter(sizes)
    number = int(np.searchsorted(ends, skip, side="right")) - 1
    skip -= int(ends[number])
    parts: list[Batch] = []
    missing = next(wanted)
    for batch in ctx.batches(number):
        found = members(number, batch_size(batch))[skip:]
        number, skip = number + 1, 0
        while len(found):
            taken, found = np.split(found, [missing])
            parts.append(select(batch, taken))
            missing -= len(taken)
            if not missing:
                yield join(parts)
                parts, missing = [], next(wanted, 0)
                if not missing:
                    return
