"""What preparation learns from the training part of the data: vocabularies, means and deviations, quantiles.

It is learned from samples as they were read, kept on the disk, in blocks of fixed size, so that it depends on
neither the blocks of the files nor on how many there are.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.saved import Damaged, typed_as
from recpipe.data.columns import Columns, Int64
from recpipe.data.feature import Feature
from recpipe.data.features import Features
from recpipe.data.gathered import Gathered
from recpipe.data.sources.transforms import mix64
from recpipe.errors import DataError, shown

Between = Callable[[int, int], Columns]
"""Samples ``low`` to ``high`` (excluded) as they were read."""
UNSEEN, FIRST = 1, 2
"""The row of ids that a vocabulary lacks, and that of its first id; row 0 is for missing ones."""
LARGEST = 1 << 24
"""Most ids of a vocabulary."""
AT_ONCE = 1 << 24
"""About how many different ids, or values of a column, are in memory at a time."""
STEP = 1 << 16
"""Samples of a block."""


@dataclass(frozen=True)
class Learned:
    """``vocabularies``: of each table, keys int64 in the order of their rows, as base64 of little-endian
    bytes. ``scales``: mean and standard deviation of dense features. ``edges``: of buckets, by feature."""

    vocabularies: dict[str, str] = field(default_factory=dict)
    scales: dict[str, tuple[float, float]] = field(default_factory=dict)
    edges: dict[str, tuple[float, ...]] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    """The latest time of each age, in microseconds since 1970."""

    def keys(self, table: str) -> Int64:
        """The vocabulary of a table, int64 [ids]; ``Damaged`` if it is not as it was written."""
        try:
            keys = np.frombuffer(base64.b64decode(self.vocabularies[table], validate=True), "<i8")
        except ValueError as fault:
            raise Damaged(f"the vocabulary of {shown(table)} is no keys in base64") from fault
        return keys.astype(np.int64)

    @property
    def sizes(self) -> dict[str, int]:
        """How many rows each table with a vocabulary needs."""
        return {table: FIRST + len(self.keys(table)) for table in self.vocabularies}

    def to_dict(self) -> dict[str, Any]:
        """What ``read`` takes, in values that JSON has."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    @classmethod
    def read(cls, saved: object, features: Features) -> Learned:
        """The inverse of ``to_dict``; ``Damaged`` if it is not of these ``features``."""
        found = typed_as(cls, saved, "learned")
        wanted = cls(
            dict.fromkeys(vocabulary_tables(features), ""),
            {name: (0.0, 1.0) for f in features.dense if f.scale == "standard" for name in f.names},
            {feature.name: () for feature in features.sparse if feature.buckets},
            {f.name: 0.0 for f in features.dense if f.kind == "timestamp" and f.now is None},
        )
        for name, own in asdict(wanted).items():
            if own.keys() != getattr(found, name).keys():
                raise Damaged(f"learned.{name} is not of the features")
        for table in found.vocabularies:
            if len(np.unique(keys := found.keys(table))) != len(keys):
                raise Damaged(f"the vocabulary of {shown(table)} has an id twice")
        return found


def vocabulary_tables(features: Features) -> dict[str, list[Feature]]:
    """The features that share each table with a vocabulary."""
    tables: dict[str, list[Feature]] = {}
    for feature in features.sparse:
        if feature.ids == "vocabulary":
            tables.setdefault(feature.table_name, []).append(feature)
    return tables


def learn(features: Features, between: Between, samples: int) -> Learned:
    """From the first ``samples`` that were read. ``DataError`` for a vocabulary that does not fit."""
    single = [feature.name for feature in features.sparse if not feature.is_bag]
    vocabularies = {}
    for table, own in vocabulary_tables(features).items():
        keys = _vocabulary(table, own, _occurrences(own, single, between, samples))
        vocabularies[table] = base64.b64encode(keys.astype("<i8").tobytes()).decode()
    edges = {}
    for feature in features.sparse:
        if feature.buckets is not None:
            place = single.index(feature.name)
            edges[feature.name] = _quantiles(feature.buckets, _numbers(place, between, samples), samples)
    return Learned(
        vocabularies, _scales(features, between, samples), edges, _latest(features, between, samples)
    )


