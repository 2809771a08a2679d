"""The products of all pairs of a sample's vectors and their gradient on a CPU, by loops of its own.

They compute what TorchRec's ``InteractionArch`` does, in float32, with sums in another order. A product of
matrices as small as a sample's takes a library longer to begin than to make, and half of it is not wanted.
Here four vectors at a time are multiplied with sixteen others, and the sums stay in registers::

    products     transposed, so that one instruction takes a number of each of sixteen vectors
    gradients    those of four vectors: of each the sum of the others, times the gradients of their products

Samples depend on no other one, so that their bits do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe import private_api
from recpipe.backend.dense import differentiable, plain_interaction
from recpipe.common.loops import compiled, cut, has_wide_registers, tell
from recpipe.common.teams import share_out
from recpipe.common.timing import phase
from recpipe.common.vectors import BLOCK, LANES, fma, load, mul, splat, spread, store, transpose

Floats = NDArray[np.float32]
TILE = 4
"""Vectors that are multiplied at a time: fewer in all have no loops."""
LEAST = 256
"""Samples of a thread at least; a few of them take no longer than passing them to it."""


def takes(count: int) -> bool:
    """Whether there are loops for ``count`` vectors a sample."""
    return count >= TILE


def pair_products(dense: torch.Tensor, rows: torch.Tensor, spent: bool = False) -> torch.Tensor:
    """dense [B, D] and rows [B, F, D], float32 -> [B, D + F (F + 1) / 2]: the dense vector, and the products
    of all pairs of the 1 + F vectors in TorchRec's order.

    ``spent``: the backward pass may write the gradient of ``rows`` over them.
    """
    if not torch.is_grad_enabled():
        with phase("interaction forward"):
            return products(dense, rows)
    out: torch.Tensor = _Pairs.apply(dense, rows, spent)  # type: ignore[no-untyped-call]
    return out


def products(dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``pair_products`` without a graph."""
    batch, features, dim = rows.shape
    count = 1 + features
    out = torch.empty(batch, dim + count * features // 2)
    tell("pairs forward", batch * count * features * dim / 2, dense, rows, out)
    given = (*_flat(dense), *_flat(rows), out.view(-1).numpy(), count, dim, has_wide_registers())
    share_out(multiply_pairs, given, _ends(batch))
    return out


def gradients(
    dense: torch.Tensor, rows: torch.Tensor, gradient: torch.Tensor, spent: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of ``dense`` and of ``rows``, from that of their ``pair_products``; the latter in the
    place of ``rows`` if they are ``spent``."""
    batch, features, dim = rows.shape
    # With room for one more vector in front, as rows have it that a table looks up for this: its update takes
    # the gradient without a copy, and does not read what is there.
    room = dim if rows.stride(0) == (1 + features) * dim else 0
    to_dense, to_rows = torch.empty(batch, dim), rows.detach()
    if not spent or not rows[0].is_contiguous():
        to_rows = torch.empty(batch, room + features * dim)[:, room:].view(rows.shape)
    tell("pairs backward", batch * (1 + features) * features * dim, dense, rows, gradient, to_dense, to_rows)
    given = (*_flat(dense), *_flat(rows), gradient.contiguous().view(-1).numpy())
    made = (to_dense.view(-1).numpy(), *_flat(to_rows), 1 + features, dim, has_wide_registers())
    share_out(differentiate_pairs, given + made, _ends(batch))
    return to_dense, to_rows


class _Pairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: torch.Tensor, rows: torch.Tensor, spent: bool) -> torch.Tensor:
        with phase("interaction forward"):
            ctx.spent = spent
            ctx.save_for_backward(dense, rows)
            return products(dense, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dense, rows = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiable(plain_interaction, (dense, rows), gradient), None
        with phase("interaction backward"):
            spent = ctx.spent and not private_api.graph_is_kept()
            return *gradients(dense, rows, gradient, spent), None


def _flat(x: torch.Tensor) -> tuple[Floats, int]:
    """The memory of x from its first number to its last one, float32 of one axis, and how far samples are
    apart in it."""
    x = x.detach() if x[0].is_contiguous() else x.detach().contiguous()
    size = x[0].numel()
    apart = x.stride(0) if len(x) > 1 else size
    return x.as_strided(((len(x) - 1) * apart + size,), (1,)).numpy(), apart


def _ends(samples: int) -> list[int]:
    """Those of the parts of samples that threads take, of which there are as many as torch's operators have
    here."""
    return cut(samples, LEAST, torch.get_num_threads())


@compiled
def multiply_pairs(
    dense: NDArray[np.float32],
    dense_apart: int,
    rows: NDArray[np.float32],
    rows_apart: int,
    out: NDArray[np.float32],
    count: int,
    dim: int,
    wide_registers: bool,
    low: int,
    high: int,
) -> None:
    """Write the dense vectors and the products of all pairs of ``count`` vectors of samples [low, high) into
    ``out`` [B * W].

    ``wide_registers``: there are enough for 8 sums of 16 numbers.
    """
    deep, wide = -(-dim // LANES) * LANES, -(-count // LANES) * LANES
    width = dim + count * (count - 1) // 2
    own = np.zeros(wide * deep, np.float32)  # a sample's vectors, and zeros
    lying = np.zeros(deep * wide, np.float32)  # the same, transposed
    square = np.zeros(wide * wide + LANES, np.float32)
    ends = np.zeros(width + LANES, np.float32)
    for b in range(low, high):
        _take(own, dense, b * dense_apart, rows, b * rows_apart, count, dim, deep)
        for k in range(0, count, BLOCK):
            for d in range(0, dim, BLOCK):
                transpose(own, k * deep + d, deep, lying, d * wide + k, wide)
        for i in range(0, count, TILE):
            v = (i + 1) // LANES * LANES
            a0, a1, a2, a3 = i * deep, (i + 1) * deep, (i + 2) * deep, (i + 3) * deep
            while v < wide:
                p0, p1, p2, p3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
                if wide_registers and v + LANES < wide:
                    q0, q1, q2, q3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
                    for d in range(dim):
                        x0, x1 = load(lying, d * wide + v), load(lying, d * wide + v + LANES)
                        s0, s1 = spread(own, a0 + d), spread(own, a1 + d)
                        s2, s3 = spread(own, a2 + d), spread(own, a3 + d)
                        p0, p1, p2, p3 = fma(s0, x0, p0), fma(s1, x0, p1), fma(s2, x0, p2), fma(s3, x0, p3)
                        q0, q1, q2, q3 = fma(s0, x1, q0), fma(s1, x1, q1), fma(s2, x1, q2), fma(s3, x1, q3)
                    store(square, i * wide + v + LANES, q0)
                    store(square, (i + 1) * wide + v + LANES, q1)
                    store(square, (i + 2) * wide + v + LANES, q2)
                    store(square, (i + 3) * wide + v + LANES, q3)
                    after = v + 2 * LANES
                else:
                    for d in range(dim):
                        x0 = load(lying, d * wide + v)
                        p0, p1 = fma(spread(own, a0 + d), x0, p0), fma(spread(own, a1 + d), x0, p1)
                        p2, p3 = fma(spread(own, a2 + d), x0, p2), fma(spread(own, a3 + d), x0, p3)
                    after = v + LANES
                store(square, i * wide + v, p0)
                store(square, (i + 1) * wide + v, p1)
                store(square, (i + 2) * wide + v, p2)
                store(square, (i + 3) * wide + v, p3)
                v = after
        # A row of products that is written has numbers behind it that later ones are written over, or the
        # next samples'; the last samples' have no such place.
        last = (high - 1 - b) * width < LANES
        target, start = (ends, 0) if last else (out, b * width)
        for d in range(dim):
            target[start + d] = own[d]
        at = start + dim
        for i in range(count - 1):
            for j in range(i + 1, count, LANES):
                store(target, at + j - i - 1, load(square, i * wide + j))
            at += count - 1 - i
        if last:
            out[b * width : (b + 1) * width] = ends[:width]


@compiled
def differentiate_pairs(
    dense: NDArray[np.float32],
    dense_apart: int,
    rows: NDArray[np.float32],
    rows_apart: int,
    gradient: NDArray[np.float32],
    to_dense: NDArray[np.float32],
    to_rows: NDArray[np.float32],
    to_rows_apart: int,
    count: int,
    dim: int,
    wide_registers: bool,
    low: int,
    high: int,
) -> None:
    """The gradients of the dense vectors (from all their places) and of the other ``count`` - 1 of samples
    [low, high): those of ``multiply_pairs`` with ``gradient`` [B * W]. ``wide_registers`` as there."""
    deep, width = -(-dim // LANES) * LANES, dim + count * (count - 1) // 2
    own, found = np.zeros(count * deep, np.float32), np.empty(count * deep, np.float32)
    # Whole vectors are written where they are wanted, others with what is behind them.
    whole = deep == dim
    others = to_rows if whole else found
    # Where the product of vectors i < j is: starts[i] + j.
    starts = np.empty(count, np.int64)
    for i in range(count):
        starts[i] = i * (2 * count - i - 1) // 2 - i - 1
    for b in range(low, high):
        base = b * width + dim
        _take(own, dense, b * dense_apart, rows, b * rows_apart, count, dim, deep)
        for tile in range(0, count, TILE):
            i = min(tile, count - TILE)
            g0, g1 = base + starts[i], base + starts[i + 1]
            g2, g3 = base + starts[i + 2], base + starts[i + 3]
            s01, s02 = spread(gradient, g0 + i + 1), spread(gradient, g0 + i + 2)
            s03, s12 = spread(gradient, g0 + i + 3), spread(gradient, g1 + i + 2)
            s13, s23 = spread(gradient, g1 + i + 3), spread(gradient, g2 + i + 3)
            d = 0
            while d < deep:
                to = b * to_rows_apart + (i - 1) * dim + d if whole else i * deep + d
                own_at, twice = i * deep + d, wide_registers and d + 2 * LANES <= deep
                x0, x1 = load(own, own_at), load(own, own_at + deep)
                x2, x3 = load(own, own_at + 2 * deep), load(own, own_at + 3 * deep)
                p0 = fma(s03, x3, fma(s02, x2, mul(s01, x1)))
                p1 = fma(s13, x3, fma(s12, x2, mul(s01, x0)))
                p2 = fma(s23, x3, fma(s12, x1, mul(s02, x0)))
                p3 = fma(s23, x2, fma(s13, x1, mul(s03, x0)))
                if twice:
                    x0, x1 = load(own, own_at + LANES), load(own, own_at + deep + LANES)
                    x2, x3 = load(own, own_at + 2 * deep + LANES), load(own, own_at + 3 * deep + LANES)
                    q0 = fma(s03, x3, fma(s02, x2, mul(s01, x1)))
                    q1 = fma(s13, x3, fma(s12, x2, mul(s01, x0)))
                    q2 = fma(s23, x3, fma(s12, x1, mul(s02, x0)))
                    q3 = fma(s23, x2, fma(s13, x1, mul(s03, x0)))
                    for j in range(i):
                        g, x, y = (
                            base + starts[j] + i,
                            load(own, j * deep + d),
                            load(own, j * deep + d + LANES),
                        )
                        t0, t1 = spread(gradient, g), spread(gradient, g + 1)
                        t2, t3 = spread(gradient, g + 2), spread(gradient, g + 3)
                        p0, p1, p2, p3 = fma(t0, x, p0), fma(t1, x, p1), fma(t2, x, p2), fma(t3, x, p3)
                        q0, q1, q2, q3 = fma(t0, y, q0), fma(t1, y, q1), fma(t2, y, q2), fma(t3, y, q3)
                    for j in range(i + TILE, count):
                        x, y = load(own, j * deep + d), load(own, j * deep + d + LANES)
                        t0, t1 = spread(gradient, g0 + j), spread(gradient, g1 + j)
                        t2, t3 = spread(gradient, g2 + j), spread(gradient, g3 + j)
                        p0, p1, p2, p3 = fma(t0, x, p0), fma(t1, x, p1), fma(t2, x, p2), fma(t3, x, p3)
                        q0, q1, q2, q3 = fma(t0, y, q0), fma(t1, y, q1), fma(t2, y, q2), fma(t3, y, q3)
                    if i == 0 or not whole:
                        store(found, own_at + LANES, q0)
                    else:
                        store(to_rows, to + LANES, q0)
                    store(others, to + deep + LANES, q1)
                    store(others, to + 2 * deep + LANES, q2)
                    store(others, to + 3 * deep + LANES, q3)
                else:
                    for j in range(i):
                        g, x = base + starts[j] + i, load(own, j * deep + d)
                        p0, p1 = fma(spread(gradient, g), x, p0), fma(spread(gradient, g + 1), x, p1)
                        p2, p3 = fma(spread(gradient, g + 2), x, p2), fma(spread(gradient, g + 3), x, p3)
                    for j in range(i + TILE, count):
                        x = load(own, j * deep + d)
                        p0, p1 = fma(spread(gradient, g0 + j), x, p0), fma(spread(gradient, g1 + j), x, p1)
                        p2, p3 = fma(spread(gradient, g2 + j), x, p2), fma(spread(gradient, g3 + j), x, p3)
                if i == 0 or not whole:
                    store(found, own_at, p0)
                else:
                    store(to_rows, to, p0)
                store(others, to + deep, p1)
                store(others, to + 2 * deep, p2)
                store(others, to + 3 * deep, p3)
                d += 2 * LANES if twice else LANES
        for d in range(dim):
            to_dense[b * dim + d] = found[d] + gradient[b * width + d]
        if not whole:
            for k in range(1, count):
                for d in range(dim):
                    to_rows[b * to_rows_apart + (k - 1) * dim + d] = found[k * deep + d]


def _take(
    own: Floats,
    dense: Floats,
    dense_at: int,
    rows: Floats,
    rows_at: int,
    count: int,
    dim: int,
    deep: int,
) -> None:
    """Copy a sample's ``count`` vectors, ``deep`` numbers apart."""
    whole = dim // LANES * LANES
    for d in range(dim):
        own[d] = dense[dense_at + d]
    for k in range(1, count):
        at = rows_at + (k - 1) * dim
        for d in range(0, whole, LANES):
            store(own, k * deep + d, load(rows, at + d))
        for d in range(whole, dim):
            own[k * deep + d] = rows[at + d]
