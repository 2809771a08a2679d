"""Chooses a type for each table: sensitivities first, then the best exchange rate, with back-off.

The smallest model within a bound on the loss of normalized entropy is a multiple-choice knapsack. If losses
added up, walking along each table's convex hull (loss against bytes) in the order of loss per byte saved
would solve its linear relaxation. They add up only nearly, so every step is evaluated for real. Steps are
tried several at a time, twice as many after each success and half as many after a failure; a single step that
fails is dropped, and the table's next larger choice is tried instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from recpipe.kit import Meter
from recpipe_low_precision.judge import BudgetSpent, Evaluation, Judge
from recpipe_low_precision.row_types import FLOAT, Assignment, Choice

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
        meter: Meter | None,
        choices: Sequence[Choice],
        cost: Cost,
        may: Callable[[str, Choice], bool],
        bound: float,
        names: Sequence[str] | None = None,
        base: Assignment | None = None,
    ) -> None:
        self.judge, self.choices, self.cost, self.may = judge, choices, cost, may
        self.bound, self.meter = bound, meter
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
        """Search until no step is left or the budget is spent. ``found`` is up to date if it is
        interrupted."""
        try:
            if any(choice != FLOAT for choice in self.base.values()):
                self.floor = max(0.0, self._evaluate({}, "base").upper)
            options = {unit: self._options(unit) for unit in range(len(self.units))}
            self._descend(options)
        except BudgetSpent:
            self.found.ended = f"the budget of {self.judge.budget} evaluations was spent"
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
            if self._accept(tried):
                now, at_once = tried, 2 * at_once
            elif at_once > 1:
                at_once = max(1, min(at_once, len(steps)) // 2)
            else:
                failed = steps[0]
                open_[failed.unit] = [o for o in open_[failed.unit] if o.cost > failed.to.cost]

    def _accept(self, tried: Mapping[int, Option]) -> bool:
        """Evaluate an assignment, and keep it if it is within the bound."""
        changed = {table: option.choice for unit, option in tried.items() for table in self.units[unit]}
        found = self._evaluate(changed, "search")
        if found.upper > self.bound:
            return False
        self.found.assignment, self.found.evaluation = dict(changed), found
        self.found.accepted.append(found)
        return True


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
