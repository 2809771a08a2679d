"""What a cache of answers by approximate keys gains a server, on a trace of customers who come back.

    python benchmarks/answer_cache.py --data online_retail.parquet [--requests 20000] [--rounds 3] [--http]

The recipe experiment=online_retail is trained for some steps and packaged. A request is an invoice at its
time: its customer, country, hour and weekday beside the 64 articles at the price that come most often.
``recpipe answer-cache`` replays the trace in this process: the model alone, exact and approximate keys, and
similarity caching (FAISS), whose radius is chosen knowing its true error. ``--http``: the same trace, each
request once and in order, over 16 connections to ``recpipe serve`` with and without the plugin, and at half
of the rate without it. A C++ compiler and recpipe[retrieval,serve] are needed.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import tempfile
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from serving import CONNECTIONS, Side, http, kserve, running
from serving_native import open_loop

RULES = (
    "[{feature: InvoiceDate_weekday, by: skip}, {feature: InvoiceDate_hour, by: bucket, size: 3}, "
    "{feature: CustomerID, by: cluster, size: 256, first: 3}]"
)
ITEMS, CANDIDATES, PORT = ("StockCode", "UnitPrice"), 64, 8790


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Online Retail II as parquet")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=400, help="of training (default 400)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bounds", type=float, nargs="+", default=[0.005, 0.02])
    parser.add_argument("--http", action="store_true", help="through recpipe serve, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run, package = packaged(folder, options.data, options.steps)
        for bound in options.bounds:
            words = [
                f"requests={options.requests}",
                f"rounds={options.rounds}",
                f"hydra.run.dir={folder}/{bound}",
            ]
            replayed(run, package, bound, words)
        if options.http:
            served(folder, run, package, options)
    return 0


def packaged(folder: Path, data: Path, steps: int) -> tuple[Path, Path]:
    """A trained run and its package."""
    import recpipe

    words = ["experiment=online_retail", f"data.path={data}", f"data.cache_dir={folder}/cache"]
    usual = [
        f"trainer.max_steps={steps}",
        "trainer.logger=null",
        "trainer.eval_every=1.0",
        "trainer.limit_val_batches=4",
    ]
    recpipe.train(None, None, *words, *usual, output=folder / "run", quiet=True).close()
    return folder / "run", recpipe.package(folder / "run", folder / "m.recpipe", reference=False, quiet=True)


def knobs(bound: float) -> list[str]:
    return [f"plugins.answer_cache.bound={bound}", f"plugins.answer_cache.keys={RULES}"]


def replayed(run: Path, package: Path, bound: float, words: list[str]) -> dict[str, Any]:
    """In this process."""
    from recpipe_answer_cache.command import compare_caches

    trace = [
        f"items=[{','.join(ITEMS)}]",
        f"candidates={CANDIDATES}",
        "visit=[InvoiceNo]",
        "time=InvoiceDate",
    ]
    return compare_caches(run, [f"package={package}", *trace, *words, *knobs(bound)])


def served(folder: Path, run: Path, package: Path, options: argparse.Namespace) -> None:
    """Through HTTP."""
    requests = bodies(run, package, options.requests)
    ways = {"model": [], **{f"bound {b}": ["+plugin=answer_cache", *knobs(b)] for b in options.bounds}}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    tails: dict[str, list[float]] = {name: [] for name in ways}
    told: dict[str, Any] = {}
    for number in range(options.rounds):
        for way, (name, words) in enumerate(ways.items()):
            half = rates["model"][0] / 2 if rates["model"] else None
            for what in ("rate", "half") if half else ("rate",):
                port = PORT + 8 * number + 2 * way + (what == "half")
                command = [
                    sys.executable,
                    "-m",
                    "recpipe",
                    "serve",
                    str(package),
                    f"port={port}",
                    "name=m",
                    *words,
                ]
                side = Side(name, command, port, [], says="serving")
                with running([side], folder):  # a new one each time: its cache is empty
                    side.signal(signal.SIGCONT)
                    at = np.zeros(len(requests)) if what == "rate" else np.arange(len(requests)) / (half or 1)
                    load = open_loop(port, requests, at, CONNECTIONS)
                    if load.failed:
                        raise SystemExit(f"{name}: {load.failed} requests failed")
                    if what == "rate":
                        rates[name].append(load.rate)
                        told[name] = answers(port)
                    else:
                        tails[name].append(load.percentile(99))
    for name in ways:
        ratios = [a / b for a, b in zip(rates[name], rates["model"], strict=True)]
        tail = f"p99 {median(tails[name]):.1f} ms at half of the model's rate, " if tails[name] else ""
        print(
            f"{name}: {median(rates[name]):,.0f} requests/s, {median(ratios):.2f} ({min(ratios):.2f}.."
            f"{max(ratios):.2f}) of the model's, {tail}{told[name] or ''}"
        )


def bodies(run: Path, package: Path, count: int) -> list[bytes]:
    """The trace as HTTP requests."""
    from recpipe_answer_cache.trace import made_trace, rows_of
    from recpipe_serve import Scorer
    from recpipe_serve.http.features import Features

    from recpipe.answers.trained import open_trained

    trained, scorer = open_trained(run), Scorer(package)
    rows = rows_of(trained, ["InvoiceNo"], None, count, 0)
    trace = made_trace(trained.schema, Features(scorer.manifest, CANDIDATES), rows, ITEMS, CANDIDATES)
    return [http("/v2/models/m/infer", *kserve(inputs)) for inputs in trace.inputs]


def answers(port: int) -> dict[str, float]:
    """What the server's metrics say of its cache."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        text = page.read().decode()
    return {name: float(v) for name, v in re.findall(r"^recpipe_answers_(\w+) (\S+)$", text, re.MULTILINE)}


if __name__ == "__main__":
    sys.exit(main())
