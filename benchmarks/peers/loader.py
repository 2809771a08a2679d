"""recpipe's loader alone on the prepared files, training nothing.

python benchmarks/peers/loader.py DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter

from work import TABLES, setting_of, versions

from recpipe.data.make import open_dataset


def main() -> None:
    directory = Path(sys.argv[1])
    batch = setting_of(directory).batch
    recipe = {"name": "npy", "path": str(directory), "tables": TABLES, "eval_fraction": 0.0}
    dataset = open_dataset({**recipe, "batch_size": batch, "cache_dir": str(directory / "cache")}, seed=1)
    started = perf_counter()
    samples = sum(b.size for b in dataset.batches("train", batch))
    speed = samples / (perf_counter() - started)
    print(json.dumps({"samples_per_second": speed, "versions": versions("torch", "recpipe")}))


if __name__ == "__main__":
    main()
