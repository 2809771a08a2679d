"""A cache of answers candidate by candidate: of a request of which some are known, the model scores the
others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from recpipe_serve import Asked

from recpipe.common.memory import untouched
from recpipe_answer_cache.cache import AnswerCache, Cache, Ids
from recpipe_answer_cache.config import CacheConfig
from recpipe_answer_cache.control import Setting
from recpipe_answer_cache.errors import Floats
from recpipe_answer_cache.table import (
    EVICTED,
    EXPIRED,
    KEPT,
    MISS,
    READY,
    USED,
    WAYS,
    WORDS,
    find_rows,
    keep_rows,
)

LONG_AGO = -np.inf
"""Of answers that no time ends."""
FIRST_SIZED, SIZED = 64, 8
"""The first requests, and later one in so many, by whose answers the mean prediction is known."""


@dataclass(slots=True)
class Part:
    """What is remembered of a request while the model scores some of its candidates."""

    places: Ids
    """Of these among the request's samples, int64 [M], ascending."""
    digests: Ids
    """Of these [M, 4]."""
    coarser: bool
    states: Ids
    """What they were [M]."""
    answer: Floats
    """What would have been answered, float32 [N, T]: of those that miss it says nothing."""
    audit: bool
    version: int
    whole: Floats | None = None
    """What was answered, once that is known."""


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
        self._words = untouched((rows * WORDS,), torch.int64).numpy()
        self._counts = np.zeros(4, np.int64)
        kept = np.zeros(rows * self._outputs, np.float32)
        self._table = self._words, self._words.view(np.float64), kept, self._counts
        """As ``find_rows`` takes it."""
        self._never, self._setting = np.zeros(FIRST_SIZED, np.int64), np.empty(3)
        super().__init__(config, manifest, fixed, clock)

    def forget(self) -> None:
        """Forget all answers."""
        if self._counts[KEPT]:
            self._words[USED::WORDS] = 0
        self._counts[KEPT] = 0

    @property
    def entries_kept(self) -> tuple[int, int]:
        """How many candidates' scores are kept, and how many have given way."""
        return int(self._counts[KEPT]), int(self._counts[EVICTED])

    def find(self, asked: Asked) -> tuple[Floats | None, Part | None]:
        """The answer to a request of which all candidates are known, float32 [N, T]; or None, and the ticket
        with those that the model is to score."""
        controller, counts = self.controller, self.counts
        counts.asked += 1
        if controller.off is not None or self._held:
            return None, None
        setting, samples = controller.setting, asked.samples
        digests, coarser = self.keys.of_candidates(asked, setting.level)
        share = controller.audit_share
        audit = bool(share) and self._random.random() < share
        self._setting[0] = LONG_AGO if self.config.ttl is None else self.clock() - self.config.ttl
        self._setting[1], self._setting[2] = setting.beta, setting.level > 0
        states, places, told = np.empty(samples, np.int64), np.empty(samples, np.int64), np.zeros(5, np.int64)
        answer = np.empty((samples, self._outputs), np.float32)
        own, latest, flat = digests.reshape(-1), self._latest(asked), answer.reshape(-1)
        find_rows(*self._table, own, coarser, latest, self._setting, audit, states, places, flat, told)
        misses, equal, due, ready, wanted = told.tolist()
        audit = audit and ready > 0
        counts.expired = int(self._counts[EXPIRED])
        controller.asked(equal / samples, due / samples, ready / samples)
        counts.missed += misses
        counts.refreshed += due
        counts.equal += equal if setting.level or audit else ready
        counts.audited += audit
        counts.served += equal if audit else equal + ready
        if not wanted:
            self._gave(answer)
            return self._shaped(answer), None
        places = places[:wanted]
        return None, Part(places, digests[places], coarser, states[places], answer, audit, self._version)

    def _gave(self, answer: Floats) -> None:
        """Follow the mean prediction, by some of the answers: each of them costs as much as finding it."""
        asked = self.counts.asked
        if self.config.bound and (asked < FIRST_SIZED or asked % SIZED == 0):
            self.error_of.gave(self.error_of.size(answer))

    def _latest(self, asked: Asked) -> Ids:
        """The version in which a row of each candidate changed last."""
        if not self._changed:
            if len(self._never) < asked.samples:
                self._never = np.zeros(asked.samples, np.int64)
            return self._never[: asked.samples]
        found = np.zeros(asked.samples, np.int64)
        for place, versions in self._changed.items():
            own = asked.bags(place, True, keyed=True)
            lengths = np.broadcast_to(np.asarray(own.lengths), asked.samples)
            of_sample = np.repeat(np.arange(asked.samples), lengths)
            np.maximum.at(found, of_sample, versions[self._slots(place, own.ids)])
        return found

    def lacking(self, asked: Asked, ticket: Part) -> Asked | None:
        """The candidates that the model is to score; None: all of them."""
        return None if len(ticket.places) == asked.samples else asked.part(ticket.places)

    def completed(self, ticket: Part, scores: Floats) -> Floats:
        """The answer to the whole request, from what the model gave of the part."""
        return self._shaped(self._whole(ticket, scores.reshape(len(scores), -1)))

    def _whole(self, ticket: Part, newer: Floats) -> Floats:
        """The scores of all candidates of a request, float32 [N, T]."""
        if ticket.whole is None:
            ticket.whole = ticket.answer.copy()
            ticket.whole[ticket.places] = newer
        return ticket.whole

    def _shaped(self, answer: Floats) -> Floats:
        """As the model has it, float32 [N] of one output."""
        return answer[:, 0] if self._outputs == 1 else answer

    def keep(self, ticket: Part, scores: Floats) -> None:
        """Take in what the model gave for the candidates of a ticket."""
        if ticket.version != self._version:
            return
        newer = np.ascontiguousarray(scores.reshape(len(scores), -1))
        wrong = np.zeros(len(newer), bool)
        if self.config.bound:
            self._gave(self._whole(ticket, newer))
            known = ticket.states != MISS
            if known.any():
                self._check(ticket, newer, known, wrong)
        now = np.array([self.clock()])
        own, flat = ticket.digests.reshape(-1), newer.reshape(-1)
        keep_rows(*self._table, own, ticket.coarser, ticket.states, wrong, flat, now, self._version)

    def _check(
        self,
        ticket: Part,
        newer: Floats,
        known: NDArray[np.bool_],
        wrong: NDArray[np.bool_],
    ) -> None:
        """Hold the candidates that were ``known`` against what the model gave; mark those that were
        ``wrong`` [M]."""
        places, given = ticket.places, ticket.states == READY
        whole, error_of = self._whole(ticket, newer), self.error_of
        if self.config.error == "score":  # each is judged by itself
            off = error_of.of_samples(ticket.answer[places], newer)
            wrong[:] = known & (off.max(axis=1) > self.config.bound * self.config.tolerance)
            error = float(off[given].sum(axis=0).max() / len(whole))
        else:
            others = error_of(_with(whole, places[known], ticket.answer), whole) > 0
            wrong[:] = known & others
            error = error_of(_with(whole, places[given], ticket.answer), whole)
        count = int(wrong.sum())
        self.counts.wrong += count
        self.controller.checked(error, count / int(known.sum()), ticket.audit)


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
