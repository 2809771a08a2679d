"""What it costs to learn features from the training part: CPU time of preparing with and without.

    python benchmarks/prepare_learned.py [--rows 400000] [--runs 3]

The same generated rows (five skewed columns of ids, one of them text, and four of numbers) as parquet and as
CSV, with hashed ids, with vocabularies, and with vocabularies, standard numbers and quantile buckets.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

IDS = ("c0", "c1", "c2", "c3", "user")
NUMBERS = ("x0", "x1", "x2", "x3")


def make_table(rows: int, seed: int = 0) -> pa.Table:
    """Ids by Zipf's law, of a million and of 200,000 words."""
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {"click": rng.integers(0, 2, rows)}
    columns |= {name: rng.zipf(1.2, rows) % 1_000_000 for name in IDS[:-1]}
    columns["user"] = np.array([f"user{n}" for n in range(200_000)])[rng.zipf(1.3, rows) % 200_000]
    return pa.table(columns | {name: rng.lognormal(size=rows) for name in NUMBERS})


def features(case: str) -> dict[str, Any]:
    """The schema of a case: hash, vocabulary, or all that is learned."""
    ids = "hash" if case == "hash" else "vocabulary"
    found: list[dict[str, Any]] = [{"name": name, "ids": ids, "rows": 1_000_003} for name in IDS]
    scale = "standard" if case == "all" else "none"
    found += [{"name": name, "kind": "dense", "scale": scale} for name in NUMBERS]
    if case == "all":
        found.append({"name": "bucket", "column": "x0", "kind": "dense", "buckets": 20})
    return {"labels": ["click"], "features": found}


def seconds(file: Path, case: str) -> float:
    """CPU time of one preparation into an empty cache."""
    from recpipe.data.config import FilesConfig
    from recpipe.data.make import open_dataset

    with tempfile.TemporaryDirectory() as cache:
        config = FilesConfig(path=str(file), features=features(case), cache_dir=cache)
        began = time.process_time()
        open_dataset(config, 0)
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
        pq.write_table(table, folder / "rows.parquet")
        pyarrow.csv.write_csv(table, folder / "rows.csv")
        cases = [
            (file, case) for file in ("rows.parquet", "rows.csv") for case in ("hash", "vocabulary", "all")
        ]
        found: dict[tuple[str, str], list[float]] = {key: [] for key in cases}
        for run in range(options.runs + 1):
            for file, case in cases:
                took = seconds(folder / file, case)
                if run:  # the first one warms up
                    found[file, case].append(took)
    for (file, case), own in found.items():
        print(f"{file:13} {case:11} {statistics.median(own):6.2f} s ({min(own):.2f} to {max(own):.2f})")


if __name__ == "__main__":
    main()
