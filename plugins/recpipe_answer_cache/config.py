"""What a cache of answers is told: how requests become keys, and within which bound it is to stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from annotated_types import Ge, Gt, Interval

from recpipe.common.validation import FieldError, Positive, Text, one_of, typed

SECTION = "plugins.answer_cache"
BY = ("exact", "skip", "round", "bucket", "history", "cluster")
SIZED = {
    "round": "the width of a step",
    "bucket": "the number of buckets",
    "history": "how many of the latest ids count",
    "cluster": "the number of clusters",
}
ERRORS = ("score", "top_k")
POLICIES = ("lru", "lfu")
UNITS = ("request", "candidate")
LEVELS = 16


@dataclass(frozen=True)
class KeyRule:
    """How some features of a request enter its key. At level 0 all enter as they are."""

    feature: Text
    """Of a sparse or dense feature its name, or a pattern of names."""
    by: Annotated[str, one_of(*BY)]
    """``exact``: as it is; ``skip``: not at all; ``round``: dense values to steps; ``bucket``: ids by equal
    ranges of rows; ``history``: the latest ids of each bag; ``cluster``: all features with this word together
    by the nearest of the centres of their mean rows."""
    size: Annotated[float, Ge(0)] | None = None
    """Of the coarsest level (``SIZED``). Each finer level has half the step, or twice as many."""
    first: Annotated[int, Interval(ge=1, le=LEVELS)] = 1
    """The finest level at which this is so; at those below the feature enters as it is."""

    def __post_init__(self) -> None:
        sized = self.by in SIZED
        if sized and self.size is None:
            raise FieldError(f"size is missing: {SIZED[self.by]} of '{self.feature}' at the coarsest level")
        if self.size is not None and not sized:
            raise FieldError(
                f"size={self.size:g} of '{self.feature}' means nothing by={self.by}; leave it out"
            )
        if sized and self.by != "history" and not self.size:
            raise FieldError(f"size={self.size:g} of '{self.feature}' is not above 0, {SIZED[self.by]}")

    def at(self, level: int, levels: int) -> float:
        """The size at a ``level`` of so many."""
        assert self.size is not None
        finer = 2.0 ** (levels - level)
        return self.size / finer if self.by == "round" else self.size * finer


@dataclass(frozen=True)
class CacheConfig:
    """The knobs of the plugin, ``plugins.answer_cache``."""

    bound: Annotated[float, Interval(ge=0, le=1)] = 0.005
    """The error that answers may have, on average over requests; 0: none, keys are exact."""
    error: Annotated[str, one_of(*ERRORS)] = "score"
    """``score``: the mean distance of a prediction from the model's, as a share of the mean prediction;
    ``top_k``: the share of requests whose ``k`` best samples are others."""
    k: Positive = 10
    keys: tuple[KeyRule, ...] = ()
    """How features enter the key; those that no rule names as they are. The first rule that fits counts."""
    levels: Annotated[int, Interval(ge=1, le=LEVELS)] = 3
    """Of coarseness, beside level 0, at which keys are exact."""
    unit: Annotated[str, one_of(*UNITS)] = "request"
    """What an answer is of: a whole ``request``, or each ``candidate`` of it, of which the model then scores
    those that are not known."""
    capacity: Positive = 100_000
    """Most answers that are kept."""
    policy: Text = "lru"
    """``lru``, ``lfu``, or ``MODULE:CLASS`` of a ``recpipe.plugin.CachePolicy`` that takes a ``RowSpace``."""
    ttl: Annotated[float, Gt(0)] | None = None
    """Seconds after which an answer is no longer given; None: a newer package alone ends it."""
    beta: Annotated[float, Interval(ge=1, le=1024)] = 2.0
    """Hits are inferred again at hit counts 1, beta, beta^2 ... (auto-refresh); the least that is tried."""
    beta_most: Annotated[float, Interval(ge=1, le=1024)] = 32.0
    """The most that is tried."""
    tolerance: Annotated[float, Ge(1)] = 4.0
    """By how many times the bound an answer may be off that is not wrong; where one is wrong, the count of
    hits starts again."""
    audit: Annotated[float, Interval(ge=0.001, le=1)] = 0.03
    """The share of other hits that are inferred again, by chance, to measure the error."""
    least_hits: Annotated[float, Interval(ge=0, le=1)] = 0.01
    """The share of requests that must be answered from the cache, or it is switched off."""

    dwell: Annotated[int, Interval(ge=100, le=10**9)] = 2000
    """Requests after which a coarser level is judged by what it gains, and the next one tried."""

    def __post_init__(self) -> None:
        if self.beta_most < self.beta:
            raise FieldError(f"beta_most={self.beta_most:g} is below beta={self.beta:g}")
        if self.policy not in POLICIES and ":" not in self.policy:
            raise FieldError(
                f"policy={self.policy}: choose {', '.join(POLICIES)}, or MODULE:CLASS of a CachePolicy"
            )
        if self.unit == "candidate" and self.policy != "lru":
            raise FieldError(f"policy={self.policy} is of whole requests; unit=candidate has lru alone")
        late = next((rule for rule in self.keys if rule.first > self.levels), None)
        if late is not None:
            raise FieldError(
                f"keys: '{late.feature}' begins at level {late.first}, and there are {self.levels}"
            )


def config_of(values: Mapping[str, Any]) -> CacheConfig:
    """The knobs as a recipe has them; ``UserError`` names the one that is wrong."""
    rules = tuple(typed(KeyRule, rule, f"{SECTION}.keys[{n}]") for n, rule in enumerate(values["keys"]))
    return replace(typed(CacheConfig, {**values, "keys": []}, SECTION), keys=rules)
