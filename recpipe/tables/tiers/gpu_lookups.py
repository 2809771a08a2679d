"""A batch's lookups where a GPU trains: the GPU finds the distinct rows, and the host plans for these alone.

The ids go to the GPU, which sorts the rows that they stand for. Distinct rows, and how often each is looked
up, come back: of 8,192 samples of Criteo's skew they are a sixth of the ids, of 65,536 an eleventh. Where
each of them is goes to the GPU again, which finds each lookup's slot by it. Both have streams of their own.
The first, which waits for the GPU, is done one batch further ahead than planning, in another thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.common.device import Aside
from recpipe.common.loops import compiled
from recpipe.data.parts import in_order
from recpipe.plugin.bags import RowIds, Slots
from recpipe.tables.rows import table_bags
from recpipe.tables.tiers.lookups import DeviceBags, Lookups
from recpipe.tables.tiers.transfer import Positions, Sent

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from recpipe.common.loops import Spread
    from recpipe.plugin.tables import TableSet
    from recpipe.tables.tiers.transfer import Transfer


class Finder:
    """Finds the distinct rows that batches look up in ``tables``."""

    def __init__(self, tables: TableSet, transfer: Transfer, spread: Spread) -> None:
        self.tables, self.transfer, self.spread = tables, transfer, spread
        self.aside = Aside(transfer.device, first=True)
        self.after = Aside(transfer.device, first=True)
        """The stream on which lookups find their slots: it does not wait for the rows of a later batch."""
        layout, kind = tables.layout, torch.int64
        if layout.total_rows <= np.iinfo(np.int32).max:
            kind = torch.int32  # sorted in half of the time
        self._kind = kind
        of_features = np.stack((layout.bases[tables.table_of], np.diff(layout.bases)[tables.table_of]))
        # Views are made here, once: each lets go of Python's lock.
        bases, sizes = torch.from_numpy(of_features).to(transfer.device).unbind()
        self._of_features, self._of_bags = (bases, sizes), (bases.unsqueeze(1), sizes.unsqueeze(1))
        self._each = torch.empty(0, dtype=torch.int64)
        """The offsets of the latest batch with one id in each bag. Threads that find rows at the same time
        may put others here, so that each reads it once."""

    def bags(self, sparse: KeyedJaggedTensor) -> GpuBags:
        """The batch's lookups; ``DataError`` if an id is not in its table."""
        with self.aside.stream(after=sparse.values().is_cuda):
            rows, wrong, offsets, weights, one_each = self._looked_up(sparse)
            distinct, which, times = torch.unique(rows, return_inverse=True, return_counts=True)
            found = self._here(sparse, wrong, distinct, times)
        half = len(found) // 2
        rows_here = found[:half].astype(np.int64, copy=False)
        times_here = found[half:].astype(np.int32, copy=False)
        # All of it is there by now; its memory is kept for who uses it.
        which, offsets = self.after.lend(which), self.after.lend(offsets)
        weights = None if weights is None else self.after.lend(weights)
        return GpuBags(rows_here, times_here, which, offsets, weights, one_each, sparse.stride(), self)

    def distinct(self, sparse: KeyedJaggedTensor) -> RowIds:
        """The distinct rows that the batch looks up, sorted, int64 [U]; ``DataError`` if an id is not in its
        table."""
        with self.aside.stream(after=sparse.values().is_cuda):
            rows, wrong, *_ = self._looked_up(sparse)
            return self._here(sparse, wrong, torch.unique(rows)).astype(np.int64)

    def _looked_up(
        self, sparse: KeyedJaggedTensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool]:
        """The rows of all lookups, [L], whether an id is not in its table, the bags' offsets, int64 [F * B +
        1], the lookups' weights, if ids have any, and whether each bag is known to have one id."""
        sparse = in_order(sparse, self.tables.features)
        weights = sparse.weights() if self.tables.weighted else None
        lengths = sparse.lengths()
        one_each = not lengths.is_cuda and len(lengths) == len(sparse.values()) > 0
        one_each = one_each and bool(_all_one(lengths.numpy()))
        if one_each:  # no lengths have to go there
            (bases, sizes), bags = self._of_bags, sparse.values().view(-1, sparse.stride())
            ids, *given = self._there(bags, weights)
            offsets = self._each
            if len(offsets) != ids.numel() + 1:
                self._each = offsets = torch.arange(ids.numel() + 1, device=ids.device)
        else:
            bases, sizes = self._of_features
            lengths, ids, *given = self._there(lengths, sparse.values(), weights)
            offsets = _ends(lengths)
            counts = offsets[:: sparse.stride()].diff()
            features = torch.repeat_interleave(counts, output_size=len(ids))
            bases, sizes = bases.index_select(0, features), sizes.index_select(0, features)
        wrong = ids.div(sizes, rounding_mode="floor").any()  # 0 of an id that is in its table
        rows = _as(self._kind, ids + bases).view(-1)
        return rows, wrong, offsets, given[0].float() if given else None, one_each

    def _here(self, sparse: KeyedJaggedTensor, wrong: torch.Tensor, *parts: torch.Tensor) -> NDArray[Any]:
        """``parts`` after one another, in host memory. If an id is ``wrong``, the CPU looks for it and names
        it."""
        sent = [_as(self._kind, part) for part in (wrong.view(1), *parts)]
        host = self.transfer.to_host_now(torch.cat(sent))
        if host[0]:
            table_bags(self.tables, sparse, self.spread)
            raise RuntimeError("a GPU says that an id is not in its table, the CPU says that all are")
        return host[1:]

    def _there(self, *parts: torch.Tensor | None) -> list[torch.Tensor]:
        """``parts`` that are not None on the GPU, for this object's stream."""
        given = [part for part in parts if part is not None]
        if given[0].is_cuda:
            return [self.aside.lend(part) for part in given]
        return self.transfer.arrays_now([part.numpy() for part in given], self.spread)


