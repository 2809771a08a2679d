"""Chooses a type for each table: sensitivities first, then the best exchange rate, with back-off.

The smallest model within a bound on the loss of normalized entropy is a multiple-choice knapsack. If losses
added up, walking along each table's convex hull (loss against bytes) in the order of loss per byte saved
would solve its linear relaxation. They add up only nearly, so every step is evaluated for real. Steps are
tried several at a time, twice as many after each success and half as many after a failure; a single step that
fails is dropped, and the table's next larger choice is tried instead.

``Judge`` evaluates assignments of types, remembers every evaluation, and counts them against a budget.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recpipe import UserError
from recpipe.kit import Meter
from recpipe.model.metrics import Interval
from recpipe_low_precision.row_types import FLOAT, Assignment, Choice
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
        """The difference that ``assignment`` makes, of several labels for the one that loses most;
        ``BudgetSpent`` if no evaluation is left."""
        types = {table: str(choice) for table, choice in assignment.items() if choice != FLOAT}
        key = json.dumps(types, sort_keys=True)
        if len(self.done) >= self.budget:
            raise BudgetSpent
        found = self._known.get(key)
        if found is None:
            losses, base = self.slice.evaluate(assignment).losses, self.base.losses
            of_label = [self.bootstrap.relative(losses[:, n], base[:, n]) for n in range(base.shape[1])]
            worst = max(range(len(of_label)), key=lambda n: of_label[n].high)
            apart = of_label[worst]
            ne = float(losses[:, worst].mean() / self.slice.base_entropy[worst])
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

    def auc(
        self, labels: NDArray[np.float32], scores: Floats, base: Floats, weights: Floats | None = None
    ) -> Interval:
        """AUC of ``scores`` less that of ``base``, for 0/1 ``labels`` [samples] and their ``weights``."""
        group = np.zeros(self.samples, np.int64)
        group[self.starts[1:]] = 1
        group = np.cumsum(group)
        ranked, ranked_base = (_Ranked(labels, own, group, weights) for own in (scores, base))
        drawn = [ranked.auc(times) - ranked_base.auc(times) for times in self.times]
        low, high = np.percentile(drawn, (TAIL, 100 - TAIL))
        once = np.ones(self.groups, np.float32)
        return Interval(ranked.auc(once) - ranked_base.auc(once), float(low), float(high))

    def _drawn(self, sums: Floats) -> Floats:
        scale = float(np.abs(sums).max()) or 1.0
        return (self.times @ (sums / scale).astype(np.float32)).astype(np.float64) * scale


class _Ranked:
    """Samples in the order of their scores, for AUCs of resamples."""

    def __init__(
        self,
        labels: NDArray[np.float32],
        scores: Floats,
        group: NDArray[np.int64],
        weights: Floats | None = None,
    ) -> None:
        order = np.argsort(scores, kind="stable")
        ordered = scores[order]
        self.ties = np.concatenate(([0], np.flatnonzero(np.diff(ordered)) + 1))
        self.positive = labels[order] > 0.5
        self.group = group[order]
        self.weights = None if weights is None else weights[order]

    def auc(self, times: NDArray[np.float32]) -> float:
        """With each sample as often as ``times`` says of its group."""
        weight = times[self.group].astype(np.float64)
        if self.weights is not None:
            weight *= self.weights
        positive = np.add.reduceat(np.where(self.positive, weight, 0), self.ties)
        negative = np.add.reduceat(np.where(self.positive, 0, weight), self.ties)
        below = np.cumsum(negative) - negative
        pairs = positive.sum() * negative.sum()
        return float((positive * (below + negative / 2)).sum() / pairs) if pairs else float("nan")


log = logging.getLogger("recpipe")
Cost = Callable[[str, Choice], float]
"""What a table costs (bytes, or seconds of lookups) if it is kept so."""


@dataclass(frozen=True)
class Option:
    """A choice for the tables of one unit, with what it costs and loses."""

    choice: Choice
    cost: float
    loss: float
    """``Evaluation.upper`` when this unit alone is kept so."""


@dataclass(frozen=True)
class Change:
    """A unit's change to a cheaper choice."""

    unit: int
    to: Option
    rate: float
    """Loss for each unit of cost that is saved."""


@dataclass
class Found:
    """What a search has found so far."""

    assignment: dict[str, Choice]
    evaluation: Evaluation | None
    """None: nothing but fp32 was accepted."""
    accepted: list[Evaluation]
    """After each accepted change."""
    ended: str = "no step is left that keeps the bound"


