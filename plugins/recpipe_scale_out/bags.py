"""The bags of a batch: which of them each shard is asked for, and how their values are put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from recpipe_serve import LookupCall
from recpipe_serve.errors import Refused

from recpipe_scale_out.lookups import TableLookup, runs
from recpipe_scale_out.remote import Column, RemoteLookup
from recpipe_scale_out.wire import Array, Floats, Wanted, received, width_of


class Ids(NamedTuple):
    """Ids, bag by bag."""

    bags: int
    ids: Array
    """int64 [n]."""
    lengths: Array | None
    """How many each bag has, int64 [bags]; None: each has one."""
    weights: Array | None
    """float32 [n], where rows are weighted."""

    def chosen(self, which: NDArray[np.bool_]) -> Ids:
        """Those of the bags that ``which`` bool [bags] says."""
        of_ids = which if self.lengths is None else np.repeat(which, self.lengths)
        lengths = None if self.lengths is None else self.lengths[which]
        weights = None if self.weights is None else self.weights[of_ids]
        return Ids(int(which.sum()), self.ids[of_ids], lengths, weights)

    def within(self, first: int, rows: int) -> tuple[Ids, Array]:
        """Those of so many rows from the ``first`` one on, which are numbered from there; and the bags that
        have some, int64 [bags]."""
        here = (self.ids >= first) & (self.ids < first + rows)
        ids = self.ids[here] - first
        weights = None if self.weights is None else self.weights[here]
        if self.lengths is None:
            of = np.flatnonzero(here)
            return Ids(len(of), ids, None, weights), of
        counts = np.bincount(np.repeat(np.arange(self.bags), self.lengths)[here], minlength=self.bags)
        of = np.flatnonzero(counts)
        return Ids(len(of), ids, counts[of], weights), of

    def all_in(self, here: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which bags have ids alone that are ``here``, bool [bags], as bool [n] says."""
        if self.lengths is None:
            return here
        missing = np.concatenate([[0], np.cumsum(~here)])
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        found: NDArray[np.bool_] = missing[ends[1:]] == missing[ends[:-1]]
        return found


class Bags(NamedTuple):
    """The bags of one column of a call."""

    call: int
    column: Column
    every: Ids
    where: Array | None
    """The bag of each sample; None: each has its own."""


class Asked(NamedTuple):
    """What of some bags one server is asked for."""

    wanted: Wanted
    own: TableLookup
    """As it is computed there."""
    bags: Bags
    of: Array | None
    """Which of the bags these are; None: all of them."""
    is_whole: bool = True
    """Whether these are the bags' values, and not parts of sums."""


def count_of(call: LookupCall) -> int:
    """The rows of what a call finds."""
    if call.where is not None or not call.lookup.sequence:
        return call.samples
    (feature,) = call.lookup.features
    return int(call.offsets[(feature + 1) * call.samples] - call.offsets[feature * call.samples])


def bags_of(calls: Sequence[LookupCall]) -> Iterator[Bags]:
    """The bags of each column of these calls."""
    for number, (lookup, ids, offsets, samples, where, weights) in enumerate(calls):
        assert isinstance(lookup, RemoteLookup)
        given: Array | None = None
        if where is None:
            if weights is not None and lookup.weighted:
                given = lookup.arranged(weights, offsets, samples)[0].numpy()
            ids, offsets = lookup.arranged(ids, offsets, samples)
        rows, ends = ids.numpy(), offsets.numpy()
        every = np.diff(ends) if where is None else ends  # lengths
        for place, column in enumerate(lookup.columns):
            if where is not None:
                low, high = ends[place : place + 2].tolist()
                of_sample = where.numpy()[place * samples : (place + 1) * samples] - low
                alike = high - low == samples and np.array_equal(of_sample, np.arange(samples))
                own = Ids(high - low, rows[low:high], None, None)
                yield Bags(number, column, own, None if alike else of_sample)
                continue
            low, high = int(ends[place * samples]), int(ends[(place + 1) * samples])
            each = every[place * samples : (place + 1) * samples]
            one_each = lookup.sequence or (high - low == samples and bool((each == 1).all()))
            lengths = None if one_each else each
            bags = high - low if lengths is None else samples
            own_weights = None if given is None else given[low:high]
            yield Bags(number, column, Ids(bags, rows[low:high], lengths, own_weights), None)


