"""Scores requests in which candidates share features: what is shared is looked up once a request.

A request is one user and N candidates. The user's bags are pooled once, and their sums are then set beside
every candidate's own, so that a lookup of the user costs what one candidate does; rows that are not pooled
are repeated for every candidate. Scores have the bits of samples that carry everything themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.answers.score import Call, Lookup, Scorer, numbers, offsets_of, with_lengths

Array = NDArray[Any]


@dataclass(frozen=True)
class Side:
    """The ids of some features, as many bags for each."""

    features: tuple[int, ...]
    """Their places among the model's sparse features, ascending."""
    ids: torch.Tensor
    """int64, by feature and then by bag."""
    given_lengths: torch.Tensor | None
    """How many ids each bag has, int64 [features * bags]; None: each has one."""
    bags: int
    of_sample: torch.Tensor | None = None
    """The bag of each sample, int64 [B]; None: each sample has its own."""
    weights: torch.Tensor | None = None
    """float32, of the ids; None: they have none."""

    @cached_property
    def lengths(self) -> torch.Tensor:
        """How many ids each bag has, int64 [features * bags]."""
        given = self.given_lengths
        return torch.ones(len(self.ids), dtype=torch.int64) if given is None else given

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Where each bag begins, and where the last one ends: int64 [features * bags + 1]."""
        return numbers(len(self.ids) + 1) if self.given_lengths is None else offsets_of(self.given_lengths)


@dataclass(frozen=True)
class _Part:
    """One lookup over a side's features; ``columns``: its places among the whole lookup's, ``dims`` their
    widths."""

    lookup: Lookup
    columns: tuple[int, ...]
    dims: list[int]


class _Calls(NamedTuple):
    """What ``sides`` look up. ``found``: for each call the model's lookup that it is part of, and the side
    whose features it looks up; None: each call is a whole lookup of the model."""

    sides: Sequence[Side]
    calls: list[Call]
    found: list[tuple[int, _Part, Side]] | None


@runtime_checkable
class ReadsAhead(Protocol):
    """A scorer that is told what the requests look up that wait, so that it can read the rows meanwhile."""

    def ahead(self, calls: list[Call]) -> None:
        """Begin to read what these lookups need, and return. They may come later, together with others, or
        never."""


@runtime_checkable
class SaysWhatIsAtHand(ReadsAhead, Protocol):
    """One that also takes calls with ``where`` and says which wait for nothing (contract 2.8)."""

    def at_hand(self, calls: list[Call]) -> bool:
        """Whether these lookups, which come next, find all of their rows in memory."""


@runtime_checkable
class ComputesMeanwhile(Protocol):
    """A scorer that computes what of a batch needs no rows while it waits for these."""

    def meanwhile(self, dense: torch.Tensor) -> None:
        """The dense features float32 [B, D] of the batch that is looked up next, and then scored."""


class RequestScorer:
    """Scores requests by ``scorer``. ``ahead``: begins to read what waiting requests look up, and returns;
    None: all is there. ``correct``: corrects the scores (``Corrected``), which calling does not; None:
    nothing does.

    Where each bag has one id, its row is looked up for every candidate: that costs what copying it does, and
    leaves one lookup, and nothing to put together.
    """

    def __init__(self, scorer: Scorer, correct: Callable[..., Array] | None = None) -> None:
        self.scorer, self.correct = scorer, correct
        self._reads = scorer if isinstance(scorer, ReadsAhead) else None
        self.ahead = None if self._reads is None else self._ahead
        self._computes = scorer if isinstance(scorer, ComputesMeanwhile) else None
        self._says = scorer if isinstance(scorer, SaysWhatIsAtHand) else None
        self._takes_where = self._reads is None or self._says is not None
        self._parts: dict[tuple[int, ...], list[tuple[int, _Part]]] = {}
        self._runs: dict[tuple[tuple[int, ...], ...], list[tuple[int, int, int]]] = {}
        self._singles: dict[tuple[tuple[int, ...], ...], list[_Singles]] = {}
        self._next: _Calls | None = None

    @property
    def lacking(self) -> str:
        """Without the rows of which shards the latest batch was scored, ``1,3``; mostly none."""
        return ",".join(map(str, getattr(self.scorer, "lacking", ())))

    def __call__(
        self, dense: torch.Tensor, sides: Sequence[Side], between: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Scores float32 [B] or [B, T] of ``dense`` float32 [B, D] and sides that have every feature once.
        Inputs are not checked. ``between`` is called once the lookups are done, before what takes longer."""
        asked, self._next = self._next, None
        if asked is None or asked.sides is not sides:
            asked = self._calls(sides)
        with torch.inference_mode():
            if self._computes is not None:
                self._computes.meanwhile(dense)
            pooled = self.scorer.pooled(asked.calls)
            if asked.found is None:
                inputs = with_lengths(asked.calls, pooled)
            else:
                inputs = self._put_together(asked.calls, asked.found, pooled, len(dense))
            if between is not None:
                between()
            return self.scorer.scores(dense, inputs)

    def _put_together(
        self,
        calls: Sequence[Call],
        found: Sequence[tuple[int, _Part, Side]],
        pooled: Sequence[torch.Tensor],
        samples: int,
    ) -> list[torch.Tensor]:
        """What the model's lookups find, from what their parts have."""
        inputs: list[list[torch.Tensor]] = [[] for _ in self.scorer.lookups]
        pieces: list[list[tuple[_Part, torch.Tensor]]] = [[] for _ in self.scorer.lookups]
        for (number, part, side), call, rows in zip(found, calls, pooled, strict=True):
            if part.lookup.sequence:
                lengths = part.lookup.lengths(call.offsets, call.samples)
                inputs[number] += _repeated(rows, lengths, side.of_sample)
            else:
                if side.of_sample is not None:  # from the sums of each bag to those of each sample
                    rows = rows.expand(samples, -1) if side.bags == 1 else rows[side.of_sample]
                pieces[number].append((part, rows))
        for own, beside in zip(inputs, pieces, strict=True):
            if len(beside) == 1:
                own.append(beside[0][1])
            elif beside:
                # Columns that follow each other in a part are taken at once.
                key = tuple(part.columns for part, _ in beside)
                if key not in self._runs:
                    self._runs[key] = _columns([part for part, _ in beside])
                columns = [beside[n][1].narrow(1, start, width) for n, start, width in self._runs[key]]
                own.append(torch.cat(columns, dim=1))
        return [one for own in inputs for one in own]

    def _ahead(self, sides: Sequence[Side]) -> None:
        assert self._reads is not None
        self._next = self._calls(sides)
        self._reads.ahead(self._next.calls)

    def at_hand(self, sides: Sequence[Side]) -> bool:
        """Whether all that these sides look up is in memory."""
        if self._says is None:
            return self._reads is None
        if self._next is None or self._next.sides is not sides:
            self._next = self._calls(sides)
        return self._says.at_hand(self._next.calls)

    def _calls(self, sides: Sequence[Side]) -> _Calls:
        if self._takes_where and len(sides) > 1 and all(side.given_lengths is None for side in sides):
            key = tuple(side.features for side in sides)
            if key not in self._singles:
                self._singles[key] = [_Singles(lookup, key) for lookup in self.scorer.lookups]
            return _Calls(sides, [own.call(sides) for own in self._singles[key]], None)
        calls: list[Call] = []
        found = []
        for side in sides:
            if side.features not in self._parts:
                self._parts[side.features] = self._parts_of(side.features)
            for number, part in self._parts[side.features]:
                calls.append(Call(part.lookup, side.ids, side.offsets, side.bags, None, side.weights))
                found.append((number, part, side))
        return _Calls(sides, calls, found)

    def _parts_of(self, features: tuple[int, ...]) -> list[tuple[int, _Part]]:
        """The model's lookups that have some of these features: their numbers, and the parts over them."""
        manifest = self.scorer.manifest
        names = [manifest["sparse"][place]["name"] for place in features]
        parts = []
        for number, found in enumerate(manifest["lookups"]):
            columns = tuple(i for i, (feature, _) in enumerate(found["parts"]) if feature in names)
            if columns:
                own = [found["parts"][i] for i in columns]
                dims = [manifest["tables"][table]["dimension"] for _, table in own]
                lookup = self.scorer.lookup({**found, "parts": own}, names)
                parts.append((number, _Part(lookup, columns, dims)))
        return parts


