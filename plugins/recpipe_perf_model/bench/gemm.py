"""Products of matrices as the layers and interactions of a step have them, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from recpipe import private_api
from recpipe.backend.matmul import has_bfloat16_units, has_onednn
from recpipe.profiling.limits import Sample
from recpipe_perf_model.bench.timing import Make, clock

SAMPLES = (16, 8192)
"""The smallest and the largest batch or share of one."""
WIDTHS = (1, 4, 8, 13, 16, 24, 32, 50, 64, 81, 96, 128, 200, 256, 300, 367, 416, 512, 768, 1024, 1500, 2048)
"""Widths of layers: usual ones, and some that are no multiple of a vector."""
MOST_FLOPS = 2.5e9
"""Operations of the largest product; beyond them, speed does not change."""
FEATURES = (4, 40)
DIMS = (4, 8, 16, 24, 32, 48, 64, 100, 128)
LAYERS, INTERACTIONS = 90, 48
"""How many layers and interactions are drawn."""


def measure(quick: bool) -> Iterator[Sample]:
    """Layers of drawn sizes, each with its four products, and interactions with theirs."""
    dtypes = [torch.float32, *([torch.bfloat16] if has_bfloat16_units() else [])]
    layers = draws(LAYERS // 4 if quick else LAYERS, 1)
    pairs = interactions(INTERACTIONS // 4 if quick else INTERACTIONS, 2)
    with clock() as timer, torch.no_grad():
        for dtype in dtypes:
            yield from timer.samples(make for size in layers for make in layer(*size, dtype))
            yield from timer.samples(make for size in pairs for make in interaction(*size, dtype))


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


def interactions(count: int, seed: int) -> list[tuple[int, int, int]]:
    """(samples, features, dim)."""
    random = np.random.default_rng(seed)
    found: list[tuple[int, int, int]] = []
    low, high = np.log2(SAMPLES)
    while len(found) < count:
        samples = int(2 ** random.uniform(low, high)) // 16 * 16
        features = int(2 ** random.uniform(*np.log2(FEATURES)))
        dim = int(random.choice(DIMS))
        if samples * features * dim <= 1 << 23:
            found.append((max(16, samples), features, dim))
    return found


def layer(samples: int, inputs: int, outputs: int, dtype: torch.dtype) -> list[Make]:
    """A linear layer by ``addmm`` and by oneDNN's operator, and the gradients of its input and weight."""

    def matrix(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=dtype)

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

    def rows() -> torch.Tensor:
        return torch.ones(samples, features, dim, dtype=dtype)

    def pairs() -> torch.Tensor:
        return torch.ones(samples, features, features, dtype=dtype)

    def products() -> Callable[[], object]:
        x = rows()
        return partial(torch.bmm, x, x.transpose(1, 2))

    return [
        products,
        lambda: partial(torch.bmm, pairs(), rows()),
        lambda: partial(torch.bmm, rows().transpose(1, 2), pairs()),
    ]