@dataclass
class GpuBags:
    """A batch's lookups, of which the host knows the distinct rows; the rest is on the GPU."""

    rows: RowIds
    """Distinct rows, sorted, int64 [U]."""
    times: NDArray[np.int32]
    """How often each is looked up, int32 [U]."""
    which: torch.Tensor
    """Position of each lookup's row among them, int64 [L]."""
    offsets: torch.Tensor
    """Feature-major, int64 [F * B + 1]."""
    weights: torch.Tensor | None
    """Weights of the lookups, float32 [L]; None: each counts once."""
    one_each: bool
    """Whether each bag is known to have one id."""
    batch_size: int
    finder: Finder

    def __len__(self) -> int:
        return len(self.which)


@dataclass
class GpuLookups(Lookups):
    """The lookups, each found by a GPU. What a TBE looks up is made by ``prepare``, or when it is first asked
    for.

    ``slab_first``: the slab's first place in its table, 0 unless the slots are in the same one.
    """

    given: GpuBags
    where: Slots
    """Where each distinct row is: a slot or, below ``IN_STORE``, ``-2`` minus a position in the slab."""
    pooled: bool
    batch_size: int
    order: NDArray[np.int64] | None = None
    """The samples, int64 [n]; None: in the batch's own order."""
    cold_first: int = 0
    _prepared: tuple[tuple[int, bool], tuple[DeviceBags, ...], Sent] | None = field(default=None, init=False)
    """The arguments of ``prepare``, what it made for the tables, and what that is ready by."""
    _whole: torch.Tensor | None = field(default=None, init=False)
    """What ``_found`` returns, until it is no longer needed."""

    @cached_property
    def needs_cold(self) -> NDArray[np.bool_]:  # type: ignore[override]
        """For each sample, in the batch's own order, whether it looks up a row in the slab, bool [B]."""
        size, finder = self.given.batch_size, self.given.finder
        if not (self.where < 0).any():
            return np.zeros(size, bool)
        with finder.after.stream():
            cold = _ends((self._found() < 0).long())[self.given.offsets].diff() > 0
            return finder.transfer.to_host_now(cold.view(-1, size).any(0))

    def permuted(self, order: NDArray[np.int64], cold_first: int) -> GpuLookups:
        """The lookups of all samples in ``order`` (int64 [B]), of which those before ``cold_first`` need no
        row of the slab."""
        new = replace(self, batch_size=len(order), order=order, cold_first=cold_first)
        new._whole = self._whole
        return new

    def prepare(self, slab_first: int, at_once: bool, also: Sequence[Positions] = ()) -> Sent:
        """Begin to make what ``tiers`` returns with these arguments; ``also``: arrays to send with it, which
        are on the device once that is made."""
        given, transfer, aside = self.given, self.given.finder.transfer, self.given.finder.after
        with aside.stream():
            if at_once:
                places, *others = transfer.positions_now(_in_one(self.where, slab_first), *also)
                found = places.index_select(0, given.which)
                bags: tuple[DeviceBags, ...] = ((found, self._own(given.offsets), given.weights),)
            else:
                others = transfer.positions_now(*also) if also else []
                bags = self._parted(slab_first)
            sent = Sent(others, aside.mark())
        self._prepared, self._whole = ((slab_first, at_once), bags, sent), None
        self.made = [part for each in bags for part in each if part is not None]
        return sent

    def tiers(self, slab_first: int = 0, at_once: bool = False) -> tuple[DeviceBags, ...]:
        """The lookups in the resident slots and in the slab, as ``Lookups.tiers``; ``at_once``: in the one
        table that has both. The current stream waits until they are there. Whoever calls this keeps them
        until the stream has passed their last use."""
        if self._prepared is None or self._prepared[0] != (slab_first, at_once):
            self.prepare(slab_first, at_once)
        assert self._prepared is not None, "just made"
        _, bags, sent = self._prepared
        sent.use(kept=True)
        return bags

    def _found(self) -> torch.Tensor:
        """Where each lookup's row is, int64 [L], in the batch's own order."""
        if self._whole is None:
            (where,) = self.given.finder.transfer.positions_now(self.where)
            self._whole = where.index_select(0, self.given.which)
        return self._whole

    def _parted(self, slab_first: int) -> tuple[DeviceBags, DeviceBags]:
        found, weights, bags = self._found(), self.given.weights, self.given.offsets
        if self.order is not None:
            (order,) = self.given.finder.transfer.positions_now(self.order)
            places, bags = _places(bags, order, len(found))
            found = found.index_select(0, places)
            weights = None if weights is None else weights.index_select(0, places)
        own = self._own(bags)
        of_slots, of_slab = weights, None if weights is None else weights[:0]
        if (self.where < 0).any():
            warm = found >= 0
            slab_offsets = _ends((~warm).long())[own]
            offsets = own - slab_offsets
            hot, cold = warm.nonzero().squeeze(1), (~warm).nonzero().squeeze(1)
            slots, slab = found.index_select(0, hot), slab_first - 2 - found.index_select(0, cold)
            if weights is not None:
                of_slots, of_slab = weights.index_select(0, hot), weights.index_select(0, cold)
        else:
            slots, offsets, slab, slab_offsets = found, own, found[:0], torch.zeros_like(own)
        if self.pooled and self.cold_first:  # samples from there on have all of the slab's lookups
            starts = slab_offsets[:-1].view(-1, self.batch_size)[:, self.cold_first :].reshape(-1)
            slab_offsets = torch.cat((starts, slab_offsets[-1:]))
        return (slots, offsets, of_slots), (slab, slab_offsets, of_slab)

    def _own(self, bags: torch.Tensor) -> torch.Tensor:
        """The offsets of a TBE's bags, if those of samples are ``bags``: each id is one without pooling."""
        return bags if self.pooled else torch.arange(len(self.given) + 1, device=bags.device)


