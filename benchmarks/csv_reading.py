"""How fast rows of CSV become samples, beside ``pyarrow.csv.read_csv`` alone: rows a second of wall time.

    python benchmarks/csv_reading.py [--rows 1000000] [--runs 3] [--threads 2]

The generated rows of ``prepare_learned.py``. pyarrow reads them with types that it guesses, and as text,
which no guess misreads; recpipe parses them as text ("parsed"), and makes keys of ids and numbers of the rest
("samples"). Beside each rate are its part of that of pyarrow with guessed types, and the CPU time of all
threads.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
from prepare_learned import features, make_table


def guessed(file: Path) -> None:
    """pyarrow with types of its own choice."""
    pa.csv.read_csv(file)


def as_text(file: Path) -> None:
    """pyarrow without a guess."""
    names = file.open().readline().strip().replace('"', "").split(",")
    text = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    pa.csv.read_csv(file, convert_options=text)


def parsed(file: Path) -> None:
    """recpipe, up to record batches of text."""
    from recpipe.data.listing import input_files

    (found,) = input_files(str(file))
    for _ in found.blocks(found.columns.names):
        pass


def samples(file: Path) -> None:
    """recpipe, up to what preparation writes."""
    from recpipe.data.config import FilesConfig
    from recpipe.data.make import open_source

    for _ in open_source(FilesConfig(path=str(file), features=features("hash"))).blocks():
        pass


READERS: dict[str, Callable[[Path], None]] = {
    "guessed": guessed,
    "as text": as_text,
    "parsed": parsed,
    "samples": samples,
}


def main() -> None:
    """Measure all readers in turn and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    pa.set_cpu_count(options.threads)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in READERS}
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "rows.csv"
        pyarrow.csv.write_csv(make_table(options.rows), file)
        for run in range(options.runs + 1):
            for reader, read in READERS.items():
                began, worked = time.perf_counter(), time.process_time()
                read(file)
                if run:  # the first one warms up
                    took[reader].append((time.perf_counter() - began, time.process_time() - worked))
    alone = statistics.median(wall for wall, _ in took["guessed"])
    for reader, own in took.items():
        wall, cpu = (statistics.median(times) for times in zip(*own, strict=True))
        rate = f"{options.rows / wall:12,.0f} rows/s, {alone / wall:.2f} of pyarrow's"
        print(f"{reader:8} {rate}; {cpu:.2f} CPU seconds")


if __name__ == "__main__":
    main()
