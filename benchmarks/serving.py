"""What the server costs beside the model, beside other servers of the same model, and how long requests take.

    python benchmarks/serving.py [--package model.recpipe] [--rounds 5] [--litserve DIRECTORY]
    python benchmarks/serving.py --rates 100 200 400 800 1200 --workers 1

A request is one user, with half of the sparse features, and 64 candidates with dense values and the other
half. Each round asks all servers in turn, the others are stopped (SIGSTOP) meanwhile: as fast as 16
connections go, one connection alone, and at half of the fastest rate with random arrivals. "nothing" is the
same server around a model that answers zeros at once. The client is native (serving_client.c). "Ideal" is
the p99 of a simulated server with nothing beside it that takes these arrivals, all that wait in one batch, at
the speed measured alone and at 16 connections. "uvicorn" is the package's loader behind uvicorn in 20 lines
(serving_uvicorn.py). ``--rates``: instead, random arrivals at each of these rates. Without ``--package`` the
default recipe is trained for some steps and packaged, which needs a C++ compiler. ``--litserve``: where
``pip install --target DIRECTORY litserve`` has put it, if it is not installed.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from serving_load import Load, arrivals
from serving_native import batch_server, closed_loop, open_loop

CANDIDATES, CONNECTIONS, DIFFERENT = 64, 16, 32
NAME = "model"
PORT = 8750
STARTING = 120.0
"""Seconds in which a server must be ready."""
GROWTH = 4.0
"""MiB by which a server's memory may grow from the second quarter of the time to the last."""


