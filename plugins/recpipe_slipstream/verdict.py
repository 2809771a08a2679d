"""The knobs of a run, what it counts, and whether leaving inputs out pays: what can be had, what steps take,
and the report's sentence on it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from recpipe.kit import milliseconds
from recpipe_slipstream.classifier import SIZES

LEAST = 1 / SIZES
"""If less than this share of all inputs could be left out, no batch would get smaller by a step."""
TRIAL = 32
"""So many steps with marks show whether steps have become shorter."""
ENOUGH = 4
"""Fewer steps tell nothing."""
SHORTER = 0.99
"""Steps must take less than this share of what they took before, else leaving inputs out ends."""


@dataclass(frozen=True)
class Method:
    """The plugin's knobs, with shares converted to batches; see its yaml."""

    drop: float
    window: int
    start: int
    sampled_batches: int
    epoch_batches: int
    stale_lookups: int | None
    min_touches: int
    snapshot_every: int | None
    search: str
    control: str | None
    step: int
    """A batch keeps a multiple of so many inputs."""
    tries: bool
    """Whether to stop where nothing is to be had."""


@dataclass
class Totals:
    """Sums over the batches trained so far, also before a resume; seconds are host time."""

    samples: int = 0
    hot: int = 0
    dropped: int = 0
    marked_hot: int = 0
    """How many hot inputs the marks in force have classified."""
    marked_dropped: int = 0
    """How many of them were left out."""
    classified: int = 0
    """How many inputs were classified, hot ones or not."""
    marked_batches: int = 0
    """How many batches were trained under marks."""
    offered_share: float = 0.0
    """Share of hot inputs among those sampled last."""
    refused: str = ""
    """Why nothing was marked: too few inputs are ``hot``, or too few of these are ``stale``."""
    snapshots: int = 0
    threshold: float = 0.0
    sampled_inputs: int = 0
    sampled_share: float = 0.0
    snapshot_seconds: float = 0.0
    search_seconds: float = 0.0
    classify_seconds: float = 0.0
    freeze_seconds: float = 0.0


@dataclass
class Steps:
    """Seconds of the newest steps before marks and under them, without those in which something else
    happened."""

    before: deque[float] = field(default_factory=lambda: deque(maxlen=TRIAL))
    after: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    _since: float | None = None

    def end(self, marked: bool) -> None:
        """A step has ended; ``marked``: its batch was trained under marks."""
        now = perf_counter()
        if self._since is not None:
            (self.after if marked else self.before).append(now - self._since)
        self._since = now

    def pause(self) -> None:
        """Something that is no step has happened."""
        self._since = None

    @property
    def medians(self) -> tuple[float, float] | None:
        """The medians before and after; None until there are enough of both."""
        if min(len(self.before), len(self.after)) < ENOUGH:
            return None
        return median(self.before), median(self.after)


def sentence(totals: Totals, steps: Steps, drop: float, stopped_at: int | None) -> str:
    """Whether it can have paid, and why. Steps before the marks may have fetched rows that later ones find
    resident, so they do not tell what was saved; but a whole batch takes at most as much longer as it has
    more samples."""
    hot = f"{100 * totals.offered_share:.1f}% of the inputs are hot"
    if totals.refused == "hot":
        most = 100 * drop * totals.offered_share
        return f"nothing was left out, and no snapshot taken: {hot}, so that at most {most:.1f}% could be"
    if totals.refused == "stale":
        found = 100 * totals.sampled_share
        return f"nothing was left out: {hot}, and {found:.1f}% of these were stale after the window"
    if not totals.snapshots:
        return "nothing was left out: the run ended before a window did"
    dropped = 100 * totals.dropped / max(1, totals.samples)
    told = f"left out {dropped:.1f}% of all inputs, {100 * totals.dropped / max(1, totals.hot):.1f}% of the "
    told += "hot ones it classified"
    times = steps.medians
    if times is None:
        return f"{told}; too few steps to tell whether it paid"
    before, after = times
    compared = f"steps took {milliseconds(after)} ms, and {milliseconds(before)} before"
    if stopped_at is not None:
        return f"{told}, and stopped before batch {stopped_at}: {compared}"
    share = totals.dropped / max(1, totals.classified)
    saved = after * totals.marked_batches * share / (1 - share)
    cost = totals.snapshot_seconds + totals.search_seconds
    paid = "can have paid" if saved > cost else "did not pay"
    return (
        f"{paid}: {told}; steps took {milliseconds(after)} ms, whole batches would have taken at most "
        f"{saved:.2f} s more in all, for {cost:.2f} s of snapshots and search and "
        f"{totals.classify_seconds:.2f} s of classification in the loader's thread"
    )
