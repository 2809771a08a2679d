"""What a model that stays fresh costs: training while it publishes, a server while deltas come, and how long
a click takes to change an answer.

    python benchmarks/freshness.py publishing [--steps 400] [--every 50] [--rounds 3]
    python benchmarks/freshness.py serving [--rounds 5] [--seconds 5] [--every 1.0] [--share 0.1]
    python benchmarks/freshness.py click [--clicks 20] [--every 1.0] [--redis]

``publishing``: the default recipe with and without ``trainer.publish``, in turn: time of a step, the copies
that steps waited for beside the longest step without, rows of a delta. ``serving``: the latency of random
arrivals at half of the fastest rate, in turn without deltas and with one every so many seconds that has a
share of all rows and the whole dense part; they are made beforehand, since who trains is elsewhere.
``click``: clicks on an item go to a stream (a folder, or a Redis server that this starts); a training reads
it and publishes, a server follows; the seconds from the last click's sending to the first answer that
differs. All need a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

PORT = 8760
QUIET = ("trainer.progress=false", "trainer.logger=null", "task.page=false", "task.beside=null")
STARTING = 600.0
"""Seconds in which a process must have done what is waited for."""


def main() -> int:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["publishing", "serving", "click"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=float, help="steps (50), or seconds (1), between two deltas")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--share", type=float, default=0.1, help="of the rows that each delta has")
    parser.add_argument("--clicks", type=int, default=20)
    parser.add_argument("--redis", action="store_true", help="a Redis stream, not a folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        {"publishing": publishing, "serving": serving, "click": click}[options.what](options, Path(folder))
    return 0


# -- training ----------------------------------------------------------------------------------------


def publishing(options: argparse.Namespace, folder: Path) -> None:
    """Runs with and without, in turn."""
    every = int(options.every or 50)
    size = ("data.samples=4000000", f"trainer.max_steps={options.steps}", "trainer.checkpoint_every=null")
    size += ("trainer.eval_every=1.0",)
    found: dict[str, list[float]] = {"without": [], "with": []}
    copies, longest, longest_steps, deltas = [], [], [], folder / "deltas"
    for number in range(options.rounds + 1):  # the first one makes the base, and warms caches
        for name, seconds in found.items():
            own = f"trainer.publish={{dir: {deltas}, every_steps: {every}}}" if name == "with" else "seed=1"
            run = folder / f"{name}-{number}"
            said = recipe(*QUIET, *size, own, f"hydra.run.dir={run}")
            steps = json.loads((run / "report.json").read_text())["throughput"]
            if number:
                seconds.append(1e3 / steps["samples_per_second"] * 2048)
            copied = re.search(r"waited ([\d.]+) ms each for a copy, and ([\d.]+) ms", said)
            if copied and number:
                copies.append(float(copied[1]))
                longest.append(float(copied[2]))
            if number and name == "without":
                longest_steps.append(longest_step(steps["step_histogram"]))
    written = sorted(deltas.glob("delta-*"))
    rows = [json.loads((d / "delta.json").read_text())["tables"] for d in written[-options.rounds :]]
    counts = [sum(table["rows"] for table in own.values()) for own in rows]
    plain, fresh = (median(own) for own in found.values())
    print(
        f"a step of 2,048 samples: {plain:.1f} ms without, {fresh:.1f} ms with a delta every {every} steps "
        f"({fresh / plain:.3f}); a copy {median(copies):.1f} ms, the longest {max(longest):.1f} ms, where "
        f"the longest step without took {max(longest_steps):.1f} ms; {median(counts):,.0f} rows a delta"
    )


def longest_step(histogram: dict[str, list[float]]) -> float:
    """The end of the last class that has a step, in ms."""
    return max(end for end, n in zip(histogram["edges_ms"][1:], histogram["counts"], strict=False) if n)


def recipe(*words: str) -> str:
    """What a run says; it must succeed."""
    done = subprocess.run([sys.executable, "-m", "recpipe", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


# -- serving -----------------------------------------------------------------------------------------


def serving(options: argparse.Namespace, folder: Path) -> None:
    """p99 in turn without deltas and with."""
    from serving import CANDIDATES, CONNECTIONS, _inputs, _packaged, http, kserve
    from serving_load import arrivals
    from serving_native import closed_loop, open_loop

    package, deltas = _packaged(folder), folder / "deltas"
    deltas.mkdir()
    every = options.every or 1.0
    made = made_deltas(package, folder / "made", options.share, options.rounds * int(options.seconds / every))
    manifest = json.loads((package / "manifest.json").read_text())
    path = "/v2/models/model/infer"
    requests = [http(path, *kserve(_inputs(manifest, seed))) for seed in range(32)]
    with server(package, f"follow={deltas}", "poll_seconds=0.1"):
        rate = closed_loop(PORT, requests, CONNECTIONS, options.seconds).rate / 2
        until(partial(answers, hand_over(made, deltas)))  # what reads them has started then
        found: dict[str, list[float]] = {"without": [], "with": []}
        for number in range(options.rounds):
            for name, times in found.items():
                when, stop = arrivals(rate, options.seconds, number), threading.Event()
                writer = threading.Thread(target=hand_over_each, args=(made, deltas, every, stop))
                if name == "with":
                    writer.start()
                load = open_loop(PORT, requests, when)
                stop.set()
                if name == "with":
                    writer.join()
                if load.failed:
                    sys.exit(f"{load.failed} requests failed")
                times.append(load.percentile(99))
        state = asked("/v2/models/model/deltas")
    ratios = sorted(b / a for a, b in zip(*found.values(), strict=True))
    print(
        f"{rate:.0f} requests/s of {CANDIDATES} candidates: p99 {median(found['without']):.2f} ms without "
        f"deltas, {median(found['with']):.2f} ms with one every {every:g} s of "
        f"{options.share:.0%} of the rows: {median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) times; "
        f"{state['counts']['taken']} deltas of {state['counts']['rows']:,} rows taken"
    )


def made_deltas(base: Path, folder: Path, share: float, count: int) -> list[Path]:
    """So many deltas as a training would write them, one after the other; the last one is the first."""
    import torch

    from recpipe.answers import score
    from recpipe.answers.delta import Change, Version, write_delta
    from recpipe.answers.manifest import read_manifest

    folder.mkdir()
    manifest, draw, made = read_manifest(base), np.random.default_rng(0), []
    version = Version.of_package(base, manifest)
    dense = {name: value.clone() for name, value in score.tensors(base / "dense.safetensors").items()}
    for _ in range(count + 1):
        rows = {}
        for name, about in manifest["tables"].items():
            own = max(1, int(about["rows"] * share))
            ids = np.sort(draw.choice(about["rows"], own, replace=False))
            values = 0.1 * draw.standard_normal((own, about["dimension"]), np.float32)
            rows[name] = ids, about["type"], torch.from_numpy(values).view(torch.uint8)
        other = {
            name: value + 1e-3 * torch.randn(value.shape) if value.is_floating_point() else value
            for name, value in dense.items()
        }
        now = time.time()
        delta = write_delta(folder, version, Change(1, now, now, rows, {}, other))
        version = delta.version
        made.append(delta.directory)
    return made[::-1]


def hand_over(made: list[Path], folder: Path) -> str:
    """Move the next of ``made`` into ``folder``; returns its name."""
    directory = made.pop()
    directory.rename(folder / directory.name)
    return directory.name


def hand_over_each(made: list[Path], folder: Path, every: float, stop: threading.Event) -> None:
    """Move one of ``made`` into ``folder`` every so many seconds until ``stop``."""
    while not stop.wait(every) and made:
        hand_over(made, folder)


def answers(name: str) -> bool:
    """Whether the delta of this ``name`` does."""
    answering: int = asked("/v2/models/model/deltas")["answering"]
    return name == f"delta-{answering:08d}"


@contextmanager
def server(package: Path, *words: str) -> Iterator[None]:
    """A server of ``package`` in the block."""
    command = [sys.executable, "-m", "recpipe", "serve", str(package), f"port={PORT}", "name=model", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until(lambda: asked("/v2/health/ready", False) is not None, process)
        yield
    finally:
        process.terminate()
        process.wait()


def asked(path: str, json_too: bool = True, body: dict[str, Any] | None = None) -> Any:
    """What the server answers; None if it does not."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", data, timeout=10) as answer:
            text = answer.read()
    except OSError:
        return None
    return json.loads(text) if json_too else text


