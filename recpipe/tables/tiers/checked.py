"""Checks a policy's decisions when it makes them, so that the error for a wrong one names the policy's
plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.compiled import compiled
from recpipe.common.saved import Damaged, entries, within
from recpipe.plugin.api import Origin
from recpipe.plugin.blame import blaming
from recpipe.plugin.errors import PluginError
from recpipe.plugin.policy import NOTHING, CachePolicy, Placement, RowIds, Slots


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


class CheckedPolicy:
    """Asks ``policy``, which the plugin ``owner`` brought, and refuses invalid placements.

    Each check passes once or twice over the rows that move, using marks in maps that exist anyway.
    """

    def __init__(self, policy: CachePolicy, owner: Origin) -> None:
        self.policy, self.owner = policy, owner
        self._where = policy.space.residents._where
        self._marks = np.zeros(policy.space.slots, np.int32)
        self._moved = NOTHING.slots
        """The slots of ``migrate``'s rows."""

    def migrate(self, rows: RowIds) -> Placement:
        """As ``CachePolicy``."""
        placement = self._asked("migrate", lambda: self.policy.migrate(rows))
        if bool((self._where[placement.rows] >= 0).any()):
            raise self._wrong("migrate", "a row that is resident already")
        self._moved = placement.slots
        return placement

    def admit(self, hits: Slots, misses: RowIds, looked_up: RowIds) -> Placement:
        """As ``CachePolicy``."""
        placement = self._asked("admit", lambda: self.policy.admit(hits, misses, looked_up))
        if len(placement.slots) or len(placement.freed):
            self._check_admitted(placement, hits, misses)
        return placement

    def _check_admitted(self, placement: Placement, hits: Slots, misses: RowIds) -> None:
        vacated = np.concatenate((placement.slots, placement.freed))
        if _meet(self._marks, vacated, self._moved):
            raise self._wrong("admit", "something in a slot that migrate() has just given to another row")
        if _meet(self._marks, vacated, hits):
            raise self._wrong("admit", "something in the slot of a row that this batch looks up")
        if not _within(self._where, placement.rows, misses):
            raise self._wrong("admit", "a row that is not among the misses")

    def _asked(self, call: str, ask: Callable[[], Placement]) -> Placement:
        with blaming(self.owner, f"cache policy, {call}()"):
            placement = ask()
        if placement is not NOTHING:
            self._check(call, placement)
        return placement

    def _check(self, call: str, placement: Placement) -> None:
        if not isinstance(placement, Placement):
            raise self._wrong(call, f"a {type(placement).__name__}; a Placement is asked for")
        slots, rows, freed = placement.slots, placement.rows, placement.freed
        if len(slots) != len(rows):
            raise self._wrong(call, f"{len(rows)} rows in {len(slots)} slots")
        self._check_range(call, slots, len(self._marks), "slot")
        self._check_range(call, freed, len(self._marks), "slot")
        self._check_range(call, rows, len(self._where), "row")
        if _repeats(self._marks, np.concatenate((slots, freed))):
            raise self._wrong(call, "something in a slot twice")
        if _repeats(self._where, rows):
            raise self._wrong(call, "a row twice")

    def _check_range(self, call: str, numbers: Slots | RowIds, most: int, what: str) -> None:
        if not isinstance(numbers, np.ndarray) or numbers.ndim != 1:
            raise self._wrong(call, f"{what}s that are no array of one dimension")
        if not np.issubdtype(numbers.dtype, np.integer):
            raise self._wrong(call, f"{what}s of type {numbers.dtype}")
        if not len(numbers):
            return
        least, last = _span(numbers)
        if least < 0 or last >= most:
            raise self._wrong(call, f"{what} {least if least < 0 else last}, and there are {most}")

    def _wrong(self, call: str, what: str) -> PluginError:
        return PluginError(f"plugin {self.owner}: {type(self.policy).__name__}.{call}() placed {what}")


# Each of these marks places of a map, which is as it was before when it returns.


@compiled
def _repeats(map_: NDArray[np.int32], numbers: Slots | RowIds) -> bool:
    """Whether one of ``numbers`` occurs twice."""
    before = np.empty(len(numbers), np.int32)
    marked = 0
    while marked < len(numbers) and map_[numbers[marked]] != MARK:
        before[marked] = map_[numbers[marked]]
        map_[numbers[marked]] = MARK
        marked += 1
    for i in range(marked):
        map_[numbers[i]] = before[i]
    return marked < len(numbers)


@compiled
def _meet(map_: NDArray[np.int32], distinct: Slots, others: Slots) -> bool:
    """Whether one of ``others`` is among the ``distinct`` numbers; at these, the map is 0."""
    for number in distinct:
        map_[number] = MARK
    meet = False
    for other in others:
        meet |= map_[other] == MARK
    for number in distinct:
        map_[number] = 0
    return meet


@compiled
def _within(map_: NDArray[np.int32], rows: RowIds, misses: RowIds) -> bool:
    """Whether ``rows`` are among the distinct ``misses``."""
    before = np.empty(len(misses), np.int32)
    for i in range(len(misses)):
        before[i] = map_[misses[i]]
        map_[misses[i]] = MARK
    are = True
    for row in rows:
        are &= map_[row] == MARK
    for i in range(len(misses)):
        map_[misses[i]] = before[i]
    return are


@compiled
def _span(numbers: Slots | RowIds) -> tuple[int, int]:
    """The least and the greatest of ``numbers``."""
    least = most = numbers[0]
    for number in numbers:
        least, most = min(least, number), max(most, number)
    return least, most
