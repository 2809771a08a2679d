"""Scores requests in which candidates share features: what is shared is looked up once a request.

A request is one user and N candidates. The user's bags are pooled once, and their sums are then set beside
every candidate's own, so that a lookup of the user costs what one candidate does; rows that are not pooled
are repeated for every candidate. Scores have the bits of samples that carry everything themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from recpipe.inference.score import Call, Lookup, Scorer, offsets_of


@dataclass(frozen=True)
class Side:
    """The ids of some features, as many bags for each."""

    features: tuple[int, ...]
    """Their places among the model's sparse features, ascending."""
    ids: torch.Tensor
    """int64, by feature and then by bag."""
    given_lengths: torch.Tensor | None
    """Of each bag, int64 [features * bags]; None: each has one id."""
    bags: int
    of_sample: torch.Tensor | None = None
    """The bag of each sample, int64 [B]; None: each sample has its own."""

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Of each bag, int64 [features * bags]."""
        given = self.given_lengths
        return torch.ones(len(self.ids), dtype=torch.int64) if given is None else given

    @property
    def offsets(self) -> torch.Tensor:
        """Where each bag begins, and where the last one ends: int64 [features * bags + 1]."""
        return _numbers(self.ids.shape[0] + 1) if self.given_lengths is None else self._summed

    @cached_property
    def _summed(self) -> torch.Tensor:
        return offsets_of(self.lengths)


@lru_cache(64)
def _numbers(count: int) -> torch.Tensor:
    return torch.arange(count)


@dataclass(frozen=True)
class _Part:
    """One lookup over a side's features; ``columns``: its places among the whole lookup's, ``dims`` their
    widths."""

    lookup: Lookup
    columns: tuple[int, ...]
    dims: list[int]


class _Calls(NamedTuple):
    """The lookups of ``sides`` that were read ahead."""

    sides: Sequence[Side]
    calls: list[Call]
    found: list[tuple[int, _Part, Side]]


@runtime_checkable
class ReadsAhead(Protocol):
    """A scorer that is told what the requests look up that wait, so that it can read the rows meanwhile."""

    def ahead(self, calls: list[Call]) -> None:
        """Begin to read what these lookups need, and return. They may come later, together with others, or
        never."""

    def at_hand(self, calls: list[Call]) -> bool:
        """Whether these lookups, which come next, wait for nothing."""


class RequestScorer:
    """Scores requests by ``scorer``. ``ahead``: begins to read what waiting requests look up, and returns;
    None: all is there.

    Where each bag has one id, which costs the same to look up as its row costs to copy, the ids are repeated
    for every candidate and not the rows: that is one lookup, and nothing to put together.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self._reads = scorer if isinstance(scorer, ReadsAhead) else None
        self.ahead = None if self._reads is None else self._ahead
        self._parts: dict[tuple[int, ...], list[_Part | None]] = {}
        self._runs: dict[tuple[tuple[int, ...], ...], list[tuple[int, int, int]]] = {}
        self._next: _Calls | None = None

    def __call__(
        self, dense: torch.Tensor, sides: Sequence[Side], between: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Scores float32 [B] or [B, T] of ``dense`` float32 [B, D] and sides that have every feature once.
        Inputs are not checked. ``between`` is called once the lookups are done, before what takes longer."""
        if self._reads is None and all(side.given_lengths is None for side in sides):
            sides = [_repeated_ids(sides, len(dense))]
        next_one, self._next = self._next, None
        if next_one is not None and next_one.sides is sides:
            calls, found = next_one.calls, next_one.found
        else:
            calls, found = self._calls(sides)
        with torch.inference_mode():
            inputs: list[list[torch.Tensor]] = [[] for _ in self.scorer.lookups]
            pieces: list[list[tuple[_Part, torch.Tensor]]] = [[] for _ in self.scorer.lookups]
            for (number, part, side), call, rows in zip(found, calls, self.scorer.pooled(calls), strict=True):
                if part.lookup.sequence:
                    lengths = part.lookup.lengths(call[2], call[3])
                    inputs[number] += _repeated(rows, lengths, side.of_sample)
                    continue
                pieces[number].append((part, _wide(rows, side, dense.shape[0])))
            if between is not None:
                between()
            for own, beside in zip(inputs, pieces, strict=True):
                if beside:
                    own.append(self._joined(beside))
            return self.scorer.scores(dense, [one for own in inputs for one in own])

    def _joined(self, beside: Sequence[tuple[_Part, torch.Tensor]]) -> torch.Tensor:
        """Parts of one lookup as the whole lookup gives them: columns that follow each other in a part are
        taken at once."""
        if len(beside) == 1:
            return beside[0][1]
        key = tuple(part.columns for part, _ in beside)
        if key not in self._runs:
            self._runs[key] = _runs([part for part, _ in beside])
        return torch.cat([beside[n][1].narrow(1, start, width) for n, start, width in self._runs[key]], dim=1)

    def _ahead(self, sides: Sequence[Side]) -> None:
        assert self._reads is not None
        self._next = _Calls(sides, *self._calls(sides))
        self._reads.ahead(self._next.calls)

    def at_hand(self, sides: Sequence[Side]) -> bool:
        """Whether all that these sides look up is in memory."""
        if self._reads is None:
            return True
        if self._next is None or self._next.sides is not sides:
            self._next = _Calls(sides, *self._calls(sides))
        return self._reads.at_hand(self._next.calls)

    def _calls(self, sides: Sequence[Side]) -> tuple[list[Call], list[tuple[int, _Part, Side]]]:
        """The lookups of these sides, and for each the model's lookup that it is part of, and its side."""
        calls: list[Call] = []
        found = []
        for side in sides:
            for number, part in enumerate(self._of(side.features)):
                if part is not None:
                    calls.append((part.lookup, side.ids, side.offsets, side.bags))
                    found.append((number, part, side))
        return calls, found

    def _of(self, features: tuple[int, ...]) -> list[_Part | None]:
        """For each lookup of the model, its part over these features; None if it has none of them."""
        if features not in self._parts:
            manifest = self.scorer.manifest
            names = [manifest["sparse"][place]["name"] for place in features]
            self._parts[features] = [self._part(found, names) for found in manifest["lookups"]]
        return self._parts[features]

    def _part(self, found: dict[str, list[list[str]]], names: list[str]) -> _Part | None:
        columns = tuple(i for i, (feature, _) in enumerate(found["parts"]) if feature in names)
        if not columns:
            return None
        own = [found["parts"][i] for i in columns]
        dims = [self.scorer.manifest["tables"][table]["dimension"] for _, table in own]
        return _Part(self.scorer.lookup({**found, "parts": own}, names), columns, dims)


def _repeated_ids(sides: Sequence[Side], samples: int) -> Side:
    """All features of ``sides`` that have one id in each bag, with an id for each sample."""
    if len(sides) == 1 and sides[0].of_sample is None:
        return sides[0]
    order = [feature for side in sides for feature in side.features]
    ids = np.empty((len(order), samples), np.int64)
    for side in sides:
        own = side.ids.numpy().reshape(len(side.features), side.bags)
        # A slice, where features follow each other, is written to quicker than numbers of rows.
        first, last = side.features[0], side.features[-1] + 1
        rows = slice(first, last) if last - first == len(side.features) else list(side.features)
        if side.of_sample is None or side.bags == 1:
            ids[rows] = own
        else:
            ids[rows] = own[:, side.of_sample.numpy()]
    return Side(tuple(range(len(order))), torch.from_numpy(ids.reshape(-1)), None, samples)


def _wide(rows: torch.Tensor, side: Side, samples: int) -> torch.Tensor:
    """The sums of each sample, from those of each bag."""
    if side.of_sample is None:
        return rows
    return rows.expand(samples, -1) if side.bags == 1 else rows[side.of_sample]


def _runs(parts: Sequence[_Part]) -> list[tuple[int, int, int]]:
    """The columns of a whole lookup in their order, those of one part that follow each other together: the
    number of the part, where they begin in it, and how wide they are."""
    each = []
    for number, part in enumerate(parts):
        starts = [sum(part.dims[:i]) for i in range(len(part.dims))]
        each += [
            (c, number, start, dim) for c, start, dim in zip(part.columns, starts, part.dims, strict=True)
        ]
    runs: list[tuple[int, int, int]] = []
    for _, number, start, dim in sorted(each):
        if runs and runs[-1][0] == number and runs[-1][1] + runs[-1][2] == start:
            runs[-1] = (number, runs[-1][1], runs[-1][2] + dim)
        else:
            runs.append((number, start, dim))
    return runs


def _repeated(
    rows: torch.Tensor, lengths: torch.Tensor, of_sample: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of each sample's bag, and how many they are; ``lengths``: of the bags."""
    if of_sample is None:
        return rows, lengths
    counts = lengths[of_sample]
    begins = (lengths.cumsum(0) - lengths)[of_sample] - (counts.cumsum(0) - counts)
    places = begins.repeat_interleave(counts)
    return rows[places + torch.arange(len(places))], counts
