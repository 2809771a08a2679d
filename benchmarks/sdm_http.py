"""What rows on the SSD cost a server: requests/s and p99 over HTTP, against one with all rows in DRAM.

    python benchmarks/sdm.py --http [--shares 0.05 0.1 0.25] [--admission static] [--work DIR_ON_THE_DISK]
    python benchmarks/sdm.py --http --dim 16 --pooling 1 --shares 0.2 --repeat 0.999   what hits cost
    python benchmarks/sdm.py --http --update

A request is one user, with ids (zipf) in several tables, and 64 candidates. The model is DLRM with int8
rows, trained for two steps on users drawn in the same way; the package has the training samples' lookup
counts. Both servers answer the same requests in turn, from as many connections as keep them busy, and one by
one give the same bytes. ``share`` is DRAM over the tables' bytes in float32. The bound is min(c0 / (c0 + m *
c_io), IOPS / m / (requests/s with all rows in DRAM)): m rows are read for a request, c0 is the processor time
of a request with all rows in DRAM, c_io that of a row, IOPS what the disk gives; the index is taken to cost
nothing. ``--update``: a newer package takes over under load.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from recpipe_low_precision.checkpoint import take_place, write_quantized
from safetensors.torch import load_file, save_file
from serving_load import Load, closed_loop, run

import recpipe
from recpipe.answers.manifest import write_manifest
from recpipe.answers.row_types import row_bytes
from recpipe.answers.score import Scorer
from recpipe.answers.trained import open_trained
from recpipe.plugin.store import StoreLayout
from recpipe.tables.stores.ssd import SsdStore

USERS, USER_ROWS, ITEM_ROWS, CANDIDATES = 8, 125_000, 10_000, 64
SAMPLES, ZIPF = 20_000, 1.05
TOGETHER = 8
"""Requests of a batch."""
CONNECTIONS = 24
RECENT = 1000
"""Users among whom one asks again."""
WORDS = (
    "data=parquet",
    "data.label=click",
    "data.dense=[price]",
    f"data.sparse=[{','.join(f'user{n}' for n in range(USERS))},item]",
    "data.hash_ids=false",
    "data.batch_size=500",
    "model.bottom=[128]",
    "model.top=[512,256]",
    "trainer.max_steps=2",
    "trainer.logger=null",
)


class Drawn:
    """Ids of users and candidates."""

    def __init__(self, pooling: int, repeat: float = 0.0) -> None:
        self.rng, self.pooling, self.repeat = np.random.default_rng(0), pooling, repeat
        self.before: deque[list[NDArray[np.int64]]] = deque(maxlen=RECENT)
        """The users of the last requests."""
        popularity = np.arange(1, USER_ROWS + 1, dtype=np.float64) ** -ZIPF
        self.cumulative = np.cumsum(popularity / popularity.sum())
        self.row_of_rank = [self.rng.permutation(USER_ROWS) for _ in range(USERS)]

    def users(self, count: int) -> list[NDArray[np.int64]]:
        """For each table [count, pooling]."""
        found = []
        for rows in self.row_of_rank:
            ranks = np.searchsorted(self.cumulative, self.rng.random((count, self.pooling)))
            found.append(rows[np.minimum(ranks, USER_ROWS - 1)])
        return found

    def requests(self, count: int) -> list[bytes]:
        """Whole HTTP requests; of a share of them the user has asked before."""
        users, found = self.users(count), []
        for n in range(count):
            user = [own[n] for own in users]
            if self.before and self.rng.random() < self.repeat:
                user = self.before[int(self.rng.integers(len(self.before)))]
            self.before.append(user)
            found.append(self._request(user))
        return found

    def _request(self, user: list[NDArray[np.int64]]) -> bytes:
        items = self.rng.integers(0, ITEM_ROWS, CANDIDATES)
        parts = [("dense", "FP32", [1, 1], np.ones(1, np.float32).tobytes())]
        parts += [(f"user{n}", "INT64", [1, self.pooling], ids.tobytes()) for n, ids in enumerate(user)]
        parts.append(("item", "INT64", [CANDIDATES], items.tobytes()))
        inputs = [
            {"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(data)}}
            for name, kind, shape, data in parts
        ]
        header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        body = header + b"".join(data for *_, data in parts)
        lines = (
            "POST /v2/models/m/infer HTTP/1.1",
            "Host: x",
            f"Content-Length: {len(body)}",
            f"Inference-Header-Content-Length: {len(header)}",
        )
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def made(work: Path, drawn: Drawn, dim: int) -> Path:
    """The package, made once in ``work``."""
    package = work / f"dim{dim}-pooling{drawn.pooling}.recpipe"
    if not package.exists():
        users, items = drawn.users(SAMPLES), drawn.rng.integers(0, ITEM_ROWS, SAMPLES)
        ends = pa.array(np.arange(0, SAMPLES * drawn.pooling + 1, drawn.pooling, dtype=np.int32))
        columns = {f"user{n}": pa.ListArray.from_arrays(ends, ids.reshape(-1)) for n, ids in enumerate(users)}
        clicks, prices = drawn.rng.integers(0, 2, SAMPLES), drawn.rng.random(SAMPLES)
        pq.write_table(
            pa.table({"click": clicks, "price": prices, "item": items, **columns}), work / "clicks.parquet"
        )
        rows = ",".join([*(f"user{n}: {USER_ROWS}" for n in range(USERS)), f"item: {ITEM_ROWS}"])
        words = (f"data.path={work / 'clicks.parquet'}", f"data.cache_dir={work}", f"data.tables={{{rows}}}")
        words += (f"model.embedding_dim={dim}",)
        for folder in ("run", "drawn"):
            shutil.rmtree(work / folder, ignore_errors=True)
        recpipe.train(None, None, *WORDS, *words, output=work / "run", quiet=True).close()
        source = open_trained(work / "run").source()
        write_quantized(work / "drawn", source, dict.fromkeys(source.shapes, "int8"))
        # Labels are drawn by chance, so that there is no quality to judge.
        take_place(work / "drawn", work / "quantized")
        recpipe.package(work / "quantized", package, popularity=True, quiet=True)
    return package


class Unchecked(Scorer):
    """A scorer of a package whose golden scores are to be made."""

    def check_golden(self) -> float:
        """Nothing is compared."""
        return 0.0


def newer(package: Path, share: float) -> Path:
    """The package with a ``share`` of the users' rows changed."""
    folder = package.with_name("newer.recpipe")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(package, folder)
    rng = np.random.default_rng(9)
    for n in range(USERS):
        file = folder / f"tables/user{n}.safetensors"
        rows = load_file(file)["rows"].clone()
        chosen = torch.from_numpy(rng.choice(USER_ROWS, int(share * USER_ROWS), replace=False))
        rows[chosen, 4:] = rows[chosen, 4:].flip(1)
        save_file({"rows": rows}, file)
    content = json.loads((folder / "manifest.json").read_text())
    kept = {key: value for key, value in content.items() if key not in ("format", "schema", "files")}
    golden = load_file(folder / "golden.safetensors")
    write_manifest(folder, kept)
    scorer = Unchecked(folder)
    golden |= zip((own.about["golden"] for own in scorer.programs), scorer.golden_scores(), strict=True)
    save_file(golden, folder / "golden.safetensors")
    write_manifest(folder, kept)
    return folder


