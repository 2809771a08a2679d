"""A policy's decisions for a batch: what is wrong with them, and how they are saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled
from recpipe.common.saved import Damaged, entries, within
from recpipe.plugin.bags import RowIds, Slots
from recpipe.plugin.policy import NOTHING, CachePolicy, Placement


@dataclass(frozen=True)
class Decision:
    """A policy's decision for one batch, which looks up ``rows`` (int64 [L], with repeats, or distinct and
    sorted)."""

    moved: Placement
    admitted: Placement
    rows: RowIds

    def is_of(self, rows: RowIds) -> bool:
        """Whether the decision is for the batch that looks up ``rows``, each once or with repeats."""
        if self.rows is rows or np.array_equal(self.rows, rows):
            return True
        # One of the two may be of a GPU, if a run goes on from a checkpoint on another device.
        return len(self.rows) != len(rows) and np.array_equal(np.unique(self.rows), np.unique(rows))

    def to_state(self) -> dict[str, Any]:
        """The decision as arrays, for a checkpoint."""
        parts = {"moved": self.moved, "admitted": self.admitted}
        fields = {f"{name}_{field}": getattr(p, field) for name, p in parts.items() for field in _FIELDS}
        return {"rows": self.rows, **fields}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Decision:
        """Make a decision from ``to_state``'s result."""
        moved, admitted = (
            Placement(*(state[f"{name}_{field}"] for field in _FIELDS)) for name in ("moved", "admitted")
        )
        return cls(moved, admitted, state["rows"])


_FIELDS = ("slots", "rows", "freed")
_HINTS: dict[str, Any] = {
    "slots": NDArray[np.int32],
    "rows": NDArray[np.int64],
    "freed": NDArray[np.int32],
}


def check_decision(state: Mapping[str, Any], row_of_slot: RowIds, rows: int) -> None:
    """``Damaged`` if ``state`` cannot be a result of ``Decision.to_state`` while the rows of ``row_of_slot``
    are resident."""
    hints = {f"{name}_{field}": _HINTS[field] for name in ("moved", "admitted") for field in _FIELDS}
    found = entries({"rows": NDArray[np.int64], **hints}, state, "decided")
    for key, values in found.items():
        size = len(found[key.replace("_rows", "_slots")]) if key.endswith("_rows") else None
        within(found, key, 0, rows if key.endswith("rows") else len(row_of_slot), size=size)
        if key != "rows" and len(np.unique(values)) < len(values):
            raise Damaged(f"decided.{key} has a number twice")
    held = row_of_slot.copy()
    for name in ("moved", "admitted"):
        slots, placed, freed = (found[f"{name}_{field}"] for field in _FIELDS)
        vacated = np.concatenate((slots, freed))
        looked_up = np.isin(held[vacated], found["rows"]).any() or not np.isin(placed, found["rows"]).all()
        if np.isin(placed, held).any() or (name == "admitted" and looked_up):
            raise Damaged(f"decided.{name}_rows cannot get these slots")
        held[freed], held[slots] = -1, placed


MARK = np.iinfo(np.int32).min
"""The mark of a row that is in no tier."""


