"""The profile of a machine that does not exist: its times follow from a few rates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from recpipe_perf_model.bench.overheads import OPTIMIZERS
from recpipe_perf_model.kernels.operators import GEMMS, optimizer_sizes
from recpipe_perf_model.machine import Host, MachineProfile

from recpipe.profiling.limits import Sample

FLOPS = 1e11
"""Operations per second of a thread."""
BYTES = 1e10
"""Bytes per second of a thread."""
CALL = 5e-6
"""Seconds of an operator that does nothing."""
OVERHEADS = {
    "recorded": 1e-6,
    "node": 2e-6,
    "function": 1e-5,
    "call": 1e-7,
    "wake": 3e-5,
    "hand over": 2e-5,
    "loop": 2e-4,
}
PASSES = (
    "elementwise",
    "cat",
    "take index_select",
    "take index",
    "put",
    "sum 0",
    "sum",
    "loss",
    "math",
    "fill",
)
HOST = Host("A CPU", "AVX2", 2, 2, "cpu", "2.13.0", "1.8.0", "1.8.0")


def product(kind: str, m: float, n: float, k: float, threads: float) -> Sample:
    footprint = 4 * (m * k + k * n + m * n)
    seconds = CALL + 2 * m * n * k / FLOPS / threads
    at = {"b": 1.0, "m": m, "n": n, "k": k, "footprint": footprint, "reuse": 2.0**24}
    return Sample(kind, {**at, "dtype": "float32", "threads": threads}, seconds)


def passed(kind: str, elements: float, threads: float) -> Sample:
    moved = 8 * elements
    at = {"bytes": moved, "footprint": moved, "elements": elements, "runs": 0.0, "reuse": 2.0**24}
    return Sample(kind, {**at, "dtype": "float32", "threads": threads}, CALL + moved / BYTES / threads)


def profile(**changes: float) -> MachineProfile:
    """The machine's profile; ``changes`` multiply the times of kinds."""
    random = np.random.default_rng(0)
    products, passes = [], []
    for threads in (1.0, 2.0):
        for kind in GEMMS:
            for sizes in 2 ** random.uniform(4, 11, (24, 3)):
                products.append(product(kind, *np.round(sizes).tolist(), threads))
        for kind in PASSES:
            for size in 2 ** random.uniform(4, 22, 12):
                passes.append(passed(kind, float(round(size)), threads))
        free = {"threads": threads}
        passes += [Sample(kind, free, 1e-6) for kind in ("view", "empty") for _ in range(2)]
    overheads = [Sample(kind, {}, seconds * changes.get(kind, 1.0)) for kind, seconds in OVERHEADS.items()]
    overheads += [Sample("step", {"elements": count}, 1e-4 + count * 1e-5) for count in (1.0, 26.0)]
    for threads in (1.0, 2.0):
        for name in OPTIMIZERS:
            for count, values in ((2, 100), (10, 10_000), (20, 1_000_000)):
                at = {**optimizer_sizes(name, count, values), "threads": threads}
                overheads.append(Sample(f"optimizer {name}", at, CALL + float(at["bytes"]) / BYTES))
    lookups = [
        Sample(kind, _looked_up(rows, bags, lookups), (1e-5 + lookups * 1e-8) * times)
        for kind, times in (("lookup forward", 1.0), ("lookup update", 2.0))
        for rows in (100, 10_000, 1_000_000)
        for bags, lookups in ((512, 512), (4096, 4096), (512, 5120))
    ]
    families = {"gemm": products, "pointwise": passes, "overheads": overheads, "lookups": lookups}
    return MachineProfile(HOST, "then", False, {name: tuple(each) for name, each in families.items()})


def loops(base: MachineProfile) -> list[Sample]:
    """Lookups and updates by loops: in half of the time of the others, by two threads in half of that."""
    return [
        replace(s, kind=f"loop {s.kind}", at={**s.at, "threads": threads}, seconds=s.seconds / 2 / threads)
        for s in base.samples["lookups"]
        for threads in (1.0, 2.0)
    ]


def _looked_up(rows: int, bags: int, lookups: int) -> dict[str, float]:
    distinct = rows * -np.expm1(-lookups / rows)
    return {"tables": 1.0, "rows": rows, "dim": 16.0, "bags": bags, "lookups": lookups, "distinct": distinct}
