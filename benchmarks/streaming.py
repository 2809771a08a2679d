"""What reading a stream costs: CPU time from its records to batches, beside pyarrow's scan of them alone.

    python benchmarks/streaming.py [--rows 400000] [--runs 3]

The same generated rows as parquet, as JSON lines, and as a broker's messages (a JSON object each, 10,000 at a
time, without the broker and its client), in batches of 2,048 samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
from prepare_learned import features, make_table

AT_ONCE = 10_000


class Sent:
    """The lines of a file as a broker's messages."""

    name, identity, in_turn = "messages", {}, False

    def __init__(self, lines: list[bytes], columns: list[str]) -> None:
        from recpipe.data.stream.messages import Message

        self._columns = columns
        self._messages = [Message(line, number, f"message {number}") for number, line in enumerate(lines, 1)]

    def chunks(self, position: Any) -> Iterator[Any]:
        """All messages from the first one on, and then none."""
        from recpipe.data.stream.messages import chunks_of

        for low in range(0, len(self._messages), AT_ONCE):
            yield from chunks_of(self._messages[low : low + AT_ONCE], "0", self._columns, skip=False)
        while True:
            time.sleep(0.01)
            yield None


def streamed(folder: Path, kind: str, lines: list[bytes]) -> float:
    """CPU seconds from records to batches. What is read before the first batch, to find types, counts too."""
    from recpipe.data.config import StreamConfig
    from recpipe.data.stream.stream import Stream

    own = {"path": str(folder / ("parquet" if kind == "parquet" else "json")), "features": features("hash")}
    found = Stream(StreamConfig(**own, settle=0.0, end="stop", idle=0.05))
    if kind == "messages":
        found.source = Sent(lines, found.encoding.features.columns)
    began = time.process_time()
    for _ in found.batches("train", 2048):
        pass
    return time.process_time() - began


def scanned(folder: Path, kind: str, lines: list[bytes]) -> float:
    """CPU seconds of pyarrow for the same bytes, on one thread."""
    began = time.process_time()
    if kind == "parquet":
        for _ in pq.ParquetFile(folder / "parquet" / "rows.parquet").iter_batches(32768, use_threads=False):
            pass
    else:
        for low in range(0, len(lines), AT_ONCE):
            text = b"\n".join(lines[low : low + AT_ONCE])
            read = pa.json.ReadOptions(use_threads=False, block_size=len(text) + 1)
            pa.json.read_json(pa.BufferReader(text), read)
    return time.process_time() - began


def main() -> None:
    """Measure all cases in turn and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, table = Path(name), make_table(options.rows)
        for kind in ("parquet", "json"):
            (folder / kind).mkdir()
        pq.write_table(table, folder / "parquet" / "rows.parquet")
        lines = [json.dumps(row).encode() for row in table.to_pylist()]
        (folder / "json" / "rows.jsonl").write_bytes(b"\n".join(lines))
        kinds = ("parquet", "json", "messages")
        cases: dict[tuple[str, str], Callable[[], float]] = {}
        for kind in kinds:
            cases["recpipe", kind] = partial(streamed, folder, kind, lines)
            cases["pyarrow", kind] = partial(scanned, folder, kind, lines)
        times: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
        for run in range(options.runs + 1):
            for case, measure in cases.items():
                seconds = measure()
                if run:  # the first one imports and loads loops
                    times[case].append(seconds)
    for kind in kinds:
        own, alone = (options.rows / statistics.median(times[who, kind]) for who in ("recpipe", "pyarrow"))
        print(f"{kind:10} {own:>12,.0f} samples a CPU second; pyarrow's scan alone {alone:>12,.0f}")


if __name__ == "__main__":
    main()
