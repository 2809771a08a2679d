"""Hashes of samples, to tell whether two sets of samples are the same."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recpipe.data.parts import batch_size, leaves
from recpipe.data.sources.transforms import mix64

UInt64 = NDArray[np.uint64]


def sample_hashes(batch: object, ids: bool = True) -> UInt64:
    """A hash of each sample's content, uint64 [B]; equal samples have equal hashes.

    ``ids`` False: the hash leaves ids out. The order of the ids within a bag does not matter.
    """
    size = batch_size(batch)
    total = np.zeros(size, np.uint64)
    for number, leaf in enumerate(leaves(batch)):
        if isinstance(leaf, torch.Tensor):
            if leaf.dim() and len(leaf) == size and leaf.numel():
                words = _words(leaf.reshape(size, -1))
                total += mix64((words * _factors(number, words.shape[1])).sum(axis=1))
        elif ids and size:
            bags = _bags(leaf).reshape(-1, size)
            total += (bags * _factors(number, len(bags))[:, None]).sum(axis=0)
    return mix64(total)


def _words(values: torch.Tensor) -> UInt64:
    """The bytes of each row of ``values``, as words of four bytes if their number is a multiple of four."""
    raw = values.detach().cpu().contiguous().view(torch.uint8).numpy()
    words: UInt64 = (raw if raw.shape[1] % 4 else raw.view(np.uint32)).astype(np.uint64)
    return words


def _bags(leaf: JaggedTensor | KeyedJaggedTensor) -> UInt64:
    """A hash of each bag's ids and their weights, feature by feature."""
    lengths = leaf.lengths().cpu().numpy()
    own = mix64(leaf.values().cpu().numpy().astype(np.uint64) + np.uint64(1))
    weights = leaf.weights_or_none()
    if weights is not None:
        own *= _words(weights.reshape(-1, 1)).sum(axis=1) * np.uint64(2) + np.uint64(1)
    if len(own) == len(lengths) and (lengths == 1).all():
        return own
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(own)))
    ends = np.cumsum(lengths)
    bags: UInt64 = sums[ends] - sums[ends - lengths]
    return bags


@lru_cache(maxsize=256)
def _factors(number: int, width: int) -> UInt64:
    """Odd random factors, different ones for each part of a batch."""
    factors: UInt64 = mix64(np.arange(width, dtype=np.uint64) + np.uint64((number + 1) << 32)) | np.uint64(1)
    return factors
