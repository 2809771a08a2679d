"""The interface of the cold tier: rows that are not resident are kept in a ``ColdStore``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Rows = NDArray[np.int64]
Records = NDArray[np.float32]
Fill = Callable[[str, int, int], Records]
"""``fill(table, start, stop) -> float32 [stop - start, width]``: the first records of a table's rows."""


@dataclass(frozen=True)
class StoreLayout:
    """The numbering of rows: tables in order, their rows, and the width of a record.

    A row's global number is ``base(table) + id``: one int64 names a row of any table, so that a
    whole batch moves in one call. A record is float32 [width]: the row's weights, then its
    optimizer state.
    """

    tables: tuple[str, ...]
    rows: tuple[int, ...]
    width: int

    @property
    def total_rows(self) -> int:
        """Rows of all tables together."""
        return sum(self.rows)

    @property
    def bases(self) -> Rows:
        """Global number of each table's row 0; one more entry at the end: ``total_rows``. int64 [T + 1]."""
        return np.concatenate(([0], np.cumsum(self.rows))).astype(np.int64)


@dataclass
class IoCounters:
    """Traffic with the cold tier since the run began, in rows and in bytes that the device moved."""

    rows_read: int = 0
    rows_written: int = 0
    rows_staged: int = 0
    """Rows of ``rows_written`` whose block was still staged in memory, so that the store need not read it
    first."""
    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0

    def plus(self, other: IoCounters, sign: int = 1) -> IoCounters:
        """The sum of both, or with ``sign`` -1 the difference."""
        theirs = vars(other)
        return IoCounters(**{name: mine + sign * theirs[name] for name, mine in vars(self).items()})


class ColdStore(ABC):
    """Records by global row number. Calls come one at a time; a later call sees earlier writes."""

    layout: StoreLayout
    io: IoCounters
    direct: bool | None
    """True: O_DIRECT; False: buffered by the page cache; None: not a file (DRAM)."""
    shares_blocks: bool = False
    """Whether several rows are in a block that is read and written as a whole."""
    is_memory: bool = False
    """Whether a row is read by copying it from this process's memory, which takes as long in whatever
    company."""
    rounded: Callable[[Records], Records] | None = None
    """Returns what ``gather`` would return of records after they are written, if that differs (fewer bits).
    It may be called from any thread. A store around another one passes it on."""
    rounded_there: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    """The same for records on a GPU, computed there; None, or if it returns None: it cannot be."""

    @abstractmethod
    def gather(self, rows: Rows, out: Records) -> None:
        """Copy the records of ``rows`` (unique, any order, int64 [n]) into ``out`` (float32 [n, width])."""

    @abstractmethod
    def scatter(self, rows: Rows, records: Records) -> None:
        """Replace the records of ``rows`` (unique, int64 [n]) by ``records`` (float32 [n, width])."""

    @abstractmethod
    def flush(self) -> None:
        """Return once every earlier ``scatter`` is as durable as this store makes it."""

    @abstractmethod
    def close(self) -> None:
        """Flush and release files and memory; the store cannot be used afterwards."""

    def background(self) -> IoCounters:
        """What the store moved by itself between calls; not counted in ``io``."""
        return IoCounters()

    def staged(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of ``rows`` could be written now without reading what surrounds them first, bool [n]. False
        for all where a write never needs a read."""
        return np.zeros(len(rows), bool)

    @property
    @abstractmethod
    def cold_bytes(self) -> int:
        """Bytes that the records take in this store, padding and headers included."""

    @property
    @abstractmethod
    def overhead_bytes(self) -> int:
        """Bytes of DRAM that the store itself needs beyond the records (buffers, tables)."""
