"""Cold stores: gathers and scatters of rows, in host memory and on the disk below the current directory,
where runs put their stores; and the codecs of rows in fewer bits.

A store's time has two parts: what its thread computes, and what it waits for. ``... busy`` is the processor
time of the process in the same request.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from recpipe.plugin.quantizer import RecordLayout, RowCodec
from recpipe.plugin.store import ColdStore, Records, Rows, StoreLayout
from recpipe.profiling.limits import Sample
from recpipe.tables.stores.blocks import BLOCK_BYTES, BlockMap
from recpipe.tables.stores.codecs import Bf16Rows, Fp16Rows, Int8Rows
from recpipe.tables.stores.host import HostStore
from recpipe.tables.stores.ssd import SsdStore
from recpipe_perf_model.bench.lookups import least

WIDTHS = (17, 65)
"""Values of a record: dimensions 16 and 64 under row-wise Adagrad."""
BYTES = 96 << 20
"""About the size of each table."""
COUNTS = (48, 400, 3_000, 20_000)
"""Rows of a request."""
DENSE = (1, 12)
"""Rows are drawn from the whole table, or from a part of it so many times smaller, where they share more
blocks."""
REPEATS = 7
CODECS: dict[str, Callable[[RecordLayout], RowCodec]] = {"int8": Int8Rows, "fp16": Fp16Rows, "bf16": Bf16Rows}
LEAST = 1e-7
"""Seconds that a request is taken for that no clock could measure."""


def measure(quick: bool) -> Iterator[Sample]:
    """The least of several passes over ``once``."""
    yield from least(once, quick)


def once(quick: bool) -> Iterator[Sample]:
    """Samples ``host read``, ``host write``; ``ssd read``, ``ssd write`` (of blocks just read), ``ssd
    rewrite`` (of others, which it reads first); each also as ``... busy``; ``encode`` and ``decode``."""
    widths, counts = (WIDTHS[:1], COUNTS[1:3]) if quick else (WIDTHS, COUNTS)
    for width in widths:
        layout = StoreLayout(("rows",), (BYTES // (4 * width),), width)
        store = HostStore(layout, _fill(layout))
        for rows in _requests(layout, counts):
            yield from _both(store, "host", rows, "read", "write")
        store.close()
        del store
        with tempfile.TemporaryDirectory(prefix="recpipe-perf-", dir=Path.cwd()) as folder:
            ssd = SsdStore.create(layout, _fill(layout), Path(folder) / "store", scratch=True)
            try:
                for rows in _requests(layout, counts):
                    yield from _both(ssd, "ssd", rows, "read", "write")
                    yield from _rewritten(ssd, rows, layout)
            finally:
                ssd.close()
    yield from _codecs(quick)


def _fill(layout: StoreLayout) -> Callable[[str, int, int], Records]:
    return lambda table, start, stop: np.full((stop - start, layout.width), 0.5, np.float32)


def _requests(layout: StoreLayout, counts: tuple[int, ...]) -> Iterator[list[Rows]]:
    """For each size several requests of different rows, in no order."""
    random = np.random.default_rng(0)
    for count in counts:
        for dense in DENSE:
            among = layout.total_rows // dense
            if among > 4 * count:
                yield [random.choice(among, count, replace=False) for _ in range(REPEATS)]


def _both(store: ColdStore, name: str, requests: list[Rows], first: str, second: str) -> Iterator[Sample]:
    """Read the rows of each request, then write them."""
    width = store.layout.width
    out = np.empty((len(requests[0]), width), np.float32)
    times: dict[str, list[tuple[float, float]]] = {first: [], second: []}
    for rows in requests:
        times[first].append(_timed(lambda rows=rows: store.gather(rows, out)))  # type: ignore[misc]
        times[second].append(_timed(lambda rows=rows: store.scatter(rows, out)))  # type: ignore[misc]
    at = sizes(store.layout, requests[0])
    for what, found in times.items():
        # Numbers of requests differ little.
        elapsed, busy = np.median(found[1:], axis=0)
        written = what != first
        chosen = {**at, **({"blocks": at["own_blocks"], "requests": at["own_requests"]} if written else {})}
        yield Sample(f"{name} {what}", chosen, max(LEAST, float(elapsed)))
        yield Sample(f"{name} {what} busy", chosen, max(LEAST, float(busy)))


def _rewritten(store: SsdStore, requests: list[Rows], layout: StoreLayout) -> Iterator[Sample]:
    """Write rows whose blocks have left the staging area."""
    records = np.full((len(requests[0]), layout.width), 0.5, np.float32)
    found = []
    for rows in requests:
        store.forget_staged()
        found.append(_timed(lambda rows=rows: store.scatter(rows, records)))  # type: ignore[misc]
    elapsed, busy = np.median(found[1:], axis=0)
    at = sizes(layout, requests[0])
    at |= {"blocks": at["own_blocks"], "requests": at["own_requests"]}
    yield Sample("ssd rewrite", at, max(LEAST, float(elapsed)))
    yield Sample("ssd rewrite busy", at, max(LEAST, float(busy)))


def sizes(layout: StoreLayout, rows: Rows) -> dict[str, float | str]:
    """What an ssd store moves for distinct ``rows``: 4 KiB blocks and requests to read them, with those that
    alone lie between two, and ``own_blocks`` and ``own_requests`` to write them."""
    blocks = BlockMap(layout)
    wanted = np.unique(blocks.places(rows).blocks)
    bridged = blocks.bridged(wanted)
    each = blocks.block_bytes // BLOCK_BYTES
    return {
        "rows": float(len(rows)),
        "width": float(layout.width),
        "bytes": float(4 * layout.width * layout.total_rows),
        "blocks": float(each * len(bridged)),
        "requests": float(1 + np.count_nonzero(np.diff(bridged) != 1)),
        "own_blocks": float(each * len(wanted)),
        "own_requests": float(1 + np.count_nonzero(np.diff(wanted) != 1)),
    }


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and processor seconds of the process."""
    began, busy = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - busy


def _codecs(quick: bool) -> Iterator[Sample]:
    for name, codec in CODECS.items():
        for width in WIDTHS[:1] if quick else WIDTHS:
            made = codec(RecordLayout(width - 1, width))
            for count in COUNTS[1:3] if quick else COUNTS[1:]:
                records = np.random.default_rng(0).normal(size=(count, width)).astype(np.float32)
                encoded, out = made.encode(records), np.empty_like(records)
                runs = {"encode": lambda: made.encode(records), "decode": lambda: made.decode(encoded, out)}  # noqa: B023
                for what, run in runs.items():
                    seconds = float(np.median([_timed(run)[0] for _ in range(REPEATS)]))
                    yield Sample(f"{what} {name}", {"rows": float(count), "width": float(width)}, seconds)
