"""What plans go by: what each table of a package takes, and what looking it up costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from recpipe.answers.reference import Lookups, read_lookups
from recpipe.answers.score import row_bytes
from recpipe.errors import UserError
from recpipe.plugin import TableInfo

LINE = 64
"""Bytes that are read of memory at least."""


@dataclass(frozen=True)
class TableFacts:
    """One table of a package."""

    info: TableInfo
    row_bytes: int
    net: int
    """The first of the model's lookups that has it: the tables of one collection are one net."""
    lookups: float | None
    """How many of its rows a sample looks up, measured on held-out or training samples; None: not known."""
    counts: Lookups | None
    """How often training looked up each row; None: not known."""

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return self.info.rows * self.row_bytes

    def load(self, first: int, rows: int) -> float:
        """Bytes that a sample reads of these rows, in whole cache lines; ``UserError`` if it was not
        measured."""
        if self.lookups is None:
            raise UserError(
                f"plan=load: the package does not say how often table '{self.info.name}' is looked up; make "
                "it with reference figures (recpipe package, where the data are) or with popularity=true"
            )
        lines = -(-self.row_bytes // LINE) * LINE
        return self.lookups * lines * self.share(first, rows)

    def share(self, first: int, rows: int) -> float:
        """Which share of its lookups is of these rows; without counts, that of rows."""
        if self.counts is None or not self._ends[-1]:
            return rows / self.info.rows
        low, high = np.searchsorted(self.counts[0], [first, first + rows])
        return float((self._ends[high] - self._ends[low]) / self._ends[-1])

    @cached_property
    def _ends(self) -> Any:
        assert self.counts is not None
        return np.concatenate([[0], np.cumsum(self.counts[1])])


def facts_of(package: Path, manifest: Mapping[str, Any]) -> dict[str, TableFacts]:
    """What the ``package`` with this ``manifest`` says of its tables, by name."""
    counted = read_lookups(package)
    samples = manifest.get("popularity", {}).get("samples") or 0
    reference = (manifest.get("reference") or {}).get("features", {})
    each = {name: about["ids_per_sample"] for name, about in reference.items()}
    found = {}
    for name, about in manifest["tables"].items():
        parts = [
            (net, lookup["pooling"], feature)
            for net, lookup in enumerate(manifest["lookups"])
            for feature, table in lookup["parts"]
            if table == name
        ]
        features = tuple(feature for _, _, feature in parts)
        counts = counted.get(name)
        lookups: float | None = None
        if counts is not None and samples:
            lookups = float(counts[1].sum()) / samples
        elif all(feature in each for feature in features):
            lookups = float(sum(each[feature] for feature in features))
        pooled = all(pooling != "none" for _, pooling, _ in parts)
        info = TableInfo(name, about["rows"], about["dimension"], pooled, features)
        net = min((net for net, _, _ in parts), default=0)
        found[name] = TableFacts(info, row_bytes(about), net, lookups, counts)
    return found
