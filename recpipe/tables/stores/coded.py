"""A cold store with encoded records, as a wrapper of any local store, which then holds fewer bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from recpipe.plugin.quantizer import Coding
from recpipe.plugin.store import ColdStore, Fill, Records, Rows, StoreLayout
from recpipe.tables.stores.front import FrontStore

MakeLocal = Callable[[StoreLayout, Fill], ColdStore]


class CodedStore(FrontStore):
    """Records of ``layout``, encoded in ``inner``. Its bytes are those of ``inner``; its seconds include the
    codec's."""

    def __init__(self, layout: StoreLayout, coding: Coding, inner: ColdStore) -> None:
        super().__init__(inner)
        self.layout, self.coding = layout, coding
        self.rounded, self.rounded_there = coding.rounded, coding.rounded_there

    def gather(self, rows: Rows, out: Records) -> None:
        """Decoded records."""
        words = np.empty((len(rows), self.coding.width), np.float32)
        self.inner.gather(rows, words)
        began = time.perf_counter()
        self.coding.decode(words, out)
        self.io.read_seconds += time.perf_counter() - began

    def scatter(self, rows: Rows, records: Records) -> None:
        """Encode ``records`` and write them."""
        began = time.perf_counter()
        words = self.coding.encoded(records)
        self.io.write_seconds += time.perf_counter() - began
        self.inner.scatter(rows, words)


def local_store(layout: StoreLayout, fill: Fill, coding: Coding | None, make: MakeLocal) -> ColdStore:
    """Make a store by ``make``, with encoded records if there is a ``coding``."""
    if coding is None:
        return make(layout, fill)
    return CodedStore(layout, coding, make(coding.layout(layout), coding.fill(fill)))
