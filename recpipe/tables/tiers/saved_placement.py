"""Saves in a checkpoint which rows are resident, so that a resumed run makes the same decisions."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.saved import entries, residents
from recpipe.tables.tiers.decided import Decision, check_decision
from recpipe.tables.tiers.planner import TierPlanner

_STATE = {
    "policy": str,
    "slots": int,
    "row_of_slot": NDArray[np.int64],
    "state": dict[str, Any],
}
"""What a checkpoint has of a group's placement, and the types."""
RANKS = "ranks"
"""What it has instead where the group is sharded: each rank's tiers."""


def placement_state(planner: TierPlanner) -> dict[str, Any]:
    """The resident rows, the policy's state, and its decision for the next batch."""
    return {
        "policy": type(planner.policy).__name__,
        "slots": planner.space.slots,
        "row_of_slot": planner.row_of_slot.copy(),
        "state": copy.deepcopy(planner.policy.state_dict()),
        "decided": None if planner.decided is None else planner.decided.to_state(),
    }


def same_place(planner: TierPlanner, state: Mapping[str, Any]) -> bool:
    """Whether ``state`` is of this policy and budget, of a whole group, and not of a recpipe before 0.2."""
    mine = {"policy": type(planner.policy).__name__, "slots": planner.space.slots}
    return "decided" in state and all(state.get(key) == value for key, value in mine.items())


def check_placement(planner: TierPlanner, state: Mapping[str, Any]) -> None:
    """``Damaged`` on what ``placement_state`` cannot have given; that of shards is not looked at."""
    if RANKS in state:
        return
    entries(_STATE, state)
    if same_place(planner, state):
        residents(state, "row_of_slot", planner.space.slots, planner.space.rows)
        planner.policy.check_state(state["state"])
        if state["decided"] is not None:
            decided = entries({"decided": dict[str, Any]}, state)["decided"]
            check_decision(decided, state["row_of_slot"], planner.space.rows)


def of_whole(state: Mapping[str, Any]) -> bool:
    """Whether ``state`` is of a group that was not sharded."""
    return RANKS not in state and _STATE.keys() <= state.keys()


def restore(planner: TierPlanner, state: Mapping[str, Any]) -> None:
    """Continue with the saved resident rows in their slots and the saved state of the policy."""
    planner.restore(state["row_of_slot"])
    planner.policy.load_state_dict(state["state"])
    if state["decided"] is not None:
        planner.decided = Decision.from_state(state["decided"])