def _blocks(between: Between, samples: int) -> Iterator[tuple[int, Columns]]:
    for low in range(0, samples, STEP):
        yield low, between(low, min(low + STEP, samples))


@dataclass
class _Occurrences:
    """Keys that are there, int64 [n], and their places in the order of samples, then of features, then within
    a bag."""

    keys: Int64
    places: Int64


def _occurrences(
    own: Sequence[Feature], single: Sequence[str], between: Between, samples: int
) -> Callable[[], Iterator[_Occurrences]]:
    def read() -> Iterator[_Occurrences]:
        for low, columns in _blocks(between, samples):
            for number, feature in enumerate(own):
                sample = np.arange(low, low + len(columns))
                if feature.is_bag:
                    bag = columns.bags[feature.name].trimmed()
                    lengths = np.diff(bag.offsets)
                    within = np.arange(len(bag.values)) - np.repeat(bag.offsets[:-1], lengths)
                    keys, sample = bag.values, np.repeat(sample, lengths)
                    missing = bit_at(bag.missing, 0, len(keys))
                else:
                    place = single.index(feature.name)
                    keys, within = columns.ids[:, place], np.zeros(len(columns), np.int64)
                    missing = bit_at(columns.missing, place, len(columns))
                places = (sample << 24) | (number << 16) | np.minimum(within, 0xFFFF)
                yield _Occurrences(keys[~missing].astype(np.int64), places[~missing])

    return read


def bit_at(bits: NDArray[np.uint8] | None, place: int, size: int) -> NDArray[np.bool_]:
    """Whether the bit at ``place`` of each of ``size`` rows is set, as ``Columns.missing`` has them."""
    if bits is None:
        return np.zeros(size, bool)
    return np.asarray((bits[:, place // 8] >> (7 - place % 8)) & 1, bool)


def _vocabulary(table: str, own: Sequence[Feature], read: Callable[[], Iterator[_Occurrences]]) -> Int64:
    """The keys that come at least ``min_count`` times, those that come most first, then those seen first.

    Keys are counted in parts by their hash, as many as are needed for a part to fit into memory; each reads
    all occurrences.
    """
    parts = 1 + sum(len(block.keys) for block in read()) // AT_ONCE
    kept = [np.empty((3, 0), np.int64)]

    def merge(found: Int64) -> Int64:
        found = merged(found)
        if own[0].min_count == 1:  # it can only grow
            require_room(table, own[0], found.shape[1])
        return found

    for part in range(parts):
        counted = Gathered(3, merge, STEP)
        for block in read():
            inside = mix64(block.keys.view(np.uint64)) % np.uint64(parts) == part
            keys, places = block.keys[inside], block.places[inside]
            counted.add(keys, np.ones_like(keys), places)
        found = counted.merged()
        kept.append(found[:, found[1] >= own[0].min_count])
        require_room(table, own[0], sum(each.shape[1] for each in kept))
    keys, counts, places = np.concatenate(kept, 1)
    return np.asarray(keys[np.lexsort((places, -counts))])


def merged(found: Int64) -> Int64:
    """Keys, counts and first places [3, n] in which each key is there once."""
    keys, counts, places = found
    order = np.lexsort((places, keys))
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))) if len(keys) else order
    summed = np.add.reduceat(counts[order], starts) if len(keys) else counts
    return np.stack([keys[starts], summed, places[order][starts]])


def require_room(table: str, feature: Feature, ids: int) -> None:
    """``DataError`` if a vocabulary of so many ``ids`` does not fit."""
    most = min(LARGEST, feature.rows - FIRST) if isinstance(feature.rows, int) else LARGEST
    if ids <= most:
        return
    room, remedy = f"{LARGEST:,} is the most", "take ids: hash"
    if most < LARGEST:
        room = f"its table has {feature.rows:,} rows, two of which are for missing and unseen ones"
        remedy = "raise rows, or leave them out: they are then learned"
    raise DataError(
        f"the vocabulary of '{shown(table)}' has {ids:,} ids or more (min_count={feature.min_count}), and "
        f"{room}; {remedy}, or leave rare ones out with a larger min_count"
    )


