"""Measures the effect of rounding on a sample of the rows that are written back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.plugin import Figure, RecordLayout, RowCodec

B = TypeVar("B")
EVERY = 8
"""One in so many calls of ``encode`` is sampled."""
ROWS = 32
"""The most rows that are sampled in a call."""


class Meter:
    """The largest and the mean rounding error of weights that training writes back; first values are not
    counted."""

    def __init__(self) -> None:
        self.rows = self.values = self.calls = 0
        self.rounded_any = False
        """Whether any row was rounded, first values included."""
        self.largest = self.sum = self.sum_of_sizes = 0.0
        self._counts = False
        self._lock = threading.Lock()

    def begun(self, batches: Iterator[B]) -> Iterator[B]:
        """Pass ``batches`` on unchanged; when they are asked for, training begins."""
        self._counts = True
        yield from batches

    def wants(self) -> bool:
        """Whether to sample this call."""
        with self._lock:
            self.calls += self._counts
            return self._counts and self.calls % EVERY == 1

    def add(self, weights: NDArray[np.float32], kept: NDArray[np.float32]) -> None:
        """Add weights of some rows, float32 [n, dim], and what the codec keeps of them."""
        errors = np.abs(kept.astype(np.float64) - weights)
        with self._lock:
            self.rows += len(weights)
            self.values += errors.size
            self.largest = max(self.largest, float(errors.max(initial=0)))
            self.sum += float(errors.sum())
            self.sum_of_sizes += float(np.abs(weights).sum())

    def figures(self) -> dict[str, Figure]:
        """The figures for the report."""
        values = max(1, self.values)
        return {
            "sampled_rows": self.rows,
            "rounding_error_largest": self.largest,
            "rounding_error_mean": self.sum / values,
            "sampled_weight_mean": self.sum_of_sizes / values,
        }


class Metered(RowCodec):
    """A wrapper of ``codec`` whose rounding errors ``meter`` samples."""

    def __init__(self, codec: RowCodec, layout: RecordLayout, meter: Meter) -> None:
        self.codec, self.layout, self.meter = codec, layout, meter
        self.bytes_per_record = codec.bytes_per_record

    def encode(self, records: NDArray[np.float32]) -> NDArray[np.uint8]:
        """What ``codec`` encodes, sampled for the report."""
        encoded = self.codec.encode(records)
        self.meter.rounded_any |= len(records) > 0
        if len(records) and self.meter.wants():
            chosen = slice(None, None, -(-len(records) // ROWS))
            kept = np.empty((len(encoded[chosen]), self.layout.width), np.float32)
            self.codec.decode(np.ascontiguousarray(encoded[chosen]), kept)
            self.meter.add(records[chosen, : self.layout.dim], kept[:, : self.layout.dim])
        return encoded

    def decode(self, encoded: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """What ``codec`` decodes."""
        self.codec.decode(encoded, out)

    def rounded(self, records: torch.Tensor) -> torch.Tensor | None:
        """What ``codec`` rounds to; not sampled, since nothing is written back."""
        self.meter.rounded_any |= len(records) > 0
        return self.codec.rounded(records)
