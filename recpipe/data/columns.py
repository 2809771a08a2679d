"""Blocks of samples in columns, the one form between every source and the batches cut from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.schema import Schema
from recpipe.plugin.batch import Batch

Float32 = NDArray[np.float32]
Ids = NDArray[np.integer]
Bits = NDArray[np.uint8]
Int64 = NDArray[np.int64]


@dataclass
class MultiHot:
    """One multi-hot feature of n samples: sample i holds ``values[offsets[i]:offsets[i + 1]]``.

    values of whole numbers, offsets int64 [n + 1]. ``offsets[0]`` need not be 0, and there may be values
    beyond the last offset. ``missing``: as of ``Columns``, for the values. ``weights``: of the values,
    float32, None if they have none.
    """

    values: Ids
    offsets: Int64
    missing: Bits | None = None
    weights: Float32 | None = None

    def trimmed(self) -> MultiHot:
        """The same bags with only their own values and offsets that begin at 0."""
        low, high = self.offsets[0], self.offsets[-1]
        missing = None if self.missing is None else self.missing[low:high]
        weights = None if self.weights is None else self.weights[low:high]
        return MultiHot(self.values[low:high], self.offsets - low, missing, weights)


@dataclass
class Columns:
    """n samples: labels float32 [n], or [n, L] if there are several, dense float32 [n, D], ids
    [n, one-hot features], other bags.

    Ids are rows of tables or, as a source gives them, what an ``IdMapper`` makes rows of. ``missing``: which
    of these are not there, bits uint8 [n, features / 8] as packbits makes them; None: none. ``weights``: of
    the labels, in their shape, as in ``Batch``.
    """

    labels: Float32
    dense: Float32
    ids: Ids
    bags: dict[str, MultiHot] = field(default_factory=dict)
    missing: Bits | None = None
    weights: Float32 | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice) -> Columns:
        """Samples ``[start, stop)``; views, no copies."""
        low, high, _ = rows.indices(len(self))
        bags = {
            name: MultiHot(bag.values, bag.offsets[low : high + 1], bag.missing, bag.weights)
            for name, bag in self.bags.items()
        }
        missing = None if self.missing is None else self.missing[low:high]
        weights = None if self.weights is None else self.weights[low:high]
        return Columns(
            self.labels[low:high], self.dense[low:high], self.ids[low:high], bags, missing, weights
        )

    def widened(self) -> Columns:
        """The same with ids of 8 bytes, as sources give them; on the disk they may take fewer."""
        bags = {name: bag.trimmed() for name, bag in self.bags.items()}
        wide = {name: replace(bag, values=bag.values.astype(np.int64)) for name, bag in bags.items()}
        return replace(self, ids=self.ids.astype(np.int64), bags=wide)

    def where(self, good: NDArray[np.bool_]) -> Columns:
        """The samples for which ``good`` (bool [n]) is true, copied."""
        return self.take(np.flatnonzero(good))

    def take(self, rows: Int64) -> Columns:
        """The samples with the numbers ``rows`` int64 [m], in this order, copied."""
        bags = {}
        for name, bag in self.bags.items():
            lengths = bag.offsets[rows + 1] - bag.offsets[rows]
            offsets = offsets_of(lengths)
            own = np.repeat(bag.offsets[rows] - offsets[:-1], lengths) + np.arange(offsets[-1])
            missing = None if bag.missing is None else bag.missing[own]
            of_ids = None if bag.weights is None else bag.weights[own]
            bags[name] = MultiHot(bag.values[own], offsets, missing, of_ids)
        missing = None if self.missing is None else self.missing[rows]
        weights = None if self.weights is None else self.weights[rows]
        return Columns(self.labels[rows], self.dense[rows], self.ids[rows], bags, missing, weights)


def concatenate(parts: Sequence[Columns]) -> Columns:
    """One block of all samples of ``parts``, in order. All or none of them have weights."""
    if len(parts) == 1:
        return parts[0]
    bags = {}
    for name in parts[0].bags:
        own = [part.bags[name].trimmed() for part in parts]
        lengths = np.concatenate([np.diff(bag.offsets) for bag in own])
        missing = _joined_bits([bag.missing for bag in own], [len(bag.values) for bag in own], 1)
        values, weights = np.concatenate([bag.values for bag in own]), _joined_weights(own)
        bags[name] = MultiHot(values, offsets_of(lengths), missing, weights)
    return Columns(
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.dense for part in parts]),
        np.concatenate([part.ids for part in parts]),
        bags,
        _joined_bits([part.missing for part in parts], list(map(len, parts)), parts[0].ids.shape[1]),
        _joined_weights(parts),
    )


def _joined_weights(parts: Sequence[Columns] | Sequence[MultiHot]) -> Float32 | None:
    """All blocks of a source have weights, or none."""
    found = [part.weights for part in parts if part.weights is not None]
    assert len(found) in (0, len(parts))
    return np.concatenate(found) if found else None


def bits_of(missing: NDArray[np.bool_]) -> Bits | None:
    """``Columns.missing`` of bool [n, features]."""
    return np.packbits(missing, axis=1) if missing.any() else None


def _joined_bits(parts: Sequence[Bits | None], sizes: Sequence[int], features: int) -> Bits | None:
    if all(part is None for part in parts):
        return None
    shapes = [(size, -(-features // 8)) for size in sizes]
    return np.concatenate(
        [
            np.zeros(shape, np.uint8) if part is None else part
            for part, shape in zip(parts, shapes, strict=True)
        ]
    )


def offsets_of(lengths: NDArray[np.integer]) -> Int64:
    """int64 [n + 1] offsets of n bags from their lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


