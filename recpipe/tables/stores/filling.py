"""First records of a store, table by table, in chunks of bounded memory, with a bar."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from recpipe.common.meter import counting
from recpipe.plugin.store import Fill, Records, StoreLayout

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
