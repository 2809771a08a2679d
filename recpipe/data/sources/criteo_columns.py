"""The names of the columns of Criteo's files, in their order."""

from __future__ import annotations

DENSE = tuple(f"I{i}" for i in range(1, 14))
SPARSE = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("label", *DENSE, *SPARSE)
