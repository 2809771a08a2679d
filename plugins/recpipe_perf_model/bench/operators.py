"""Operators of a step's dense part, forward and backward, at drawn sizes: products of matrices, and passes
over memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from recpipe import private_api
from recpipe.backend.matmul import has_bfloat16_units, has_onednn
from recpipe.profiling.limits import Sample
from recpipe_perf_model.bench.timing import Make, OperatorClock

SAMPLES = (16, 8192)
"""The smallest and the largest batch or share of one."""
FEATURES = (4, 40)
WIDTHS = (1, 4, 8, 13, 16, 24, 32, 50, 64, 81, 96, 128, 200, 256, 300, 367, 416, 512, 768, 1024, 1500, 2048)
"""Widths of layers: usual ones, and some that are no multiple of a vector."""
MOST_FLOPS = 2.5e9
"""Operations of the largest product; beyond them, speed does not change."""
DIMS = (4, 8, 16, 24, 32, 48, 64, 100, 128)
LAYERS, INTERACTIONS = 90, 48
"""How many layers and interactions are drawn."""
PASS_WIDTHS = (1, 8, 16, 32, 64, 128, 256, 367, 512, 1024, 2048)
PASS_DIMS = (4, 8, 16, 32, 64, 128)
MOST = 1 << 23
"""Values of the largest tensor."""
DRAWS, JOINS, VECTORS = 36, 24, 24
"""How many shapes are drawn: of matrices, of features that are joined, and of vectors."""
Random = np.random.Generator


def _dtypes() -> list[torch.dtype]:
    return [torch.float32, *([torch.bfloat16] if has_bfloat16_units() else [])]


def uniform_log2(random: Random, ends: tuple[int, int]) -> int:
    """A number between two others, whose logarithm is as likely anywhere."""
    return int(2 ** random.uniform(*np.log2(ends)))


def measure_products(quick: bool) -> Iterator[Sample]:
    """Layers of drawn sizes, each with its four products, and interactions with theirs."""
    layers = draws(LAYERS // 4 if quick else LAYERS, 1)
    random = np.random.default_rng(2)
    pairs: list[tuple[int, int, int]] = []
    while len(pairs) < (INTERACTIONS // 4 if quick else INTERACTIONS):
        samples, features = uniform_log2(random, SAMPLES) // 16 * 16, uniform_log2(random, FEATURES)
        dim = int(random.choice(DIMS))
        if samples * features * dim <= MOST:
            pairs.append((max(16, samples), features, dim))
    with closing(OperatorClock()) as clock, torch.no_grad():
        for dtype in _dtypes():
            yield from clock.samples(make for size in layers for make in layer(*size, dtype))
            yield from clock.samples(make for size in pairs for make in interaction(*size, dtype))


def draws(count: int, seed: int) -> list[tuple[int, int, int]]:
    """Layers: (samples, inputs, outputs), spread evenly over the logarithms of the samples."""
    random = np.random.default_rng(seed)
    found: list[tuple[int, int, int]] = []
    places = random.permutation(count)
    low, high = np.log2(SAMPLES)
    while len(found) < count:
        place = (places[len(found)] + random.random()) / count
        samples = int(2 ** (low + (high - low) * place)) // 16 * 16
        inputs, outputs = (int(width) for width in random.choice(WIDTHS, 2))
        if 2 * samples * inputs * outputs <= MOST_FLOPS:
            found.append((max(16, samples), inputs, outputs))
    return found


def layer(samples: int, inputs: int, outputs: int, dtype: torch.dtype) -> list[Make]:
    """A linear layer by ``addmm`` and by oneDNN's operator, and the gradients of its input and weight."""
    matrix = partial(torch.ones, dtype=dtype)
    x, gradient = partial(matrix, samples, inputs), partial(matrix, samples, outputs)
    weight, bias = partial(matrix, outputs, inputs), partial(matrix, outputs)
    makes: list[Make] = [
        lambda: partial(torch.addmm, bias(), x(), weight().t()),
        lambda: partial(torch.mm, gradient(), weight()),
        lambda: partial(torch.mm, gradient().t(), x()),
    ]
    if has_onednn() and (dtype == torch.float32 or private_api.onednn_takes_bfloat16()):
        makes.append(lambda: partial(private_api.linear_pointwise, x(), weight(), bias(), "none", [], ""))
    return makes


def interaction(samples: int, features: int, dim: int, dtype: torch.dtype) -> list[Make]:
    """The products of all pairs of features, and both gradients."""
    rows = partial(torch.ones, samples, features, dim, dtype=dtype)
    pairs = partial(torch.ones, samples, features, features, dtype=dtype)

    def products() -> Callable[[], object]:
        x = rows()
        return partial(torch.bmm, x, x.transpose(1, 2))

    return [
        products,
        lambda: partial(torch.bmm, pairs(), rows()),
        lambda: partial(torch.bmm, rows().transpose(1, 2), pairs()),
    ]


def measure_passes(quick: bool) -> Iterator[Sample]:
    """Elementwise operators, copies, joins, gathers of columns, sums and losses, each at drawn sizes."""
    share = 3 if quick else 1
    with closing(OperatorClock()) as clock, torch.no_grad():
        for dtype in _dtypes():
            random = np.random.default_rng(3)
            for draw, count in ((matrices, DRAWS), (joins, JOINS)):
                yield from clock.samples(make for _ in range(count // share) for make in draw(random, dtype))
        drawn_vectors = range(VECTORS // share)
        yield from clock.samples(make for _ in drawn_vectors for make in vectors(random))


def _samples(random: Random) -> int:
    return max(16, uniform_log2(random, SAMPLES) // 16 * 16)


def matrices(random: Random, dtype: torch.dtype) -> list[Make]:
    """What layers do beside their products, on one drawn shape."""
    rows, columns = _samples(random), int(random.choice(PASS_WIDTHS))
    matrix = partial(torch.ones, rows, columns, dtype=dtype)

    def cut() -> torch.Tensor:
        return torch.ones(rows, columns + 16, dtype=dtype)[:, 16:]

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
    if rows <= max(PASS_WIDTHS):
        makes.append(lambda: partial(matrix().copy_, torch.ones(columns, rows, dtype=dtype).t()))
    return makes


def joins(random: Random, dtype: torch.dtype) -> list[Make]:
    """What an interaction does beside its products, on one drawn number of features."""
    dim = int(random.choice(PASS_DIMS))
    features = uniform_log2(random, FEATURES)
    rows = min(_samples(random), max(16, MOST // (features * max(dim, features))))
    row, column = torch.triu_indices(features, features, offset=1)
    pairs = row * features + column
    width = dim + len(row)
    made = partial(torch.ones, rows, dtype=dtype)

    def split_and_joined() -> Callable[[], object]:
        return partial(torch.cat, torch.split(made(features * dim), dim, dim=1), dim=1)

    def put() -> Callable[[], object]:
        into, values = made(features, features), made(len(row))
        return partial(torch.ops.aten.index_put, into, [None, row, column], values, True)

    def taken() -> Callable[[], object]:
        products = made(features, features)
        return lambda: products[:, row, column]

    return [
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


def vectors(random: Random) -> list[Make]:
    """What a loss does, on so many samples."""
    rows = _samples(random)
    vector = partial(torch.rand, rows)
    return [
        lambda: partial(binary_cross_entropy_with_logits, vector(), vector()),
        lambda: partial(torch.sigmoid, vector()),
        lambda: partial(torch.sub, vector(), vector()),
        lambda: partial(torch.sum, vector()),
        lambda: partial(torch.rand(rows, 16).view, -1),
        lambda: partial(torch.empty, rows, 16),
    ]
