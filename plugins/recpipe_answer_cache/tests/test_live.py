"""The cache in a running server: beside deltas that come, and in several workers."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import recpipe
from recpipe.answers import score
from recpipe.answers.apply import apply_deltas
from recpipe.answers.delta import Change, Version, write_delta
from recpipe.answers.manifest import read_manifest
from recpipe.answers.score import Scorer
from recpipe.private_api.compiled import compiler

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytestmark = [
    pytest.mark.soak,  # servers of their own; test_served.py and recpipe_serve's test_fresh.py hold the parts
    pytest.mark.skipif(compiler() is None, reason="packages are compiled: no C++ compiler here"),
]
WORDS = (
    "data.samples=600",
    "data.batch_size=128",
    "data.tables={a: 300, b: 80}",
    "data.pooling=[1, 1]",
    "model.bottom=[16]",
    "model.top=[16]",
    "trainer.device=cpu",
    "trainer.logger=null",
    "trainer.max_steps=2",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    recpipe.train(None, None, *WORDS, output=folder / "run", quiet=True).close()
    return recpipe.package(folder / "run", folder / "base.recpipe", reference=False, quiet=True)


@contextmanager
def served(package: Path, *words: str) -> Iterator[int]:
    """In the block, the package is served at this port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "recpipe", "serve", str(package), f"port={port}", "name=m", *words]
    server = subprocess.Popen([*command, "+plugin=answer_cache", "plugins.answer_cache.bound=0"])
    try:
        while True:
            with suppress(OSError):
                if ask(port, "/v2/health/ready", status=True) == 200:
                    break
            assert server.poll() is None
            time.sleep(0.05)
        yield port
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def ask(port: int, path: str, body: Any = None, status: bool = False) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body))
        response = connection.getresponse()
        found = response.read()
    finally:
        connection.close()
    if status:
        return response.status
    return found.decode() if path == "/metrics" else json.loads(found)


def scores(port: int, a: int) -> np.ndarray:
    """Of ten candidates beside this id of ``a``."""
    inputs = [
        ("dense", "FP32", [1, 13], [0.5] * 13),
        ("a", "INT64", [1], [a]),
        ("b", "INT64", [10], [*range(10)]),
    ]
    body = {"inputs": [{"name": n, "datatype": t, "shape": s, "data": v} for n, t, s, v in inputs]}
    return np.array(ask(port, "/v2/models/m/infer", body)["outputs"][0]["data"], np.float32)


def by_package(package: Path, a: int) -> np.ndarray:
    ids = torch.tensor([a] * 10 + [*range(10)])
    return Scorer(package, mapped=True)(torch.full((10, 13), 0.5), ids, torch.ones(20).long()).numpy()


def counted(port: int) -> dict[str, list[float]]:
    """The figures of the cache, of each worker that has some."""
    found: dict[str, list[float]] = {}
    for name, value in re.findall(r"^recpipe_answers_(\w+)\S* (\S+)$", ask(port, "/metrics"), re.M):
        found.setdefault(name, []).append(float(value))
    return found


@pytest.mark.parametrize("unit", ["request", "candidate"])
def test_a_delta_ends_the_answers_that_it_must(base: Path, tmp_path: Path, unit: str) -> None:
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    manifest = read_manifest(base)
    version, width = Version.of_package(base, manifest), manifest["tables"]["a"]["dimension"]
    with served(base, f"follow={fresh}", "poll_seconds=0.05", f"plugins.answer_cache.unit={unit}") as port:

        def publish(package: Path, **change: Any) -> Path:
            """Have the next delta served; returns the package that it makes."""
            nonlocal version
            own = Change(version.step + 1, 0.0, 0.0, change.get("rows", {}), {}, change.get("dense", {}))
            delta = write_delta(fresh, version, own)
            version = delta.version
            apply_deltas(package, [delta.directory], tmp_path / str(version.sequence))
            while ask(port, "/v2/models/m/deltas")["answering"] != version.sequence:
                time.sleep(0.02)
            return tmp_path / str(version.sequence)

        def require(package: Path, missed: int) -> None:
            before = counted(port)["missed"][0]
            for a in (3, 7, 3, 7):
                np.testing.assert_allclose(scores(port, a), by_package(package, a), atol=1e-6)
            assert counted(port)["missed"][0] - before == missed * (10 if unit == "candidate" else 1)

        require(base, 2)
        require(base, 0)
        values = torch.ones(1, width).view(torch.uint8)
        rows = publish(base, rows={"a": (np.array([7]), "fp32", values)})
        assert np.abs(by_package(rows, 7) - by_package(base, 7)).max() > 1e-3
        require(rows, 1)
        held = score.tensors(base / "dense.safetensors").items()
        dense = {name: value + 0.1 for name, value in held if value.is_floating_point()}
        require(publish(rows, dense=dense), 2)


def test_each_worker_keeps_its_own_answers(base: Path) -> None:
    with served(base, "workers=2") as port:
        wanted = scores(port, 3)
        for _ in range(59):
            np.testing.assert_array_equal(scores(port, 3), wanted)
        time.sleep(1)
        found = counted(port)
        assert len(found["requests"]) == 2
        assert sum(found["requests"]) == 60
        assert 1 <= sum(found["missed"]) <= 2
        assert sum(found["served"]) == 60 - sum(found["missed"])
