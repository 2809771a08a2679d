"""The cold tier in DRAM: one array of records. Those for a GPU pass through the caller's page-locked
buffer."""

from __future__ import annotations

import time

import torch

from recpipe.errors import StoreError
from recpipe.plugin.store import ColdStore, Fill, IoCounters, Records, Rows, StoreLayout
from recpipe.tables.stores.filling import filled_chunks


class HostStore(ColdStore):
    """Records in host memory, float32 [total_rows, width], moved by torch's parallel index kernels;
    ``records`` is the array itself."""

    direct = None
    is_memory = True

    def __init__(self, layout: StoreLayout, fill: Fill) -> None:
        self.layout = layout
        self.io = IoCounters()
        self.records = _allocate(layout)
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

    @property
    def cold_bytes(self) -> int:
        """Bytes of the array."""
        return self.records.numel() * self.records.element_size()

    @property
    def overhead_bytes(self) -> int:
        """Zero: gather and scatter copy directly between the array and the caller's."""
        return 0


def _allocate(layout: StoreLayout) -> torch.Tensor:
    try:
        return torch.empty((layout.total_rows, layout.width), dtype=torch.float32)
    except (RuntimeError, MemoryError) as error:
        need = 4 * layout.total_rows * layout.width
        raise StoreError(
            f"tiers.store=host: the cold rows need {need / 2**30:.2f} GiB of memory and it cannot be had: "
            "use tiers.store=ssd"
        ) from error
