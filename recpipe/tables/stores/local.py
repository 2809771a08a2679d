"""Cold stores of one process: in DRAM, or in front of another one, with encoded records or slower than this
machine's; and how any store is filled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.common.memory import untouched
from recpipe.common.meter import counting
from recpipe.distributed.ranks import Emulation
from recpipe.errors import StoreError
from recpipe.plugin.quantizer import Coding
from recpipe.plugin.store import ColdStore, Fill, IoCounters, Records, Rows, StoreLayout

MakeLocal = Callable[[StoreLayout, Fill], ColdStore]
"""Makes this process's own store of records."""
CHUNK_BYTES = 16 << 20
"""What is filled at a time."""


class HostStore(ColdStore):
    """Records in host memory, float32 [total_rows, width], moved by torch's parallel index kernels straight
    between ``records``, the array itself, and the caller's, which is page-locked where a GPU trains."""

    direct = None
    is_memory = True
    cold_bytes = 0
    """Bytes of the array."""
    overhead_bytes = 0

    def __init__(self, layout: StoreLayout, fill: Fill) -> None:
        self.layout = layout
        self.io = IoCounters()
        self.cold_bytes = 4 * layout.total_rows * layout.width
        try:
            self.records = untouched((layout.total_rows, layout.width), torch.float32)
        except (RuntimeError, MemoryError) as error:
            raise StoreError(
                f"tiers.store=host: the cold rows need {self.cold_bytes / 2**30:.2f} GiB of memory and it "
                "cannot be had: use tiers.store=ssd"
            ) from error
        for start, records in filled_chunks(layout, fill):
            if records.view(np.uint32).any():  # encoded records are any bits
                self.records[start : start + len(records)] = torch.from_numpy(records)

    def gather(self, rows: Rows, out: Records) -> None:
        """Copy records into ``out``; IndexError for a row outside the layout."""
        began = time.perf_counter()
        assert out.shape == (len(rows), self.layout.width), (out.shape, len(rows))
        torch.index_select(self.records, 0, torch.from_numpy(rows), out=torch.from_numpy(out))
        self.io.rows_read += len(rows)
        self.io.bytes_read += out.nbytes
        self.io.read_seconds += time.perf_counter() - began

    def scatter(self, rows: Rows, records: Records) -> None:
        """Replace records; IndexError for a row outside the layout."""
        began = time.perf_counter()
        assert records.shape == (len(rows), self.layout.width), (records.shape, len(rows))
        self.records.index_copy_(0, torch.from_numpy(rows), torch.from_numpy(records))
        self.io.rows_written += len(rows)
        self.io.bytes_written += records.nbytes
        self.io.write_seconds += time.perf_counter() - began

    def flush(self) -> None:
        """Nothing to do: a write to DRAM is done when ``scatter`` returns."""

    def close(self) -> None:
        """Release the array."""
        self.records = torch.empty((0, self.layout.width))


class FrontStore(ColdStore):
    """Changes the records or the time of ``gather`` and ``scatter``, and passes all else on to ``inner``.

    ``inner`` is owned: ``close`` closes it. Traffic and bytes are those of ``inner``.
    """

    cold_bytes = overhead_bytes = 0

    def __init__(self, inner: ColdStore) -> None:
        self.inner = inner
        self.layout, self.direct = inner.layout, inner.direct
        self.rounded, self.rounded_there = inner.rounded, inner.rounded_there
        self.shares_blocks, self.io = inner.shares_blocks, inner.io
        self.cold_bytes, self.overhead_bytes = inner.cold_bytes, inner.overhead_bytes

    def staged(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of ``rows`` ``inner`` could write without reading what surrounds them first, bool [n]."""
        return self.inner.staged(rows)

    def flush(self) -> None:
        """Let ``inner`` have all as durably as it can."""
        self.inner.flush()

    def close(self) -> None:
        """Close ``inner``."""
        self.inner.close()


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


class EmulatedStore(FrontStore):
    """Passes requests to ``inner`` and then waits, as a link of ``emulation``'s latency and bandwidth would
    take for their records.

    The wait leaves the processor to other threads, as a device does. It counts as reading or writing time.
    """

    def __init__(self, inner: ColdStore, emulation: Emulation) -> None:
        super().__init__(inner)
        self.emulation = emulation

    def gather(self, rows: Rows, out: Records) -> None:
        """Read the records of ``rows`` into ``out``, after the time that the emulated device takes."""
        self.inner.gather(rows, out)
        self.io.read_seconds += self._wait(out.nbytes)

    def scatter(self, rows: Rows, records: Records) -> None:
        """Write the records of ``rows``, after the time that the emulated device takes."""
        self.inner.scatter(rows, records)
        self.io.write_seconds += self._wait(records.nbytes)

    def _wait(self, size: int) -> float:
        seconds = self.emulation.seconds(size) if size else 0.0
        time.sleep(seconds)
        return seconds


def filled_chunks(
    layout: StoreLayout, fill: Fill, chunk_rows: int | None = None
) -> Iterator[tuple[int, Records]]:
    """Yield ``(start, records)`` of all rows in order, ``chunk_rows`` rows of one table at a time; ``start``
    is the number of the first one over all tables.

    ``records`` is float32 [n, width], contiguous; by default n is what fits ``CHUNK_BYTES``.
    """
    step = chunk_rows or max(1, CHUNK_BYTES // (4 * layout.width))
    with counting("filling the cold tier's rows", layout.total_rows) as add:
        for name, rows, base in zip(layout.tables, layout.rows, layout.bases.tolist(), strict=False):
            for start in range(0, rows, step):
                stop = min(rows, start + step)
                records = np.ascontiguousarray(fill(name, start, stop), dtype=np.float32)
                if records.shape != (stop - start, layout.width):
                    raise ValueError(
                        f"fill({name!r}, {start}, {stop}) gave shape {records.shape}, "
                        f"not ({stop - start}, {layout.width})"
                    )
                yield base + start, records
                add(stop - start)
