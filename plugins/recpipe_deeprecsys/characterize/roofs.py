"""The machine's limits as roofs: the least time of an operator, and which limit says so.

The roofline model (Williams, Waterman, Patterson, CACM 52(4), 2009) with a roof for each level of memory: an
operator that touches so many bytes cannot be faster than its arithmetic at the rate of large products of
matrices, nor than its bytes at the best rate that was measured over as much memory. The limits are those of
the performance model's micro-benchmarks (``recpipe perf calibrate``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from recpipe_perf_model.bench.caches import rate
from recpipe_perf_model.calibrate import calibrate, measured_again
from recpipe_perf_model.machine import Host, MachineProfile, own_profile, profile_path

from recpipe.common.console import log
from recpipe.profiling.limits import Sample

FAMILIES = ("limits", "caches")
"""The micro-benchmarks that roofs are made of."""
NEARER = 1.5
"""Bytes come from a cache where they can be so many times as fast as from memory."""
PRODUCTS, MEMORY, CACHE, ROWS, CALL = "arithmetic", "memory", "cache", "random rows", "call"
"""What can bound an operator."""
Rates = tuple[tuple[float, float], ...]
"""Footprints in bytes, ascending, and the most bytes per second over as much memory or more."""


@dataclass(frozen=True)
class Work:
    """What an operator does, however it is made."""

    flops: float = 0.0
    """Operations; an addition and a multiplication count as two."""
    streamed: float = 0.0
    """Bytes read and written one after the other."""
    gathered: float = 0.0
    """Bytes of rows read and written at random."""
    footprint: float = 0.0
    """Bytes of the distinct memory among them."""
    dtype: str = "float32"
    row_bytes: float = 0.0
    """Of each row at random."""
    weights: float = 0.0
    """Parameters that it uses, each counted as often as it is read from a table."""

    @property
    def bytes(self) -> float:
        """Read and written."""
        return self.streamed + self.gathered

    @property
    def intensity(self) -> float | None:
        """Operations per byte; None without bytes."""
        return self.flops / self.bytes if self.bytes else None

    def times(self, count: float) -> Work:
        """So many of it, over the same memory."""
        return replace(
            self,
            flops=count * self.flops,
            streamed=count * self.streamed,
            gathered=count * self.gathered,
            weights=count * self.weights,
        )


@dataclass(frozen=True)
class Roofs:
    """The limits of one process on this machine."""

    products: Mapping[str, float]
    """Operations per second of large products, by the type of their values."""
    stream: Rates
    rows: Mapping[float, Rates]
    """Of rows at random, by their bytes."""
    threads: int

    @classmethod
    def of(cls, samples: Iterable[Sample], threads: int) -> Roofs:
        """The best of all samples: other programs only make a measurement slower."""
        products: dict[str, float] = {}
        stream: dict[float, float] = {}
        rows: dict[float, dict[float, float]] = {}
        for sample in samples:
            found = rate(sample)
            if sample.kind.startswith("gemm "):
                name = sample.kind.removeprefix("gemm ")
                products[name] = max(found, products.get(name, 0.0))
            elif sample.kind in ("stream", "rows at random"):
                footprint = float(sample.at["footprint"])
                own = stream if sample.kind == "stream" else rows.setdefault(_row_bytes(sample), {})
                own[footprint] = max(found, own.get(footprint, 0.0))
        return cls(products, _falling(stream), {size: _falling(own) for size, own in rows.items()}, threads)

    def stream_rate(self, footprint: float) -> float:
        """Bytes per second of a stream over so much memory."""
        return _between(self.stream, footprint)

    def row_rate(self, row_bytes: float, footprint: float) -> float:
        """Bytes per second of rows at random, of which the distinct ones are so much memory.

        Between the sizes of rows that were measured, the logarithm of the rate is interpolated by that of the
        size.
        """
        sizes = sorted(self.rows)
        rates = [_between(self.rows[size], footprint) for size in sizes]
        return float(np.exp(np.interp(np.log(max(row_bytes, 1.0)), np.log(sizes), np.log(rates))))

    def least(self, work: Work) -> tuple[float, str]:
        """The least seconds of ``work`` in one call, and what it is bounded by.

        Rows at random may come while others are written, so that each kind of memory bounds it by itself.
        """
        if not work.bytes and not work.flops:
            return 0.0, CALL
        memory = CACHE if self.cached(work) else MEMORY
        bounds = {memory: work.bytes / self.stream_rate(work.footprint)}
        if work.dtype in self.products:
            bounds[PRODUCTS] = work.flops / self.products[work.dtype]
        if work.gathered:
            bounds[ROWS] = work.gathered / self.row_rate(work.row_bytes, work.footprint)
        bound = max(bounds, key=lambda name: bounds[name])
        return bounds[bound], bound

    def cached(self, work: Work) -> bool:
        """Whether its memory fits a cache."""
        return self.stream_rate(work.footprint) > NEARER * self.stream[-1][1]

    def to_dict(self) -> dict[str, Any]:
        """What characterize.json has of them."""
        return {
            "threads": self.threads,
            "flops_per_s": dict(self.products),
            "stream": [list(pair) for pair in self.stream],
            "rows": {f"{size:.0f}": [list(pair) for pair in own] for size, own in self.rows.items()},
        }


class Machine:
    """This machine's roofs, from its profile; measured where that does not have them."""

    def __init__(self) -> None:
        self._host = Host.current(torch.device("cpu"))
        found = own_profile(self._host)
        if found is None or any(name not in found.samples for name in FAMILIES):
            log.info("measuring this machine's limits once; recpipe perf calibrate does it more closely")
            found = calibrate(profile_path(self._host), found is None or found.quick, FAMILIES)
        self._samples = _of(found)
        self.disturbed = _disturbed(found)
        """What disturbed the last measurement; '' if nothing did."""
        self.again = False
        """Whether they were measured anew."""

    @property
    def roofs(self) -> Roofs:
        """The best of all that was measured."""
        return Roofs.of(self._samples, self._host.threads)

    def measure_again(self) -> None:
        """Measure the limits anew."""
        log.info("an operator is faster than this machine's limits allow: measuring them anew")
        self.again = True
        found = measured_again(profile_path(self._host), FAMILIES)
        self._samples, self.disturbed = [*self._samples, *_of(found)], _disturbed(found)


def _disturbed(profile: MachineProfile) -> str:
    return next((profile.disturbed[name] for name in FAMILIES if name in profile.disturbed), "")


def _of(profile: MachineProfile) -> list[Sample]:
    return [sample for name in FAMILIES for sample in profile.samples[name]]


def _row_bytes(sample: Sample) -> float:
    return float(sample.at["row_bytes"])


def _falling(rates: Mapping[float, float]) -> Rates:
    """With the rate of more memory where less was not as fast, because a call takes its time, too."""
    found: list[tuple[float, float]] = []
    for footprint in sorted(rates, reverse=True):
        best = max(rates[footprint], found[-1][1] if found else 0.0)
        found.append((footprint, best))
    return tuple(reversed(found))


def _between(rates: Sequence[tuple[float, float]], footprint: float) -> float:
    """The rate at a footprint; between two that were measured that of the smaller one, which is higher: a
    cache may end anywhere between them."""
    fits = [found for size, found in rates if size <= footprint]
    return fits[-1] if fits else rates[0][1]
