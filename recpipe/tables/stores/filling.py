"""First records of a store, table by table, in chunks of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recpipe.tables.stores.base import Fill, Records, StoreLayout

CHUNK_BYTES = 16 << 20


def filled_chunks(
    layout: StoreLayout, fill: Fill, table: int, chunk_rows: int | None = None
) -> Iterator[tuple[int, Records]]:
    """Yield ``(start, records)`` of one table's rows in order, ``chunk_rows`` rows at a time.

    ``records`` is float32 [n, width], contiguous; by default n is what fits ``CHUNK_BYTES``.
    """
    name, rows = layout.tables[table], layout.rows[table]
    step = chunk_rows or max(1, CHUNK_BYTES // (4 * layout.width))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        records = np.ascontiguousarray(fill(name, start, stop), dtype=np.float32)
        if records.shape != (stop - start, layout.width):
            raise ValueError(
                f"fill({name!r}, {start}, {stop}) gave shape {records.shape}, "
                f"not ({stop - start}, {layout.width})"
            )
        yield start, records
