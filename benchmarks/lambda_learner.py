"""How many entities Lambda Learner updates in a second, and what its learning costs a server's latency.

    python benchmarks/lambda_learner.py [--rounds 5] [--seconds 4] [--rate 100] [--json FILE]

1. Entities updated in a second of CPU time, one thread, 8 events each: by ``Effect.learn``, rows read from
   and written to its store, and by the formula as LinkedIn's lambda-learner computes it, one entity after the
   other: the loss and its gradient in numpy, scipy's L-BFGS, then the Hessian. D = 16 and 64 coefficients,
   full and diagonal. In turn.
2. A package with effects, served: p50 and p99 of requests of 64 candidates that arrive at random ``--rate``
   times a second, without learning and while bodies of 64 labelled events are posted 20 times a second, in
   turn. A package of the same model without effects is measured beside it. A C++ compiler and recpipe[serve]
   are needed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from recpipe_lambda_learner.effects import MEANS, PRECISIONS, Effect
from recpipe_lambda_learner.posterior import Floats, Learning, packed
from scipy.optimize import fmin_l_bfgs_b

sys.path.insert(0, str(Path(__file__).resolve().parent))

EVENTS, ENTITIES, RIDGE, KEEP = 8, 500, 1.0, 0.8
USERS, ITEMS, CANDIDATES, POSTED, POSTS = 5_000, 2_000, 64, 64, 20
TOKEN = "a token of the benchmark alone"


def updates(rounds: int) -> list[list[Any]]:
    """Rows: coefficients, what is kept, updates a second by the formula and by recpipe, and their ratio."""
    rows: list[list[Any]] = []
    for width in (16, 64):
        for kind in ("full", "diagonal"):
            rng = np.random.default_rng(0)
            size = EVENTS * ENTITIES
            entities = rng.permutation(np.repeat(np.arange(ENTITIES), EVENTS))
            inputs, offsets = rng.normal(size=(size, width)), rng.normal(size=size)
            clicks = (rng.random(size) < 0.3).astype(np.float64)
            how = Learning(RIDGE, KEEP, kind)  # type: ignore[arg-type]
            effect = Effect("user", width, how)
            arguments = entities, inputs, clicks, np.ones(size), offsets
            effect.learn(*arguments)  # compiled, and a past for all
            before = effect.believed(np.arange(ENTITIES))
            of = [np.flatnonzero(entities == e) for e in range(50)]

            def formula(
                of=of, before=before, inputs=inputs, clicks=clicks, offsets=offsets, kind=kind
            ) -> int:
                for e, own in enumerate(of):
                    given = (
                        inputs[own],
                        2 * clicks[own] - 1,
                        offsets[own],
                        before.means[e],
                        before.precisions[e],
                    )
                    by_formula(*given, kind)
                return len(of)

            def ours(effect=effect, arguments=arguments, before=before) -> int:
                rows = effect.rows.found(np.arange(ENTITIES))  # the same past each time, as for the formula
                effect.rows.write(MEANS, rows, before.means)
                effect.rows.write(PRECISIONS, rows, packed(before.precisions))
                effect.learn(*arguments)
                return ENTITIES

            rates: dict[str, list[float]] = {"formula": [], "ours": []}
            for _ in range(rounds):
                for name, work in (("formula", formula), ("ours", ours)):
                    rates[name].append(rate(work))
            ratios = [b / a for a, b in zip(rates["formula"], rates["ours"], strict=True)]
            rows.append([f"{width}, {kind}", *map(spread, (rates["formula"], rates["ours"], ratios))])
            print(rows[-1], flush=True)
    return rows


def by_formula(
    x: Floats, sign: Floats, offset: Floats, mean: Floats, hessian: Floats, kind: str
) -> tuple[Floats, Floats]:
    """One entity's update: the new mean, and the Hessian there."""
    width = len(mean)
    past = hessian if hessian.ndim == 2 else np.diag(hessian)

    def loss(theta: Floats) -> tuple[float, Floats]:
        margin = sign * (x @ theta + offset)
        moved = past @ (theta - mean)
        value = np.logaddexp(0, -margin).sum() + (1 - KEEP) * RIDGE / 2 * theta @ theta
        slope = x.T @ (-sign / (1 + np.exp(margin))) + (1 - KEEP) * RIDGE * theta + KEEP * moved
        return float(value + KEEP / 2 * (theta - mean) @ moved), slope

    theta, _, _ = fmin_l_bfgs_b(loss, mean, factr=10, pgtol=1e-8)
    chance = 1 / (1 + np.exp(-(x @ theta + offset)))
    curve = chance * (1 - chance)
    if kind == "full":
        return theta, KEEP * past + x.T @ (curve[:, None] * x) + (1 - KEEP) * RIDGE * np.eye(width)
    return theta, KEEP * hessian + curve @ x**2 + (1 - KEEP) * RIDGE


def rate(work: Callable[[], int]) -> float:
    """Of what ``work`` does, in a second of CPU time; repeated for at least 0.2 s."""
    began, count = time.process_time(), 0
    while time.process_time() - began < 0.2:
        count += work()
    return count / (time.process_time() - began)


def spread(values: list[float]) -> dict[str, list[float]]:
    """Each round's value."""
    return {"rounds": values}


