"""A cache of answers candidate by candidate: of a request of which some are known, the model scores the
others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from recpipe_serve import Asked

from recpipe_answer_cache.cache import AnswerCache, Cache, Ids
from recpipe_answer_cache.config import CacheConfig
from recpipe_answer_cache.control import Setting
from recpipe_answer_cache.errors import Floats
from recpipe_answer_cache.keys import Words
from recpipe_answer_cache.table import (
    DUE,
    EQUAL,
    EVICTED,
    EXPIRED,
    KEPT,
    MISS,
    READY,
    WAYS,
    find_rows,
    keep_rows,
)

LONG_AGO = -np.inf
"""Of answers that no time ends."""
FIRST_SIZED, SIZED = 64, 8
"""The first requests, and later one in so many, by whose answers the mean prediction is known."""


class Rows(NamedTuple):
    """A table, as ``find_rows`` takes it."""

    keys: Words
    used: Ids
    since: NDArray[np.float64]
    versions: Ids
    hits: Ids
    due: NDArray[np.float64]
    looked: Ids
    counts: Ids


@dataclass(slots=True)
class Part:
    """What is remembered of a request while the model scores some of its candidates."""

    places: Ids
    """Of these among the request's samples, int64 [M], ascending."""
    digests: Words
    """Of these [M, 4]."""
    coarser: bool
    states: Ids
    """What they were [M]."""
    answer: Floats
    """What would have been answered, float32 [N, T]: of those that miss it says nothing."""
    audit: bool
    version: int