def asked_of_shards(own: Bags, some: Ids, of: Array | None) -> Iterator[tuple[int, Asked]]:
    """What each shard is asked for ``some`` of the bags: those with the numbers ``of``; None: all. Of a part
    of the table only bags with ids there are asked for."""
    column = own.column
    if len(column.parts) == 1:
        ((shard, _, _),) = column.parts
        yield shard, Asked(Wanted(column.number, *some), column.own, own, of)
        return
    for shard, first, rows in column.parts:
        here, places = some.within(first, rows)
        wanted = Wanted(column.number, *here)
        places = places if of is None else of[places]
        yield shard, Asked(wanted, column.own.of_part(False), own, places, some.lengths is None)


class Pieces:
    """The values of bags that come in several pieces, float32 [bags, width]."""

    def __init__(self, own: Bags) -> None:
        self.own = own
        self.values = np.zeros((own.every.bags, own.column.width), np.float32)
        self._added = np.zeros(own.every.bags, bool)
        """Which of them are sums of parts."""

    def take(self, one: Asked, values: Floats) -> None:
        """Values of some of the bags, or parts of these, which are added up in the order in which they
        come."""
        if one.is_whole:
            self.values[one.of] = values
        else:
            self.values[one.of] += values
            self._added[one.of] = True

    def put(self, results: Sequence[torch.Tensor]) -> None:
        """Put what has come where it belongs."""
        own, lengths = self.own, self.own.every.lengths
        if own.column.own.pooling == "mean" and lengths is not None:
            self.values[self._added] /= lengths[self._added, None].astype(np.float32)
        into = results[own.call].numpy()[:, own.column.begin : own.column.end]
        into[:] = self.values if own.where is None else self.values[own.where]


def runs_of(asked: list[Asked], values: Array) -> Iterator[tuple[list[Asked], Floats]]:
    """The runs of a request and their matrices in an answer's ``values``; ``Refused`` if these are others."""
    at = 0
    for run in runs([one.own for one in asked], [one.wanted.bags for one in asked]):
        own = asked[run]
        bags, dims = own[0].wanted.bags, [one.bags.column.width for one in own]
        end = at + bags * width_of(dims, values)
        if end > len(values):
            break
        yield own, received(values[at:end], dims, bags)
        at = end
    if at != len(values):
        raise Refused(503, "shards", "a shard's answer has not the values that it was asked for")


def beside(one: Asked) -> tuple[str, bool, int]:
    """Alike for lookups that can be one run. Numbers of some of a column's bags differ from batch to batch:
    those keep one order, in which the server that is asked knows them again."""
    return one.own.pooling, one.own.weighted, one.wanted.bags if one.of is None else -1


def follows(before: Bags, one: Asked) -> bool:
    """Whether a column is the next one of the same call, with the same bags for its samples."""
    own = one.bags
    if one.of is not None or own.call != before.call or own.column.begin != before.column.end:
        return False
    if own.where is None or before.where is None:
        return own.where is before.where
    return np.array_equal(own.where, before.where)


def stands_in(one: Asked, row: Array) -> Floats:
    """What stands for values that did not come: the mean ``row`` of the table, as often as rows would have
    been added up."""
    wanted: Any = one.wanted
    each = np.ones(len(wanted.ids), np.float32) if wanted.weights is None else wanted.weights
    if one.own.pooling == "none" or wanted.lengths is None:
        times = each
    else:
        of_bag = np.repeat(np.arange(wanted.bags), wanted.lengths)
        times = np.bincount(of_bag, each, wanted.bags)
        if one.own.pooling == "mean":
            times = times / np.maximum(wanted.lengths, 1)
    found: Floats = (times[:, None] * row).astype(np.float32)
    return found
