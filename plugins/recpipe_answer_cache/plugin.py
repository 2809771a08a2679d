"""The cache of answers as a plugin of a server: ``recpipe serve PACKAGE +plugin=answer_cache``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from recpipe_serve import AnswerServer, Asked, Scorer

from recpipe.plugin import Context, Contribution, Plugin, PluginError
from recpipe_answer_cache.cache import Cache, Ids
from recpipe_answer_cache.candidates import made_cache
from recpipe_answer_cache.clusters import UserClusters
from recpipe_answer_cache.config import config_of
from recpipe_answer_cache.errors import Floats

log = logging.getLogger("recpipe")


class ApproximateKeys(Plugin, AnswerServer):
    """Answers requests with those of others that are alike, within a bound on the error (2022)."""

    api = (2, 13)

    def __init__(
        self,
        *,
        bound: float,
        error: str,
        k: int,
        keys: list[dict[str, Any]],
        levels: int,
        unit: str,
        capacity: int,
        policy: str,
        ttl: float | None,
        beta: float,
        beta_most: float,
        tolerance: float,
        audit: float,
        least_hits: float,
        dwell: int,
    ) -> None:
        values = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        self.config = config_of(values)
        self.cache: Cache | None = None
        self._off: str | None = None

    def contribute(self, ctx: Context) -> Contribution:
        """It has no part in training."""
        raise PluginError(
            "plugin 'answer_cache' serves a finished model: recpipe serve PACKAGE +plugin=answer_cache"
        )

    def begin(self, scorer: Scorer) -> None:
        """Answer for this package, with nothing kept."""
        if self.cache is None:
            self.cache = made_cache(self.config, scorer.manifest)
        else:
            self.cache.begin(scorer.manifest)
        if isinstance(self.cache.keys.clusters, UserClusters):
            self.cache.keys.clusters.use(scorer)
        elif self.cache.keys.of_clusters:
            self.cache.keys.clusters = UserClusters(scorer, self.cache.keys)
        self._off = None

    def changed(self, scorer: Scorer, ids: Mapping[int, Ids]) -> None:
        """Answer for another version of the package, with what is kept but for requests with these ids."""
        assert self.cache is not None
        self.cache.changed(ids)
        if isinstance(self.cache.keys.clusters, UserClusters):
            self.cache.keys.clusters.use(scorer)

    def learning(self, ids: Mapping[int, Ids] | None) -> None:
        """Answer nothing to requests with one of these ids until ``learnt``; None: to none."""
        assert self.cache is not None
        self.cache.learning(ids)

    def learnt(self, ids: Mapping[int, Ids] | None) -> None:
        """Answer again, with what is kept but for requests with these ids; None: with nothing of it."""
        assert self.cache is not None
        self.cache.learnt(ids)

    def find(self, asked: Asked) -> tuple[Floats | None, Any]:
        """The kept answer to a request that is alike, or None and a ticket."""
        assert self.cache is not None
        return self.cache.find(asked)

    def lacking(self, asked: Asked, ticket: Any) -> Asked | None:
        """The candidates that are not known, if some are."""
        assert self.cache is not None
        return self.cache.lacking(asked, ticket)

    def completed(self, ticket: Any, scores: Floats) -> Floats:
        """With the kept scores of those that are known."""
        assert self.cache is not None
        return self.cache.completed(ticket, scores)

    def keep(self, ticket: Any, scores: Floats) -> None:
        """Keep what the model gave."""
        assert self.cache is not None
        self.cache.keep(ticket, scores)
        if self.cache.controller.off != self._off:
            self._off = self.cache.controller.off
            log.warning("the cache of answers is switched off: %s", self._off)

    def counted(self) -> Mapping[str, float]:
        """Requests by what became of them, the setting, and the error with its interval."""
        if self.cache is None:
            return {}
        told = self.cache.told()
        error = told["error"]
        figures = {
            **{f"answers_{name}": told[name] for name in COUNTED},
            "answers_error": error["mean"],
            "answers_error_low": error["low"],
            "answers_error_high": float("inf") if error["high"] is None else error["high"],
            "answers_off": told["off"] is not None,
        }
        return {name: float(value) for name, value in figures.items()}

    def told(self) -> Mapping[str, Any]:
        """The same for the monitor's page, and why it is off."""
        return {} if self.cache is None else {"bound": self.config.bound, **self.cache.told()}

    def close(self) -> None:
        """Nothing is held but memory."""


COUNTED = (
    "requests",
    "served",
    "equal",
    "missed",
    "refreshed",
    "audited",
    "wrong",
    "entries",
    "evicted",
    "level",
    "beta",
)
"""Of ``AnswerCache.told``, in ``/metrics``."""
