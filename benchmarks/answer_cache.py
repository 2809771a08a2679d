"""What a cache of answers by approximate keys gains a server, on a trace of customers who come back.

    python benchmarks/answer_cache.py --data online_retail.parquet [--taobao taobao_110k.parquet]
        [--only NAME ...] [--http] [--write]

Models of three sizes are trained for some steps on two years of a wholesaler's invoices, by article, price,
customer, country and the age of the invoice, and packaged. A request is an invoice at its time: its customer,
country and age beside the 100 articles at a price that come most often (of ``candidates`` beside 100 of the
300 that do, drawn anew for each request by how often they come). A customer who comes back has another age,
so that few requests are equal. The first three quarters of a trace fill the caches; the rest is measured.
``DIN``: two hours of a shop's users (Taobao), each event that follows others of its user beside the 100 items
that come most often. A user's histories differ at each event, so that no request is equal to another; keys
leave the items before out and have the category before as it is, by the hash of the latest of that history.
``recpipe answer-cache`` replays the trace in this process: the model alone, exact and approximate keys, and
similarity caching (FAISS), whose radius is chosen knowing its true error. ``--http``: the trace of the first
case, each request once and in order, over 16 connections to ``recpipe serve`` with and without the plugin,
and at half of the rate without it.
``--write``: the figures into benchmarks/results/answer_cache.json. A C++ compiler and
recpipe[retrieval,serve] are needed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from serving import CONNECTIONS, Side, http, kserve, running
from serving_native import open_loop

FEATURES: list[dict[str, Any]] = [
    {"name": "StockCode", "ids": "vocabulary"},
    {"name": "CustomerID", "ids": "vocabulary", "missing": ["0"]},
    {"name": "Country", "ids": "vocabulary"},
    {"name": "UnitPrice", "kind": "dense", "scale": "log"},
    {"name": "InvoiceDate", "kind": "timestamp", "as": ["age"]},
]
RULES = "[{feature: InvoiceDate_age, by: round, size: 4}]"
"""The logarithm of days."""
ITEMS, CANDIDATES, PORT = ("StockCode", "UnitPrice"), 100, 8790


RETAIL_TRACE = (f"items=[{','.join(ITEMS)}]", "visit=[InvoiceNo]", "time=InvoiceDate")
TAOBAO_TRACE = ("items=[item,category]", "visit=[user,ts]", "time=ts", "similar=false")
HISTORIES = "[{feature: items, by: skip}, {feature: categories, by: history, size: 1}]"


@dataclass(frozen=True)
class Case:
    """A model, and how its trace is replayed."""

    model: tuple[str, ...]
    requests: int
    trace: tuple[str, ...] = ()
    knobs: tuple[str, ...] = ()
    taobao: bool = False
    """Whether it is of that data."""


KAGGLE = ("model.bottom=[512,256,64]", "model.top=[512,256]")
"""DLRM as its authors have it for Criteo's Kaggle data."""
CASES = {
    "DLRM": Case(KAGGLE, 20_000),
    "DLRM-DCN": Case(
        (
            *("model=dlrm_dcn", "model.embedding_dim=64", "model.bottom=[512,256]"),
            *("model.top=[1024,512,256]", "model.cross_rank=128"),
        ),
        10_000,
        ("similar=false",),
    ),
    "DLRM, small": Case((), 20_000),
    "DIN": Case(("experiment=taobao_din",), 10_000, taobao=True),
    "candidates": Case(
        KAGGLE,
        10_000,
        ("pool=300", "similar=false"),
        ("plugins.answer_cache.unit=candidate", "plugins.answer_cache.capacity=1000000"),
    ),
}


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="Online Retail II as parquet")
    parser.add_argument("--taobao", type=Path, help="events of Taobao as parquet, for DIN")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--requests", type=int, help="of each trace, in the place of its own number")
    parser.add_argument("--steps", type=int, default=400, help="of training (default 400)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--bounds", type=float, nargs="+", default=[0.005])
    parser.add_argument("--write", action="store_true", help="keep the figures")
    parser.add_argument("--http", action="store_true", help="through recpipe serve, too")
    options = parser.parse_args()
    if options.taobao is None:
        options.only = [case for case in options.only if not CASES[case].taobao]
    if options.http and CASES[options.only[0]].taobao:
        parser.error("--http is of a case of the wholesaler's: name one first")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[tuple[str, float], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        made: dict[tuple[str, ...], tuple[Path, Path]] = {}
        for case in options.only:
            own = CASES[case]
            folder = Path(name) / str(len(made))
            if own.model not in made:
                folder.mkdir()
                data = [f"data.path={options.taobao}"] if own.taobao else retail(folder, options.data)
                made[own.model] = packaged(folder, options.steps, [*data, *own.model])
            run, package = made[own.model]
            for bound in options.bounds:
                count = options.requests or own.requests
                words = [f"requests={count}", f"warm={count * 3 // 4}", f"rounds={options.rounds}"]
                label = f"{case} {bound}".replace(",", "").replace(" ", "_")  # a comma is Hydra's sweep
                words += [f"hydra.run.dir={name}/{label}", *own.trace]
                words += TAOBAO_TRACE if own.taobao else RETAIL_TRACE
                rules = HISTORIES if own.taobao else RULES
                found[case, bound] = replayed(run, package, words, [*knobs(bound, rules), *own.knobs])
        if options.write:
            write(found, options)
        if options.http:
            case = CASES[options.only[0]]
            served(Path(name), *made[case.model], options, options.requests or case.requests)
    return 0


def retail(folder: Path, data: Path) -> list[str]:
    """The words of the wholesaler's data."""
    features = {"labels": [{"name": "dozen", "expression": "Quantity >= 12"}], "features": FEATURES}
    (folder / "features.yaml").write_text(json.dumps(features | {"unread": ["InvoiceNo"]}))
    return ["experiment=online_retail", f"data.path={data}", f"data.features={folder}/features.yaml"]


def packaged(folder: Path, steps: int, words: Sequence[str]) -> tuple[Path, Path]:
    """A trained run and its package."""
    import recpipe

    own = [f"data.cache_dir={folder}/cache", f"trainer.max_steps={steps}", "trainer.logger=null"]
    own += ["trainer.eval_every=1.0", "trainer.limit_val_batches=4"]
    recpipe.train(None, None, *words, *own, output=folder / "run", quiet=True).close()
    return folder / "run", recpipe.package(folder / "run", folder / "m.recpipe", reference=False, quiet=True)


def knobs(bound: float, rules: str = RULES) -> list[str]:
    own = {"bound": bound, "keys": rules, "levels": 2, "beta": 1.5, "dwell": 500}
    return [f"plugins.answer_cache.{key}={value}" for key, value in own.items()]


def replayed(run: Path, package: Path, words: list[str], own: list[str]) -> dict[str, Any]:
    """In this process."""
    from recpipe_answer_cache.command import compare_caches

    return compare_caches(run, [f"package={package}", f"candidates={CANDIDATES}", *words, *own])


def write(found: dict[tuple[str, float], dict[str, Any]], options: argparse.Namespace) -> None:
    """The figures of the replays, as docs/tables.py reads them."""
    from recpipe.report.environment import environment

    columns = {
        "model": None,
        "bound": None,
        "answered by": None,
        "requests/s": "{:,.0f}",
        "over the model alone": "{:.2f}",
        "processor time, ms": "{:.3f}",
        "p99, ms": "{:.2f}",
        "answered from the cache": "{:.1%}",
        "true error": "{:.2%}",
        "other top 10": "{:.1%}",
    }
    rows = []
    seen: set[tuple[str, str]] = set()
    for (case, bound), told in found.items():
        for way in told["ways"]:
            alone = way["name"] in ("model", "exact")  # the same at every bound
            if alone and (case, way["name"]) in seen:
                continue
            seen.add((case, way["name"]))
            times = [way["rate"][0], way["over_model"], way["processor_ms"], way["p99_ms"]]
            answered = [1 - way["inferred"], way["errors"]["score"], way["errors"]["top_k"]]
            rows.append([case, "" if alone else f"{bound:.1%}", way["name"], *times, *answered])
    result = {
        "title": "A cache of answers on a trace of returning customers",
        "command": "python benchmarks/answer_cache.py --data FILE",
        "machine": f"{len(os.sched_getaffinity(0))} cores of {environment()['cpu']}",
        "commit": "",
        "date": date.today().isoformat(),
        "kept": "one pass of all requests; what each of them took was not kept"
        if options.rounds == 1
        else f"medians of {options.rounds} passes in turn (lowest..highest); each pass was not kept",
        "columns": columns,
        "rows": rows,
    }
    target = Path(__file__).resolve().parent / "results" / "answer_cache.json"
    target.write_text(json.dumps(result, indent=1) + "\n")


def served(folder: Path, run: Path, package: Path, options: argparse.Namespace, count: int) -> None:
    """Through HTTP."""
    requests = bodies(run, package, count)
    ways = {"model": [], **{f"bound {b}": ["+plugin=answer_cache", *knobs(b)] for b in options.bounds}}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    tails: dict[str, list[float]] = {name: [] for name in ways}
    told: dict[str, Any] = {}
    for number in range(options.rounds):
        for way, (name, words) in enumerate(ways.items()):
            for what in ("rate", "half"):
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
                    at = np.arange(len(requests)) * (2 / rates["model"][0] if what == "half" else 0.0)
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
