"""The gradient of each row that a batch looks up: the sum of its lookups', which it is updated by once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.common.loops import compiled

_ODD = np.uint64(0x9E3779B97F4A7C15)


def summed(
    indices: torch.Tensor,
    offsets: torch.Tensor,
    firsts: torch.Tensor,
    pooled: bool,
    weights: torch.Tensor | None,
    gradient: torch.Tensor,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct rows int64 [n] of these lookups, and the gradient float32 [n, D] of each, summed over its
    lookups in their order.

    ``indices`` int64 [L] and ``offsets`` int64 [F * B + 1] of the bags of F features, whose tables begin at
    row ``firsts`` int64 [F]. ``gradient``: of the bags, [B, F * D], if they are ``pooled``, with ``weights``
    of the ids or without; else of each id, [L, D].
    """
    if gradient.device.type == "cpu":
        return _by_loop(indices, offsets, firsts, pooled, weights, gradient, dim)
    features = len(firsts)
    samples = (len(offsets) - 1) // features
    bags = torch.arange(len(offsets) - 1, device=indices.device)
    bag_of = bags.repeat_interleave(offsets.diff(), output_size=len(indices))
    feature_of = bag_of // samples
    rows, order = (indices + firsts[feature_of]).sort(stable=True)
    # The gradient of a lookup: its bag's, in the order of samples, or its own.
    source = ((bag_of % samples) * features + feature_of)[order] if pooled else order
    distinct, counts = torch.unique_consecutive(rows, return_counts=True)
    sums = torch.nn.functional.embedding_bag(
        source,
        gradient.reshape(-1, dim),
        counts.cumsum(0) - counts,
        mode="sum",
        per_sample_weights=None if weights is None else weights[order],
    )
    return distinct, sums


def _by_loop(
    indices: torch.Tensor,
    offsets: torch.Tensor,
    firsts: torch.Tensor,
    pooled: bool,
    weights: torch.Tensor | None,
    gradient: torch.Tensor,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``summed`` in one pass, without sorting; rows come in the order in which they are first looked up."""
    lookups = len(indices)
    rows = np.empty(lookups, np.int64)
    sums = np.empty(lookups * dim, np.float32)
    places = np.full(1 << max(4, (2 * lookups - 1).bit_length()), -1, np.int32)
    shape = np.array([dim, len(firsts), pooled], np.int64)
    of_ids = np.empty(0, np.float32) if weights is None else weights.float().contiguous().numpy()
    given = (indices.contiguous().numpy(), offsets.contiguous().numpy(), firsts.numpy())
    flat = gradient.float().contiguous().view(-1).numpy()
    count = sum_by_row(*given, of_ids, flat, shape, places, rows, sums)
    return torch.from_numpy(rows[:count]), torch.from_numpy(sums[: count * dim]).view(-1, dim)


@compiled
def sum_by_row(
    indices: NDArray[np.int64],
    offsets: NDArray[np.int64],
    firsts: NDArray[np.int64],
    weights: NDArray[np.float32],
    gradient: NDArray[np.float32],
    shape: NDArray[np.int64],
    places: NDArray[np.int32],
    rows: NDArray[np.int64],
    sums: NDArray[np.float32],
) -> int:
    """Write the distinct rows of lookups and the sums of their gradients (``summed``); returns how many.

    ``shape``: D, F, and whether lookups are pooled. ``places``: room to find rows again, -1 everywhere, of a
    power of two that is twice the number of lookups at least.
    """
    dim, features, pooled = shape[0], shape[1], shape[2]
    samples, mask, count = (len(offsets) - 1) // features, np.uint64(len(places) - 1), 0
    for feature in range(features):
        for sample in range(samples):
            bag = feature * samples + sample
            for lookup in range(offsets[bag], offsets[bag + 1]):
                row = indices[lookup] + firsts[feature]
                mixed = np.uint64(row) * _ODD
                slot = (mixed ^ (mixed >> np.uint64(32))) & mask
                place = places[slot]
                while place >= 0 and rows[place] != row:
                    slot = (slot + np.uint64(1)) & mask
                    place = places[slot]
                start = (sample * features + feature if pooled else lookup) * dim
                weight = weights[lookup] if len(weights) else np.float32(1)
                if place < 0:
                    places[slot], rows[count], place = count, row, count
                    count += 1
                    for j in range(dim):
                        sums[place * dim + j] = weight * gradient[start + j]
                else:
                    for j in range(dim):
                        sums[place * dim + j] += weight * gradient[start + j]
    return count
