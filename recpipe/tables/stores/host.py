"""The cold tier in DRAM, and how any store is filled."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from recpipe.common.meter import counting
from recpipe.errors import StoreError
from recpipe.plugin.store import ColdStore, Fill, IoCounters, Records, Rows, StoreLayout


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
            self.records = torch.empty((layout.total_rows, layout.width), dtype=torch.float32)
        except (RuntimeError, MemoryError) as error:
            raise StoreError(
                f"tiers.store=host: the cold rows need {self.cold_bytes / 2**30:.2f} GiB of memory and it "
                "cannot be had: use tiers.store=ssd"
            ) from error
        for start, records in filled_chunks(layout, fill):
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


CHUNK_BYTES = 16 << 20


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
