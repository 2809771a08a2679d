"""The update of rows in memory on a CPU: each row that a batch looks up makes one step by the sum of its
lookups' gradients, which is nowhere written.

Lookups of a row are found by a hash table and chained in their order, so that its sum is always made in the
same one. A table's rows are updated in the order in which they are first looked up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.common.instructions import prefetch
from recpipe.common.loops import compiled
from recpipe.common.vectors import (
    LANES,
    add,
    div,
    fma,
    load,
    mul,
    number,
    put,
    root,
    splat,
    spread,
    store,
    total,
)
from recpipe.plugin.tables import TableOptimizer
from recpipe.tables.updating import BETA1, BETA2, DECAY, EPS, KEPT, RATE

KINDS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam")
SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM, PARTIAL_ADAM = range(len(KINDS))
AHEAD = 12
"""So many rows before one is updated the processor is asked for it."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


def has_loop(own: TableOptimizer) -> bool:
    """Whether the loop below makes the steps of this optimizer: those that FBGEMM fuses, and Adam's, with
    weight decay too, as ``recpipe.tables.updating`` has them."""
    if own.name in ("adam", "partial_rowwise_adam"):
        return own.clip_row_norm is None and own.average is None
    return own.fused


@compiled
def update_rows(
    kind: int,
    knobs: NDArray[np.float64],
    weights: NDArray[np.float32],
    state: NDArray[np.float32],
    bases: NDArray[np.int64],
    states: NDArray[np.int64],
    tables: NDArray[np.int64],
    indices: NDArray[np.int64],
    offsets: NDArray[np.int64],
    factors: NDArray[np.float32],
    gradient: NDArray[np.float32],
    dim: int,
    low: int,
    high: int,
) -> None:
    """One step of the rows that features [low, high) look up, none of which another feature does.

    ``kind``: of ``KINDS``; ``knobs`` and the state of a row: as ``recpipe.tables.updating`` has them.
    ``weights`` and ``state``: all tables', one after the other; those of feature f begin at ``bases[f]`` and
    ``states[f]``. Neighbouring features with the same number in ``tables`` share a table. ``indices`` int64
    [L] and ``offsets`` int64 [F * B + 1] are FBGEMM's, feature by feature. ``gradient`` [B * F * D], of bags,
    is multiplied by ``factors`` [L] for each id, if there are any.
    """
    features = len(bases)
    samples, width, whole = (len(offsets) - 1) // features, features * dim, dim // LANES * LANES
    rate, eps = np.float32(knobs[RATE]), np.float32(knobs[EPS])
    decay, kept = np.float32(knobs[DECAY]), np.float32(knobs[KEPT])
    beta1, rest1 = np.float32(knobs[BETA1]), np.float32(1.0 - knobs[BETA1])
    beta2, rest2 = np.float32(knobs[BETA2]), np.float32(1.0 - knobs[BETA2])
    adam, plain, apart = kind in (ADAM, PARTIAL_ADAM), len(factors) == 0, 0
    if kind == ADAGRAD:
        apart = dim
    elif kind == ROWWISE_ADAGRAD:
        apart = 1
    elif adam:
        apart = 2 * dim + 1 if kind == ADAM else dim + 2
    sums = np.empty(dim + LANES, np.float32)
    most, first = 0, low
    while first < high:
        last = first + 1
        while last < high and tables[last] == tables[first]:
            last += 1
        most = max(most, offsets[last * samples] - offsets[first * samples])
        first = last
    slots = 16
    while slots < 2 * most:
        slots *= 2
    places = np.empty(slots, np.int32)
    rows, heads = np.empty(most + AHEAD, np.int64), np.empty(most + AHEAD, np.int32)
    tails = np.empty(most, np.int32)
    sources, after = np.empty(most, np.int64), np.empty(most, np.int32)
    first = low
    while first < high:
        last = first + 1
        while last < high and tables[last] == tables[first]:
            last += 1
        lookups = offsets[last * samples] - offsets[first * samples]
        slots = 16
        while slots < 2 * lookups:
            slots *= 2
        places[:slots] = -1
        mask, count, at = np.uint64(slots - 1), 0, 0
        for feature in range(first, last):
            for sample in range(samples):
                bag = feature * samples + sample
                for lookup in range(offsets[bag], offsets[bag + 1]):
                    row = indices[lookup]
                    mixed = np.uint64(row) * _ODD
                    slot = (mixed >> np.uint64(32)) & mask
                    place = places[slot]
                    while place >= 0 and rows[place] != row:
                        slot = (slot + np.uint64(1)) & mask
                        place = places[slot]
                    sources[at], after[at] = sample * width + feature * dim, -1
                    if place < 0:
                        places[slot], rows[count], heads[count], tails[count] = count, row, at, at
                        count += 1
                    else:
                        after[tails[place]] = at
                        tails[place] = at
                    at += 1
        if count > 0:
            rows[count : count + AHEAD], heads[count : count + AHEAD] = rows[count - 1], heads[count - 1]
        base, begin, zero = bases[first], states[first], offsets[first * samples]
        for k in range(count):
            ahead, source = rows[k + AHEAD], sources[heads[k + AHEAD]]
            for d in range(0, dim, LANES):
                prefetch(weights, base + ahead * dim + d)
                prefetch(gradient, source + d)
            for d in range(0, apart, LANES):
                prefetch(state, begin + ahead * apart + d)
            own, moments = base + rows[k] * dim, begin + rows[k] * apart
            size = scale = np.float32(0)
            if adam:
                state[moments + apart - 1] += np.float32(1)
                updates = np.float64(state[moments + apart - 1])
                size = np.float32(1.0 / (1.0 - knobs[BETA1] ** updates))
                scale = np.float32(1.0 / np.sqrt(1.0 - knobs[BETA2] ** updates))
            squares, rest = splat(0.0), np.float32(0)
            for d in range(0, whole, LANES):
                link = heads[k]
                g = load(gradient, sources[link] + d)
                if plain:
                    link = after[link]
                    while link >= 0:
                        g = add(g, load(gradient, sources[link] + d))
                        link = after[link]
                else:
                    g = mul(spread(factors, zero + link), g)
                    link = after[link]
                    while link >= 0:
                        g = fma(spread(factors, zero + link), load(gradient, sources[link] + d), g)
                        link = after[link]
                if kind == SGD:
                    store(weights, own + d, fma(splat(-rate), g, load(weights, own + d)))
                elif kind == ADAGRAD:
                    m = fma(g, g, load(state, moments + d))
                    store(state, moments + d, m)
                    step = div(mul(splat(rate), g), add(root(m), splat(eps)))
                    store(weights, own + d, fma(splat(-1.0), step, load(weights, own + d)))
                elif kind == ADAM:
                    w = load(weights, own + d)
                    g = fma(splat(decay), w, g)
                    second = fma(mul(splat(rest2), g), g, mul(splat(beta2), load(state, moments + dim + d)))
                    store(state, moments + dim + d, second)
                    m = fma(splat(rest1), g, mul(splat(beta1), load(state, moments + d)))
                    store(state, moments + d, m)
                    step = div(mul(splat(size), m), fma(root(second), splat(scale), splat(eps)))
                    store(weights, own + d, fma(splat(-rate), step, mul(splat(kept), w)))
                else:
                    if adam:
                        g = fma(splat(decay), load(weights, own + d), g)
                    store(sums, d, g)
                    squares = fma(g, g, squares)
            for d in range(whole, dim):
                link = heads[k]
                one = gradient[sources[link] + d] * (np.float32(1) if plain else factors[zero + link])
                link = after[link]
                while link >= 0:
                    one += gradient[sources[link] + d] * (np.float32(1) if plain else factors[zero + link])
                    link = after[link]
                if kind == SGD:
                    put(weights, own + d, number(weights, own + d) - rate * one)
                elif kind == ADAGRAD:
                    state[moments + d] += one * one
                    way = rate * one / (np.sqrt(state[moments + d]) + eps)
                    put(weights, own + d, number(weights, own + d) - way)
                elif kind == ADAM:
                    one += decay * number(weights, own + d)
                    state[moments + dim + d] = beta2 * state[moments + dim + d] + rest2 * one * one
                    state[moments + d] = beta1 * state[moments + d] + rest1 * one
                    way = size * state[moments + d] / (np.sqrt(state[moments + dim + d]) * scale + eps)
                    put(weights, own + d, kept * number(weights, own + d) - rate * way)
                else:
                    if adam:
                        one += decay * number(weights, own + d)
                    sums[d] = one
                    rest += one * one
            if kind == ROWWISE_ADAGRAD:
                mean = state[moments] + (total(squares) + rest) / np.float32(dim)
                state[moments] = mean
                size = rate / (np.sqrt(mean) + eps)
                for d in range(0, whole, LANES):
                    store(weights, own + d, fma(splat(-size), load(sums, d), load(weights, own + d)))
                for d in range(whole, dim):
                    put(weights, own + d, number(weights, own + d) - size * sums[d])
            elif kind == PARTIAL_ADAM:
                mean = beta2 * state[moments + dim] + rest2 * ((total(squares) + rest) / np.float32(dim))
                state[moments + dim] = mean
                size = -rate * size / (np.sqrt(mean) * scale + eps)
                for d in range(0, whole, LANES):
                    m = fma(splat(rest1), load(sums, d), mul(splat(beta1), load(state, moments + d)))
                    store(state, moments + d, m)
                    store(weights, own + d, fma(splat(size), m, mul(splat(kept), load(weights, own + d))))
                for d in range(whole, dim):
                    state[moments + d] = beta1 * state[moments + d] + rest1 * sums[d]
                    put(weights, own + d, kept * number(weights, own + d) + size * state[moments + d])
        first = last
