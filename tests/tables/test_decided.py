"""A plugin's placements are checked when they are given, and a wrong one names the plugin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recpipe.plugin.bags import Bags, RowIds, Slots
from recpipe.plugin.calls import Origin, Owned
from recpipe.plugin.errors import PluginError
from recpipe.plugin.policy import NOTHING, Cache, CachePolicy, Placement, RowSpace
from recpipe.tables.tiers.planner import TierPlanner

ACME = Origin("acme", "recpipe-acme", "2.3.0")


class Places(CachePolicy):
    """Fills four slots in the first batch; in the second one it answers as it is told."""

    def __init__(self, moved: Placement = NOTHING, admitted: Any = NOTHING) -> None:
        super().__init__(RowSpace(np.array([0, 20]), 6))
        self.moved, self.admitted, self.batch = moved, admitted, 0

    def migrate(self, rows: RowIds) -> Placement:
        self.batch += 1
        return self.moved if self.batch == 2 else NOTHING

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Any:
        return self.admitted if self.batch == 2 else Placement(np.arange(4, dtype=np.int32), misses[:4])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Tables(Cache):
    def policy(self, space: RowSpace) -> CachePolicy:
        raise NotImplementedError


def bags(*rows: int) -> Bags:
    return Bags(np.array(rows), np.arange(len(rows) + 1), len(rows))


def placed(slots: list[int], rows: list[int], freed: list[int] | None = None) -> Placement:
    return Placement(np.array(slots, np.int32), np.array(rows, np.int64), np.array(freed or [], np.int32))


def planned(policy: Places) -> None:
    """Rows 0 to 3 are in slots 0 to 3; the second batch finds rows 1 and 2 there and misses 7, 8 and 9."""
    planner = TierPlanner(policy, carry=True, owner=Owned.of(ACME, Tables()))
    planner.plan(bags(0, 1, 2, 3))
    planner.commit()
    planner.plan(bags(1, 2, 7, 8, 9, 7))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (placed([1], [7]), "something in the slot of a row that this batch looks up"),
        (placed([4], [7], freed=[2]), "something in the slot of a row that this batch looks up"),
        (placed([4], [11]), "a row that is not among the misses"),
        (placed([4], [1]), "a row that is not among the misses"),
        (placed([4, 4], [7, 8]), "something in a slot twice"),
        (placed([4], [7], freed=[4]), "something in a slot twice"),
        (placed([4, 5], [7, 7]), "a row twice"),
        (placed([6], [7]), "slot 6, and there are 6"),
        (placed([-1], [7]), "slot -1, and there are 6"),
        (placed([4], [20]), "row 20, and there are 20"),
        (placed([4], [7, 8]), "2 rows in 1 slots"),
        (Placement(np.array([4.0]), np.array([7])), "slots of type float64"),  # type: ignore[arg-type]
        (Placement(np.array([[4]]), np.array([7])), "slots that are no array of one dimension"),
        (Placement([4], np.array([7])), "slots that are no array of one dimension"),  # type: ignore[arg-type]
        (None, "a NoneType; a Placement is asked for"),
    ],
)
def test_a_wrong_placement_names_the_plugin(wrong: Any, said: str) -> None:
    with pytest.raises(
        PluginError, match=r"plugin acme \(recpipe-acme 2.3.0\), part acme.Tables: Places.admit\(\) placed"
    ) as fault:
        planned(Places(admitted=wrong))
    assert str(fault.value).endswith(said)


def test_a_row_that_is_resident_cannot_move_in() -> None:
    with pytest.raises(PluginError, match=r"Places.migrate\(\) placed a row that is resident already"):
        planned(Places(moved=placed([5], [3])))


def test_a_slot_gets_one_row_for_a_batch() -> None:
    twice = Places(placed([5], [12]), placed([4, 5], [7, 8]))
    with pytest.raises(PluginError, match=r"admit\(\) placed something in a slot that migrate\(\) has just"):
        planned(twice)
    planned(Places(placed([5], [12]), placed([4, 0], [7, 8])))


@pytest.mark.parametrize("right", [placed([4, 0], [9, 7]), placed([5], [8], freed=[3]), placed([], [], [0])])
def test_right_ones_are_carried_out(right: Placement) -> None:
    policy = Places(admitted=right)
    planned(policy)
    residents = policy.space.residents
    np.testing.assert_array_equal(residents.row_of_slot[right.slots], right.rows)
    np.testing.assert_array_equal(residents.slot_of(right.rows), right.slots)
    assert (residents.row_of_slot[right.freed] == -1).all()


def test_a_fault_of_the_policy_has_the_plugins_name() -> None:
    class Breaks(Places):
        def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
            raise ZeroDivisionError("x")

    said = r"acme \(recpipe-acme 2.3.0\), part acme.Tables.policy.admit, raised ZeroDivisionError: x"
    with pytest.raises(PluginError, match=said):
        planned(Breaks())
