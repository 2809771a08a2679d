"""Keeps the error of a cache under its bound: measures it on hits that are inferred again by chance, and
chooses the coarseness of keys and the intervals of refreshes by it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf, sqrt

FIRST = 30
"""Hits under a new setting that are all inferred again, before it is trusted."""
WINDOW = 100
"""The latest audits by which the error is told."""
RECENT = 1000
"""About as many of the latest requests say which share of them the cache can answer."""
LESS = 0.9
"""A coarser level that will answer less than this of what the finer one does has gained nothing."""
FEW = 0.02
"""Of the hits."""
PATIENCE = 3
"""Dwells after which a cache that answers too little is switched off."""
Z = 1.96
"""Of a normal distribution's 95% interval."""


@dataclass(frozen=True)
class Setting:
    """What may be changed to have fewer errors or more hits."""

    level: int
    beta: float


@dataclass(frozen=True)
class Estimate:
    """The mean error of a request's answer, and the ends of its 95% interval; ``audits``: hits that it was
    measured on."""

    mean: float
    low: float
    high: float
    audits: int


@dataclass
class Tried:
    """What was seen under a setting: shares of the latest requests' samples, of hits, of those equal to some
    before, and of hits that may be answered; and of requests that have one of these."""

    asked: int = 0
    hits: float = 0.0
    equal: float = 0.0
    ready: float = 0.0
    answered: float = 0.0
    checked: int = 0
    wrong: float = 0.0
    """The share of the hits that were inferred again lately."""
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def saw(self, equal: float, due: float, ready: float) -> None:
        """Take in a request, by the shares of its samples."""
        self.asked += 1
        weight = 1 / min(self.asked, RECENT)
        self.hits += (equal + due + ready - self.hits) * weight
        self.equal += (equal - self.equal) * weight
        self.ready += (ready - self.ready) * weight
        self.answered += ((ready > 0) - self.answered) * weight

    def saw_wrong(self, wrong: float) -> None:
        """Take in a request of whose samples that were inferred again this share was wrong."""
        self.checked += 1
        self.wrong += (wrong - self.wrong) / min(self.checked, RECENT)

    def estimate(self) -> Estimate:
        """The error if all ready hits are answered."""
        share, count = self.answered, len(self.errors)
        if not count:
            return Estimate(0.0, 0.0, inf if share else 0.0, 0)
        mean = sum(self.errors) / count
        spread = sqrt(sum((error - mean) ** 2 for error in self.errors) / max(1, count - 1))
        half = Z * spread / sqrt(count)
        return Estimate(share * mean, share * max(0.0, mean - half), share * (mean + half), count)

    def promise(self, hits: float) -> float:
        """The share of requests that will be answered once so many are hits: equal ones, and those whose
        keys' requests agree."""
        return self.equal + (hits - self.equal) * (1 - self.wrong)

    def gains_over(self, finer: Tried) -> bool:
        """Whether the coarser keys of this setting will let as many requests be answered at least. Their
        cache is not full yet; once it is, it has as many hits."""
        return self.promise(max(self.hits, finer.hits)) >= LESS * finer.promise(finer.hits)


