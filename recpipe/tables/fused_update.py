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
from recpipe.common.vectors import LANES, add, div, fma, load, mul, root, splat, store, total

KINDS = ("sgd", "adagrad", "rowwise_adagrad")
SGD, ADAGRAD, ROWWISE_ADAGRAD = range(len(KINDS))
RATE, EPS = range(2)
"""Where a loop's ``knobs`` have what."""
AHEAD = 12
"""So many rows before one is updated the processor is asked for it."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


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
    gradient: NDArray[np.float32],
    dim: int,
    low: int,
    high: int,
) -> None:
    """One step of the rows that features [low, high) look up, none of which another feature does.

    ``weights`` and ``state``: all tables', one after the other; those of feature f begin at ``bases[f]`` and
    ``states[f]``. Neighbouring features with the same number in ``tables`` share a table. ``indices`` int64
    [L] and ``offsets`` int64 [F * B + 1] are FBGEMM's, feature by feature. ``gradient`` [B * F * D], of bags.
    """
    features = len(bases)
    samples, width, whole = (len(offsets) - 1) // features, features * dim, dim // LANES * LANES
    rate, eps = np.float32(knobs[RATE]), np.float32(knobs[EPS])
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
        base, begin = bases[first], states[first]
        for k in range(count):
            ahead, source = rows[k + AHEAD] * dim, sources[heads[k + AHEAD]]
            for d in range(0, dim, LANES):
                prefetch(weights, base + ahead + d)
                prefetch(gradient, source + d)
                if kind == ADAGRAD:
                    prefetch(state, begin + ahead + d)
            if kind == ROWWISE_ADAGRAD:
                prefetch(state, begin + rows[k + AHEAD])
            own, moments, head = base + rows[k] * dim, begin + rows[k] * dim, heads[k]
            squares, rest = splat(0.0), np.float32(0)
            for d in range(0, whole, LANES):
                g, link = load(gradient, sources[head] + d), after[head]
                while link >= 0:
                    g = add(g, load(gradient, sources[link] + d))
                    link = after[link]
                if kind == SGD:
                    store(weights, own + d, fma(splat(-rate), g, load(weights, own + d)))
                elif kind == ADAGRAD:
                    m = fma(g, g, load(state, moments + d))
                    store(state, moments + d, m)
                    step = div(mul(splat(rate), g), add(root(m), splat(eps)))
                    store(weights, own + d, fma(splat(-1.0), step, load(weights, own + d)))
                else:
                    store(sums, d, g)
                    squares = fma(g, g, squares)
            for d in range(whole, dim):
                one, link = gradient[sources[head] + d], after[head]
                while link >= 0:
                    one += gradient[sources[link] + d]
                    link = after[link]
                if kind == SGD:
                    weights[own + d] -= rate * one
                elif kind == ADAGRAD:
                    state[moments + d] += one * one
                    weights[own + d] -= rate * one / (np.sqrt(state[moments + d]) + eps)
                else:
                    sums[d] = one
                    rest += one * one
            if kind == ROWWISE_ADAGRAD:
                mean = state[begin + rows[k]] + (total(squares) + rest) / np.float32(dim)
                state[begin + rows[k]] = mean
                size = rate / (np.sqrt(mean) + eps)
                for d in range(0, whole, LANES):
                    store(weights, own + d, fma(splat(-size), load(sums, d), load(weights, own + d)))
                for d in range(whole, dim):
                    weights[own + d] -= size * sums[d]
        first = last
