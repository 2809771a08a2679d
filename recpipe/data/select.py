"""Selects samples of a batch of any type by number, for micro-batches and ranks' shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recpipe.data.parts import batch_size, child, with_parts
from recpipe.plugin.bags import places_of
from recpipe.private_api import HostIds

T = TypeVar("T")
Jagged: TypeAlias = JaggedTensor | KeyedJaggedTensor


def select(batch: T, samples: NDArray[np.int64]) -> T:
    """The ``samples`` (int64 [n], any order, also repeated) of ``batch``, in that order.

    A batch of B samples is anything made of tensors, ``KeyedJaggedTensor`` and ``JaggedTensor``: a dataclass,
    another object with attributes, a mapping, a list or a tuple, nested at will. Tensors whose first
    dimension is B are cut, and all else is shared. A type that needs something else has a method
    ``select(samples)`` of its own.

    Raises ``UserError`` for a batch whose parts do not agree on B.
    """
    if _has_own(batch):
        own: T = batch.select(samples)  # type: ignore[attr-defined]
        return own
    cut: T = _Cut(samples, batch_size(batch)).of(batch)
    return cut


def between(batch: T, low: int, high: int) -> T:
    """Samples [low, high) of ``batch``, as ``select`` gives them; tensors share the batch's memory."""
    size = batch_size(batch)
    if (low, high) == (0, size):
        return batch
    if _has_own(batch):
        return select(batch, np.arange(low, high))
    cut: T = _Range(low, high, size).of(batch)
    return cut


def join(batches: Sequence[T]) -> T:
    """One batch of all samples of ``batches``, in order: the reverse of ``select``.

    Tensors with a row for each sample are concatenated; what all samples share is taken from the first batch.
    """
    sizes = [batch_size(batch) for batch in batches]
    joined: T = batches[0] if len(batches) == 1 else _joined(batches, sizes)
    return joined


def _joined(parts: Sequence[Any], sizes: list[int]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        by_sample = all(p.dim() and len(p) == size for p, size in zip(parts, sizes, strict=True))
        return torch.cat(list(parts)) if by_sample else first
    if isinstance(first, KeyedJaggedTensor):
        return KeyedJaggedTensor(first.keys(), **_joined_ids(parts, sizes, len(first.keys())))
    if isinstance(first, JaggedTensor):
        return JaggedTensor(**_joined_ids(parts, sizes, 1))
    return with_parts(first, lambda _, key: _joined([child(part, key) for part in parts], sizes))


def _joined_ids(parts: Sequence[Any], sizes: list[int], keys: int) -> dict[str, torch.Tensor | None]:
    """The ids of all parts, one part after the other within each key."""
    per_key = [part.lengths().view(keys, size) for part, size in zip(parts, sizes, strict=True)]
    counts = [lengths.sum(1).tolist() for lengths in per_key]

    def by_key(values: list[torch.Tensor]) -> torch.Tensor:
        split = [torch.split(value, count) for value, count in zip(values, counts, strict=True)]
        return torch.cat([part[key] for key in range(keys) for part in split])

    weights = [part.weights_or_none() for part in parts]
    return {
        "values": by_key([part.values() for part in parts]),
        "weights": None if any(w is None for w in weights) else by_key(weights),
        "lengths": torch.cat(per_key, dim=1).reshape(-1),
    }


def _has_own(value: object) -> bool:
    return hasattr(value, "select") and not isinstance(value, torch.Tensor)


class _Cut:
    """Cuts ``samples`` out of a batch of ``size`` samples."""

    def __init__(self, samples: NDArray[np.int64], size: int) -> None:
        self.samples, self.size = samples, size
        self.index = torch.from_numpy(samples)

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            cuttable = value.dim() and len(value) == self.size
            return self._rows(value) if cuttable else value
        if isinstance(value, HostIds):
            return value.cut(self._keyed, len(self.samples))
        if isinstance(value, KeyedJaggedTensor):
            return self._keyed(value, value)
        if isinstance(value, JaggedTensor):
            return JaggedTensor(**self._jagged(value, value))
        if _has_own(value):
            return value.select(self.samples)
        return with_parts(value, lambda part, _: self.of(part))

    def _rows(self, value: torch.Tensor) -> torch.Tensor:
        return value[self.index.to(value.device)]

    def _keyed(self, value: KeyedJaggedTensor, known: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(value.keys(), **self._jagged(value, known))

    def _jagged(self, value: Jagged, known: Jagged) -> dict[str, torch.Tensor | None]:
        """Values, weights, lengths and offsets of the samples' bags, key by key, on its device. ``known``:
        the same, perhaps in host memory, to read lengths and offsets from."""
        device = value.values().device
        places, offsets = places_of(
            known.offsets().cpu().numpy().astype(np.int64, copy=False), self.size, self.samples
        )
        index = torch.from_numpy(places).to(device)
        weights = value.weights_or_none()
        return {
            "values": value.values()[index],
            "weights": None if weights is None else weights[index],
            "lengths": torch.from_numpy(np.diff(offsets)).to(device),
            "offsets": torch.from_numpy(offsets).to(device),
        }


class _Range(_Cut):
    """Cuts neighbouring samples out of a batch."""

    def __init__(self, low: int, high: int, size: int) -> None:
        super().__init__(np.arange(low, high), size)
        self.low, self.high = low, high

    def _rows(self, value: torch.Tensor) -> torch.Tensor:
        return value[self.low : self.high]

    def _jagged(self, value: Jagged, known: Jagged) -> dict[str, torch.Tensor | None]:
        """The ids between two offsets, for each key."""
        keys = known.lengths().numel() // self.size
        if known.values().numel() == known.lengths().numel() and bool((known.lengths() == 1).all()):
            return self._one_hot(value, keys)
        lengths = value.lengths().view(-1, self.size)[:, self.low : self.high].reshape(-1)
        firsts = torch.arange(keys) * self.size
        offsets = known.offsets().cpu()
        places = list(
            zip(offsets[firsts + self.low].tolist(), offsets[firsts + self.high].tolist(), strict=True)
        )
        weights = value.weights_or_none()

        def cut(values: torch.Tensor) -> torch.Tensor:
            return torch.cat([values[start:stop] for start, stop in places])

        return {
            "values": cut(value.values()),
            "weights": None if weights is None else cut(weights),
            "lengths": lengths,
            "offsets": torch.cat((lengths.new_zeros(1), lengths.cumsum(0))),
        }

    def _one_hot(self, value: Jagged, keys: int) -> dict[str, torch.Tensor | None]:
        """Bags of one id each, which most batches have, are cut as a matrix."""
        count = keys * (self.high - self.low)
        weights = value.weights_or_none()

        def cut(values: torch.Tensor) -> torch.Tensor:
            return values.view(keys, self.size)[:, self.low : self.high].reshape(-1)

        return {
            "values": cut(value.values()),
            "weights": None if weights is None else cut(weights),
            "lengths": value.lengths()[:count],
            "offsets": value.offsets()[: count + 1],
        }
