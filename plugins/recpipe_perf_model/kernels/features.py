"""What kernel models know of an operator: its amounts of work, and where it lies among others.

The amounts are what a non-negative linear model multiplies; the place is what a correction is interpolated
by, in units in which 2 is about as far as two operators are alike.
"""

from __future__ import annotations

import numpy as np

from recpipe_perf_model.kernels.linear import At, Features, Vector, hats
from recpipe_perf_model.kernels.operators import GEMMS

CACHES = np.log2([2.0**18, 2.0**22, 2.0**26])
"""Knots, in bytes touched between two uses of an operator's memory; they decide which cache still has it."""
GRAIN = 32768
"""Values from which on torch lets several threads share a pass."""
VECTOR = 16
"""Rows and columns that a product's kernels take at a time."""
TINY = 16.0**3
"""Multiplications up to which torch does not call oneDNN (``mkldnn_gemm_min_size``)."""
WAY = 4096
"""Bytes apart at which addresses share the lines of a cache of the first level."""
BYTES = {"bfloat16": 2, "float16": 2, "float64": 8}
"""Of a value; of other types, 4."""
TURNED = 3600
"""Values from which on torch turns a matrix block by block."""
WHOLE = 12.0
"""In place of the logarithm of the values of a piece, for memory without gaps."""


def form(kind: str) -> tuple[Features, Features]:
    """The amounts of work and the place of operators of this kind."""
    if kind in GEMMS:
        return product_work, product_place
    return pass_work, turned_place if kind == "transpose" else pass_place


def product_work(at: At) -> Vector:
    """The amounts of work of a product of matrices."""
    b, m, n, k = (float(at.get(name, 1)) for name in "bmnk")
    padded = b * _padded(m) * _padded(n) * _padded(k)
    tiny, levels = _is_tiny(at), _levels(at)
    amounts = [float(tiny), b, b * m * n * k, padded, b * m * n, b * m * k, b * k * n]
    return np.concatenate([levels * (not tiny), amounts, float(at.get("footprint", 0)) * levels])


def product_place(at: At) -> Vector:
    """Where a product lies among others: the logarithms of its sizes, how well they fill vectors, and whether
    rows compete for the same lines of a cache."""
    b, m, n, k = (float(at.get(name, 1)) for name in "bmnk")
    fill = [2 * np.log2(_padded(size) / size) for size in (n, k)]
    row_bytes = [size * BYTES.get(str(at.get("dtype")), 4) for size in (n, k)]
    same_lines = [2.0 * (size % WAY == 0) for size in row_bytes]
    return np.array([*np.log2([b, m, n, k]), *fill, *same_lines, _depth(at), 8.0 * _is_tiny(at)])


def _is_tiny(at: At) -> bool:
    """Whether torch multiplies by its own loops, since oneDNN's kernels take longer to be called."""
    return bool(np.prod([float(at.get(name, 1)) for name in "bmnk"]) <= TINY)


def pass_work(at: At) -> Vector:
    """The amounts of work of a pass over memory, for each of the threads that share it."""
    elements, levels = float(at.get("elements", 0)), _levels(at)
    shared = _is_shared(at)
    threads = float(at.get("threads", 1)) if shared else 1.0
    work = np.array([*(float(at.get("bytes", 0)) * levels), elements, float(at.get("runs", 0)), _rows(at)])
    return np.concatenate([levels, [1.0, float(shared)], work / threads])


def pass_place(at: At) -> Vector:
    """Where a pass lies among others: the logarithms of its sizes and of their ratios."""
    elements, runs = float(at.get("elements", 0)), float(at.get("runs", 0))
    names = ("bytes", "footprint", "elements")
    moved, footprint, values = np.log2([max(1.0, float(at.get(name, 0))) for name in names])
    results = np.log2(max(1.0, float(at.get("results", elements))))
    row = np.log2(max(1.0, float(at.get("row", elements))))
    piece = np.log2(max(1.0, elements / runs)) if runs else WHOLE
    apart = [2 * (moved - footprint), 2 * (moved - values), results - values]
    return np.array([moved, *apart, row / 2, piece / 2, 4.0 * _is_shared(at), _depth(at)])


def turned_place(at: At) -> Vector:
    """Where a copy that changes the order of values lies among others."""
    return np.append(pass_place(at), 4.0 * (float(at.get("elements", 0)) >= TURNED))


def _is_shared(at: At) -> bool:
    return float(at.get("threads", 1)) > 1 and float(at.get("elements", 0)) >= GRAIN


def _rows(at: At) -> float:
    """How many rows the widest tensor has."""
    return float(at.get("elements", 0)) / max(1.0, float(at.get("row", at.get("elements", 1))))


def _levels(at: At) -> Vector:
    """Which caches, and memory, the operator's bytes come from, as weights with sum 1."""
    return hats(float(at.get("reuse", 1.0)), CACHES)


def _depth(at: At) -> float:
    """How far away the operator's memory is, so that neighbouring caches are 2 apart."""
    return 2.0 * float(_levels(at) @ np.arange(len(CACHES)))


def _padded(size: float) -> float:
    return float(-(-size // VECTOR) * VECTOR)