@dataclass
class Side:
    """A server, and what each round measured."""

    name: str
    command: list[str]
    port: int
    requests: list[bytes]
    environment: dict[str, str] = field(default_factory=dict)
    ready: str = "/v2/health/ready"
    """The address that answers 200 when requests are answered."""
    says: str = ""
    """What its output has when all of its processes answer."""
    process: Any = None
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    half: list[Load] = field(default_factory=list)
    ideal: list[float] = field(default_factory=list)
    """p99 in milliseconds."""
    busy: list[float] = field(default_factory=list)
    """Share of a core that the server took at half load."""

    def ask(self, seconds: float, number: int, open_too: bool) -> None:
        """One round."""
        closed_loop(self.port, self.requests, CONNECTIONS, 0.3)
        before = self.processor_seconds()
        load = closed_loop(self.port, self.requests, CONNECTIONS, seconds)
        self.cpu.append((self.processor_seconds() - before) / len(load.times))
        self.rates.append(load.rate)
        failed = load.failed
        if open_too:
            load = closed_loop(self.port, self.requests, 1, seconds / 2)
            self.alone.append(load.percentile(50))
            when = arrivals(median(self.rates) / 2, seconds, number)
            before = self.processor_seconds()
            self.half.append(open_loop(self.port, self.requests, when))
            self.busy.append((self.processor_seconds() - before) / self.half[-1].seconds)
            ideal = batch_server(self.alone[-1] / 1e3, self.rates[-1], CONNECTIONS, when)
            self.ideal.append(1e3 * float(np.percentile(ideal, 99)))
            failed += self.half[-1].failed
        if failed:
            sys.exit(f"{self.name}: {failed} requests failed")

    def processor_seconds(self) -> float:
        """Of all processes of the server's session."""
        return sum(int(fields[11]) + int(fields[12]) for _, fields in self._processes()) / os.sysconf(
            "SC_CLK_TCK"
        )

    def memory(self) -> int:
        """Bytes that only this server's processes have, without files: pages of a library count as one
        process's own as soon as others that use it have ended."""
        found = 0
        for pid, _ in self._processes():
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Anonymous:"):
                    found += 1024 * int(line.split()[1])
        return found

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes."""
        for pid, _ in self._processes():
            os.kill(pid, number)

    def _processes(self) -> Iterator[tuple[int, list[str]]]:
        for file in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = file.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            if int(fields[3]) == self.process.pid:
                yield int(file.parent.name), fields


def main() -> int:
    """Run the benchmark: 0, or 1 if memory grew."""
    options = _options()
    if options.role:
        serve_nothing(options.package, options.port)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        package = options.package or _packaged(Path(folder))
        sides = _sides(package, options)
        if options.minutes:
            with running(sides[:1], Path(folder)):
                return _soak(sides[0], options.minutes, options.rate)
        with running(sides, Path(folder)):
            if options.rates:
                _at_rates(sides, options)
                return 0
            for number in range(options.rounds):
                for side in sides:
                    side.signal(signal.SIGCONT)
                    side.ask(options.seconds, number, side.name != "nothing")
                    side.signal(signal.SIGSTOP)
            _print(sides)
            if options.reload:
                _reload(sides[0], options.seconds)
            for side in sides:
                side.signal(signal.SIGCONT)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--package", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a load (default 3)")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--litserve", type=Path)
    parser.add_argument("--fast-queue", action="store_true", help="LitServe's ZeroMQ queue, not its default")
    parser.add_argument("--rates", type=float, nargs="+", help="instead: at these requests/s")
    parser.add_argument("--reload", action="store_true", help="at last, p99 while a package is loaded anew")
    parser.add_argument("--minutes", type=float, help="instead: watch the first server's memory for so long")
    parser.add_argument("--rate", type=float, help="requests/s of --minutes (default: half of the fastest)")
    parser.add_argument("--role", choices=["nothing"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _sides(package: Path, options: argparse.Namespace) -> list[Side]:
    manifest = json.loads((package / "manifest.json").read_text())
    inputs = [_inputs(manifest, seed) for seed in range(DIFFERENT)]
    recpipe = [http(f"/v2/models/{NAME}/infer", *kserve(one)) for one in inputs]
    sides = []
    for workers in options.workers:
        words = [str(package), f"workers={workers}", f"port={PORT + len(sides)}", f"name={NAME}"]
        command = [sys.executable, "-m", "recpipe", "serve", *words]
        sides.append(Side(f"recpipe, workers={workers}", command, PORT + len(sides), recpipe, says="serving"))
    port = PORT + len(sides)
    words = ["--role", "nothing", "--port", str(port), "--package", str(package)]
    if not options.rates:
        sides.append(Side("nothing", [sys.executable, __file__, *words], port, recpipe))
    script = Path(__file__).with_name("serving_uvicorn.py")
    plain = [http("/", _joined(one), {}) for one in inputs]
    port += 1
    sides.append(
        Side("uvicorn", [sys.executable, str(script), str(package), str(port)], port, plain, ready="/")
    )
    if options.rates:
        return sides
    path = [str(options.litserve)] if options.litserve else []
    sys.path[:0] = path
    if importlib.util.find_spec("litserve") is None:
        print("LitServe is not installed (pip install litserve, or --litserve DIRECTORY): left out")
        return sides
    script = Path(__file__).with_name("serving_litserve.py")
    command = [sys.executable, str(script), str(package), str(port + 1), str(int(options.fast_queue))]
    found = os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])
    requests = [http("/predict", _litserve(one), {}) for one in inputs]
    sides.append(Side("litserve", command, port + 1, requests, {"PYTHONPATH": found}, "/health"))
    return sides


def _inputs(manifest: dict[str, Any], seed: int) -> dict[str, Any]:
    """``dense`` for each candidate, and ids: of the user for the first half of the features."""
    rng = np.random.default_rng(seed)
    names = [(feature["name"], feature["rows"]) for feature in manifest["sparse"]]
    found = {"dense": rng.random((CANDIDATES, len(manifest["dense"]["names"])), np.float32)}
    for place, (name, rows) in enumerate(names):
        found[name] = rng.integers(0, rows, 1 if place < len(names) // 2 else CANDIDATES)
    return found


def kserve(inputs: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """The open inference protocol's body, with binary tensors."""
    described = [
        {
            "name": name,
            "datatype": "INT64" if values.dtype.kind == "i" else "FP32",
            "shape": list(values.shape),
            "parameters": {"binary_data_size": values.nbytes},
        }
        for name, values in inputs.items()
    ]
    head = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    body = head + b"".join(values.tobytes() for values in inputs.values())
    return body, {"Inference-Header-Content-Length": str(len(head))}


