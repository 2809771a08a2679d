"""Parts of report.json behind the page's plots: a run's intervals, the skew of its lookups, its tables."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Series:
    """A run's intervals of equally many steps (the last may be shorter): in each list a value for each.

    ``step``, ``samples`` and ``seconds`` are those of the whole run at an interval's end, as in ``Point``;
    all others are those of the interval. Those of the tiers, of this rank, are empty if all rows are
    resident.
    """

    step: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """How many steps the interval has."""
    samples: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    samples_per_second: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    """Mean training loss."""
    lookups: list[int] = field(default_factory=list)
    """Ids looked up in tables that are not all resident; empty if the plugin that holds those does not
    tell."""
    hits: list[int] = field(default_factory=list)
    """Those of the ``lookups`` whose row was resident before any row moved for the batch."""
    bytes_read: list[int] = field(default_factory=list)
    bytes_written: list[int] = field(default_factory=list)


@dataclass
class TableMemory:
    """Where one table's rows are; bytes are those of weights and optimizer state."""

    name: str
    rows: int
    dim: int
    weight_bytes: int
    """All rows' weights, as they are in device memory."""
    state_bytes: int
    """All rows' optimizer state."""
    resident_rows: int | None
    """Rows that were resident when the run ended; None if the plugin that holds them does not tell."""
    resident_bytes: int | None
    cold_bytes: int
    """Bytes in the cold tier, which has a place for every row of a table that is not all resident."""
    sharding: str | None = None
    """How it is cut over ranks, if it is; rows and bytes are then those of all ranks."""
