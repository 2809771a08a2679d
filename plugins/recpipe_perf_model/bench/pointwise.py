"""Passes over memory: elementwise operators, copies, joins, gathers of columns, sums, losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from recpipe.backend.matmul import has_bfloat16_units
from recpipe.profiling.limits import Sample
from recpipe_perf_model.bench.timing import Make, clock

SAMPLES = (16, 8192)
WIDTHS = (1, 8, 16, 32, 64, 128, 256, 367, 512, 1024, 2048)
FEATURES = (4, 40)
DIMS = (4, 8, 16, 32, 64, 128)
MOST = 1 << 23
"""Values of the largest tensor."""
DRAWS, JOINS, VECTORS = 36, 24, 24
"""How many shapes are drawn: of matrices, of features that are joined, and of vectors."""
Random = np.random.Generator


def measure(quick: bool) -> Iterator[Sample]:
    """Each operator at drawn sizes."""
    share = 3 if quick else 1
    dtypes = [torch.float32, *([torch.bfloat16] if has_bfloat16_units() else [])]
    with clock() as timer, torch.no_grad():
        for dtype in dtypes:
            random = np.random.default_rng(3)
            drawn = range(DRAWS // share), range(JOINS // share)
            yield from timer.samples(make for _ in drawn[0] for make in matrices(random, dtype))
            yield from timer.samples(make for _ in drawn[1] for make in joins(random, dtype))
        drawn_vectors = range(VECTORS // share)
        yield from timer.samples(make for _ in drawn_vectors for make in vectors(random))


def _samples(random: Random) -> int:
    return max(16, int(2 ** random.uniform(*np.log2(SAMPLES))) // 16 * 16)


def matrices(random: Random, dtype: torch.dtype) -> list[Make]:
    """What layers do beside their products, on one drawn shape."""
    rows, columns = _samples(random), int(random.choice(WIDTHS))

    def matrix(columns: int = columns, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.ones(rows, columns, dtype=dtype)

    def cut() -> torch.Tensor:
        return matrix(columns + 16)[:, 16:]

    def gradient_into() -> Callable[[], object]:
        found, out, into = matrix(), matrix(), matrix()
        return lambda: torch.ops.aten.threshold_backward.grad_input(found, out, 0, grad_input=into)

    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    makes: list[Make] = [
        lambda: partial(torch.relu, matrix()),
        lambda: matrix().relu_,
        lambda: partial(torch.ops.aten.threshold_backward, matrix(), matrix(), 0),
        gradient_into,
        lambda: partial(torch.add, matrix(), matrix()),
        lambda: partial(torch.mul, matrix(), matrix()),
        lambda: partial(torch.add, cut(), cut()),
        lambda: partial(torch.mul, matrix(), 0.5),
        lambda: partial(matrix().sum, 0),
        lambda: partial(matrix().sum, 1),
        lambda: partial(torch.zeros, rows, columns, dtype=dtype),
        lambda: partial(matrix().to, other),
        lambda: partial(torch.sigmoid, matrix()),
    ]
    if rows <= max(WIDTHS):
        makes.append(lambda: partial(matrix().copy_, torch.ones(columns, rows, dtype=dtype).t()))
    return makes


def joins(random: Random, dtype: torch.dtype) -> list[Make]:
    """What an interaction does beside its products, on one drawn number of features."""
    dim = int(random.choice(DIMS))
    features = int(2 ** random.uniform(*np.log2(FEATURES)))
    rows = min(_samples(random), max(16, MOST // (features * max(dim, features))))
    row, column = torch.triu_indices(features, features, offset=1)
    pairs = row * features + column
    width = dim + len(row)

    def made(*shape: int) -> torch.Tensor:
        return torch.ones(rows, *shape, dtype=dtype)

    def split_and_joined() -> Callable[[], object]:
        parts = torch.split(made(features * dim), dim, dim=1)
        return partial(torch.cat, parts, dim=1)

    def put() -> Callable[[], object]:
        into, values = made(features, features), made(len(row))
        return partial(torch.ops.aten.index_put, into, [None, row, column], values, True)

    def taken() -> Callable[[], object]:
        products = made(features, features)
        return lambda: products[:, row, column]

    makes: list[Make] = [
        lambda: partial(torch.cat, (made(dim), made(features * dim)), dim=1),
        lambda: partial(torch.cat, (made(1, dim), made(features, dim)), dim=1),
        lambda: partial(torch.cat, (made(dim), made(len(row))), dim=1),
        split_and_joined,
        lambda: partial(torch.index_select, made(features**2), 1, pairs),
        lambda: partial(torch.gather, made(features**2), 1, pairs.expand(rows, -1)),
        lambda: partial(torch.index_select, made(width), 1, torch.arange(features**2) % width),
        taken,
        put,
        lambda: partial(torch.add, made(features * dim)[:, :dim], made(features * dim)[:, dim : 2 * dim]),
    ]
    return makes


def vectors(random: Random) -> list[Make]:
    """What a loss does, on so many samples."""
    rows = _samples(random)

    def vector() -> torch.Tensor:
        return torch.rand(rows)

    return [
        lambda: partial(binary_cross_entropy_with_logits, vector(), vector()),
        lambda: partial(torch.sigmoid, vector()),
        lambda: partial(torch.sub, vector(), vector()),
        lambda: partial(torch.sum, vector()),
        lambda: partial(torch.rand(rows, 16).view, -1),
        lambda: partial(torch.empty, rows, 16),
    ]