class Served:
    """A server of ``package`` in a process of its own."""

    def __init__(self, package: Path, *words: str) -> None:
        limits = ("port=0", "name=m", f"batch={TOGETHER * CANDIDATES}")
        command = [sys.executable, "-m", "recpipe", "serve", str(package), *limits, *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        self.said = ""
        for line in self.process.stdout:
            self.said += line
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/", line):
                self.port = int(found[1])
                return
        raise RuntimeError(self.said)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, _: type | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self.process.terminate()
        self.process.communicate()

    def load(self, requests: list[bytes], seconds: float) -> Load:
        """Answers to ``requests``, over and over."""
        found = run(closed_loop(self.port, requests, CONNECTIONS, seconds))
        assert not found.failed, f"{found.failed} requests were not answered"
        return found

    @property
    def processor(self) -> float:
        """Processor seconds so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory(self) -> dict[str, float]:
        """MiB: the most that was resident, and what is now but for files."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return {
            key: int(re.search(rf"{key}:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]
            for key in ("VmHWM", "RssAnon")
        }

    def counted(self, name: str) -> float:
        """A figure of /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as response:
            text = response.read().decode()
        return float(re.search(rf"^recpipe_{name} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]


@dataclass
class Side:
    """Medians over rounds."""

    share: float
    admission: str
    requests: float
    dram_requests: float
    ratio: float
    lowest: float
    highest: float
    p99_ms: float
    dram_p99_ms: float
    p99_ratio: float
    cpu_ratio: float
    missed: float
    """Of the lookups."""
    read_a_request: float
    ahead: float
    """Of the rows that are read."""
    bound: float


def compared(share: float, package: Path, dram: Served, drawn: Drawn, options: argparse.Namespace) -> Side:
    """Both servers in turn."""
    words = (
        f"plugins.sdm.dram={share:%}",
        "plugins.sdm.tables=user*",
        f"plugins.sdm.admission={options.admission}",
        f"plugins.sdm.pooled={options.pooled}",
    )
    with Served(package, "+plugin=sdm", *words) as ssd:
        print(ssd.said.strip(), ssd.memory, flush=True)
        _require_equal(dram, ssd, drawn.requests(20))
        for _ in range(options.warm):
            ssd.load(drawn.requests(3000), options.seconds)
        rates, tails, cpus, answers = [], [], [], 0
        before = {
            name: ssd.counted(f"sdm_{name}") for name in ("lookups", "missed", "rows_read", "rows_read_ahead")
        }
        for _ in range(options.rounds):
            given = drawn.requests(int(options.seconds * 2000))
            for server in (dram, ssd):
                start = server.processor
                load = server.load(given, options.seconds)
                rates.append(load.rate)
                tails.append(load.percentile(99))
                cpus.append((server.processor - start) / len(load.times))
                answers += len(load.times) if server is ssd else 0
        moved = {name: ssd.counted(f"sdm_{name}") - value for name, value in before.items()}
    rate, tail, cpu = (np.array(found).reshape(-1, 2) for found in (rates, tails, cpus))
    read = moved["rows_read"] / answers
    io_cpu, iops = disk(options.work, max(1, round(read * TOGETHER)), options.dim)
    own = float(np.median(cpu[:, 0]))
    ratios = rate[:, 1] / rate[:, 0]
    return Side(
        share,
        options.admission,
        float(np.median(rate[:, 1])),
        float(np.median(rate[:, 0])),
        float(np.median(ratios)),
        float(ratios.min()),
        float(ratios.max()),
        float(np.median(tail[:, 1])),
        float(np.median(tail[:, 0])),
        float(np.median(tail[:, 1] / tail[:, 0])),
        float(np.median(cpu[:, 0] / cpu[:, 1])),
        moved["missed"] / max(1.0, moved["lookups"]),
        read,
        moved["rows_read_ahead"] / max(1.0, moved["rows_read"]),
        min(own / (own + read * io_cpu), iops / max(read, 1e-9) / float(np.median(rate[:, 0]))),
    )


def disk(work: Path, count: int, dim: int) -> tuple[float, float]:
    """Processor seconds of a row, and rows a second, where ``count`` are read at a time."""
    words = np.zeros((USERS * USER_ROWS, row_bytes("int8", dim) // 4), np.float32)
    layout = StoreLayout(("users",), (len(words),), words.shape[1])
    store = SsdStore.create(
        layout, lambda _, start, stop: words[start:stop], work / "store", staging_bytes=1 << 20, scratch=True
    )
    rng, out = np.random.default_rng(1), np.empty((count, words.shape[1]), np.float32)
    parts = [rng.choice(len(words), count, replace=False) for _ in range(100)]
    wall, cpu = time.perf_counter(), time.process_time()
    for part in parts:
        store.gather(part, out)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    store.close()
    return cpu / (100 * count), 100 * count / wall


def _require_equal(dram: Served, ssd: Served, requests: list[bytes]) -> None:
    """Scores of requests that come alone have the same bits."""
    from serving_load import connected

    async def one_by_one(port: int) -> list[bytes]:
        connection = await connected(port)
        found = [(await connection.ask(request))[1] for request in requests]
        connection.close()
        return found

    first, second = (run(one_by_one(server.port)) for server in (dram, ssd))
    assert first == second, "other scores than with all rows in DRAM"


def update(package: Path, drawn: Drawn, options: argparse.Namespace) -> None:
    """p99 before, while and after a newer package takes over."""
    link = options.work / "served"
    link.unlink(missing_ok=True)
    link.symlink_to(package)
    then = newer(package, options.changed)
    words = ("+plugin=sdm", f"plugins.sdm.dram={options.shares[0]:%}", "plugins.sdm.tables=user*")
    with Served(link, *words, f"plugins.sdm.directory={options.work}") as server:
        given = drawn.requests(8000)
        server.load(given, 2)
        before = server.load(given, 5)
        link.unlink()
        link.symlink_to(then)
        written, rows = server.counted("sdm_bytes_written"), server.counted("sdm_rows_replaced")
        began = time.monotonic()
        server.process.send_signal(signal.SIGHUP)
        during = []
        while server.counted("sdm_rows_replaced") - rows < int(options.changed * USER_ROWS) * USERS:
            during.append(server.load(given, 1))
            assert time.monotonic() < began + 120, "it does not take over"
        seconds = time.monotonic() - began
        written = server.counted("sdm_bytes_written") - written
        after = server.load(given, 5)
    times = np.concatenate([load.times for load in during])
    print(
        f"{options.changed:.0%} of {USERS * USER_ROWS:,} rows changed in about {seconds:.0f} s, "
        f"{written / 2**20:,.0f} MiB written; p99 {before.percentile(99):.1f} ms before, "
        f"{1e3 * np.percentile(times, 99):.1f} ms meanwhile, {after.percentile(99):.1f} ms after; "
        f"requests/s {before.rate:,.0f}, {np.mean([load.rate for load in during]):,.0f}, {after.rate:,.0f}"
    )


def main(words: list[str]) -> int:
    """Run the benchmark; always 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.1, 0.25])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--pooling", type=int, default=20, help="ids of a user in a table (default 20)")
    parser.add_argument("--admission", choices=["static", "lfu"], default="lfu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a round on each side")
    parser.add_argument("--warm", type=int, default=1, help="rounds before the first that counts")
    parser.add_argument("--work", type=Path, default=Path("sdm-http"), help="on the disk; kept")
    parser.add_argument(
        "--repeat", type=float, default=0.0, help="share of requests of a user who comes again"
    )
    parser.add_argument("--pooled", default="0", help="plugins.sdm.pooled, such as 1%%")
    parser.add_argument("--update", action="store_true", help="let a newer package take over under load")
    parser.add_argument("--changed", type=float, default=0.1, help="share of the rows that differ in it")
    parser.add_argument("--make", action="store_true", help="make the package, and no more")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write DRAM share against requests/s to this .svg")
    options = parser.parse_args(words)
    options.work.mkdir(parents=True, exist_ok=True)
    drawn = Drawn(options.pooling, options.repeat)
    package = made(options.work, drawn, options.dim)
    if options.make:
        return 0
    if options.update:
        update(package, drawn, options)
        return 0
    found = []
    with Served(package) as dram:
        print(dram.said.strip(), dram.memory, flush=True)
        for share in options.shares:
            found.append(compared(share, package, dram, drawn, options))
            print(json.dumps(asdict(found[-1])), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(side) for side in found], indent=2) + "\n")
    if options.plot:
        plot([asdict(side) for side in found], options.plot)
    return 0


def plot(sides: list[dict[str, float]], file: Path) -> None:
    """DRAM share against requests/s over all rows in DRAM, beside the bound."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    shares = [100 * side["share"] for side in sides]
    ratios = np.array([[side[key] for side in sides] for key in ("ratio", "lowest", "highest")])
    axes.errorbar(
        shares,
        ratios[0],
        (ratios[0] - ratios[1], ratios[2] - ratios[0]),
        fmt="o-",
        capsize=3,
        label="measured",
    )
    axes.plot(shares, [side["bound"] for side in sides], "--", label="bound")
    axes.axhline(0.9, color="0.6", linewidth=0.8)
    axes.set(
        xlabel="DRAM, % of the tables in float32", ylabel="requests/s over all rows in DRAM", ylim=(0, 1.15)
    )
    axes.legend(loc="lower right")
    figure.savefig(file)
