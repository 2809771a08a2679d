"""Which of a GPU's rows are in its memory, in the host's and on its disks, and what that costs, on paper.

Whole parts of tables go to GPU memory first, those with the most lookups for their bytes; what is left of it
keeps the most popular rows of the other parts, of each the same share; the host's memory does so for what
still remains, and the rest is on disks. Rows are moved while the step before trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recpipe.perf.scale.ids import covered, distinct
from recpipe.perf.scale.machine import GIGA
from recpipe.perf.scale.model import Table
from recpipe.perf.scale.work import Load, Training

BLOCK = 4096
"""Bytes that a disk reads for a row at least."""


@dataclass(frozen=True)
class Room:
    """Bytes for rows that a GPU has in its memory, and as its share of its host's memory and disks."""

    hbm: float
    dram: float
    ssd: float

    @property
    def total(self) -> float:
        """In all tiers."""
        return self.hbm + self.dram + self.ssd


@dataclass(frozen=True)
class Tiered:
    """Bytes of a GPU's rows by tier, and the seconds of a step that its rows from slower ones take."""

    hbm: float
    dram: float
    ssd: float
    seconds: float
    missed: float
    """The share of its lookups' distinct rows that are not in GPU memory."""


def tiered(training: Training, parts: Sequence[tuple[Table, Load]], room: Room) -> Tiered:
    """Where the rows of the ``parts`` of one GPU are."""
    whole = sum(load.memory for _, load in parts)
    if whole <= room.hbm:
        return Tiered(whole, 0.0, 0.0, 0.0, 0.0)
    left = room.hbm
    rest: list[tuple[Table, Load]] = []
    for table, load in sorted(parts, key=lambda part: -part[1].lookups / max(1.0, part[1].memory)):
        if not rest and load.memory <= left:
            left -= load.memory
        else:
            rest.append((table, load))
    below = sum(load.memory for _, load in rest)
    kept, hosted = left / below, min(1.0, (left + room.dram) / below)
    moved = disk = slow = 0.0
    for table, load in rest:
        lookups = training.batch * table.pooling
        missed = load.distinct * _missed(table, lookups, kept)
        from_disk = load.distinct * _missed(table, lookups, hosted) if hosted < 1 else 0.0
        slow += missed
        disk += from_disk
        moved += 2 * missed * load.record
    known = training.machine.constants
    bus = min(known.pcie_gb_s * known.pcie_share, known.dram_gb_s / training.host_gpus) * GIGA
    reads = known.ssd_reads_s / training.host_gpus
    all_rows = sum(load.distinct for _, load in parts)
    dram = below * (hosted - kept)
    # A row from a disk is read, and written back as a block.
    seconds = moved / bus + 2 * disk / reads
    return Tiered(room.hbm, dram, max(0.0, below - left - dram), seconds, slow / max(1.0, all_rows))


def _missed(table: Table, lookups: float, kept: float) -> float:
    """The share of the distinct rows of so many lookups that are not among the ``kept`` share of most popular
    rows."""
    every = distinct(float(table.rows), table.skew, lookups)
    popular = lookups * covered(table.rows, table.skew, kept)
    return 1 - min(every, distinct(max(1.0, kept * table.rows), table.skew, popular)) / max(every, 1e-12)
