"""A cache of answers by approximate keys, whose error is measured and bounded (Finamore et al., 2022)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from time import monotonic
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from recpipe_serve import Asked

from recpipe.common.loops import load_loops
from recpipe_answer_cache.config import CacheConfig
from recpipe_answer_cache.control import Controller, Setting
from recpipe_answer_cache.entries import Entry, Key, entries_of
from recpipe_answer_cache.errors import ErrorOf, Floats
from recpipe_answer_cache.keys import Keys

Why = Literal["miss", "refresh", "audit"]
Ids = NDArray[np.int64]
HELD = np.iinfo(np.int64).max
"""In the place of a version: answers are others soon."""
SLOTS = 16
"""Bits of a key by which it is told when its answers have changed last: of two with the same, both have."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class Counts:
    """Requests so far, by what became of them; where answers are kept candidate by candidate their samples,
    ``asked`` and ``audited`` excepted. ``equal``: those served with the answer to an equal request;
    ``wrong``: refreshes and audits that found another answer."""

    asked: int = 0
    served: int = 0
    equal: int = 0
    missed: int = 0
    refreshed: int = 0
    audited: int = 0
    wrong: int = 0
    expired: int = 0


class InFront(ABC):
    """What requests are put to before the model."""

    @abstractmethod
    def find(self, asked: Asked) -> tuple[Floats | None, Any]:
        """The answer to a request, float32 [N] or [N, T]; or None, and the ticket by which to ``keep`` what
        the model gives. There is no ticket where nothing is to be kept."""

    def lacking(self, asked: Asked, ticket: Any) -> Asked | None:
        """Of a request with this ticket those samples that the model is to score; None: all of them."""
        return None

    def completed(self, ticket: Any, scores: Floats) -> Floats:
        """The answer to the whole request, from what the model gave of what was lacking."""
        return scores

    @abstractmethod
    def keep(self, ticket: Any, scores: Floats) -> None:
        """Take in what the model gave for the request of a ticket, or for what was lacking."""