def until(done: Callable[[], bool], process: subprocess.Popen[Any] | None = None) -> None:
    """Wait until ``done``."""
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > STARTING or (process is not None and process.poll() is not None):
            sys.exit("what is waited for does not come")
        time.sleep(0.02)


# -- from a click to an answer -----------------------------------------------------------------------


FEATURES = {
    "labels": ["click"],
    "features": [
        {"name": "user", "rows": "dynamic", "capacity": 10_000},
        {"name": "item", "rows": "dynamic", "capacity": 1_000},
        {"name": "price", "kind": "dense"},
    ],
}


def click(options: argparse.Namespace, folder: Path) -> None:
    """The seconds from clicks to another answer."""
    every, batch = options.every or 1.0, options.clicks
    (folder / "f.yaml").write_text(json.dumps(FEATURES))
    send, source = redis_stream(folder) if options.redis else folder_stream(folder)
    draw = np.random.default_rng(0)

    def record(user: int, item: int, clicked: int) -> dict[str, Any]:
        return {"click": clicked, "user": user, "item": f"i{item}", "price": float(draw.random())}

    def some(count: int) -> list[dict[str, Any]]:
        drawn = draw.integers(0, [500, 100, 2], (count, 3))
        return [record(*map(int, one)) for one in drawn]

    send(some(50 * batch))
    words = ["data=stream", *source, f"data.features={folder}/f.yaml", f"data.batch_size={batch}"]
    words += ["model.bottom=[16]", "model.top=[16]", "optim.tables.lr=0.1", *QUIET]
    words += [f"trainer.publish={{dir: {folder}/fresh, every_seconds: {every}}}", f"hydra.run.dir={folder}/r"]
    log = (folder / "train.log").open("w")
    training = subprocess.Popen([sys.executable, "-m", "recpipe", *words], stdout=log, stderr=log)
    try:
        until(lambda: any((folder / "fresh").glob("delta-*")), training)
        with server(folder / "fresh" / "base.recpipe", f"follow={folder}/fresh", "poll_seconds=0.1"):
            taken = []
            for number in range(options.rounds):
                ask = {"rows": [{"user": 10_000 + number, "item": f"i{number}", "price": 0.5}]}
                time.sleep(2 * every)
                before = score_of(ask)
                send([record(10_000 + number, number, 1) for _ in range(batch)])
                sent = time.monotonic()
                until(partial(moved, ask, before))
                taken.append(time.monotonic() - sent)
    finally:
        training.terminate()
        training.wait()
    through = "a Redis stream" if options.redis else "files in a folder"
    print(
        f"from {batch} clicks through {through} to another answer, a delta every {every:g} s: "
        f"{median(taken):.2f} s ({min(taken):.2f}-{max(taken):.2f}) over {len(taken)}"
    )