class Search:
    """The search over ``units`` (tables that change together) with these ``choices`` beside fp32.

    ``may`` says whether a table can be kept by a choice at all. ``names``: what it chooses for, if not all
    tables, but layers; ``base`` is then what is chosen for the others.
    """

    def __init__(
        self,
        judge: Judge,
        choices: Sequence[Choice],
        cost: Cost,
        may: Callable[[str, Choice], bool],
        bound: float,
        names: Sequence[str] | None = None,
        base: Assignment | None = None,
    ) -> None:
        self.judge, self.choices, self.cost, self.may = judge, choices, cost, may
        self.bound = bound
        self.base = dict.fromkeys(judge.slice.tables, FLOAT) | dict(base or {})
        self.prefix = "" if names is None else "layer "
        """Before the names of its steps, in an evaluation."""
        self.floor = 0.0
        """The loss of ``base``."""
        tables = sorted(judge.slice.tables if names is None else names, key=lambda t: -cost(t, FLOAT))
        # Single tables, the largest first, and the small ones together where they would be too many.
        alone = max(1, judge.budget // 2 // max(1, len(choices)))
        if len(tables) > alone:
            self.units = [*([table] for table in tables[: alone - 1]), tables[alone - 1 :]]
        else:
            self.units = [[table] for table in tables]
        # The steps of a search are fewer than the sensitivities; many of the latter are asked for again.
        judge.expected = min(judge.budget, len(judge.done) + 2 * len(self.units) * max(1, len(choices)))
        self.found = Found(dict.fromkeys(tables, FLOAT), None, [])

    def run(self) -> Found:
        """Search until no step is left or the budget is spent. ``found`` is up to date if it is interrupted,
        and how to go on is said."""
        with Meter() as self.meter:
            try:
                if any(choice != FLOAT for choice in self.base.values()):
                    self.floor = max(0.0, self._evaluate({}, "base").upper)
                self._descend({unit: self._options(unit) for unit in range(len(self.units))})
            except BudgetSpent:
                self.found.ended = f"the budget of {self.judge.budget} evaluations was spent"
            except KeyboardInterrupt:
                log.info(
                    "interrupted after %d evaluations, which are kept: the same command with hydra.run.dir=%s"
                    " goes on from there",
                    len(self.judge.done),
                    self.judge.journal.parent,
                )
                raise
        return self.found

    def _options(self, unit: int) -> list[Option]:
        """The choices that keep the bound when this unit alone has them, fp32 first, the cheapest last."""
        tables = self.units[unit]
        made = [Option(FLOAT, sum(self.cost(t, FLOAT) for t in tables), self.floor)]
        for choice in self.choices:
            if not all(self.may(table, choice) for table in tables):
                continue
            found = self._evaluate(dict.fromkeys(tables, choice), "sensitivity")
            if found.upper <= self.bound:
                cost = sum(self.cost(table, choice) for table in tables)
                made.append(Option(choice, cost, found.upper))
        return sorted(made, key=lambda option: (-option.cost, option.loss))

    def _evaluate(self, changed: Assignment, step: str) -> Evaluation:
        return self.judge.evaluate({**self.base, **changed}, f"{self.prefix}{step}", self.meter)

    def _descend(self, options: Mapping[int, list[Option]]) -> None:
        """Take steps in the order of their rates, as long as the whole assignment keeps the bound."""
        now = {unit: listed[0] for unit, listed in options.items()}
        open_ = {unit: list(listed) for unit, listed in options.items()}
        at_once = 1
        while True:
            steps = sorted(
                (step for unit in open_ for step in hull_steps(unit, now[unit], open_[unit])),
                key=lambda step: (step.rate, step.unit),
            )
            if not steps:
                return
            tried = dict(now)
            for step in steps[:at_once]:
                tried[step.unit] = step.to
            changed = {table: option.choice for unit, option in tried.items() for table in self.units[unit]}
            found = self._evaluate(changed, "search")
            if found.upper <= self.bound:
                self.found.assignment, self.found.evaluation = changed, found
                self.found.accepted.append(found)
                now, at_once = tried, 2 * at_once
            elif at_once > 1:
                at_once = max(1, min(at_once, len(steps)) // 2)
            else:
                failed = steps[0]
                open_[failed.unit] = [o for o in open_[failed.unit] if o.cost > failed.to.cost]


def hull_steps(unit: int, now: Option, options: Sequence[Option]) -> list[Change]:
    """The steps from ``now`` along the lower convex hull of loss against cost, in order; their rates grow."""
    steps: list[Change] = []
    at = now
    while True:
        cheaper = [o for o in options if o.cost < at.cost]
        if not cheaper:
            return steps
        best = min(cheaper, key=lambda o: ((o.loss - at.loss) / (at.cost - o.cost), o.cost))
        steps.append(Change(unit, best, (best.loss - at.loss) / (at.cost - best.cost)))
        at = best
