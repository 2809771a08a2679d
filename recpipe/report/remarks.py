"""What stands under the tables of a comparison: what marks mean, faults, what one rounding does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recpipe.report import figures
from recpipe.report.exactness import FACTOR
from recpipe.report.quality import shown_figures


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
        names = shown_figures(content["rows"])
        quality = (f"{key} {figures.signed(rounding[f'{key}_difference'], 6)}" for key in names)
        found.append(
            f"one rounding of every first weight moves {rounding['name']}'s parameters by "
            f"{_both(rounding, '')} and its {', '.join(quality)}; exact rows may differ by "
            f"{_both(rounding, 'allowed_')}, {FACTOR:g} times that"
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
    allowed = f", where rounding explains {_both(rounding, 'allowed_')}" if rounding else ""
    return f"differ by {_both(row, '')}{allowed}"


def _both(figures_of: Mapping[str, Any], kind: str) -> str:
    largest, rms = (figures.scientific(figures_of[f"{kind}{n}_parameter_difference"]) for n in ("max", "rms"))
    return f"{largest} (rms {rms})"
