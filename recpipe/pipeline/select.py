"""Samples of a batch of any type, picked by number: what micro-batches and ranks' shares are made by."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recpipe.embedding.planner import places_of
from recpipe.errors import UserError

T = TypeVar("T")


def select(batch: T, samples: NDArray[np.int64]) -> T:
    """The ``samples`` (int64 [n], any order, also repeated) of ``batch``, in that order.

    A batch of B samples is anything made of tensors, ``KeyedJaggedTensor`` and ``JaggedTensor``: a dataclass,
    another object with attributes, a mapping, a list or a tuple, nested at will. Tensors whose first
    dimension is B are cut, and all else is shared. A type that this does not suit brings a method
    ``select(samples)`` of its own.

    Raises ``UserError`` for a batch whose parts do not agree on B.
    """
    if _has_own(batch):
        own: T = batch.select(samples)  # type: ignore[attr-defined]
        return own
    cut: T = _Cut(samples, batch_size(batch)).of(batch)
    return cut


def _has_own(value: object) -> bool:
    return hasattr(value, "select") and not isinstance(value, torch.Tensor)


def batch_size(batch: object) -> int:
    """Samples in ``batch``: those of its jagged tensors; without any, the length of its first tensor."""
    parts = list(leaves(batch))
    jagged = {_stride(leaf) for leaf in parts if not isinstance(leaf, torch.Tensor)}
    if len(jagged) > 1:
        raise UserError(
            f"a batch of type {type(batch).__name__} has parts of {' and '.join(map(str, sorted(jagged)))} "
            "samples, so that it cannot be cut by sample; give its type a method select(samples)"
        )
    if jagged:
        return jagged.pop()
    lengths = (len(leaf) for leaf in parts if isinstance(leaf, torch.Tensor) and leaf.dim())
    size = next(lengths, None)
    if size is None:
        raise UserError(f"a batch of type {type(batch).__name__} holds no tensor")
    return size


def leaves(value: object) -> Iterator[torch.Tensor | JaggedTensor | KeyedJaggedTensor]:
    """All that a batch of any type is made of, in its order."""
    if isinstance(value, torch.Tensor | JaggedTensor | KeyedJaggedTensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)
    else:
        for part in _attributes(value).values():
            yield from leaves(part)


def _attributes(value: object) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}


def _stride(leaf: JaggedTensor | KeyedJaggedTensor) -> int:
    if isinstance(leaf, JaggedTensor):
        return int(leaf.lengths().numel())
    if leaf.variable_stride_per_key():
        raise UserError(
            "a KeyedJaggedTensor whose keys have different numbers of samples cannot be cut by sample; "
            "give the batch's type a method select(samples)"
        )
    return int(leaf.stride())


class _Cut:
    """``samples`` of a batch of ``size``."""

    def __init__(self, samples: NDArray[np.int64], size: int) -> None:
        self.samples, self.size = samples, size
        self.index = torch.from_numpy(samples)

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            cuttable = value.dim() and len(value) == self.size
            return value[self.index.to(value.device)] if cuttable else value
        if isinstance(value, KeyedJaggedTensor):
            return KeyedJaggedTensor(value.keys(), **self._jagged(value))
        if isinstance(value, JaggedTensor):
            return JaggedTensor(**self._jagged(value))
        if _has_own(value):
            return value.select(self.samples)
        if isinstance(value, Mapping):
            return type(value)({name: self.of(part) for name, part in value.items()})  # type: ignore[call-arg]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.of, value))
        if isinstance(value, list | tuple):
            return type(value)(map(self.of, value))
        return self._object(value)

    def _object(self, value: Any) -> Any:
        """A copy with its attributes cut; no constructor runs, whose arguments nobody knows."""
        attributes = _attributes(value)
        if not attributes:
            return value
        made = copy.copy(value)
        for name, part in attributes.items():
            object.__setattr__(made, name, self.of(part))
        return made

    def _jagged(self, value: JaggedTensor | KeyedJaggedTensor) -> dict[str, torch.Tensor | None]:
        """Values, weights, lengths and offsets of the samples' bags, key by key, on its device."""
        device = value.values().device
        places, offsets = places_of(
            value.offsets().cpu().numpy().astype(np.int64, copy=False), self.size, self.samples
        )
        index = torch.from_numpy(places).to(device)
        weights = value.weights_or_none()
        return {
            "values": value.values()[index],
            "weights": None if weights is None else weights[index],
            "lengths": torch.from_numpy(np.diff(offsets)).to(device),
            "offsets": torch.from_numpy(offsets).to(device),
        }
