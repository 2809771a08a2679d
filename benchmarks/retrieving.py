"""What a server takes to find a user's candidates and rank them, beside its parts alone.

    python benchmarks/retrieving.py [--items 100000] [--found 200] [--rounds 5] [--seconds 2] [--json FILE]

Two towers and a DLRM are trained for some steps on generated clicks, so that there is an index of each kind
over as many items, and a package with each. In turn, the other servers stopped meanwhile, each is asked for
the best 10 of the ``--found`` candidates of one of 64 users (``retrieve``), and to score as many that it is
given, as tensors (``infer``: scoring alone). FAISS alone searches in this process, by one thread, for one
vector after the other. One connection gives the times of requests, 16 the rate; CPU time is the server's.
The client is native (serving_client.c). A C++ compiler and recpipe[retrieval,serve] are needed. ``--json``
writes a data file for docs/tables.py.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent))

from serving import CONNECTIONS, Side, http, kserve, running
from serving_native import closed_loop

from recpipe.backend.choices import Host

KINDS = ("flat", "hnsw", "ivf_pq")
USERS, PORT = 64, 8780
FEATURES: dict[str, dict[str, Any]] = {
    "user": {"name": "user", "rows": 20_000},
    "seen": {"name": "seen", "kind": "multi_hot", "separator": "|", "rows": 20_000},
    "item": {"name": "item", "rows": 200_000},
    "shop": {"name": "shop", "rows": 2_000},
    "price": {"name": "price", "kind": "dense", "scale": "log1p"},
}


@dataclass
class Measured:
    """What the rounds gave of one way to ask."""

    alone: list[tuple[float, float]] = field(default_factory=list)
    """Median and p99 of one connection's requests, milliseconds."""
    rates: list[float] = field(default_factory=list)
    """Requests a second of 16 connections, or of one caller."""
    cpu: list[float] = field(default_factory=list)
    """Milliseconds a request."""


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--found", type=int, default=200, help="candidates that are ranked (default 200)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load (default 2)")
    parser.add_argument("--json", type=Path, help="a data file for docs/tables.py")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packages = packaged(folder, options.items)
        vectors = np.random.default_rng(1).normal(size=(USERS, 32)).astype(np.float32)
        asked = [retrieving(options.found), scoring(packages["flat"], options.found)]
        sides = [side(kind, package, PORT + n) for n, (kind, package) in enumerate(packages.items())]
        found = {(kind, what): Measured() for kind in KINDS for what in ("faiss", "retrieve", "infer")}
        with running(sides, folder):
            for _ in range(options.rounds):
                for kind, one in zip(KINDS, sides, strict=True):
                    search(found[kind, "faiss"], folder / kind, vectors, options)
                    one.signal(signal.SIGCONT)
                    for what, requests in zip(("retrieve", "infer"), asked, strict=True):
                        ask(found[kind, what], one, requests, options.seconds)
                    one.signal(signal.SIGSTOP)
        rows = table(found, folder)
    show(rows, options)
    if options.json:
        options.json.write_text(json.dumps(result(rows, options), indent=1) + "\n", encoding="utf-8")
    return 0


def packaged(folder: Path, items: int) -> dict[str, Path]:
    """A package with each kind of index over so many items."""
    from recpipe_retrieval.command import make_index

    import recpipe

    rng = np.random.default_rng(0)
    seen = rng.integers(0, 20_000, (items, 5)).astype(str)
    rows = {"user": rng.integers(0, 20_000, items), "seen": ["|".join(own) for own in seen]}
    rows |= {"item": rng.permutation(items), "shop": rng.integers(0, 2_000, items)}
    rows |= {"price": rng.lognormal(size=items), "click": rng.integers(0, 2, items)}
    pq.write_table(pa.table(rows), folder / "clicks.parquet")

    def trained(name: str, *words: str) -> Path:
        features = {"labels": ["click"], "features": [*FEATURES.values()]}
        (folder / "features.yaml").write_text(json.dumps(features))
        data = ["data=files", f"data.path={folder}/clicks.parquet", f"data.features={folder}/features.yaml"]
        usual = ["trainer.max_steps=20", "trainer.logger=null", "data.batch_size=1024", *words]
        recpipe.train(None, None, *data, *usual, output=folder / name, quiet=True).close()
        return folder / name

    loss = "model.loss=in_batch_softmax"
    towers = trained(
        "towers", "model=two_tower", "model.candidate=[item,shop,price]", "model.normalize=true", loss
    )
    ranker = trained("ranker", "model.bottom=[64,32]", "model.top=[128,64]")
    found = {}
    for kind in KINDS:
        own = [f"output={folder / kind}", f"kind={kind}", f"hydra.run.dir={folder}/{kind}-run"]
        make_index(towers, ["item=item", "columns=[shop,price]", *own])
        target = folder / f"{kind}.recpipe"
        found[kind] = recpipe.package(ranker, target, index=folder / kind, reference=False, quiet=True)
    return found


def side(kind: str, package: Path, port: int) -> Side:
    words = ["serve", str(package), f"port={port}", "name=m"]
    return Side(kind, [sys.executable, "-m", "recpipe", *words], port, [], says="serving")


