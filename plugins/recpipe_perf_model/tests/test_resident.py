"""The plain step's tasks by hand: what follows what, what overlaps, and what bounds it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from recpipe_perf_model.step.amounts import Amounts, Factors
from recpipe_perf_model.step.capture import Captured, GroupLookups, Part, TableLookups, captured
from recpipe_perf_model.step.step import Estimate, Step, divided, predict_resident, resident_tasks
from recpipe_perf_model.step.walk import walk
from recpipe_perf_model.tests.synthetic import loops, profile
from recpipe_perf_model.tests.test_capture import BATCH, SAMPLES, dlrm

from recpipe.errors import UserError

MS = 1e-3


def exactly(ms: float) -> Estimate:
    return Estimate(ms * MS, ms * MS, ms * MS)


def part(samples: int) -> Part:
    return Part(samples, 1, ((), (), (), ()), (0, 0), 0, 0, 0)


CAPTURED = Captured(
    128,
    part(128),
    (),
    (GroupLookups(16, "sgd", True, (TableLookups(100, 128, 128, 90),)),),
    0,
    (4, 1000),
)
SHARED = replace(CAPTURED, shares=(part(64), part(64)))


class Fixed(Amounts):
    """A machine on which each part of a step takes a given time, in milliseconds."""

    def __init__(self, **times: float) -> None:
        self.threads, self.factors = 2, Factors()
        self.groups = 1
        self.times = {"look": 1.0, "dense": 4.0, "update": 2.0, "optimizer": 1.0, "loop": 0.5} | times

    def among(self, touched: float) -> Fixed:
        return self

    def overhead(self, kind: str, times: float = 1.0) -> float:
        return MS * self.times.get(kind, 0.0) * times

    def pipeline(self, captured: Any) -> float:
        return self.overhead("step")

    def operator(self, operator: Any, threads: float) -> float:
        return 0.0

    def stages(self, part: Part) -> list[float]:
        each = 1 if part.samples == 128 else self.times.get("each", 0.5)
        return [MS * self.times["dense"] / 4 * each] * 4

    def lookups(self, groups: Any, kind: str, threads: float | None = None) -> float:
        whole = MS * self.times["look" if kind == "lookup forward" else "update"]
        return whole * len(groups) / self.groups

    def optimizer(self, name: str, sizes: Any, threads: float) -> float:
        return MS * self.times["optimizer"]


def milliseconds(step: Step, amounts: Amounts) -> float:
    return predict_resident(step, amounts).step.seconds / MS


def test_without_other_threads_a_step_is_the_sum_of_its_parts() -> None:
    found = predict_resident(Step(CAPTURED), Fixed())
    assert found.step.seconds / MS == pytest.approx(1 + 4 + 2 + 1 + 0.5)
    assert sum(found.walked.critical.values()) == pytest.approx(found.step.seconds)
    assert found.step.low < found.step.seconds < found.step.high
    assert "add up gradients" not in found.tasks


def test_the_update_beside_the_optimizer_takes_the_longer_of_both() -> None:
    assert milliseconds(Step(CAPTURED, beside=True), Fixed()) == pytest.approx(1 + 4 + 2 + 0.5)
    assert milliseconds(Step(CAPTURED, beside=True), Fixed(optimizer=3.0)) == pytest.approx(1 + 4 + 3 + 0.5)


def test_a_short_update_does_not_go_to_another_thread() -> None:
    assert milliseconds(Step(CAPTURED, beside=True), Fixed(update=1.0)) == pytest.approx(1 + 4 + 1 + 1 + 0.5)


def test_groups_of_tables_are_divided_among_threads() -> None:
    """Of two groups with 2 ms of lookups each and 4 ms of update, the other thread takes one. It begins the
    update at once, and this one after the optimizer's millisecond."""
    two = replace(CAPTURED, groups=CAPTURED.groups * 2)
    machine = Fixed(look=4.0, update=8.0)
    machine.groups = 2
    step = Step(two, beside=True)
    found = predict_resident(step, machine)
    assert found.step.seconds / MS == pytest.approx(2 + 4 + 1 + 4 + 0.5)
    assert {"look up beside", "table update of the last groups"} <= found.tasks.keys()
    apart = walk(resident_tasks(step, machine, in_one=True), 2).step_seconds
    assert apart / MS == pytest.approx(4 + 4 + 8 + 0.5)
    # Without threads beside, and for work that is too short for them, nothing is divided.
    assert milliseconds(Step(two), machine) == pytest.approx(4 + 4 + 8 + 1 + 0.5)
    machine.times |= {"look": 1.0, "update": 1.0}
    assert milliseconds(step, machine) == pytest.approx(1 + 4 + 1 + 1 + 0.5)


