"""Checks that parts of a table cover all of it without overlaps."""

from __future__ import annotations

from collections.abc import Iterable

Part = tuple[int, int, int, int]
"""First row, first column, rows, columns."""


def tiles(parts: Iterable[Part], rows: int, columns: int) -> bool:
    """Whether each of ``rows`` x ``columns`` values is in exactly one of ``parts``."""
    area = 0
    reached: list[Part] = []
    for part in sorted(p for p in parts if p[2] and p[3]):
        row, column, height, width = part
        if min(part) < 0 or row + height > rows or column + width > columns:
            return False
        reached = [p for p in reached if p[0] + p[2] > row]
        if any(p[1] < column + width and column < p[1] + p[3] for p in reached):
            return False
        reached.append(part)
        area += height * width
    return area == rows * columns
