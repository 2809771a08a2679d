"""The tensors that the main server and a shard exchange, as a model of the open inference protocol takes and
gives them.

A request has lookups, one after the other: their numbers ``lookups`` INT32 [L], how many ``bags`` INT32 [L]
each asks for, all of their ``ids`` INT64 [N] (places among the rows that the shard holds), or INT32, how many
of them each bag has, ``lengths`` INT32 [sum of bags], left out where each has one, and the ``weights`` FP32
[N] of ids, where some have any. The answer, ``pooled`` FP32 or FP16 [V], has a matrix [bags, W] for each of
the request's ``runs``: beside each other the sums of its lookups. Where rows are not pooled it is [n, D].

As INT8 the answer is UINT8 [V]: each sum of D values is D codes and then scale and bias, float32, as FBGEMM
has rows of 8 bits (Fused8BitRowwiseQuantized); a value is code * scale + bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from recpipe_serve.errors import bad

Array = NDArray[Any]
Floats = NDArray[np.float32]
LOOKUPS, BAGS, IDS, LENGTHS, WEIGHTS, POOLED = "lookups", "bags", "ids", "lengths", "weights", "pooled"
OUTPUT_TYPE = "output_type"
"""A parameter of requests: the type of the answer, one of ``TYPES``; FP32 unless it is there."""
TYPES: Mapping[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"),
    "FP16": np.dtype("<f2"),
    "INT8": np.dtype("u1"),
}
SCALE_AND_BIAS = 8
"""Bytes behind the codes of a sum that is sent as INT8."""
INPUTS = {LOOKUPS: "INT32", BAGS: "INT32", IDS: "INT64", LENGTHS: "INT32", WEIGHTS: "FP32"}
OPTIONAL = (LENGTHS, WEIGHTS)
SMALL = np.iinfo(np.int32).max
"""The largest id that is sent in 32 bits."""
_NOTHING = np.zeros(1, np.int64)


class Wanted(NamedTuple):
    """What one lookup asks for."""

    lookup: int
    """Its number."""
    bags: int
    ids: Array
    """int64 [n], one bag's after the other's."""
    lengths: Array | None
    """How many ids each bag has, int64 [bags]; None: each has one."""
    weights: Array | None = None
    """float32 [n], where rows are weighted."""


@dataclass(frozen=True)
class Question:
    """All that a shard is asked for a batch: ``Wanted``, one after the other."""

    lookups: list[int]
    """Their numbers."""
    bags: Array
    """How many each asks for, int64 [L]."""
    ids: Array
    """int64 [N]."""
    lengths: Array | None
    """How many ids each bag has, int64 [sum of bags]; None: each has one."""
    weights: Array | None
    """Of the ids, float32 [N]; None: there are none."""

    @classmethod
    def of(cls, wanted: Sequence[Wanted]) -> Question:
        """These lookups."""
        lengths = weights = None
        if any(own.lengths is not None for own in wanted):
            lengths = np.concatenate(
                [np.ones(own.bags, np.int64) if own.lengths is None else own.lengths for own in wanted]
            )
        if any(own.weights is not None for own in wanted):
            weights = np.concatenate(
                [np.ones(len(own.ids), np.float32) if own.weights is None else own.weights for own in wanted]
            )
        bags = np.array([own.bags for own in wanted], np.int64)
        ids = np.concatenate([own.ids for own in wanted])
        return cls([own.lookup for own in wanted], bags, ids, lengths, weights)

    @cached_property
    def bag_ends(self) -> Array:
        """Where the bags of each lookup begin, and where those of the last one end: int64 [L + 1]."""
        return np.concatenate([_NOTHING, np.cumsum(self.bags)])

    @cached_property
    def ends(self) -> Array:
        """Where the ids of each lookup begin, and where those of the last one end: int64 [L + 1]."""
        if self.lengths is None:
            return self.bag_ends
        ends: Array = np.concatenate([_NOTHING, np.cumsum(self.lengths)])[self.bag_ends]
        return ends

    def tensors(self) -> dict[str, Array]:
        """What is sent."""
        small = not len(self.ids) or int(self.ids.max()) <= SMALL
        tensors: dict[str, Array] = {
            LOOKUPS: np.array(self.lookups, np.int32),
            BAGS: self.bags.astype(np.int32),
            IDS: self.ids.astype(np.int32) if small else self.ids,
        }
        if self.lengths is not None:
            tensors[LENGTHS] = self.lengths.astype(np.int32)
        if self.weights is not None:
            tensors[WEIGHTS] = self.weights
        return tensors

    @classmethod
    def read(cls, tensors: Mapping[str, Array]) -> Question:
        """The question in a request; ``Refused`` if its tensors do not fit each other."""
        for name in tensors:
            if name not in INPUTS:
                raise bad(f"a shard has no input '{name}'; it has {', '.join(INPUTS)}")
        for name, kind in INPUTS.items():
            found = tensors.get(name)
            if found is None and name in OPTIONAL:
                continue
            fits = found is not None and found.ndim == 1
            if not fits or found.dtype.kind != ("f" if kind == "FP32" else "i"):  # type: ignore[union-attr]
                raise bad(f"a shard takes '{name}' as {kind} [n]")
        bags, ids = tensors[BAGS].astype(np.int64), tensors[IDS].astype(np.int64)
        lengths = tensors[LENGTHS].astype(np.int64) if LENGTHS in tensors else None
        weights = tensors[WEIGHTS].astype(np.float32) if WEIGHTS in tensors else None
        numbers, total = tensors[LOOKUPS].tolist(), int(bags.sum())
        if len(numbers) != len(bags) or (bags < 0).any():
            raise bad(f"'{BAGS}' does not say how many bags each of the {len(numbers)} lookups asks for")
        if lengths is not None and (len(lengths) != total or (lengths < 0).any()):
            raise bad(f"'{LENGTHS}' does not say how many ids each of the {total} bags has")
        most = total if lengths is None else int(lengths.sum())
        if len(ids) != most:
            raise bad(f"there are {len(ids)} ids, and bags have {most}")
        if weights is not None and len(weights) != len(ids):
            raise bad(f"there are {len(weights)} weights, and {len(ids)} ids")
        return cls(numbers, bags, ids, lengths, weights)


def sent(values: Floats, dims: Sequence[int], kind: str) -> Array:
    """A run's matrix float32 [bags, W] as values of an answer of this ``kind``, [V]; ``dims``: how wide each
    of its lookups is, W in all."""
    if TYPES[kind].kind == "f":
        return values.reshape(-1).astype(TYPES[kind], copy=False)
    parts = [values.reshape(-1, dims[0])] if len({*dims}) == 1 else np.split(values, np.cumsum(dims)[:-1], 1)
    quantize = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized
    codes = [quantize(torch.from_numpy(np.ascontiguousarray(part))).numpy() for part in parts]
    return (codes[0] if len(codes) == 1 else np.concatenate(codes, axis=1)).reshape(-1)


def width_of(dims: Sequence[int], values: Array) -> int:
    """How many of an answer's ``values`` a bag of a run has whose lookups are so wide."""
    return sum(dims) + (len(dims) * SCALE_AND_BIAS if values.dtype == np.uint8 else 0)


def received(values: Array, dims: Sequence[int], bags: int) -> Floats:
    """The matrix float32 [bags, W] that was ``sent`` as these values."""
    if values.dtype != np.uint8:
        return values.astype(np.float32, copy=False).reshape(bags, -1)
    if len({*dims}) == 1:
        return _floats(values.reshape(-1, dims[0] + SCALE_AND_BIAS)).reshape(bags, -1)
    ends = np.cumsum([dim + SCALE_AND_BIAS for dim in dims])[:-1]
    return np.concatenate([_floats(part) for part in np.split(values.reshape(bags, -1), ends, 1)], axis=1)


def _floats(rows: Array) -> Floats:
    """Rows of codes, scale and bias, uint8 [n, D + 8], as float32 [n, D]."""
    scale, bias = np.ascontiguousarray(rows[:, -SCALE_AND_BIAS:]).view("<f4").T[:, :, None]
    found: Floats = rows[:, :-SCALE_AND_BIAS] * scale + bias
    return found