def packages(folder: Path) -> tuple[Path, Path]:
    """A package with effects, and one without, of a model that is trained on generated clicks."""
    rng, size = np.random.default_rng(0), 60_000
    columns = {
        "click": (rng.random(size) < 0.3).astype(np.int64),
        "user": rng.integers(0, USERS, size),
        "item": rng.integers(0, ITEMS, size),
        **{f"x{n}": rng.normal(size=size) for n in range(13)},
    }
    pq.write_table(pa.table(columns), folder / "clicks.parquet")
    dense = ", ".join(f"{{name: x{n}, kind: dense}}" for n in range(13))
    sparse = "{name: user, rows: 100000}, {name: item, rows: 100000}"
    features = f"{{labels: [click], features: [{sparse}, {dense}]}}"
    inputs = ", ".join(["intercept", *(f"x{n}" for n in range(13))])
    recpipe(
        *("task=lambda", "data=files", f"data.path={folder / 'clicks.parquet'}", f"data.features={features}"),
        *(
            "data.eval_fraction=0.5",
            "optim=rowwise_adagrad",
            "trainer.backend=plain",
            f"data.cache_dir={folder}",
        ),
        *(f"lambda.effects=[{{entity: user, inputs: [{inputs}]}}]", f"hydra.run.dir={folder / 'run'}"),
    )
    for name, more in (("corrected", [f"effects={folder / 'run'}"]), ("alone", ["reference=false"])):
        recpipe("package", str(folder / "run"), str(folder / f"{name}.recpipe"), *more)
    return folder / "corrected.recpipe", folder / "alone.recpipe"


def recpipe(*words: str) -> None:
    """Run a command of recpipe's; its output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "recpipe", *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        sys.exit(done.stdout)


@contextmanager
def served(package: Path, *words: str) -> Iterator[int]:
    """In the block, the package is served at a port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "recpipe", "serve", str(package), f"port={port}", "name=m", *words]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready")
                break
            except OSError:
                if server.poll() is not None:
                    sys.exit("the server has ended")
                time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait()


def request(path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a POST."""
    text = json.dumps(body).encode()
    head = (
        f"POST /v2/models/m/{path} HTTP/1.1\r\nhost: m\r\nauthorization: Bearer {TOKEN.replace(' ', '-')}\r\n"
    )
    return f"{head}content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n".encode() + text


def inputs(rng: np.random.Generator, samples: int, users: int) -> list[dict[str, Any]]:
    """The tensors of so many samples; 1 user: of one user's candidates."""
    user, item = rng.integers(0, USERS, users), rng.integers(0, ITEMS, samples)
    dense = rng.normal(size=(samples, 13)).astype(np.float32)
    return [
        {"name": "dense", "datatype": "FP32", "shape": [samples, 13], "data": dense.reshape(-1).tolist()},
        {"name": "user", "datatype": "INT64", "shape": [users], "data": user.tolist()},
        {"name": "item", "datatype": "INT64", "shape": [samples], "data": item.tolist()},
    ]


def posts(rng: np.random.Generator, count: int, tag: str) -> list[bytes]:
    """Bodies of events, each with ids of its own."""
    made = []
    for n in range(count):
        events = [{"id": f"{tag}.{n}.{k}", "label": int(rng.random() < 0.3)} for k in range(POSTED)]
        made.append(request("learn", {"inputs": inputs(rng, POSTED, POSTED), "events": events}))
    return made


async def under_load(
    port: int, asked: list[bytes], learnt: list[bytes], rate: float, seconds: float, seed: int
) -> Any:
    """The load of requests; events are posted meanwhile, if there are some."""
    from serving_load import arrivals, open_loop

    loads = [open_loop(port, asked, arrivals(rate, seconds, seed))]
    if learnt:
        loads.append(open_loop(port, learnt, np.arange(len(learnt)) * seconds / len(learnt), 4))
    found = await asyncio.gather(*loads)
    if any(load.failed for load in found):
        sys.exit(f"{[load.failed for load in found]} requests failed")
    return found


def serving(rounds: int, seconds: float, rate: float) -> list[list[Any]]:
    """Rows: what is served, p50, p99, and p99 of posting, milliseconds."""
    from serving_load import run

    rng = np.random.default_rng(1)
    asked = [request("infer", {"inputs": inputs(rng, CANDIDATES, 1)}) for _ in range(64)]
    sides = ("the model alone", "with effects", "while these learn")
    times: dict[str, tuple[list[float], list[float], list[float]]] = {side: ([], [], []) for side in sides}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corrected, alone = packages(folder)
        token = folder / "token"
        token.write_text(TOKEN.replace(" ", "-"))
        with (
            served(alone) as one,
            served(corrected, "learn=true", f"token={token}", f"learnt={folder / 'learnt'}") as two,
        ):
            for number in range(-1, rounds):  # the first one warms up
                for side, port in zip(sides, (one, two, two), strict=True):
                    events = posts(rng, int(POSTS * seconds), f"{number}") if side == sides[2] else []
                    load, *posted = run(under_load(port, asked, events, rate, seconds, number + 1))
                    if number < 0:
                        continue
                    p50s, p99s, learning = times[side]
                    p50s.append(load.percentile(50))
                    p99s.append(load.percentile(99))
                    learning += [own.percentile(99) for own in posted]
    rows: list[list[Any]] = []
    for side, (p50s, p99s, learning) in times.items():
        rows.append([side, spread(p50s), spread(p99s), spread(learning) if learning else None])
        print(
            side,
            f"p50 {median(p50s):.2f} ms, p99 {median(p99s):.2f} ms",
            *map("{:.1f}".format, learning),
            flush=True,
        )
    return rows


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load (default 4)")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second (default 100)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = {
        "updates": updates(options.rounds),
        "serving": serving(options.rounds, options.seconds, options.rate),
    }
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
