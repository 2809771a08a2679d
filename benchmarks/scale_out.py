"""What a package costs that is cut into shards, beside the same one on one server.

    python benchmarks/scale_out.py [--shards 1 2 4 8] [--gbit 1] [--delay-us 100] [--rate 100] [--rounds 3]

Made-up models of three kinds: ``many`` tables of sizes that are alike, a ``mixed`` one whose sizes fall off,
and one with a single table of nine tenths of all rows (``one``); ids are skewed (zipf), and a request is one
user with half of the features and 64 candidates with the other half. Each plan's shards are processes behind
links of ``--gbit`` and ``--delay-us`` (relay.c: each shard's link, and all together the main server's).
Requests come at random at ``--rate`` a second; single server and shards take turns, the others are stopped
meanwhile. ``ours`` is plan=load with a tenth of the bytes at the main server. A line for each: percentiles of
latency, their ratio to the single server's in the same round, CPU time of a request over all processes, and
the relay's own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from serving import http, kserve
from serving_load import Load, arrivals
from serving_native import open_loop

CANDIDATES, DIFFERENT = 64, 64
RELAY = Path(__file__).with_name("relay.c")
PLANS = {
    "capacity": ("plan=capacity",),
    "load": ("plan=load",),
    "net": ("plan=net",),
    "ours": ("plan=load", "main="),
}


def sizes(kind: str, rows: int) -> list[int]:
    """The rows of each table, ``rows`` in all."""
    if kind == "many":
        weights = np.random.default_rng(1).uniform(0.5, 1.5, 48)
    elif kind == "one":
        weights = np.array([9.0, *np.full(12, 1 / 12)])
    else:
        weights = 1 / np.arange(1, 25) ** 1.2
    return [max(50, int(rows * own / weights.sum())) for own in weights]


def packaged(kind: str, options: argparse.Namespace, folder: Path) -> Path:
    """A package of a DLRM of this kind after two steps."""
    import recpipe

    found = sizes(kind, options.rows)
    tables = ", ".join(f"t{at}: {rows}" for at, rows in enumerate(found))
    pooling = [1 if at % 2 else options.pooling for at in range(len(found))]
    words = (
        *(f"data.tables={{{tables}}}", f"data.pooling={pooling}", "data.samples=4000"),
        *(f"model.embedding_dim={options.dim}", f"model.bottom=[64,{options.dim}]", "model.top=[128,64]"),
        *("trainer.max_steps=2", "trainer.logger=null", "trainer.device=cpu"),
    )
    recpipe.train(None, None, *words, output=folder / f"{kind}-run", quiet=True).close()
    return recpipe.package(
        folder / f"{kind}-run", folder / f"{kind}.recpipe", reference=False, popularity=True, quiet=True
    )


def requests(package: Path, port: int, pooling: int) -> list[bytes]:
    """Different ones, of skewed ids."""
    manifest, draw = json.loads((package / "manifest.json").read_text()), np.random.default_rng(5)
    made = []
    for _ in range(DIFFERENT):
        inputs: dict[str, Any] = {
            "dense": draw.random((CANDIDATES, len(manifest["dense"]["names"])), np.float32)
        }
        for at, feature in enumerate(manifest["sparse"]):
            shape = (1 if at < len(manifest["sparse"]) // 2 else CANDIDATES, 1 if at % 2 else pooling)
            ids = (draw.zipf(1.2, shape) - 1) % feature["rows"]
            inputs[feature["name"]] = ids[:, 0].copy() if shape[1] == 1 else ids
        body, headers = kserve(inputs)
        made.append(http(f"/v2/models/{package.name.partition('.')[0]}/infer", body, headers))
    return made


class Process:
    """A process of its own session, and the port that it answers on."""

    def __init__(self, command: Sequence[str], log: Path, says: str) -> None:
        with log.open("wb") as out:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environment, start_new_session=True
            )
        self.log, until = log, time.monotonic() + 180
        while says not in log.read_text():
            if self.process.poll() is not None or time.monotonic() > until:
                sys.exit(f"{' '.join(command)} does not answer: {log.read_text()[-2000:]}")
            time.sleep(0.05)

    @property
    def cpu(self) -> float:
        """Seconds so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def send(self, number: int) -> None:
        """A signal."""
        self.process.send_signal(number)

    def end(self) -> None:
        """Stop it."""
        self.send(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def free_ports(count: int) -> list[int]:
    """That nobody listens on now."""
    with ExitStack() as open_:
        own = [open_.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in own]


def served(*words: str, log: Path, says: str) -> Process:
    """``recpipe serve``."""
    return Process([sys.executable, "-m", "recpipe", "serve", *words], log, says)


class Side:
    """Servers that answer together."""

    def __init__(self, port: int, asked: list[bytes], servers: list[Process], relay: Process | None) -> None:
        self.port, self.asked, self.servers, self.relay = port, asked, servers, relay

    def load(self, rate: float, seconds: float, seed: int) -> tuple[Load, float, float]:
        """What came of a load, CPU seconds of a request, and the relay's."""
        every = [*self.servers, *([self.relay] if self.relay else [])]
        for one in every:
            one.send(signal.SIGCONT)
        open_loop(self.port, self.asked, arrivals(rate, 0.5, seed + 1000))
        before, relayed = sum(one.cpu for one in self.servers), self.relay.cpu if self.relay else 0.0
        load = open_loop(self.port, self.asked, arrivals(rate, seconds, seed))
        spent = sum(one.cpu for one in self.servers) - before
        relayed = (self.relay.cpu if self.relay else 0.0) - relayed
        for one in every:
            one.send(signal.SIGSTOP)
        if load.failed:
            sys.exit(f"{load.failed} requests failed; see {self.servers[-1].log}")
        return load, spent / len(load.times), relayed / len(load.times)


@contextmanager
def single(package: Path, options: argparse.Namespace, folder: Path) -> Iterator[Side]:
    """The whole package on one server."""
    (port,) = free_ports(1)
    server = served(str(package), f"port={port}", log=folder / "single.log", says="serving '")
    try:
        yield Side(port, requests(package, port, options.pooling), [server], None)
    finally:
        server.end()


@contextmanager
def sharded(
    package: Path, count: int, plan: str, options: argparse.Namespace, folder: Path, relay: Path
) -> Iterator[Side]:
    """The package cut into ``count`` shards by ``plan``, behind links."""
    cut, main, *others = folder / "cut", *free_ports(1 + 2 * count)
    own, seen = others[:count], others[count:]
    shutil.rmtree(cut, ignore_errors=True)
    size = sum(file.stat().st_size for file in (package / "tables").iterdir())
    words = [f"{word}{size // 10}" if word == "main=" else word for word in PLANS[plan]]
    recpipe = [sys.executable, "-m", "recpipe", "shard", str(package), str(cut), f"shards={count}", *words]
    subprocess.run(recpipe, check=True, capture_output=True)
    name = package.name.partition(".")[0]
    with ExitStack() as open_:
        servers = []
        for at, port in enumerate(own):
            place, log = str(cut / f"shard{at}"), folder / f"shard{at}.log"
            servers.append(served(place, f"port={port}", log=log, says="serving shard"))
            open_.callback(servers[-1].end)
        pairs = [f"{a}:{b}" for a, b in zip(seen, own, strict=True)]
        link = [str(relay), str(1e3 * options.gbit), str(options.delay_us), *pairs]
        links = Process(link, folder / "relay.log", "relaying")
        open_.callback(links.end)
        given = ",".join(f"127.0.0.1:{port}" for port in seen)
        words = [str(cut / "main.recpipe"), f"port={main}", f"name={name}", f"shards={given}"]
        servers.append(served(*words, log=folder / "main.log", says="serving '"))
        open_.callback(servers[-1].end)
        yield Side(main, requests(package, main, options.pooling), servers, links)


def measured(
    package: Path, count: int, plan: str, options: argparse.Namespace, folder: Path, relay: Path, one: Side
) -> dict[str, Any]:
    """A line of the table."""
    found: dict[str, list[float]] = {}
    with sharded(package, count, plan, options, folder, relay) as several:
        for number in range(options.rounds):
            for side, end in ((one, "_single"), (several, "")):
                load, cpu, relayed = side.load(options.rate, options.seconds, number)
                for share in (50, 95, 99):
                    found.setdefault(f"p{share}{end}", []).append(load.percentile(share))
                found.setdefault(f"cpu_ms{end}", []).append(1e3 * cpu)
                found.setdefault(f"relay_ms{end}", []).append(1e3 * relayed)
    ratio = [own / whole for own, whole in zip(found["p99"], found["p99_single"], strict=True)]
    return {
        "model": package.name.partition(".")[0],
        "shards": count,
        "plan": plan,
        "p99_over": ratio,
        **found,
    }


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["many", "mixed", "one"])
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--delay-us", type=float, default=100.0)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2_000_000, help="of all tables of a model")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--pooling", type=int, default=10, help="ids of every other feature")
    parser.add_argument("--output", type=Path, help="a file for all figures, as JSON")
    options = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        relay = folder / "relay"
        compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
        subprocess.run([compiler, "-O2", "-o", str(relay), str(RELAY)], check=True)
        print(
            "| model | shards | plan | p50, ms | p95 | p99 | p99 over one server | CPU a request, ms "
            + "| one server | relay |"
        )
        print("| --- | --: | --- | --: | --: | --: | --: | --: | --: | --: |")
        for kind in options.models:
            package = packaged(kind, options, folder)
            with single(package, options, folder) as one:
                for count in options.shards:
                    for plan in options.plans:
                        line = measured(package, count, plan, options, folder, relay, one)
                        lines.append(line)
                        ratio = sorted(line["p99_over"])
                        shown = [f"{median(line[key]):.2f}" for key in ("p50", "p95", "p99")]
                        cpu = [f"{median(line[key]):.2f}" for key in ("cpu_ms", "cpu_ms_single", "relay_ms")]
                        over = f"{median(ratio):.2f} ({ratio[0]:.2f}..{ratio[-1]:.2f})"
                        print("|", " | ".join([kind, str(count), plan, *shown, over, *cpu]), "|", flush=True)
            shutil.rmtree(package)
    if options.output is not None:
        options.output.write_text(json.dumps(lines, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
