"""Sums of bags that came before, so that their rows need not be looked up."""

from __future__ import annotations

from typing import NamedTuple

import torch

LEAST, MOST = 4, 32
"""Ids of a bag that is kept."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


class Bags(NamedTuple):
    """Bags of a batch that may be kept: ``keys`` int32 [n, 1 + MOST] (table and length as one number, then
    ids and -1), ``entries`` int64 [n], and ``at``, their numbers among the batch's bags, int64 [n]."""

    keys: torch.Tensor
    entries: torch.Tensor
    at: torch.Tensor


class PooledBags:
    """As many sums as fit into ``nbytes``, float32 of up to ``width`` weights.

    A hash of a bag's ids says where its sum is, and all of its ids must be the same, in the same order:
    another order may have other last bits. Bags with the same hash take each other's place.
    """

    def __init__(self, nbytes: int, width: int) -> None:
        each = 4 * (1 + MOST) + 4 * width
        self.size = nbytes // each
        self.nbytes = self.size * each
        self._keys = torch.full((self.size, 1 + MOST), -1, dtype=torch.int32)
        self._sums = torch.empty(self.size, width)
        self._factors = torch.arange(1, 2 + MOST) * _ODD | 1
        self._version = 0
        self.asked = self.found = 0
        """Bags of batches that may be kept, and those of them whose sum was here."""

    def bags(self, tables: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor) -> Bags:
        """The bags with ``offsets`` int64 [n + 1] into ``ids``; ``tables`` int64 [n] numbers their tables, -1
        for one whose sums are not kept."""
        lengths = offsets.diff()
        at = ((lengths >= LEAST) & (lengths <= MOST) & (tables >= 0)).nonzero().squeeze(1)
        own = lengths[at].unsqueeze(1)
        step = torch.arange(MOST)
        places = torch.where(step < own, offsets[at].unsqueeze(1) + step, 0)
        keys = torch.empty(len(at), 1 + MOST, dtype=torch.int32)
        keys[:, 0] = tables[at] * (1 + MOST) + own.squeeze(1)
        keys[:, 1:] = torch.where(step < own, ids[places], -1)
        hashed = (keys * self._factors).sum(1)
        return Bags(keys, self._entry(hashed), at)

    def _entry(self, hashed: torch.Tensor) -> torch.Tensor:
        return ((hashed >> 29) * _ODD >> 20).remainder(self.size)

    def sums(self, bags: Bags, version: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of ``bags`` are here, bool [n], and their sums, float32 [hits, width]. ``version``: of the
        rows; sums of another one are forgotten."""
        self._at(version)
        hit = (self._keys[bags.entries] == bags.keys).all(1)
        return hit, self._sums[bags.entries[hit]]

    def keep(self, bags: Bags, sums: torch.Tensor, version: int) -> None:
        """Keep the ``sums`` float32 [n, up to width] of ``bags``."""
        self._at(version)
        # Of bags with one entry the last one is kept, key and sum.
        entries, which = torch.unique(bags.entries, return_inverse=True)
        last = torch.zeros_like(entries).scatter_reduce(0, which, torch.arange(len(which)), "amax")
        self._keys[entries] = bags.keys[last]
        self._sums[entries, : sums.shape[1]] = sums[last]

    def _at(self, version: int) -> None:
        if version != self._version:
            self._keys.fill_(-1)
            self._version = version
