"""What joins, sessions and negatives cost: CPU time of preparing events and of reading batches of them.

    python benchmarks/derived.py [--events 1000000] [--runs 3]

The same generated log (skewed items, users in turns, in the order of time): its events as they are, with two
columns of a side table of 200,000 items, as sessions of users sorted through parts on the disk, as sessions
of a log that lies by user, and batches of 2,048 samples with and without four negatives each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ITEMS = 200_000
BATCH = 2048


def write_files(folder: Path, events: int) -> None:
    """The log in the order of time and by user, and the side table."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, max(1, events // 10), events)
    log = pa.table({"user": user, "item": rng.zipf(1.2, events) % ITEMS, "ts": np.arange(events)})
    pq.write_table(log, folder / "log.parquet")
    last = np.zeros(user.max() + 1, np.int64)
    last[user] = np.arange(events)
    pq.write_table(log.take(pa.array(np.argsort(last[user], kind="stable"))), folder / "by_user.parquet")
    words = np.array([f"category {n}" for n in range(100)])[np.arange(ITEMS) % 100]
    items = pa.table({"item": np.arange(ITEMS), "category": words, "price": rng.lognormal(size=ITEMS)})
    pq.write_table(items, folder / "items.parquet")


def recipes(folder: Path) -> dict[str, dict[str, Any]]:
    """The keys of each case."""
    item = {"name": "item", "rows": 1_000_003}
    user = {"name": "user", "rows": 1_000_003}
    before = {"name": "before", "kind": "sequence", "column": "item_history", "table": "item"} | {
        "rows": 1_000_003
    }
    joined = [{"name": "category", "rows": 1000}, {"name": "price", "kind": "dense"}]
    join = {"path": str(folder / "items.parquet"), "on": "item"}
    sessions = {"by": "user", "order": "ts", "max_length": 20}
    events = {"path": str(folder / "log.parquet"), "features": features("ts", user, item)}
    sequences = {"features": features("positive", user, item, before), "sessions": sessions}
    return {
        "events": events,
        "joined": events | {"features": features("ts", user, item, *joined), "joins": [join]},
        "sessions, sorted": sequences | {"path": str(folder / "log.parquet")},
        "sessions, by user": sequences | {"path": str(folder / "by_user.parquet")},
        "negatives": events | {"negatives": {"feature": "item", "sampling": "popularity"}},
    }


def features(label: str, *own: dict[str, Any]) -> dict[str, Any]:
    """A schema with this label, of any values."""
    return {"labels": [{"name": "label", "column": label, "kind": "values"}], "features": [*own]}


def seconds(recipe: dict[str, Any]) -> Iterator[float]:
    """CPU time of preparing into an empty cache, and of reading a batch, the mean of 200."""
    from recpipe.data.config import FilesConfig
    from recpipe.data.make import open_dataset

    with tempfile.TemporaryDirectory() as cache:
        began = time.process_time()
        dataset = open_dataset(FilesConfig(cache_dir=cache, **recipe), 0)
        yield time.process_time() - began
        began = time.process_time()
        batches = sum(1 for _ in islice(dataset.batches("train", BATCH), 200))
        yield (time.process_time() - began) / batches


def main() -> None:
    """Measure all cases in turn and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name), options.events)
        cases = recipes(Path(name))
        found: dict[str, list[list[float]]] = {case: [] for case in cases}
        for run in range(options.runs + 1):
            for case, recipe in cases.items():
                took = list(seconds(recipe))
                if run:  # the first one warms up
                    found[case].append(took)
    for case, own in found.items():
        prepared, read = (statistics.median(each) for each in zip(*own, strict=True))
        print(f"{case:18} prepared in {prepared:6.2f} s, {1000 * read:6.2f} ms a batch")


if __name__ == "__main__":
    main()