class PlacementCheck:
    """Says what is wrong with the placements of a plugin's ``policy``, for ``Owned.call``.

    One pass over the rows that move and the slots that are looked up checks all, with marks in maps that
    exist anyway.
    """

    def __init__(self, policy: CachePolicy) -> None:
        self._kind = type(policy).__name__
        self._where = policy.space.residents._where
        self._marks = np.zeros(policy.space.slots, np.bool_)
        self._moved = NOTHING.slots
        """The slots of ``migrate``'s rows."""

    def wrong(self, method: Callable[..., Placement], told: Sequence[Any], made: object) -> str | None:
        """What is wrong with what ``method`` returned when it was ``told`` so; None: nothing."""
        admits = method is CachePolicy.admit
        hits, misses = told[:2] if admits else (NOTHING.slots, NOTHING.rows)
        said = None
        if not isinstance(made, Placement):
            said = f"a {type(made).__name__}; a Placement is asked for"
        elif made is not NOTHING:
            said = self._misplaced(made, hits, misses, admits)
        if said is not None:
            return f": {self._kind}.{method.__name__}() placed {said}"
        if isinstance(made, Placement) and not admits:
            self._moved = made.slots
        return None

    def _misplaced(self, placement: Placement, hits: Slots, misses: RowIds, admits: bool) -> str | None:
        slots, rows, freed = placement.slots, placement.rows, placement.freed
        if len(slots) != len(rows):
            return f"{len(rows)} rows in {len(slots)} slots"
        for numbers, what in ((slots, "slot"), (freed, "slot"), (rows, "row")):
            if not isinstance(numbers, np.ndarray) or numbers.ndim != 1:
                return f"{what}s that are no array of one dimension"
            if not np.issubdtype(numbers.dtype, np.integer):
                return f"{what}s of type {numbers.dtype}"
        if not len(slots) + len(freed):
            return None
        wrong, number = _fault(
            self._marks, self._where, slots, freed, rows, self._moved, hits, misses, admits
        )
        most = len(self._where) if wrong == NO_ROW else len(self._marks)
        return FAULTS[wrong].format(number=number, most=most) if wrong else None


NO_SLOT, NO_ROW, SLOT_TWICE, ROW_TWICE, MOVED, LOOKED_UP, NOT_MISSED, RESIDENT = range(1, 9)
FAULTS = {
    NO_SLOT: "slot {number}, and there are {most}",
    NO_ROW: "row {number}, and there are {most}",
    SLOT_TWICE: "something in a slot twice",
    ROW_TWICE: "a row twice",
    MOVED: "something in a slot that migrate() has just given to another row",
    LOOKED_UP: "something in the slot of a row that this batch looks up",
    NOT_MISSED: "a row that is not among the misses",
    RESIDENT: "a row that is resident already",
}


@compiled
def _fault(
    marks: NDArray[np.bool_],
    where: NDArray[np.int32],
    slots: Slots,
    freed: Slots,
    rows: RowIds,
    moved: Slots,
    hits: Slots,
    misses: RowIds,
    admits: bool,
) -> tuple[int, int]:
    """What is wrong with a placement, a key of ``FAULTS``, and the number of it; 0: nothing.

    ``marks`` (False for each slot) and ``where`` are as they were before when it returns. ``admits``: it is
    ``admit``'s; else ``migrate``'s.
    """
    # Misses are distinct rows that exist, in no slot, and most policies place the first of them.
    first_misses = admits and len(rows) <= len(misses)
    if first_misses:
        for i in range(len(rows)):
            first_misses = first_misses and rows[i] == misses[i]
    for slot in slots:
        if slot < 0 or slot >= len(marks):
            return NO_SLOT, slot
    for slot in freed:
        if slot < 0 or slot >= len(marks):
            return NO_SLOT, slot
    for row in rows:
        if row < 0 or row >= len(where):
            return NO_ROW, row

    wrong = marked = 0
    for i in range(len(slots) + len(freed)):
        slot = slots[i] if i < len(slots) else freed[i - len(slots)]
        if marks[slot]:
            wrong = SLOT_TWICE
            break
        marks[slot] = True
        marked += 1
    if admits and not wrong:
        for slot in moved:
            if marks[slot]:
                wrong = MOVED
    if admits and not wrong:
        for slot in hits:
            if marks[slot]:
                wrong = LOOKED_UP
    for i in range(marked):
        marks[slots[i] if i < len(slots) else freed[i - len(slots)]] = False
    if wrong or first_misses:
        return wrong, 0

    before = np.empty(len(rows), np.int32)
    marked = found = 0
    for i in range(len(rows)):
        if where[rows[i]] == MARK:
            wrong = ROW_TWICE
            break
        before[i] = where[rows[i]]
        found += before[i] >= 0
        where[rows[i]] = MARK
        marked += 1
    if not admits and not wrong and found:
        wrong = RESIDENT
    if admits and not wrong:
        found = 0
        for miss in misses:  # they are distinct
            found += where[miss] == MARK
        if found < len(rows):
            wrong = NOT_MISSED
    for i in range(marked):
        where[rows[i]] = before[i]
    return wrong, 0
