"""A cache of answers by approximate keys, whose error is measured and bounded (Finamore et al., 2022)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, Literal

import numpy as np
from recpipe_serve import Asked

from recpipe_answer_cache.config import CacheConfig
from recpipe_answer_cache.control import Controller, Setting
from recpipe_answer_cache.entries import Entries, Entry, Floats, Key, entries_of
from recpipe_answer_cache.errors import ErrorOf
from recpipe_answer_cache.keys import Keys

Why = Literal["miss", "refresh", "audit"]


@dataclass(slots=True)
class Ticket:
    """What is remembered of a request while the model scores it."""

    key: Key
    why: Why
    version: int
    entry: Entry | None = None
    """What would have been answered."""


@dataclass
class Counts:
    """Requests so far, by what became of them. ``wrong``: refreshes and audits that found another answer."""

    asked: int = 0
    served: int = 0
    missed: int = 0
    refreshed: int = 0
    audited: int = 0
    wrong: int = 0
    expired: int = 0


class AnswerCache:
    """Answers requests of one package with the answers of others that are alike.

    ``manifest``: the package's. ``entries``: where answers are kept; None: as the config says. ``fixed``: the
    one setting that is used; None: the controller chooses. ``clock``: gives the time, in seconds.
    """

    def __init__(
        self,
        config: CacheConfig,
        manifest: Mapping[str, Any],
        entries: Entries | None = None,
        fixed: Setting | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.config, self.clock = config, clock
        self.entries = entries or entries_of(config.policy, config.capacity)
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
        setting = controller.setting
        key = self.keys.of(asked, setting.level)
        if key is None:
            return None, None
        entry = self.entries.find(key)
        if entry is not None and self.config.ttl is not None and self.clock() - entry.since > self.config.ttl:
            counts.expired += 1
            entry = None
        if entry is None:
            counts.missed += 1
            controller.asked(False, False)
            return None, Ticket(key, "miss", self._version)
        entry.hits += 1
        # Requests that are equal have equal answers: only what is merely alike is looked after.
        if setting.level and entry.is_due(setting.beta):
            counts.refreshed += 1
            controller.asked(True, False)
            return None, Ticket(key, "refresh", self._version, entry)
        share = controller.audit_share
        controller.asked(True, True)
        if share and self._random.random() < share:
            counts.audited += 1
            return None, Ticket(key, "audit", self._version, entry)
        counts.served += 1
        return entry.scores, None

    def keep(self, ticket: Ticket, scores: Floats) -> None:
        """Take in what the model gave for the request of a ticket."""
        if ticket.version != self._version:
            return
        now, scores = self.clock(), scores.copy()
        scores.setflags(write=False)  # it is given to others
        self.error_of.saw(scores)
        if ticket.entry is None:
            self.entries.put(ticket.key, Entry(scores, now))
            return
        error = self.error_of(ticket.entry.scores, scores)
        wrong = error > self.config.bound
        self.counts.wrong += wrong
        ticket.entry.refreshed(scores, now, wrong)
        self.controller.checked(error, wrong, ticket.why == "audit")

    def told(self) -> dict[str, Any]:
        """What there is to say of the cache, for JSON."""
        found, setting = self.controller.estimate(), self.controller.setting
        counts = self.counts
        return {
            "requests": counts.asked,
            "served": counts.served,
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