def _scales(features: Features, between: Between, samples: int) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of the values that are there, float64, in one pass: sums about the mean of
    each block of ``STEP`` samples are joined as in Chan, Golub and LeVeque (1979)."""
    places = dense_places(features)
    wanted = [name for f in features.dense if f.scale == "standard" for name in f.names]
    found = dict.fromkeys(wanted, (0, 0.0, 0.0))
    if wanted:
        for _, columns in _blocks(between, samples):
            for name in wanted:
                values = columns.dense[:, places[name]].astype(np.float64)
                values = values[~np.isnan(values)]
                if len(values):
                    mean = float(values.mean())
                    found[name] = _joined(
                        found[name], (len(values), mean, float(((values - mean) ** 2).sum()))
                    )
    scales = {}
    for name, (count, mean, squares) in found.items():
        deviation = math.sqrt(squares / count) if count else 0.0
        scales[name] = mean, deviation or 1.0
    return scales


def _latest(features: Features, between: Between, samples: int) -> dict[str, float]:
    """The latest time of the ages without ``now``; 0 without any."""
    places = dense_places(features)
    found = {f.name: 0.0 for f in features.dense if f.kind == "timestamp" and f.now is None}
    if found:
        low = dict.fromkeys(found, -math.inf)
        for _, columns in _blocks(between, samples):
            for name in low:
                there = columns.dense[:, places[name]]
                low[name] = max(low[name], float(np.max(there, initial=-math.inf, where=~np.isnan(there))))
        found = {name: time if time > -math.inf else 0.0 for name, time in low.items()}
    return found


def dense_places(features: Features) -> dict[str, int]:
    """The column of each dense input."""
    names = [name for feature in features.dense for name in feature.names]
    return {name: place for place, name in enumerate(names)}


def _joined(one: tuple[int, float, float], other: tuple[int, float, float]) -> tuple[int, float, float]:
    """Count, mean and sum of squares about it of two sets of values."""
    count, step = one[0] + other[0], other[1] - one[1]
    mean = one[1] + step * other[0] / count
    return count, mean, one[2] + other[2] + step * step * one[0] * other[0] / count


def _numbers(place: int, between: Between, samples: int) -> Callable[[int], NDArray[np.float64]]:
    def read(every: int) -> NDArray[np.float64]:
        """The values of each ``every``-th sample, where they are there."""
        parts = [np.empty(0)]
        for low, columns in _blocks(between, samples):
            chosen = np.arange(-low % every, len(columns), every)
            missing = bit_at(columns.missing, place, len(columns))[chosen]
            parts.append(bits_as_numbers(columns.ids[chosen, place])[~missing])
        return np.concatenate(parts)

    return read


def _quantiles(buckets: int, read: Callable[[int], NDArray[np.float64]], samples: int) -> tuple[float, ...]:
    """The edges of so many buckets with about equally many values; fewer where values repeat. Beyond
    ``AT_ONCE`` samples, of evenly spaced ones."""
    values = read(-(-samples // AT_ONCE))
    if not len(values):
        return ()
    ordered = np.sort(values)
    edges = np.unique(ordered[np.arange(1, buckets) * len(values) // buckets])
    return tuple(edges[edges > ordered[0]].tolist())


def numbers_as_bits(values: NDArray[np.float64]) -> Int64:
    """Values [n] as whole numbers, in which they are kept until their buckets are known."""
    return (values + 0.0).view(np.int64)


def bits_as_numbers(ids: NDArray[np.integer]) -> NDArray[np.float64]:
    """The inverse of ``numbers_as_bits``."""
    return np.ascontiguousarray(ids, np.int64).view(np.float64)
