"""The search, over losses that are known, and over a slice of the data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from recpipe_low_precision.row_types import FLOAT, Assignment, Choice
from recpipe_low_precision.search import BudgetSpent, Evaluation, Judge, Option, Search, hull_steps

from recpipe import UserError

CHOICES = [Choice(kind) for kind in ("fp16", "int8", "int4", "int2")]
BYTES = {"fp32": 256, "fp16": 128, "int8": 68, "int4": 36, "int2": 20}


class Known:
    """A judge whose losses are given: they add up, times ``factor`` if more than one table is changed."""

    def __init__(
        self, losses: Mapping[str, Mapping[str, float]], budget: int = 1000, factor: float = 1.0
    ) -> None:
        self.slice = SimpleNamespace(tables=dict.fromkeys(losses))
        self.losses, self.budget, self.factor = losses, budget, factor
        self.done: list[Evaluation] = []
        self.expected = budget

    def evaluate(self, assignment: Assignment, step: str, meter: object = None) -> Evaluation:
        if len(self.done) >= self.budget:
            raise BudgetSpent
        changed = {table: choice.kind for table, choice in assignment.items() if choice != FLOAT}
        loss = sum(self.losses[table][kind] for table, kind in changed.items())
        loss *= self.factor if len(changed) > 1 else 1.0
        size = sum(cost(table, choice) for table, choice in assignment.items())
        self.done.append(Evaluation(changed, int(size), 0.8 + loss, loss, loss, loss, step))
        return self.done[-1]


def cost(table: str, choice: Choice) -> float:
    return BYTES[choice.kind] * (1000 if table.startswith("large") else 10)


def kinds(found: Mapping[str, Choice]) -> dict[str, str]:
    return {table: choice.kind for table, choice in found.items()}


def search(judge: Known, bound: float) -> Search:
    return Search(judge, CHOICES, cost, lambda table, choice: True, bound)  # type: ignore[arg-type]


HARMLESS = {"fp16": 0.0, "int8": 0.0, "int4": 1e-6, "int2": 2e-6}
SENSITIVE = {"fp16": 1e-6, "int8": 5e-5, "int4": 9e-4, "int2": 9e-3}


def test_a_sensitive_table_stays_precise_and_harmless_ones_do_not() -> None:
    judge = Known({"large0": HARMLESS, "large1": HARMLESS, "small": SENSITIVE})
    found = search(judge, 2e-4).run()
    assert kinds(found.assignment) == {"large0": "int2", "large1": "int2", "small": "int8"}
    assert found.evaluation is not None
    assert found.evaluation.high <= 2e-4


def test_a_tighter_bound_is_spent_where_it_saves_most() -> None:
    judge = Known({"large": {**HARMLESS, "int2": 8e-5}, "small": {**HARMLESS, "int2": 8e-5}})
    assert kinds(search(judge, 1e-4).run().assignment) == {"large": "int2", "small": "int4"}


def test_it_backs_off_where_losses_do_not_add_up() -> None:
    tables = {f"large{i}": {**HARMLESS, "int4": 1e-5, "int2": 4e-5} for i in range(8)}
    alone = search(Known(tables), 2e-4).run()
    judge = Known(tables, factor=3.0)
    found = search(judge, 2e-4).run()
    assert found.evaluation is not None
    assert found.evaluation.high <= 2e-4
    assert any(evaluation.high > 2e-4 for evaluation in judge.done), "or it never had to"
    assert sum(kind == "int2" for kind in kinds(found.assignment).values()) < sum(
        kind == "int2" for kind in kinds(alone.assignment).values()
    )


def test_nothing_is_accepted_beyond_the_bound() -> None:
    judge = Known({"large": SENSITIVE, "small": SENSITIVE})
    found = search(judge, 0.0).run()
    assert set(kinds(found.assignment).values()) == {"fp32"}
    assert found.evaluation is None


def test_an_improvement_counts_as_none() -> None:
    """Else chance improvements of some tables would pay for the losses of others."""
    lucky = Evaluation({}, 0, 0.8, -6e-4, -11e-4, -1e-4, "search")
    assert lucky.upper == pytest.approx(5e-4)
    harmful = Evaluation({}, 0, 0.8, 1e-4, -1e-4, 3e-4, "search")
    assert harmful.upper == pytest.approx(3e-4)


def test_the_best_so_far_stays_when_the_budget_ends() -> None:
    judge = Known({f"large{i}": HARMLESS for i in range(3)})
    made = search(judge, 1e-3)
    judge.budget = 13
    found = made.run()
    assert len(judge.done) == 13
    assert "budget of 13 evaluations" in found.ended
    assert found.evaluation is judge.done[12]


def test_many_tables_change_together_within_a_small_budget() -> None:
    judge = Known({f"t{i}": HARMLESS for i in range(500)}, budget=100)
    made = search(judge, 1.0)
    assert len(made.units) == 12
    assert sum(map(len, made.units)) == 500
    assert set(kinds(made.run().assignment).values()) == {"int2"}


def test_a_hull_leaves_out_choices_that_pay_less() -> None:
    now = Option(FLOAT, 100, 0.0)
    options = [
        now,
        Option(Choice("int8"), 60, 0.5),
        Option(Choice("int4"), 40, 0.4),
        Option(Choice("int2"), 20, 2.0),
    ]
    steps = hull_steps(0, now, options)
    assert [str(step.to.choice) for step in steps] == ["int4", "int2"]
    assert steps[0].rate < steps[1].rate


@pytest.fixture
def judged(slice_of, tmp_path: Path):
    def made(budget: int = 500, work: str = "w") -> Judge:
        size = lambda assignment: sum(BYTES[c.kind] for c in assignment.values())  # noqa: E731
        return Judge(slice_of(0, 600), size, tmp_path / "evaluations.jsonl", work, budget)

    return made


def test_a_full_disk_is_said_in_one_line(slice_of) -> None:
    with pytest.raises(UserError, match=r"cannot write /dev/full: No space left on device; choose another"):
        Judge(slice_of(0, 600), len, Path("/dev/full"), "w", 1)


def test_an_interrupted_search_goes_on_from_its_evaluations(judged) -> None:
    whole = search(judged(), 1e-3).run()
    again = judged()
    asked = []
    evaluate = again.slice.evaluate
    again.slice.evaluate = lambda assignment: asked.append(assignment) or evaluate(assignment)
    found = search(again, 1e-3).run()
    assert found.assignment == whole.assignment
    assert not asked
    other = judged(work="other")
    assert not other._known, "evaluations of another checkpoint are not taken over"


def test_a_line_that_a_kill_cut_off_is_evaluated_again(judged) -> None:
    first = judged()
    first.evaluate(dict.fromkeys(first.slice.tables, Choice("int8")), "search")
    first.evaluate(dict.fromkeys(first.slice.tables, Choice("int4")), "search")
    text = first.journal.read_text()
    first.journal.write_text(text[:-20])
    assert len(judged()._known) == 1
