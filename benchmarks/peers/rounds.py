"""Runs in turn, each in a process of its own, and what they come to against the reference."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Result = dict[str, Any]


class Failed(Exception):
    """A run ended badly; its last words."""


def result_of(command: Sequence[str]) -> Result:
    """The JSON object that ``command`` prints last; libraries may say more after it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise Failed(words[-1] if words else f"exit status {done.returncode} and no word")
    found: Result = json.loads(lines[-1])
    return found


def in_turn(
    commands: Mapping[str, Sequence[str]], repetitions: int, reference: str
) -> dict[str, list[Result]]:
    """Every command's results, A B C A B C ...; a round before them is not counted.

    A row that fails is left out from then on, with a line that says so; the reference must not fail.
    """
    going = dict(commands)
    found: dict[str, list[Result]] = {name: [] for name in going}
    for number in range(repetitions + 1):
        for name in list(going):
            try:
                result = result_of(going[name])
            except Failed as fault:
                if name == reference:
                    sys.exit(f"{name}, the reference, failed: {fault}")
                print(f"{name} is left out: it failed: {fault}", flush=True)
                del going[name], found[name]
                continue
            if number:
                found[name].append(result)
    return found


def ratios(speeds: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Of each round: the same round's reference saw the same machine."""
    return [mine / its for mine, its in zip(speeds, reference, strict=True)]


def spread(values: Sequence[float]) -> str:
    """Median, lowest and highest."""
    return f"{median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def lines(speeds: Mapping[str, Sequence[float]], reference: str) -> list[str]:
    """A table: samples per second and the ratio to the reference, by row."""
    shown = [f"{'':<28} {'samples/s':>12}   ratio to {reference}"]
    for name, values in speeds.items():
        ratio = spread(ratios(values, speeds[reference]))
        shown.append(f"{name:<28} {median(values):>12,.0f}   {ratio}")
    return shown
