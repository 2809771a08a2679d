"""``Tiers``: rows of several sizes under one index, so that one look finds all of a batch's rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from recpipe.plugin import RowIds
from recpipe_sdm.looks import Look, Places
from recpipe_sdm.rows import TieredRows


class Looks(NamedTuple):
    """What a batch looks up: of each tier, and where that is among all of it (None: it is all); ``total``:
    how many rows."""

    own: list[tuple[TieredRows, Look, RowIds | None]]
    total: int

    @property
    def places(self) -> Places:
        """Of all."""
        if len(self.own) == 1:
            return self.own[0][1].places
        places = np.empty(self.total, np.int32)
        for _, look, at in self.own:
            places[at] = look.places
        return places


class Tiers:
    """``tiers``, whose rows are numbered over all of them in their order, and which have one lock,
    ``using``."""

    def __init__(self, tiers: Sequence[TieredRows], using: threading.Lock) -> None:
        self.tiers, self.using = tiers, using
        self._ends = list(accumulate(len(tier.index) for tier in tiers))

    def look(self, rows: RowIds) -> Looks:
        """Where ``rows`` (int64 [N], with repeats) are now."""
        if len(self.tiers) == 1:
            return Looks([(self.tiers[0], self.tiers[0].look(rows), None)], len(rows))
        own: list[tuple[TieredRows, Look, RowIds | None]] = []
        start = 0
        for tier, end in zip(self.tiers, self._ends, strict=True):
            at = np.flatnonzero((rows >= start) & (rows < end))
            own.append((tier, tier.look(rows[at] - start), at))
            start = end
        return Looks(own, len(rows))

    def ahead(self, looks: Looks) -> None:
        """Begin to read the rows that are not in DRAM, and return. Nothing has to follow. ``StoreError`` if a
        disk fails at once."""
        for tier, look, _ in looks.own:
            tier.ahead(look)

    @contextmanager
    def found(self, looks: Looks) -> Iterator[Places]:
        """The place in its tier's buffer of each row that a batch looks up, int32 [N]; -1 for a pruned one.
        They are valid in the block. ``StoreError`` if a row cannot be read."""
        for tier in self.tiers:
            tier.land()
        with self.using:
            for tier, look, _ in looks.own:
                tier.note(look)
            if self._settled(looks):
                yield looks.places
                return
        with ExitStack() as held:
            for tier in self.tiers:
                held.enter_context(tier.reading)
            while True:
                for tier, look, _ in looks.own:
                    tier.read(look)
                with self.using:
                    if self._settled(looks):  # rows may have lost their slots since they were read
                        yield looks.places
                        return

    def _settled(self, looks: Looks) -> bool:
        return all(tier.settled(look) for tier, look, _ in looks.own)