def _litserve(inputs: dict[str, Any]) -> bytes:
    """All values in one text in one JSON object, which is less work than lists of numbers."""
    return json.dumps({"x": base64.b64encode(_joined(inputs)).decode()}).encode()


def _joined(inputs: dict[str, Any]) -> bytes:
    """The bytes of all values."""
    return b"".join(values.tobytes() for values in inputs.values())


def http(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    lines += [f"{key}: {value}" for key, value in {"Content-Type": "application/json", **headers}.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextmanager
def running(sides: Sequence[Side], folder: Path) -> Iterator[None]:
    """All servers, stopped until they are asked."""
    try:
        for side in sides:
            with socket.create_server(("127.0.0.1", side.port)):
                pass  # an error here says that another server is left
            log = (folder / f"{side.port}.log").open("wb")
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **side.environment}
            side.process = subprocess.Popen(
                side.command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
            _wait_for(side, Path(log.name))
        for side in sides:  # not before all are ready: one that is stopped may hold a lock of torch's
            side.signal(signal.SIGSTOP)
        yield
    finally:
        for side in sides:
            if side.process is not None:
                side.signal(signal.SIGCONT)
                side.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    side.process.wait(20)
                side.signal(signal.SIGKILL)  # LitServe's processes outlive its first one


def _wait_for(side: Side, log: Path) -> None:
    until = time.monotonic() + STARTING
    while side.process.poll() is None and time.monotonic() < until:
        try:
            # LitServe takes connections, and answers 503 here, before it can answer requests.
            with urllib.request.urlopen(f"http://127.0.0.1:{side.port}{side.ready}", timeout=2):
                if side.says in log.read_text():
                    return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit(f"{side.name} does not answer: {log.read_text()[-2000:]}")


def _print(sides: Sequence[Side]) -> None:
    print(
        "| server | requests/s, 16 connections | server CPU a request | alone | half load: median | p99 "
        "| ideal | of a core |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for side in sides:
        spread = f"{median(side.rates):,.0f} ({min(side.rates):,.0f}-{max(side.rates):,.0f})"
        row = f"| {side.name} | {spread} | {1e3 * median(side.cpu):.2f} ms |"
        if side.half:
            p99 = [load.percentile(99) for load in side.half]
            times = f"{median(load.percentile(50) for load in side.half):.2f} ms"
            ratio = median(p99) / median(side.alone)
            spread = f"{median(p99):.2f} ms ({min(p99):.2f}-{max(p99):.2f}), {ratio:.1f} x alone"
            row += f" {median(side.alone):.2f} ms | {times} | {spread} | {median(side.ideal):.2f} ms |"
            row += f" {median(side.busy):.2f} |"
        print(row, flush=True)
    other = next((side for side in sides if side.name == "litserve"), None)
    for side in sides[:-1] if other else []:
        each = sorted(a / b for a, b in zip(side.rates, other.rates, strict=True))
        print(f"{side.name} over LitServe: {median(each):.2f} ({each[0]:.2f}-{each[-1]:.2f})")


def _at_rates(sides: Sequence[Side], options: argparse.Namespace) -> None:
    """Medians of interleaved rounds at each rate, and the ratios of each round to the last server's."""
    print("| requests/s | server | median | p99 | CPU a request | median over the last one's | CPU over |")
    print("|---|---|---|---|---|---|---|")
    for rate in options.rates:
        found: dict[str, list[tuple[float, float, float]]] = {side.name: [] for side in sides}
        for number in range(options.rounds):
            for side in sides:
                side.signal(signal.SIGCONT)
                closed_loop(side.port, side.requests, 1, 0.2)
                before = side.processor_seconds()
                load = open_loop(side.port, side.requests, arrivals(rate, options.seconds, number))
                cpu = 1e3 * (side.processor_seconds() - before) / len(load.times)
                side.signal(signal.SIGSTOP)
                if load.failed:
                    sys.exit(f"{side.name}: {load.failed} requests failed")
                found[side.name].append((load.percentile(50), load.percentile(99), cpu))
        last = found[sides[-1].name]
        for name, own in found.items():
            p50, p99, cpu = (median(each) for each in zip(*own, strict=True))
            times = sorted(a[0] / b[0] for a, b in zip(own, last, strict=True))
            cpus = sorted(a[2] / b[2] for a, b in zip(own, last, strict=True))
            ratios = [f"{median(each):.2f} ({each[0]:.2f}-{each[-1]:.2f})" for each in (times, cpus)]
            row = f"| {rate:g} | {name} | {p50:.2f} ms | {p99:.2f} ms | {cpu:.2f} ms |"
            print(f"{row} {ratios[0]} | {ratios[1]} |", flush=True)


def _reload(side: Side, seconds: float) -> None:
    """Half load for some seconds, in which the package is loaded anew."""
    side.signal(signal.SIGCONT)
    when = arrivals(median(side.rates) / 2, 2 * seconds, 1)
    address = f"http://127.0.0.1:{side.port}/metrics"
    code = (
        "import os, signal, sys, time, urllib.request\n"
        f"time.sleep({seconds / 2}); os.kill({side.process.pid}, signal.SIGHUP); began = time.monotonic()\n"
        f"done = lambda: b'result=\"done\"' in urllib.request.urlopen('{address}').read()\n"
        "while not done(): time.sleep(0.05)\n"
        "print(time.monotonic() - began)"
    )
    hang_up = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    load = open_loop(side.port, side.requests, when)
    took = float(hang_up.communicate()[0])
    during = (load.begins >= seconds / 2) & (load.begins < seconds / 2 + took + 0.1)
    inside, outside = 1e3 * load.times[during], 1e3 * load.times[~during]
    print(
        f"{side.name}, loading its package anew, {took:.1f} s: p99 {np.percentile(inside, 99):.2f} ms, "
        f"longest {inside.max():.1f} ms; before and after p99 {np.percentile(outside, 99):.2f} ms; "
        f"{load.failed} of {len(when):,} requests failed"
    )


def _soak(side: Side, minutes: float, rate: float | None) -> int:
    """Prints the memory of the server's processes while it answers; 1 if it grows."""
    side.signal(signal.SIGCONT)
    rate = rate or closed_loop(side.port, side.requests, CONNECTIONS, 3).rate / 2
    sizes, failed, times = [], 0, []
    for number in range(max(8, round(6 * minutes))):
        load = open_loop(side.port, side.requests, arrivals(rate, 10, number))
        failed, times = failed + load.failed, [*times, load.percentile(99)]
        sizes.append(side.memory() / 2**20)
        if number % 6 == 5:
            print(
                f"{(number + 1) / 6:.0f} min: {sizes[-1]:.1f} MiB, p99 {median(times[-6:]):.2f} ms",
                flush=True,
            )
    quarter = len(sizes) // 4
    before, after = median(sizes[quarter : 2 * quarter]), median(sizes[-quarter:])
    print(
        f"{side.name}, {rate:.0f} requests/s for {len(sizes) / 6:.1f} minutes, {failed} failed: private "
        f"memory {before:.1f} MiB in the second quarter, {after:.1f} MiB in the last"
    )
    return int(after - before > GROWTH or failed > 0)


def _packaged(folder: Path) -> Path:
    """A package of the default recipe's model after some steps."""
    import recpipe

    words = ("trainer.max_steps=20", "trainer.logger=null", "data.samples=20000")
    recpipe.train(None, None, *words, output=folder / "run", quiet=True).close()
    return recpipe.package(folder / "run", folder / "model.recpipe", quiet=True)


def serve_nothing(package: Path, port: int) -> None:
    """The server around a model that takes no time."""
    from recpipe_serve.config import ServeConfig
    from recpipe_serve.served import ServedPackage
    from recpipe_serve.workers import worker

    from recpipe.tasks.process import prepare_process

    prepare_process()
    nothing = worker.Worker(package, ServeConfig(port=port), NAME)
    assert isinstance(nothing.served, ServedPackage)
    nothing.served.server.batcher.score = lambda dense, _: dense.new_zeros(len(dense))
    nothing.run(socket.create_server(("127.0.0.1", port)))


if __name__ == "__main__":
    sys.exit(main())
