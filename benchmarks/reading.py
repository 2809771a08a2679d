"""What batches of files cost: CPU time from prepared data, and from files read once without preparing them.

    python benchmarks/reading.py [--rows 400000] [--runs 7]

The same generated rows as Criteo's text, as .npy triples of rows of tables and of ids to be hashed, and five
columns of ids with four of numbers as Parquet, in batches of 2,048 samples, on one core. Medians, with the
lowest and the highest. To compare with another version of recpipe, run this file with the Python that has it
installed: it asks for nothing that the first version did not have.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from prepare import TABLES, make_text, spread
from prepare_learned import IDS, NUMBERS, make_table
from rich.console import Console
from rich.table import Table

from recpipe.data.config import CriteoConfig, FileConfig, NpyConfig, ParquetConfig
from recpipe.data.make import open_dataset, open_source

try:
    StreamedDataset: Any = import_module("recpipe.data.make").StreamedDataset
except AttributeError:  # where earlier versions have it
    StreamedDataset = import_module("recpipe.data.make").StreamedDataset


def make_files(folder: Path, rows: int) -> dict[str, FileConfig]:
    """The input of all cases."""
    unit = min(rows, 20_000)
    (folder / "rows.tsv").write_bytes(make_text(unit) * (rows // unit))
    rng = np.random.default_rng(0)
    np.save(folder / "a_dense.npy", rng.lognormal(size=(rows, 13)).astype(np.float32))
    np.save(folder / "a_sparse.npy", rng.integers(0, min(TABLES.values()), (rows, 26)).astype(np.int32))
    np.save(folder / "a_labels.npy", rng.integers(0, 2, (rows, 1)).astype(np.int32))
    pq.write_table(make_table(rows), folder / "rows.parquet")
    common = {"cache_dir": str(folder / "cache"), "eval_fraction": 0.0}
    ids = {"sparse": list(IDS), "table_rows": 1_000_003}
    return {
        "Criteo's text": CriteoConfig(path=str(folder / "rows.tsv"), tables=TABLES, **common),
        "npy": NpyConfig(path=str(folder), tables=TABLES, **common),
        "npy, data.hash_ids=true": NpyConfig(path=str(folder), tables=TABLES, hash_ids=True, **common),
        "parquet": ParquetConfig(
            path=str(folder / "rows.parquet"), label="click", dense=list(NUMBERS), **ids, **common
        ),
    }


def rate(batches: Callable[[], StreamedDataset]) -> float:
    """Samples for each second of CPU time. What it takes to open files counts."""
    began = time.process_time()
    samples = sum(batch.size for batch in batches().batches("train", 2048))
    return samples / (time.process_time() - began)


def main() -> None:
    """Measure all cases in turn and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    logging.disable()
    with tempfile.TemporaryDirectory() as name:
        configs = make_files(Path(name), options.rows)
        prepared = {case: open_dataset(config, 0) for case, config in configs.items()}
        rates: dict[tuple[str, str], list[float]] = {}
        for run in range(options.runs + 1):
            for case, config in configs.items():
                found = {
                    "prepared": rate(lambda case=case: prepared[case]),
                    "streamed": rate(lambda config=config: StreamedDataset(open_source(config))),
                }
                for way, own in found.items() if run else ():  # the first one warms up
                    rates.setdefault((case, way), []).append(own)
    table = Table("files", "", "samples per CPU second", title="Batches of 2,048 samples, one core")
    for (case, way), own in rates.items():
        table.add_row(case, way, spread(own, "{:,.0f}".format))
    Console().print(table)


if __name__ == "__main__":
    main()
