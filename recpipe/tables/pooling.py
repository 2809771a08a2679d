"""The lookup of tables in memory on a CPU: rows of float32 or of 16 bits, summed by bag in float32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.common.instructions import prefetch
from recpipe.common.loops import compiled
from recpipe.common.vectors import LANES, add, fma, load, number, splat, spread, store

AHEAD = 48
"""So many ids before a row is added the processor is asked for it."""
SAMPLES_AHEAD = 16
"""So many samples before a sum is written it is asked for its place, which a write has to fetch as well."""
SAMPLES = 2048
"""Samples of which all features are looked up before others': what is written of them stays in a cache."""


@compiled
def pool_rows(
    weights: NDArray[np.float32],
    bases: NDArray[np.int64],
    indices: NDArray[np.int64],
    offsets: NDArray[np.int64],
    factors: NDArray[np.float32],
    out: NDArray[np.float32],
    dim: int,
    low: int,
    high: int,
) -> None:
    """Write the sums of the rows of each bag of samples [low, high), in the order of their ids, into ``out``
    [B * F * D].

    ``weights``: all tables', one after the other; that of feature f begins at ``bases[f]``. ``indices`` int64
    [L] and ``offsets`` int64 [F * B + 1] are FBGEMM's: feature by feature. ``factors``: by what each id's row
    is multiplied [L]; empty: by nothing.
    """
    plain = len(factors) == 0
    features = len(bases)
    samples, width, whole = (len(offsets) - 1) // features, features * dim, dim // LANES * LANES
    for start in range(low, high, SAMPLES):
        end = min(start + SAMPLES, high)
        for feature in range(features):
            base, bag = bases[feature], feature * samples
            fetched, rest = offsets[bag + start], offsets[bag + high]
            for sample in range(start, end):
                begin, stop = offsets[bag + sample], offsets[bag + sample + 1]
                at = sample * width + feature * dim
                for d in range(0, dim, LANES):
                    prefetch(out, at + SAMPLES_AHEAD * width + d)
                while fetched < min(stop + AHEAD, rest):
                    for d in range(0, dim, LANES):
                        prefetch(weights, base + indices[fetched] * dim + d)
                    fetched += 1
                for d in range(0, whole, LANES):
                    sums = splat(0.0)
                    if plain:
                        for lookup in range(begin, stop):
                            sums = add(sums, load(weights, base + indices[lookup] * dim + d))
                    else:
                        for lookup in range(begin, stop):
                            row = load(weights, base + indices[lookup] * dim + d)
                            sums = fma(spread(factors, lookup), row, sums)
                    store(out, at + d, sums)
                for d in range(whole, dim):
                    one = np.float32(0)
                    for lookup in range(begin, stop):
                        single = number(weights, base + indices[lookup] * dim + d)
                        one += single if plain else factors[lookup] * single
                    out[at + d] = one