def score_of(ask: dict[str, Any]) -> float:
    """The score of a request for one sample."""
    found: float = asked("/v2/models/model/infer", body=ask)["outputs"][0]["data"][0]
    return found


def moved(ask: dict[str, Any], before: float) -> bool:
    """Whether the request has another score now."""
    return score_of(ask) != before


Send = Callable[[list[dict[str, Any]]], None]


def folder_stream(folder: Path) -> tuple[Send, list[str]]:
    """Sends records as files that appear in a folder."""
    place, sent = folder / "incoming", [0]
    place.mkdir()

    def send(records: list[dict[str, Any]]) -> None:
        sent[0] += 1
        written = folder / "part.tmp"
        written.write_text("".join(f"{json.dumps(one)}\n" for one in records))
        written.rename(place / f"part_{sent[0]}.jsonl")

    return send, [f"data.path={place}", "data.settle=0"]


def redis_stream(folder: Path) -> tuple[Send, list[str]]:
    """Sends records to the stream of a Redis server, which ends with this process."""
    import atexit

    import redis

    if shutil.which("redis-server") is None:
        sys.exit("--redis needs redis-server")
    place = folder / "redis.sock"
    words = ["redis-server", "--port", "0", "--unixsocket", str(place), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    atexit.register(process.terminate)
    until(place.exists, process)
    client = redis.Redis.from_url(f"unix://{place}")

    def send(records: list[dict[str, Any]]) -> None:
        for one in records:
            client.xadd("clicks", {"record": json.dumps(one)})

    return send, ["data.source=redis", f"data.servers='unix://{place}'", "data.topic=clicks"]


if __name__ == "__main__":
    sys.exit(main())
