"""Evaluates assignments of types for real, remembers every evaluation, and counts them against a budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from recpipe import UserError
from recpipe.kit import Meter
from recpipe_low_precision.bootstrap import PairedBootstrap
from recpipe_low_precision.row_types import FLOAT, Assignment
from recpipe_low_precision.slices import Slice


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
        self._begin(work)

    def _begin(self, work: str) -> None:
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
            self._known[_key(found.types)] = found

    def _write(self, line: str, mode: str) -> None:
        try:
            with self.journal.open(mode) as out:
                out.write(line)
        except OSError as fault:
            raise UserError(
                f"cannot write {self.journal}: {fault.strerror}; choose another run directory, "
                "hydra.run.dir=DIRECTORY (from Python: output=DIRECTORY)"
            ) from fault

    @property
    def left(self) -> int:
        """Evaluations that may still be made."""
        return self.budget - len(self.done)

    def evaluate(self, assignment: Assignment, step: str, meter: Meter | None = None) -> Evaluation:
        """The difference that ``assignment`` makes; ``BudgetSpent`` if no evaluation is left."""
        types = {table: str(choice) for table, choice in assignment.items() if choice != FLOAT}
        key = _key(types)
        if self.left <= 0:
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


def _key(types: dict[str, str]) -> str:
    return json.dumps(types, sort_keys=True)
