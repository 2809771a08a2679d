"""What every source of a stream gives: records in the order of their arrival, with their offsets."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa

from recpipe.data.columns import Columns, concatenate

Offset = int | str
Position = Mapping[str, Offset]
"""Of each partition that something was read of, where its next record is read from."""
POLL = 0.1
"""Seconds that a source waits for records before it says that there are none now."""


class Chunk(NamedTuple):
    """Records of one partition in its order, from record ``first_row`` (from 1) of ``where`` on."""

    where: str
    """For messages."""
    partition: str
    rows: pa.RecordBatch
    offsets: Sequence[Offset]
    """After each record, where the next one is read from."""
    first_row: int
    is_text: bool = False
    """Whether all values are text, whatever they say, as those of CSV."""
    names: Sequence[str] = ()
    """What each record is called in messages, if not by its row; those with a name have types of their own,
    and one that holds something else than others is a bad row."""
    rejected: int = 0
    """How many records beside these could not be read, and are left out."""


class StreamSource(Protocol):
    """Where records come from."""

    @property
    def name(self) -> str:
        """What it reads, for messages."""

    @property
    def identity(self) -> Mapping[str, object]:
        """The same for a run that goes on elsewhere, in plain values and dataclasses."""

    @property
    def in_turn(self) -> bool:
        """Whether a partition begins when the one before has ended, so that a position is in one of them."""

    def chunks(self, position: Position) -> Iterator[Chunk | None]:
        """Records from ``position`` on, without an end; None after ``POLL`` seconds without any. Several
        iterators may be in use at once."""


class Samples(NamedTuple):
    """Samples of one partition, with the offset after each."""

    columns: Columns
    partition: str
    offsets: Sequence[Offset]


class Buffer:
    """Samples that were read and not taken yet; ``position`` is that after the latest that were taken."""

    def __init__(self, position: Position, in_turn: bool) -> None:
        self.position, self._in_turn = dict(position), in_turn
        self._kept: deque[Samples] = deque()
        self.size = 0
        """How many samples there are."""

    def add(self, samples: Samples) -> None:
        """Add samples at the end."""
        if len(samples.columns):
            self._kept.append(samples)
            self.size += len(samples.columns)

    def take(self, size: int) -> Columns:
        """Take the first ``size`` samples out, of which there are as many."""
        parts, left = list[Columns](), size
        while left:
            columns, partition, offsets = self._kept.popleft()
            own = min(left, len(columns))
            parts.append(columns[:own])
            if own < len(columns):
                self._kept.appendleft(Samples(columns[own:], partition, offsets[own:]))
            if self._in_turn:
                self.position.clear()
            self.position[partition] = offsets[own - 1]
            left -= own
        self.size -= size
        return concatenate(parts)