class Controller:
    """Begins with exact keys, goes on to coarser ones, then to longer intervals, as long as the error is
    surely within the ``bound`` and more is gained; goes back where it is not, and does not try again what has
    failed.

    ``bound``: 0 keeps keys exact. ``levels``: of coarseness, beside 0. ``betas``: the least and the most of
    the refreshes' interval. ``audit``: the share of ready hits that are inferred again by chance; ``least``:
    the share of requests that must be answered from the cache. ``dwell``: requests under a setting before it
    is judged by what it gains. ``fixed``: the one setting that there is.
    """

    def __init__(
        self,
        bound: float,
        levels: int,
        betas: tuple[float, float],
        audit: float = 0.02,
        least: float = 0.01,
        dwell: int = 2000,
        fixed: Setting | None = None,
    ) -> None:
        self.bound, self.levels, self.betas = bound, levels if bound else 0, betas
        self.audit, self.least, self.dwell, self.fixed = audit, least, dwell, fixed
        self.begin()

    def begin(self) -> None:
        """Forget all that was measured, as for another package."""
        self.off: str | None = None
        """Why the cache is switched off; None: it is not."""
        self._failed: set[Setting] = set()
        self._tried: dict[Setting, Tried] = {}
        self._enter(self.fixed or Setting(0, self.betas[0]))

    def go_on(self) -> None:
        """Measure anew under the same setting; be on again."""
        self.off = None
        self._enter(self.setting)

    def _enter(self, setting: Setting) -> None:
        self.setting, self.now = setting, Tried()

    @property
    def audit_share(self) -> float:
        """The share of ready hits that are to be inferred again by chance now."""
        if not self.bound:
            return 0.0
        return 1.0 if self.setting.level and len(self.now.errors) < FIRST else self.audit

    def estimate(self) -> Estimate:
        """The error of answers as they are given now."""
        return self.now.estimate()

    def asked(self, equal: float = 0.0, due: float = 0.0, ready: float = 0.0) -> None:
        """Count a request, by the share of its samples that are equal to some before and need no care, those
        of hits that are due for a refresh, and those of hits that may be answered; the others miss."""
        self.now.saw(equal, due, ready)
        if self.now.asked % self.dwell == 0:
            self._judge()

    def checked(self, error: float, wrong: float, audit: bool) -> None:
        """Take in by how much an answer of the cache, which was not given, was off, which share of its
        samples is ``wrong``, and whether it was inferred again by chance."""
        self.now.saw_wrong(wrong)
        if not audit:
            return
        self.now.errors.append(error)
        if len(self.now.errors) >= FIRST and len(self.now.errors) % 10 == 0:
            self._require_within()

    def _require_within(self) -> bool:
        """Go back if the error is above the bound; whether it is not."""
        found = self.now.estimate()
        if self.fixed is not None or found.audits < FIRST or found.mean <= self.bound:
            return True
        self._failed.add(self.setting)
        level, beta = self.setting.level, self.setting.beta
        if level and beta > self.betas[0]:
            self._enter(Setting(level, max(self.betas[0], beta / 2)))
        elif level:
            self._enter(Setting(level - 1, self.betas[0]))
        else:
            self.off = (
                f"answers to equal requests were {found.mean:.2%} off on average, in {found.audits} audits, "
                f"and the bound is {self.bound:.2%}"
            )
        return False

    def _surely_within(self) -> bool:
        found = self.now.estimate()
        known = found.audits >= FIRST or not self.setting.level or not self.now.ready
        return known and found.high <= self.bound

    def _judge(self) -> None:
        """Try another setting, if this one is good and there is one; or give up."""
        if self.fixed is not None or self.off is not None or not self._require_within():
            return
        level, beta = self.setting.level, self.setting.beta
        finer = self._tried.get(Setting(level - 1, beta))
        if finer is not None and not self.now.gains_over(finer):
            self._failed.add(self.setting)
            self._enter(Setting(level - 1, beta))
            return
        self._tried[self.setting] = self.now
        # Longer intervals gain nothing where hardly any hit is a refresh.
        hits, answered = self.now.hits, self.now.ready + self.now.equal
        refreshed = hits - answered > FEW * hits
        longer = min(beta * 2, self.betas[1]) if refreshed else beta
        for further in (Setting(level + 1, self.betas[0]), Setting(level, longer)):
            there = 0 < further.level <= self.levels and further != self.setting
            if there and further not in self._failed | self._tried.keys():
                if self._surely_within():
                    self._enter(further)
                return
        if answered < self.least and self.now.asked >= PATIENCE * self.dwell:
            self.off = (
                f"{answered:.2%} of the requests could be answered from the cache, by keys of level {level} "
                f"of {self.levels} at a bound of {self.bound:.2%}, and least_hits is {self.least:.2%}"
            )
