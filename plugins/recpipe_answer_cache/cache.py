"""A cache of answers by approximate keys, whose error is measured and bounded (Finamore et al., 2022)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Literal

import numpy as np
from recpipe_serve import Asked

from recpipe_answer_cache.config import CacheConfig
from recpipe_answer_cache.control import Controller, Setting
from recpipe_answer_cache.entries import Entry, Key, entries_of
from recpipe_answer_cache.errors import ErrorOf, Floats
from recpipe_answer_cache.keys import Keys

Why = Literal["miss", "refresh", "audit"]


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


@dataclass
class Counts:
    """Requests so far, by what became of them. ``equal``: those served with the answer to an equal request;
    ``wrong``: refreshes and audits that found another answer."""

    asked: int = 0
    served: int = 0
    equal: int = 0
    missed: int = 0
    refreshed: int = 0
    audited: int = 0
    wrong: int = 0
    expired: int = 0


class AnswerCache:
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
        self.config, self.clock = config, clock
        self.entries = entries_of(config.policy, config.capacity)
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
        self._sized = config.bound > 0 and config.error == "score"
        """Whether errors are shares of the mean prediction, which is then followed."""
        self._version, self._random = 0, np.random.default_rng(0)
        self.counts = Counts()
        self._manifest: Mapping[str, Any] | None = None
        self.begin(manifest)

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Forget all answers: the package with this ``manifest`` answers from now on. If it is equal, another
        version of the same package does, for which the setting is as good as it was."""
        self._version += 1
        self.entries.clear()
        if manifest == self._manifest:
            self.controller.go_on()
            return
        self._manifest = manifest
        self.keys = Keys(manifest, self.config.keys, self.config.levels)
        self.error_of = ErrorOf(manifest["outputs"], self.config.error, self.config.k)
        self.controller.begin()

    def find(self, asked: Asked) -> tuple[Floats | None, Ticket | None]:
        """The answer to a request, float32 [N] or [N, T]; or None, and the ticket by which to ``keep`` what
        the model gives. There is no ticket where nothing is to be kept."""
        controller, counts = self.controller, self.counts
        counts.asked += 1
        if controller.off is not None:
            return None, None
        setting, now = controller.setting, self.clock()
        exact = self.keys.of(asked, 0)
        assert exact is not None
        entry = self._fresh(exact, now)
        if entry is not None and setting.level:
            # Requests that are equal have equal answers: only what is merely alike is looked after.
            counts.equal += 1
            controller.asked("equal")
            return self._served(entry), None
        key = self.keys.of(asked, setting.level) if setting.level else None
        if key is not None:
            entry = self._fresh(key, now)
        ticket = Ticket(exact, key, "miss", self._version, entry)
        if entry is None:
            counts.missed += 1
            controller.asked("miss")
            return None, ticket
        entry.hits += 1
        if setting.level and entry.is_due(setting.beta):
            counts.refreshed += 1
            controller.asked("refresh")
            ticket.why = "refresh"
            return None, ticket
        share = controller.audit_share
        controller.asked("ready")
        if share and self._random.random() < share:
            counts.audited += 1
            ticket.why = "audit"
            return None, ticket
        counts.equal += not setting.level
        return self._served(entry), None

    def _fresh(self, key: Key, now: float) -> Entry | None:
        """The entry of a key, unless its time has passed."""
        entry = self.entries.find(key)
        if entry is not None and self.config.ttl is not None and now - entry.since > self.config.ttl:
            self.counts.expired += 1
            return None
        return entry

    def keep(self, ticket: Ticket, scores: Floats) -> None:
        """Take in what the model gave for the request of a ticket."""
        if ticket.version != self._version:
            return
        scores = scores.copy()
        scores.setflags(write=False)  # it is given to others
        newer = Entry(scores, self.clock(), self.error_of.size(scores) if self._sized else None)
        self._gave(newer)
        before = ticket.entry
        if before is None or ticket.key is not None:
            self.entries.put(ticket.exact, newer)
        if before is None:
            if ticket.key is not None:
                self.entries.put(ticket.key, replace(newer))
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

    def told(self) -> dict[str, Any]:
        """What there is to say of the cache, for JSON."""
        found, setting = self.controller.estimate(), self.controller.setting
        counts = self.counts
        return {
            "requests": counts.asked,
            "served": counts.served,
            "equal": counts.equal,
            "missed": counts.missed,
            "refreshed": counts.refreshed,
            "audited": counts.audited,
            "wrong": counts.wrong,
            "expired": counts.expired,
            "entries": len(self.entries),
            "evicted": self.entries.evicted,
            "level": setting.level,
            "beta": setting.beta,
            "error": {"mean": found.mean, "low": found.low, "high": None, "audits": found.audits}
            | ({"high": found.high} if np.isfinite(found.high) else {}),
            "off": self.controller.off,
        }