class _Singles:
    """How one of the model's lookups takes sides with these ``features`` that have one id in each bag."""

    def __init__(self, lookup: Lookup, features: Sequence[tuple[int, ...]]) -> None:
        self.lookup = lookup
        of_feature = {f: (s, n) for s, own in enumerate(features) for n, f in enumerate(own)}
        self._runs = _runs((*of_feature[f], 1) for f in lookup.features)
        """Features of one side that follow each other: the side, the first of them, and how many they are."""
        self._of_one_request = lru_cache(64)(self._where)

    def call(self, sides: Sequence[Side]) -> Call:
        """The lookup of all that these sides have."""
        pieces = [sides[s].ids.numpy()[i * sides[s].bags : (i + n) * sides[s].bags] for s, i, n in self._runs]
        ids = torch.from_numpy(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))
        bags = tuple(side.bags for side in sides)
        samples = max(side.bags if side.of_sample is None else len(side.of_sample) for side in sides)
        if all(side.of_sample is None or side.bags == 1 for side in sides):
            starts, where = self._of_one_request(bags, samples)
        else:
            given = [None if side.of_sample is None else side.of_sample.numpy() for side in sides]
            starts, where = self._where(bags, samples, given)
        return Call(self.lookup, ids, starts, samples, where)

    def _where(
        self, bags: Sequence[int], samples: int, given: Sequence[NDArray[np.int64] | None] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each feature's ids begin, and the place of each sample's, by the bags of each side and the
        bag of each sample where it has not its own; None: one bag is for all samples."""
        counts = [bags[s] for s, _, n in self._runs for _ in range(n)]
        starts = np.concatenate([[0], np.cumsum(counts)])
        where = np.empty((len(counts), samples), np.int64)
        first = 0
        for s, _, n in self._runs:
            own = None if given is None else given[s]
            if own is None:
                own = np.arange(samples) if bags[s] == samples else np.zeros(samples, np.int64)
            last = first + n
            np.add(starts[first:last, None], own, out=where[first:last])
            first = last
        return torch.from_numpy(starts), torch.from_numpy(where.reshape(-1))


def _columns(parts: Sequence[_Part]) -> list[tuple[int, int, int]]:
    """The columns of a whole lookup in their order: the number of the part, where they begin in it, and how
    wide they are."""
    each = []
    for number, part in enumerate(parts):
        starts = [sum(part.dims[:i]) for i in range(len(part.dims))]
        each += [
            (c, number, start, dim) for c, start, dim in zip(part.columns, starts, part.dims, strict=True)
        ]
    return _runs(piece for _, *piece in sorted(each))


def _runs(pieces: Iterable[Sequence[int]]) -> list[tuple[int, int, int]]:
    """``pieces``, each of which has the number of what it is taken from, its first place there and its width:
    those that follow each other as one."""
    runs: list[tuple[int, int, int]] = []
    for number, start, width in pieces:
        if runs and runs[-1][0] == number and runs[-1][1] + runs[-1][2] == start:
            runs[-1] = (number, runs[-1][1], runs[-1][2] + width)
        else:
            runs.append((number, start, width))
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
