"""Whether rows that declare themselves exact are: how far they are off, beside what one rounding does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recpipe.report import figures

FACTOR = 10.0
"""How many times what one rounding does an exact row may differ.

Rows that add float sums in another order came to 0.4 to 1.2 times its root mean square (default recipe, 5 to
391 steps) and up to twice its largest difference. That one jumps: under Adagrad a gradient next to zero that
changes sign moves a weight by two learning rates, in one run some steps before the other.
"""
FLOOR = 2.0**-23
"""Least difference that is allowed for: float32's spacing at 1."""


@dataclass(frozen=True)
class Difference:
    """How far the parameters of two runs are apart: tables, optimizer state and dense part together."""

    largest: float
    """Largest absolute difference of any."""
    rms: float
    """Root of the mean square of all differences: what shifts many parameters shows here first."""

    def within(self, rounding: Difference | None) -> bool | None:
        """Whether an exact row may differ so from the base row.

        ``rounding`` is the difference that one rounding of every first weight makes to the base row;
        without it, equal parameters alone are judged and the rest is None.
        """
        if self.largest == 0:
            return True
        if rounding is None:
            return None
        return self.largest <= limit(rounding.largest) and self.rms <= limit(rounding.rms)


def limit(rounding: float) -> float:
    """What an exact row may differ by where one rounding makes a difference of ``rounding``."""
    return max(FACTOR * rounding, FLOOR)


def marked_name(row: Mapping[str, Any]) -> str:
    """The name of a row of compare.json, with ``*`` where it alters what is trained and ``!`` at a fault."""
    return str(row["name"]) + ("*" if row["altered"] else "") + ("!" if _faults(row, None) else "")


def notes(content: Mapping[str, Any]) -> list[str]:
    """Lines under the tables of compare.json's ``content``: what ``*`` and ``!`` mean, what rounding does."""
    found = [
        f"* {row['name']} alters {', '.join(row['altered'])}: its parameters need not equal the other rows'"
        for row in content["rows"]
        if row["altered"]
    ]
    found += [f"! {fault}" for fault in faults(content)]
    rounding = content["rounding"]
    if rounding is not None:
        quality = (f"{key} {figures.signed(rounding[f'{key}_difference'], 6)}" for key in figures.QUALITY)
        found.append(
            f"one rounding of every first weight moves {rounding['name']}'s parameters by "
            f"{_both(rounding, '')} and its {', '.join(quality)}; exact rows may differ by "
            f"{_both(rounding, 'allowed_')} ({FACTOR:g} times that)"
        )
    return found


def faults(content: Mapping[str, Any]) -> list[str]:
    """A line for each row that is not what it should be: failed, or not exact though it declares to be."""
    return [line for row in content["rows"] for line in _faults(row, content["rounding"])]


def _faults(row: Mapping[str, Any], rounding: Mapping[str, Any] | None) -> list[str]:
    found = []
    if row["failed"] is not None:
        found.append(str(row["failed"]))
    if row["exact_as_declared"] is False:
        found.append(f"row '{row['name']}' declares itself exact, but its parameters {_how(row, rounding)}")
    return found


def _how(row: Mapping[str, Any], rounding: Mapping[str, Any] | None) -> str:
    if row["not_comparable"] is not None:
        return f"cannot be compared: {row['not_comparable']}"
    allowed = f"; one rounding is allowed {_both(rounding, 'allowed_')}" if rounding else ""
    return f"differ by {_both(row, '')}{allowed}"


def _both(figures_of: Mapping[str, Any], kind: str) -> str:
    largest, rms = (figures.scientific(figures_of[f"{kind}{n}_parameter_difference"]) for n in ("max", "rms"))
    return f"{largest} (rms {rms})"