@compiled
def _in_one(where: Slots, slab_first: int) -> NDArray[np.int64]:
    """Places in the one table that has slots and slab, int64 [U], of rows that are at ``where``."""
    places = np.empty(len(where), np.int64)
    for i in range(len(where)):
        places[i] = where[i] if where[i] >= 0 else slab_first - 2 - where[i]
    return places


@compiled
def _all_one(lengths: NDArray[np.int64] | NDArray[np.int32]) -> bool:
    ones = 0
    for length in lengths:
        ones += length == 1
    return ones == len(lengths)


def _as(kind: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """``values`` of this type; a call of torch that changes nothing would let go of Python's lock, too."""
    return values if values.dtype == kind else values.to(kind)


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets of bags of these ``lengths``, int64 [n + 1]."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _places(offsets: torch.Tensor, samples: torch.Tensor, lookups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """On a GPU, the positions of these samples' ids among a batch's ids, feature by feature, and the offsets
    of their bags (``plugin.bags.places_of`` on a CPU). ``samples``: all of a batch with so many
    ``lookups``."""
    bags = torch.stack((offsets[:-1], offsets.diff())).view(2, -1, len(samples))
    starts, lengths = bags.index_select(2, samples).flatten(1).unbind()
    new = _ends(lengths)
    shift = torch.repeat_interleave(starts - new[:-1], lengths, output_size=lookups)
    return shift + torch.arange(lookups, device=shift.device), new
