"""What comparisons of a model's outputs with those of a peer with the same weights come to."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import machine

TOLERANCE = 1e-5
"""How far outputs may be apart."""


@dataclass(frozen=True)
class Compared:
    """A model beside its peer."""

    beside: str
    """The peer."""
    difference: float
    """The largest one of a value."""
    spread: float
    """The standard deviation of the values."""
    differs: str
    """Terms that one side alone has, which do nothing here."""


def tell(models: Iterable[tuple[str, Compared]], file: Path | None) -> None:
    """Print a line for each of the ``models`` as it comes, by name, and write all into ``file``; exit status
    1 if one differs."""
    table = dict[str, Compared]()
    for name, found in models:
        table[name] = found
        print(f"{name:24} {found.difference:.1e} of ±{found.spread:.2f}  {found.differs}", flush=True)
    if file:
        written: dict[str, Any] = {name: asdict(found) for name, found in table.items()}
        file.write_text(json.dumps({"machine": machine(), "models": written}, indent=1) + "\n")
    if any(not found.difference <= TOLERANCE for found in table.values()):
        sys.exit(1)