class CandidateCache(Cache):
    """Keeps the scores of candidates one by one, each by what it shares with the request's others and what is
    its own, so that a request with other candidates finds those that it has in common with one before.

    ``capacity`` counts candidates.
    """

    def __init__(
        self,
        config: CacheConfig,
        manifest: Mapping[str, Any],
        fixed: Setting | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        rows = -(-config.capacity // WAYS) * WAYS
        self._outputs = len(manifest["outputs"])
        # Memory that nobody has touched takes none.
        self._rows = Rows(
            np.zeros(2 * rows, np.uint64),
            np.zeros(rows, np.int64),
            np.zeros(rows),
            np.zeros(rows, np.int64),
            np.zeros(rows, np.int64),
            np.zeros(rows),
            np.zeros(rows, np.int64),
            np.zeros(4, np.int64),
        )
        self._kept = np.zeros(rows * self._outputs, np.float32)
        super().__init__(config, manifest, fixed, clock)

    def forget(self) -> None:
        """Forget all answers."""
        self._rows.used[:] = 0
        self._rows.counts[KEPT] = 0

    @property
    def entries_kept(self) -> tuple[int, int]:
        """How many candidates' scores are kept, and how many have given way."""
        counts = self._rows.counts
        return int(counts[KEPT]), int(counts[EVICTED])

    def find(self, asked: Asked) -> tuple[Floats | None, Part | None]:
        """The answer to a request of which all candidates are known, float32 [N, T]; or None, and the ticket
        with those that the model is to score."""
        controller, counts = self.controller, self.counts
        counts.asked += 1
        if controller.off is not None:
            return None, None
        setting, samples = controller.setting, asked.samples
        digests, coarser = self.keys.of_candidates(asked, setting.level)
        states, rows = np.empty(samples, np.int64), np.empty(samples, np.int64)
        oldest = LONG_AGO if self.config.ttl is None else self.clock() - self.config.ttl
        told = np.array([oldest, setting.beta, setting.level > 0])
        find_rows(*self._rows, digests.reshape(-1), coarser, self._latest(asked), told, states, rows)
        misses, equal, due, ready = np.bincount(states, minlength=4).tolist()  # in the states' order
        counts.expired = int(self._rows.counts[EXPIRED])
        share = controller.audit_share
        audit = bool(ready and share) and self._random.random() < share
        controller.asked(equal / samples, due / samples, ready / samples)
        counts.missed += misses
        counts.refreshed += due
        counts.equal += equal if setting.level or audit else ready
        answer = self._kept.reshape(-1, self._outputs)[rows]
        if audit:
            counts.audited += 1
            wanted = states != EQUAL
        else:
            counts.served += equal + ready
            wanted = (states == MISS) | (states == DUE)
        places = np.flatnonzero(wanted)
        if not len(places):
            self._gave(answer)
            return self._shaped(answer), None
        return None, Part(places, digests[places], coarser, states[places], answer, audit, self._version)

    def _gave(self, answer: Floats) -> None:
        """Follow the mean prediction, by some of the answers: each of them costs as much as finding it."""
        asked = self.counts.asked
        if self.config.bound and (asked < FIRST_SIZED or asked % SIZED == 0):
            self.error_of.gave(self.error_of.size(answer))

    def _latest(self, asked: Asked) -> Ids:
        """The version in which a row of each candidate changed last."""
        found = np.zeros(asked.samples, np.int64)
        for place, versions in self._changed.items():
            own = asked.bags(place, True)
            lengths = np.broadcast_to(np.asarray(own.lengths), asked.samples)
            of_sample = np.repeat(np.arange(asked.samples), lengths)
            np.maximum.at(found, of_sample, versions[own.ids])
        return found

    def lacking(self, asked: Asked, ticket: Part) -> Asked | None:
        """The candidates that the model is to score; None: all of them."""
        return None if len(ticket.places) == asked.samples else asked.part(ticket.places)

    def completed(self, ticket: Part, scores: Floats) -> Floats:
        """The answer to the whole request, from what the model gave of the part."""
        answer = ticket.answer.copy()
        answer[ticket.places] = scores.reshape(len(scores), -1)
        return self._shaped(answer)

    def _shaped(self, answer: Floats) -> Floats:
        """As the model has it, float32 [N] of one output."""
        return answer[:, 0] if self._outputs == 1 else answer

    def keep(self, ticket: Part, scores: Floats) -> None:
        """Take in what the model gave for the candidates of a ticket."""
        if ticket.version != self._version:
            return
        newer = np.ascontiguousarray(scores.reshape(len(scores), -1))
        known = ticket.states != MISS
        wrong = np.zeros(len(newer), bool)
        if self.config.bound:
            whole = ticket.answer.copy()
            whole[ticket.places] = newer
            self._gave(whole)
            if known.any():
                self._check(ticket, newer, whole, known, wrong)
        now = np.array([self.clock()])
        rest = ticket.coarser, ticket.states, wrong, newer.reshape(-1), now, self._version
        keep_rows(*self._rows, self._kept, ticket.digests.reshape(-1), *rest)

    def _check(
        self, ticket: Part, newer: Floats, whole: Floats, known: NDArray[np.bool_], wrong: NDArray[np.bool_]
    ) -> None:
        """Hold the candidates that were ``known`` against what the model gave, and mark those that were
        ``wrong``."""
        places = ticket.places[known]
        if self.config.error == "score":  # each is judged by itself
            off = self.error_of.of_samples(ticket.answer[places], newer[known]).max(axis=1)
            wrong[known] = off > self.config.bound * self.config.tolerance
        else:
            wrong[known] = self.error_of(_with(whole, places, ticket.answer), whole) > 0
        given = ticket.places[ticket.states == READY]
        error = self.error_of(_with(whole, given, ticket.answer), whole)
        self.counts.wrong += int(wrong.sum())
        self.controller.checked(error, float(wrong.sum() / known.sum()), ticket.audit)


def _with(whole: Floats, places: Ids, answer: Floats) -> Floats:
    """The scores ``whole``, at these places those of another ``answer``."""
    found = whole.copy()
    found[places] = answer[places]
    return found


def made_cache(
    config: CacheConfig,
    manifest: Mapping[str, Any],
    fixed: Setting | None = None,
    clock: Callable[[], float] = monotonic,
) -> Cache:
    """The cache that ``config`` asks for, see ``Cache``."""
    kind = CandidateCache if config.unit == "candidate" else AnswerCache
    return kind(config, manifest, fixed, clock)
