"""Evaluates assignments of types for real, remembers every evaluation, and counts them against a budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recpipe import UserError
from recpipe.answers.figures import Interval
from recpipe.kit import Meter
from recpipe_low_precision.row_types import FLOAT, Assignment
from recpipe_low_precision.slices import Slice

RESAMPLES = 1000
GROUPS = 8192
"""Most groups of neighbouring samples that are drawn; up to so many samples, each is a group of its own."""
TAIL = 2.5
"""Percent of resamples beyond each end of an interval."""
Floats = NDArray[np.float64]


class BudgetSpent(Exception):
    """No evaluation is left."""


@dataclass(frozen=True)
class Evaluation:
    """One assignment on the calibration slice."""

    types: dict[str, str]
    """What each table that is not fp32 got."""
    bytes: int
    ne: float
    difference: float
    """Relative difference of normalized entropy to fp32, and its 95% interval."""
    low: float
    high: float
    step: str
    """``sensitivity`` or ``search``."""

    @property
    def upper(self) -> float:
        """What the bound is compared with: the interval's upper end, where an improvement counts as none.

        Fewer bits do not make a model better. What looks so on the slice is noise, of which a search among
        many assignments finds a lot, and which another slice does not have.
        """
        return max(self.difference, 0.0) + self.high - self.difference


class Judge:
    """Judges assignments on ``slice_``; ``size_of`` gives an assignment's bytes.

    Every evaluation is a line of ``journal`` at once, so an interrupt loses none. Evaluations of an earlier
    run of the same ``work`` (checkpoint, data, slice) are taken from it and count as done.
    """

    def __init__(
        self, slice_: Slice, size_of: Callable[[Assignment], int], journal: Path, work: str, budget: int
    ) -> None:
        self.slice, self.size_of, self.journal, self.budget = slice_, size_of, journal, budget
        self.base = slice_.evaluate(dict.fromkeys(slice_.tables, FLOAT))
        self.bootstrap = PairedBootstrap(len(self.base.losses))
        self.done: list[Evaluation] = []
        """In the order in which they were asked for."""
        self.expected = budget
        """About how many evaluations there will be, for the progress bar."""
        self._known: dict[str, Evaluation] = {}
        head = json.dumps({"work": work})
        lines = self.journal.read_text().splitlines() if self.journal.is_file() else []
        if not lines or lines[0] != head:
            self._write(f"{head}\n", "w")
            return
        for line in lines[1:]:
            try:
                found = Evaluation(**json.loads(line))
            except (TypeError, ValueError):
                continue  # cut off by a kill
            self._known[json.dumps(found.types, sort_keys=True)] = found

    def _write(self, line: str, mode: str) -> None:
        try:
            with self.journal.open(mode) as out:
                out.write(line)
        except OSError as fault:
            raise UserError(
                f"cannot write {self.journal}: {fault.strerror}; choose another run directory, "
                "hydra.run.dir=DIRECTORY (from Python: output=DIRECTORY)"
            ) from fault

    def evaluate(self, assignment: Assignment, step: str, meter: Meter | None = None) -> Evaluation:
        """The difference that ``assignment`` makes; ``BudgetSpent`` if no evaluation is left."""
        types = {table: str(choice) for table, choice in assignment.items() if choice != FLOAT}
        key = json.dumps(types, sort_keys=True)
        if len(self.done) >= self.budget:
            raise BudgetSpent
        found = self._known.get(key)
        if found is None:
            losses = self.slice.evaluate(assignment).losses
            apart = self.bootstrap.relative(losses, self.base.losses)
            ne = float(losses.mean()) / self.slice.base_entropy
            size = self.size_of(assignment)
            found = Evaluation(types, size, ne, apart.value, apart.low, apart.high, step)
            self._known[key] = found
            self._write(json.dumps(asdict(found)) + "\n", "a")
        self.done.append(found)
        if meter is not None and meter.due:
            meter.show(
                min(len(self.done) / self.expected, 1.0),
                f"{step}: {len(self.done)} evaluations, NE {100 * found.difference:+.4f}%",
            )
        return found


class PairedBootstrap:
    """Resamples of ``samples`` samples, the same for every question, so that equal losses give equal
    intervals."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        self.samples = samples
        self.groups = min(samples, GROUPS)
        self.starts = np.arange(self.groups) * samples // self.groups
        draw = np.random.default_rng(seed)
        self.times = np.empty((RESAMPLES, self.groups), np.float32)
        """How often each resample has each group."""
        for times in self.times:
            times[:] = np.bincount(draw.integers(self.groups, size=self.groups), minlength=self.groups)

    def relative(self, losses: Floats, base: Floats) -> Interval:
        """The mean of ``losses`` over that of ``base``, float64 [samples] each, less 1.

        For logloss that is the relative difference of normalized entropy too: the entropy of the labels, by
        which both are divided, is the same in each resample.
        """
        apart, whole = (np.add.reduceat(own, self.starts) for own in (losses - base, base))
        # The differences are small against float32's rounding only if they are summed by themselves.
        drawn = self._drawn(apart) / self._drawn(whole)
        low, high = np.percentile(drawn, (TAIL, 100 - TAIL))
        return Interval(float(apart.sum() / whole.sum()), float(low), float(high))

    def auc(self, labels: NDArray[np.float32], scores: Floats, base: Floats) -> Interval:
        """AUC of ``scores`` less that of ``base``, for 0/1 ``labels`` [samples]."""
        group = np.zeros(self.samples, np.int64)
        group[self.starts[1:]] = 1
        group = np.cumsum(group)
        ranked, ranked_base = _Ranked(labels, scores, group), _Ranked(labels, base, group)
        drawn = [ranked.auc(times) - ranked_base.auc(times) for times in self.times]
        low, high = np.percentile(drawn, (TAIL, 100 - TAIL))
        once = np.ones(self.groups, np.float32)
        return Interval(ranked.auc(once) - ranked_base.auc(once), float(low), float(high))

    def _drawn(self, sums: Floats) -> Floats:
        scale = float(np.abs(sums).max()) or 1.0
        return (self.times @ (sums / scale).astype(np.float32)).astype(np.float64) * scale


class _Ranked:
    """Samples in the order of their scores, for AUCs of resamples."""

    def __init__(self, labels: NDArray[np.float32], scores: Floats, group: NDArray[np.int64]) -> None:
        order = np.argsort(scores, kind="stable")
        ordered = scores[order]
        self.ties = np.concatenate(([0], np.flatnonzero(np.diff(ordered)) + 1))
        self.positive = labels[order] > 0.5
        self.group = group[order]

    def auc(self, times: NDArray[np.float32]) -> float:
        """With each sample as often as ``times`` says of its group."""
        weight = times[self.group].astype(np.float64)
        positive = np.add.reduceat(np.where(self.positive, weight, 0), self.ties)
        negative = np.add.reduceat(np.where(self.positive, 0, weight), self.ties)
        below = np.cumsum(negative) - negative
        pairs = positive.sum() * negative.sum()
        return float((positive * (below + negative / 2)).sum() / pairs) if pairs else float("nan")
