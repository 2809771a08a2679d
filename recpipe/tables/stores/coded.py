"""A cold store with encoded records, as a wrapper of any local store, which then holds fewer bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from recpipe.plugin.quantizer import RowCodec
from recpipe.tables.stores.base import ColdStore, Fill, Records, Rows, StoreLayout
from recpipe.tables.stores.front import FrontStore

MakeLocal = Callable[[StoreLayout, Fill], ColdStore]
WORD = 4
"""Bytes of a float32 word, the unit that stores move."""


class Coding:
    """Packs a codec's bytes into records of float32 words, which any store moves unchanged. The last word is
    padded with zeros."""

    def __init__(self, codec: RowCodec) -> None:
        self.codec = codec
        self.width = -(-codec.bytes_per_record // WORD)
        """The number of words in an encoded record."""

    def encoded(self, records: Records) -> Records:
        """``records``, float32 [n, record width], as words [n, ``width``]."""
        made = self.codec.encode(np.ascontiguousarray(records))
        if made.shape[1] < WORD * self.width:
            padded = np.zeros((len(made), WORD * self.width), np.uint8)
            padded[:, : made.shape[1]] = made
            made = padded
        return np.ascontiguousarray(made).view(np.float32)

    def decode(self, words: Records, out: Records) -> None:
        """Decode words into ``out``."""
        encoded = words.view(np.uint8)[:, : self.codec.bytes_per_record]
        self.codec.decode(np.ascontiguousarray(encoded), out)

    def rounded(self, records: Records) -> Records:
        """What is read of ``records`` after they have been written."""
        out = np.empty(records.shape, np.float32)
        self.decode(self.encoded(records), out)
        return out

    def layout(self, layout: StoreLayout) -> StoreLayout:
        """The layout of the encoded records of ``layout``."""
        return StoreLayout(layout.tables, layout.rows, self.width)

    def fill(self, fill: Fill) -> Fill:
        """First records, encoded."""
        return lambda table, start, stop: self.encoded(fill(table, start, stop))


class CodedStore(FrontStore):
    """Records of ``layout``, encoded in ``inner``. Its bytes are those of ``inner``; its seconds include the
    codec's."""

    def __init__(self, layout: StoreLayout, coding: Coding, inner: ColdStore) -> None:
        super().__init__(inner)
        self.layout, self.coding = layout, coding
        self.rounded, self.rounded_there = coding.rounded, coding.codec.rounded

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
