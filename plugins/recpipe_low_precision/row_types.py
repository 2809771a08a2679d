"""How a table is kept in low precision: the type of its rows, and which of them are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """How a table is kept: the type of its rows, and whether rows that training never looked up are left
    out."""

    kind: str
    pruned: bool = False

    def __str__(self) -> str:
        return f"{self.kind} pruned" if self.pruned else self.kind


FLOAT = Choice("fp32")
Assignment = Mapping[str, Choice]
"""A choice for each table."""