def retrieving(found: int) -> list[bytes]:
    """Requests for the best 10 of so many candidates of each user."""
    rng, requests = np.random.default_rng(2), []
    for number in range(USERS):
        user = {"user": number, "seen": "|".join(map(str, rng.integers(0, 20_000, 5)))}
        body = json.dumps({"user": user, "k": 10, "n": found}).encode()
        requests.append(http("/v2/models/m/retrieve", body, {}))
    return requests


def scoring(package: Path, found: int) -> list[bytes]:
    """Requests to score so many candidates of each user, whose features each come once."""
    manifest = json.loads((package / "manifest.json").read_text())
    rows = {feature["name"]: feature["rows"] for feature in manifest["sparse"]}
    rng, requests = np.random.default_rng(3), []
    for _ in range(USERS):
        inputs = {"dense": rng.random((found, 1), np.float32), "user": rng.integers(0, rows["user"], 1)}
        inputs |= {"seen": rng.integers(0, rows["seen"], (1, 5))}
        inputs |= {name: rng.integers(0, rows[name], found) for name in ("item", "shop")}
        requests.append(http("/v2/models/m/infer", *kserve(inputs)))
    return requests


def ask(measured: Measured, one: Side, requests: list[bytes], seconds: float) -> None:
    """One round of a server."""
    closed_loop(one.port, requests, CONNECTIONS, 0.3)
    before = one.processor_seconds()
    many = closed_loop(one.port, requests, CONNECTIONS, seconds)
    measured.cpu.append(1e3 * (one.processor_seconds() - before) / len(many.times))
    single = closed_loop(one.port, requests, 1, seconds)
    if many.failed or single.failed:
        sys.exit(f"{one.name}: {many.failed + single.failed} requests failed")
    measured.rates.append(many.rate)
    measured.alone.append((single.percentile(50), single.percentile(99)))


def search(measured: Measured, index: Path, vectors: Any, options: argparse.Namespace) -> None:
    """One round of FAISS in this process."""
    import faiss

    faiss.omp_set_num_threads(1)
    made, times = faiss.read_index(str(index / "index.faiss")), []
    began, cpu = time.perf_counter(), time.process_time()
    while (now := time.perf_counter()) < began + options.seconds:
        made.search(vectors[len(times) % USERS : len(times) % USERS + 1], options.found)
        times.append(time.perf_counter() - now)
    measured.cpu.append(1e3 * (time.process_time() - cpu) / len(times))
    measured.rates.append(len(times) / options.seconds)
    p50, p99 = np.percentile(times, (50, 99))
    measured.alone.append((1e3 * float(p50), 1e3 * float(p99)))


COLUMNS = {
    "index": None,
    "recall@100": "{:.3f}",
    "what": None,
    "median, ms": "{:.2f}",
    "p99, ms": "{:.2f}",
    "CPU of a request, ms": "{:.2f}",
    "requests/s": "{:,.0f}",
}


def table(found: dict[tuple[str, str], Measured], folder: Path) -> list[list[Any]]:
    """The cells of each way to ask: medians of the rounds, lowest, highest."""
    rows = []
    for kind in KINDS:
        told = json.loads((folder / kind / "index.json").read_text())["recall"]
        recall = told["recall@100"] if told else 1.0
        for what in ("faiss", "infer", "retrieve"):
            own = found[kind, what]
            p50, p99 = zip(*own.alone, strict=True)
            rows.append([kind, round(recall, 4), what, *map(spread, (p50, p99, own.cpu, own.rates))])
    return rows


def spread(rounds: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in (median(rounds), min(rounds), max(rounds))]


def show(rows: list[list[Any]], options: argparse.Namespace) -> None:
    """Print the table, and what of ``retrieve`` is neither search nor scoring."""
    print(f"{options.items:,} items, {options.found} of them ranked; medians of {options.rounds} rounds")
    print(*COLUMNS, sep=" | ")
    for kind, recall, what, *cells in rows:
        formats = [*COLUMNS.values()][3:]
        texts = ["{} ({}..{})".format(*map(f.format, cell)) for f, cell in zip(formats, cells, strict=True)]
        print(kind, recall, what, *texts, sep=" | ", flush=True)
    for kind in KINDS:
        search, infer, retrieve = (row[5][0] for row in rows if row[0] == kind)
        print(f"{kind}: {retrieve - search - infer:.2f} ms of CPU time beside FAISS's search and infer")


def result(rows: list[list[Any]], options: argparse.Namespace) -> dict[str, Any]:
    """What docs/tables.py reads."""
    words = f"--items {options.items} --found {options.found} --rounds {options.rounds}"
    return {
        "title": f"Retrieve, then rank: {options.found} of {options.items:,} items",
        "command": f"python benchmarks/retrieving.py {words} --seconds {options.seconds:g}",
        "machine": str(Host.current()),
        "commit": "",
        "date": date.today().isoformat(),
        "kept": f"medians (lowest..highest) of {options.rounds} rounds in turn; median and p99 of one "
        f"connection, CPU time of the server and requests/s of {CONNECTIONS}; faiss: search alone, by one "
        f"caller; infer: scoring of {options.found} candidates alone, given as tensors",
        "columns": COLUMNS,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
