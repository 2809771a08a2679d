"""How fast rows of CSV become samples, beside ``pyarrow.csv.read_csv`` alone: rows a second of wall time.

    python benchmarks/csv_reading.py [--rows 1000000] [--runs 3] [--threads 2]

The generated rows of ``prepare_learned.py``. pyarrow reads them with types that it guesses, and as text,
which no guess misreads; recpipe reads them as text, and makes keys of ids and numbers of the rest.
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


def samples(file: Path) -> None:
    """recpipe, up to what preparation writes."""
    from recpipe.data.config import FilesConfig
    from recpipe.data.make import open_source

    for _ in open_source(FilesConfig(path=str(file), features=features("hash"))).blocks():
        pass


READERS: dict[str, Callable[[Path], None]] = {"guessed": guessed, "as text": as_text, "samples": samples}


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
    took: dict[str, list[float]] = {name: [] for name in READERS}
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "rows.csv"
        pyarrow.csv.write_csv(make_table(options.rows), file)
        for run in range(options.runs + 1):
            for reader, read in READERS.items():
                began = time.perf_counter()
                read(file)
                if run:  # the first one warms up
                    took[reader].append(time.perf_counter() - began)
    for reader, own in took.items():
        print(f"{reader:8} {options.rows / statistics.median(own):12,.0f} rows/s")


if __name__ == "__main__":
    main()