class Cache(InFront):
    """Answers requests of one package with the answers of others that are alike.

    ``manifest``: the package's. ``fixed``: the one setting that is used; None: the controller chooses.
    ``clock``: gives the time, in seconds.
    """

    def __init__(
        self,
        config: CacheConfig,
        manifest: Mapping[str, Any],
        fixed: Setting | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        load_loops()
        self.config, self.clock = config, clock
        betas = (config.beta, config.beta_most)
        self.controller = Controller(
            *(
                config.bound,
                config.levels if config.keys else 0,
                betas,
                config.audit,
                config.least_hits,
                config.dwell,
                fixed,
            )
        )
        self._version, self._random = 0, Random(0)
        self._held = False
        """Whether no request is answered from here, since any answer may be another one soon."""
        self.counts = Counts()
        self._manifest: Mapping[str, Any] | None = None
        self.begin(manifest)

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Forget all answers: the package with this ``manifest`` answers from now on. If it is equal, another
        version of the same package does, for which the setting is as good as it was."""
        self._forget_all()
        if manifest == self._manifest:
            self.controller.go_on()
            return
        self._manifest = manifest
        self.keys = Keys(manifest, self.config.keys, self.config.levels)
        self.error_of = ErrorOf(manifest["outputs"], self.config.error, self.config.k)
        self.controller.begin()

    def changed(self, ids: Mapping[int, Ids]) -> None:
        """Another version of the package answers from now on, by which answers differ for requests with one
        of these ``ids`` of a feature at this place alone: rows, or keys where the feature has a map."""
        self._version += 1
        self._mark(ids, self._version)

    def learning(self, ids: Mapping[int, Ids] | None) -> None:
        """Answer nothing to requests with one of these ``ids``, see ``changed``, until ``learnt``, nor know
        any of their candidates; None: to none."""
        self._held = ids is None
        self._mark(ids or {}, HELD)

    def learnt(self, ids: Mapping[int, Ids] | None) -> None:
        """Answers differ for requests with one of these ``ids``, those that were held back among them; None:
        for any."""
        self._held = False
        if ids is None:
            self._forget_all()
        else:
            self.changed(ids)

    def _forget_all(self) -> None:
        self._version += 1
        self._changed: dict[int, Ids] = {}
        """Of features whose rows have changed since, by their places, the version in which each row did; of
        keys see ``SLOTS``."""
        self.forget()

    def _mark(self, ids: Mapping[int, Ids], version: int) -> None:
        """Note that what there is of these ``ids`` is of before this ``version``."""
        assert self._manifest is not None
        for place, own in ids.items():
            about = self._manifest["sparse"][place]
            count = 1 << SLOTS if "map" in about else about["rows"]
            if place not in self._changed:
                self._changed[place] = np.zeros(count, np.int64)
            slots = self._slots(place, own)
            self._changed[place][slots[(slots >= 0) & (slots < count)]] = version

    def _slots(self, place: int, ids: Ids) -> Ids:
        """Where it is noted when answers of these ``ids``, rows or keys, have changed last."""
        assert self._manifest is not None
        if "map" not in self._manifest["sparse"][place]:
            return ids
        return (ids.view(np.uint64) * _SPREAD >> np.uint64(64 - SLOTS)).view(np.int64)

    @abstractmethod
    def forget(self) -> None:
        """Forget all answers."""

    @property
    @abstractmethod
    def entries_kept(self) -> tuple[int, int]:
        """How many answers are kept, and how many have given way."""

    def told(self) -> dict[str, Any]:
        """What there is to say of the cache, for JSON."""
        found, setting = self.controller.estimate(), self.controller.setting
        counts = self.counts
        kept, evicted = self.entries_kept
        return {
            "requests": counts.asked,
            "served": counts.served,
            "equal": counts.equal,
            "missed": counts.missed,
            "refreshed": counts.refreshed,
            "audited": counts.audited,
            "wrong": counts.wrong,
            "expired": counts.expired,
            "entries": kept,
            "evicted": evicted,
            "level": setting.level,
            "beta": setting.beta,
            "error": {"mean": found.mean, "low": found.low, "high": None, "audits": found.audits}
            | ({"high": found.high} if np.isfinite(found.high) else {}),
            "off": self.controller.off,
        }


@dataclass(slots=True)
class Ticket:
    """What is remembered of a request while the model scores it."""

    exact: Key
    key: Key | None
    """The approximate key, if it is another one and there is one."""
    why: Why
    version: int
    entry: Entry | None = None
    """What would have been answered."""


class AnswerCache(Cache):
    """Keeps the answers to whole requests."""

    def __init__(
        self,
        config: CacheConfig,
        manifest: Mapping[str, Any],
        fixed: Setting | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.entries = entries_of(config.policy, config.capacity)
        self._sized = config.bound > 0 and config.error == "score"
        """Whether errors are shares of the mean prediction, which is then followed."""
        super().__init__(config, manifest, fixed, clock)

    def forget(self) -> None:
        """Forget all answers."""
        self.entries.clear()

    @property
    def entries_kept(self) -> tuple[int, int]:
        """How many answers are kept, and how many have given way."""
        return len(self.entries), self.entries.evicted

    def find(self, asked: Asked) -> tuple[Floats | None, Ticket | None]:
        """The answer to a request, float32 [N] or [N, T]; or None, and the ticket by which to ``keep`` what
        the model gives. There is no ticket where nothing is to be kept."""
        controller, counts = self.controller, self.counts
        counts.asked += 1
        if controller.off is not None or self._held:
            return None, None
        setting, now = controller.setting, self.clock()
        level, latest = setting.level, self._latest(asked) if self._changed else 0
        exact, coarser = self.keys.both(asked, level)
        entry = self._fresh(exact, now, latest)
        if entry is not None and level:
            # Requests that are equal have equal answers: only what is merely alike is looked after.
            counts.equal += 1
            controller.asked(equal=1.0)
            return self._served(entry), None
        key = self.keys.clustered(coarser, asked, level) if level else None
        if key is not None:
            entry = self._fresh(key, now, latest)
        ticket = Ticket(exact, key, "miss", self._version, entry)
        if entry is None:
            counts.missed += 1
            controller.asked()
            return None, ticket
        entry.hits += 1
        if level and entry.is_due(setting.beta):
            counts.refreshed += 1
            controller.asked(due=1.0)
            ticket.why = "refresh"
            return None, ticket
        share = controller.audit_share
        controller.asked(ready=1.0)
        if share and self._random.random() < share:
            counts.audited += 1
            ticket.why = "audit"
            return None, ticket
        counts.equal += not level
        return self._served(entry), None

    def _latest(self, asked: Asked) -> int:
        """The version in which a row of the request changed last."""
        found = 0
        for place, versions in self._changed.items():
            own = versions[self._slots(place, asked.bags(place, keyed=True).ids)]
            if len(own):
                found = max(found, int(own.max()))
        return found

    def _fresh(self, key: Key, now: float, latest: int) -> Entry | None:
        """The entry of a key, unless its time has passed, or rows have changed in the version ``latest``."""
        entry = self.entries.find(key)
        if entry is None:
            return None
        passed = self.config.ttl is not None and now - entry.since > self.config.ttl
        if passed or entry.version < latest:
            self.counts.expired += 1
            return None
        return entry

    def keep(self, ticket: Ticket, scores: Floats) -> None:
        """Take in what the model gave for the request of a ticket."""
        if ticket.version != self._version:
            return
        size = self.error_of.size(scores) if self._sized else None
        scores = scores.copy()
        scores.setflags(write=False)  # it is given to others
        newer = Entry(scores, self.clock(), size, version=self._version)
        self._gave(newer)
        before = ticket.entry
        if before is None or ticket.key is not None:
            self.entries.put(ticket.exact, newer)
        if before is None:
            if ticket.key is not None:
                other = Entry(scores, newer.since, size, version=self._version)
                self.entries.put(ticket.key, other)
            return
        error = self.error_of(before.scores, scores)
        wrong = error > self.config.bound * self.config.tolerance
        self.counts.wrong += wrong
        before.refreshed(newer, wrong)
        self.controller.checked(error, wrong, ticket.why == "audit")

    def _served(self, entry: Entry) -> Floats:
        self.counts.served += 1
        self._gave(entry)
        return entry.scores

    def _gave(self, entry: Entry) -> None:
        if entry.size is not None:
            self.error_of.gave(entry.size)
