"""What a plugin is told: the run before it begins, and at its end what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from recpipe.plugin.bags import Bags
    from recpipe.plugin.batch import Batch


@dataclass(frozen=True)
class TableInfo:
    """One embedding table: ``rows`` x ``dim`` float32 weights."""

    name: str
    rows: int
    dim: int
    pooled: bool = True
    """True: rows are summed by bag. False: one row for each id (``EmbeddingCollection``)."""
    features: tuple[str, ...] = ()
    """Names of the features that look it up; empty if they are not known."""
    state: int = 0
    """How many float32 values of optimizer state each row has."""


@dataclass(frozen=True)
class GroupInfo:
    """Tables whose rows have records of one size: the same dimension, optimizer and collection."""

    tables: tuple[str, ...]
    record_bytes: int
    """Bytes of one row's record: its weights and its optimizer state."""
    slots: int
    """How many of their rows ``tiers.resident_bytes`` holds."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What is known about the run before it allocates memory."""

    tables: Mapping[str, TableInfo]
    device: str
    """The device in torch's spelling: ``cpu``, ``cuda:0``."""
    batch_size: int
    resident_bytes: int
    """Device memory for table rows, optimizer state included (``tiers.resident_bytes``)."""
    groups: Sequence[GroupInfo]
    """The tables in groups. Each group has its own slots and cache policy. ``tables`` lists the tables in the
    order of the groups, and rows are numbered in that order."""
    lookups: Callable[[Any], Bags]
    """The rows that a batch of any type looks up, numbered over all tables."""
    seed: int
    data_fingerprint: str
    """Identifies the data: equal fingerprints mean equal batches. Use it as the key of anything cached about
    the data."""
    steps: int
    """Optimizer steps that the run is expected to take."""
    trainers: int = 1
    """Ranks that train; each takes its share of every batch."""
    cache_dir: Path | None = None
    """Directory for what is learned about the data (profiles), kept between runs; None: nothing is kept."""
    epoch_samples: int = 0
    """Training samples of an epoch."""
    held_out: Callable[[int], Iterator[Batch]] = lambda first: iter(())
    """Like ``batches``, for the held-out part."""
    batches: Callable[[int], Iterator[Batch]] = lambda first: iter(())
    """``batches(first)``: an epoch's training batches from number ``first`` on, as the data module yields
    them; every call reads again from ``first``, without reading what comes before. Ids that get their rows
    while they are trained (``rows: dynamic``) are stood for by rows of their hashes."""


@dataclass
class Io:
    """Traffic with the cold tier. ``direct`` is None for a store without files. ``wait_seconds``: training
    waited, and the GPU had nothing left to do."""

    store: str | None = None
    direct: bool | None = None
    rows_read: int = 0
    rows_written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    wait_seconds: float = 0.0
    rows_staged: int = 0
    """Rows whose block the store still held in memory, so that the device did not read it again."""
    fetch_seconds: float = 0.0
    """The I/O thread's time in fetches; the part beyond ``wait_seconds`` was hidden behind training."""
    write_seconds: float = 0.0
    plan_seconds: float = 0.0
    """The loader thread's time for deciding which rows move."""
    cold_start: bool = False
    """Whether the cache was never full, so that the run shows how it fills and no more."""


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What core measured, for a plugin's own figures. Seconds are host time.

    What is said of micro-batches is what this plugin's own splitter has done: 0 and empty where another's is
    used.
    """

    steps: int
    samples: int
    lookups: int
    io: Io
    """Traffic with the cold tier, the time of its fetches, and how long training waited for them."""
    before_cold_seconds: float
    """Seconds in micro-batches that needed no cold row, where a batch that was not cut is one; 0 without a
    splitter."""
    after_cold_seconds: float
    """Seconds in micro-batches that needed cold rows, likewise."""
    split_batches: int = 0
    """How many batches were trained as several micro-batches."""
    splitting: str = ""
    """Whether cutting batches paid, and why, in a sentence; empty without a splitter."""
    fills: frozenset[str] = frozenset()
    """The slots of ``Contribution`` that this plugin fills in this run (``order``, ``splitter``, ``skipper``,
    ``planner``): a part that lost its slot to another plugin's (``compose.prefer``) has done nothing."""