class BatchMaker:
    """Turns columns into batches: a KJT of int64 ids in schema order, feature-major.

    Lengths and offsets of an all-one-hot batch depend on its size alone, so they are built once per size and
    shared by the batches; nothing downstream writes into a KJT's lengths.
    """

    def __init__(self, schema: Schema, multi_hot: Sequence[str]) -> None:
        self.names = [feature.name for feature in schema.sparse]
        self.multi_hot = frozenset(multi_hot)
        self.weighted = schema.weighted
        self.means = frozenset(feature.name for feature in schema.sparse if feature.pooling == "mean")
        self._ones: dict[int, tuple[torch.Tensor, torch.Tensor, list[int], list[int]]] = {}

    def __call__(self, columns: Columns) -> Batch:
        """A batch of copies, but for int64 ids, so that it outlives the files behind ``columns``."""
        sparse = self._mixed(columns) if self.multi_hot else self._one_hot(columns)
        dense = torch.from_numpy(np.array(columns.dense, np.float32))
        labels = torch.from_numpy(np.array(columns.labels, np.float32))
        weights = None if columns.weights is None else torch.from_numpy(np.array(columns.weights, np.float32))
        return Batch(dense, sparse, labels, weights=weights)

    def _one_hot(self, columns: Columns) -> KeyedJaggedTensor:
        size, features = columns.ids.shape
        if size not in self._ones:
            self._ones[size] = (
                torch.ones(size * features, dtype=torch.int64),
                torch.arange(size * features + 1),
                [size] * features,
                [size * index for index in range(features + 1)],
            )
        lengths, offsets, per_key, offset_per_key = self._ones[size]
        values = np.ascontiguousarray(columns.ids.T, np.int64)
        return KeyedJaggedTensor(
            keys=self.names,
            values=torch.from_numpy(values.reshape(-1)),
            lengths=lengths,
            offsets=offsets,
            stride=size,
            length_per_key=per_key,
            offset_per_key=offset_per_key,
        )

    def _mixed(self, columns: Columns) -> KeyedJaggedTensor:
        size, column = len(columns), 0
        values: list[NDArray[np.integer]] = []
        lengths = np.ones((len(self.names), size), np.int64)
        for index, name in enumerate(self.names):
            if name in self.multi_hot:
                bag = columns.bags[name]
                values.append(bag.values[bag.offsets[0] : bag.offsets[-1]])
                np.subtract(bag.offsets[1:], bag.offsets[:-1], out=lengths[index])
            else:
                values.append(columns.ids[:, column])
                column += 1
        joined = np.concatenate(values, dtype=np.int64)
        return KeyedJaggedTensor(
            keys=self.names,
            values=torch.from_numpy(joined),
            weights=self._weights(columns, lengths) if self.weighted else None,
            lengths=torch.from_numpy(lengths.reshape(-1)),
            stride=size,
        )

    def _weights(self, columns: Columns, lengths: Int64) -> torch.Tensor:
        """The weights float32 of all ids, whose numbers ``lengths`` [features, n] says; those of a mean are
        parts of 1."""
        found = []
        for name, own in zip(self.names, lengths, strict=True):
            bag = columns.bags[name].trimmed() if name in self.multi_hot else None
            weights = np.ones(own.sum(), np.float32) if bag is None or bag.weights is None else bag.weights
            if name in self.means:
                owners = np.repeat(np.arange(len(own)), own)
                sums = np.bincount(owners, weights, len(own))
                weights = (weights / np.where(sums > 0, sums, 1.0)[owners]).astype(np.float32)
            found.append(weights)
        return torch.from_numpy(np.concatenate(found))