def test_who_takes_which_work() -> None:
    assert divided([3.0, 1.0, 1.0], 2) == [[0], [2, 1]]
    assert divided([3.0, 1.0, 1.0], 2, ahead=9.0) == [[0, 1, 2], []]
    assert divided([1.0, 1.0], 4) == [[0], [1], [], []]


def test_reading_is_hidden_until_it_takes_longer_than_what_it_is_behind() -> None:
    assert milliseconds(Step(CAPTURED, reading=exactly(2.0)), Fixed()) == pytest.approx(8.5)
    slow = predict_resident(Step(CAPTURED, reading=exactly(30.0)), Fixed())
    assert slow.step.seconds / MS > 30
    assert slow.walked.critical["read"] > 0.9 * slow.step.seconds * 30 / 33


def test_cores_that_share_a_batch_halve_its_dense_part() -> None:
    """Each has half of 4 ms; the second core's part before the rows runs beside the lookups."""
    found = predict_resident(Step(SHARED, shared=True), Fixed())
    assert "add up gradients" in found.tasks
    assert found.step.seconds / MS == pytest.approx(1 + 2 + 2 + 1 + 0.5)


def test_no_part_makes_a_step_shorter_by_taking_longer() -> None:
    step = Step(SHARED, beside=True, reading=exactly(1.0), shared=True)
    base = milliseconds(step, Fixed())
    for name in ("look", "dense", "update", "optimizer", "loop", "step", "hand over", "wake"):
        assert milliseconds(step, Fixed(**{name: Fixed().times.get(name, 0.0) + 1.0})) >= base - 1e-9, name


def test_a_captured_model_on_a_machine_that_does_not_exist() -> None:
    """A machine whose loop takes ten times as long has steps that are so much longer."""
    amounts = Amounts(profile())
    step = Step(captured(dlrm(), BATCH, [16, SAMPLES]), shared=False)
    found = predict_resident(step, amounts)
    slower = predict_resident(step, Amounts(profile(loop=10.0)))
    assert slower.step.seconds - found.step.seconds == pytest.approx(9 * 2e-4)
    assert found.notes == ()
    large = replace(step, captured=replace(step.captured, parameters=(10, 1_000_000)))
    sgd, adam = (replace(large, optimizer=name) for name in ("SGD", "Adam"))
    times = [predict_resident(each, amounts).step.seconds for each in (sgd, adam)]
    assert found.step.seconds < times[0] < times[1]


def test_what_is_not_sure_is_said() -> None:
    unused = GroupLookups(16, "sgd", True, (TableLookups(100, 128, 0, 0),))
    found = predict_resident(Step(replace(CAPTURED, groups=(unused,), late=7)), Fixed())
    assert "7 ids that the model makes itself are not in the time of lookups" in found.notes
    assert "1 tables are not looked up in the batch that was captured" in found.notes


def test_lookups_of_a_table_that_is_never_looked_up_cost_a_call_at_most() -> None:
    amounts = Amounts(profile())
    none = GroupLookups(16, "sgd", True, (TableLookups(100, 0, 0, 0),))
    some = replace(none, tables=(TableLookups(100, 512, 512, 99),))
    times = [amounts.lookups([group], "lookup forward") for group in (none, some)]
    assert 0 <= times[0] < times[1]
    assert np.isfinite(times).all()
    assert amounts.lookups([], "lookup update") == 0
    bare = profile()
    by_loops, measured = (
        replace(some, by_loops=True),
        replace(bare, samples={**bare.samples, "loops": tuple(loops(bare))}),
    )
    assert Amounts(measured).lookups([by_loops], "lookup forward", 1) == pytest.approx(times[1] / 2)
    assert Amounts(measured).lookups([by_loops], "lookup forward") == pytest.approx(times[1] / 4)
    with pytest.raises(UserError, match="no samples of lookups: run recpipe perf calibrate"):
        amounts.lookups([by_loops], "lookup forward")
    unmeasured = Amounts(replace(bare, samples={**bare.samples, "lookups": ()}))
    with pytest.raises(UserError, match="no samples of lookups: run recpipe perf calibrate"):
        unmeasured.lookups([some], "lookup forward")
