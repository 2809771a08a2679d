"""Classifies samples as hot or cold, one bit per sample, and makes the classes' batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from recpipe.kit import Bags, Batch, batch_size, join, select, table_bases
from recpipe.plugin import Context, RowIds


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

    @cached_property
    def digest(self) -> str:
        """A digest that is equal if all samples have equal classes."""
        return blake2b(self.packed.tobytes(), digest_size=16).hexdigest()

    def members(self, number: int, size: int, hot: bool) -> NDArray[np.int64]:
        """The samples of the data module's batch ``number`` that are in the class."""
        bits = np.unpackbits(self.packed[number], count=size).astype(bool)
        return np.flatnonzero(bits == hot)


def hot_samples(bags: Bags, found: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which samples have only lookups that are ``found`` (bool [L]) resident, bool [B]; a sample without
    lookups is hot."""
    lengths = np.diff(bags.offsets)
    bag_of = np.repeat(np.arange(len(lengths)), lengths)
    hot = np.ones(bags.batch_size, bool)
    hot[bag_of[~found] % bags.batch_size] = False
    return hot


def classify(ctx: Context, hot_rows: RowIds) -> Classes:
    """Classify all samples in one full pass over the epoch."""
    bases = table_bases(ctx)
    resident = np.zeros(int(bases[-1]), bool)
    resident[hot_rows] = True
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
    if first >= classes.batches(hot):
        return
    ends, skip = classes.ends[hot], first * classes.batch_size
    number = int(np.searchsorted(ends, skip, side="right")) - 1
    skip -= int(ends[number])
    parts: list[Batch] = []
    held = 0
    for batch in ctx.batches(number):
        members = classes.members(number, batch_size(batch), hot)[skip:]
        number, skip = number + 1, 0
        while len(members):
            taken, members = np.split(members, [classes.batch_size - held])
            parts.append(select(batch, taken))
            held += len(taken)
            if held == classes.batch_size:
                yield join(parts)
                parts, held = [], 0
    if parts:
        yield join(parts)
