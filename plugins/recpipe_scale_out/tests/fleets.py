"""A cut package, served by processes, and clients that compare every answer."""

from __future__ import annotations

import http.client
import json
import re
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recpipe_scale_out.cutting import MAIN, shard_folder
from recpipe_serve.batching.scorer import RequestScorer, Side

import recpipe
from tests.processes import SECONDS, Child

WORDS = (
    "data.samples=600",
    "data.batch_size=128",
    "data.tables={user: 300, item: 80, city: 60}",
    "model.bottom=[16]",
    "model.top=[16]",
    "trainer.device=cpu",
    "trainer.logger=null",
)
ROWS = (300, 80, 60)
SAMPLES = 5
"""Of a request."""
PAUSE = 0.01
"""Seconds between an answer and the next request: the processes that a test waits for need the cores."""


def packaged(folder: Path, steps: int = 2) -> Path:
    """A package of the model after so many steps."""
    run = folder / f"run{steps}"
    recpipe.train(None, None, *WORDS, f"trainer.max_steps={steps}", output=run, quiet=True).close()
    return recpipe.package(run, folder / f"model{steps}.recpipe", reference=False, quiet=True)


def sides(seed: int, samples: int) -> tuple[torch.Tensor, list[Side]]:
    """A request of one user, and so many candidates."""
    draw = np.random.default_rng(seed)
    user = torch.from_numpy(draw.integers(0, ROWS[0], 1))
    ids = [torch.from_numpy(draw.integers(0, rows, samples)) for rows in ROWS[1:]]
    dense = torch.from_numpy(draw.normal(size=(samples, 13)).astype(np.float32))
    shared = Side((0,), user, None, 1, torch.zeros(samples, dtype=torch.int64))
    return dense, [shared, Side((1, 2), torch.cat(ids), None, samples)]


def scored(alone: RequestScorer, seed: int, samples: int = SAMPLES) -> list[float]:
    """Its scores by the whole package."""
    return alone(*sides(seed, samples)).tolist()


def body(seed: int, samples: int = SAMPLES) -> bytes:
    """It, as it is sent."""
    dense, (user, own) = sides(seed, samples)
    each = own.ids.view(2, samples).tolist()
    inputs = [
        {"name": "dense", "datatype": "FP32", "shape": list(dense.shape), "data": dense.tolist()},
        {"name": "user", "datatype": "INT64", "shape": [1], "data": user.ids.tolist()},
        {"name": "item", "datatype": "INT64", "shape": [samples], "data": each[0]},
        {"name": "city", "datatype": "INT64", "shape": [samples], "data": each[1]},
    ]
    return json.dumps({"inputs": inputs}).encode()


def free_port() -> int:
    """That nobody listens on now, and none that the kernel gives to who connects: of those that ask for a
    server again and again which is not there, one would be given this port, and be connected with itself."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)  # a training has seeded the usual generator
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Fleet:
    """Processes of a cut package: so many replicas of each shard, and a main server. Process ``n`` of the
    shards is shard ``n // replicas``.

    ``words`` are the main server's, ``of_shards`` the shards'. ``scripts``: run in the place of the command,
    for the shards and for the main server. ``hosts``: where shards are that are not on the loopback address.
    """

    def __init__(
        self,
        directory: Path,
        folder: Path,
        count: int,
        *words: str,
        of_shards: Sequence[str] = (),
        replicas: int = 1,
        scripts: tuple[str | None, str | None] = (None, None),
        hosts: dict[int, str] | None = None,
    ) -> None:
        self.directory, self.folder, self.words, self.of_shards = directory, folder, words, of_shards
        self.replicas, self.scripts, self.hosts = replicas, scripts, hosts or {}
        self.ports = [free_port() for _ in range(count * replicas)]
        self.shards = [self.shard(at) for at in range(count * replicas)]
        self.port = free_port()
        self.main = self.begin_main(self.port)
        said = self.main.until("serving '")
        self.host, self.path = re.search(r"http://([\d.:]+)(/\S+?);", said).groups()  # type: ignore[union-attr]

    def at(self, number: int) -> str:
        """The host of a process of the shards."""
        return self.hosts.get(number, "127.0.0.1")

    def shard(self, number: int, *words: str, directory: Path | None = None) -> Child:
        """Start a process of the shards."""
        place = (directory or self.directory) / shard_folder(number // self.replicas)
        own = ("serve", str(place), f"port={self.ports[number]}", f"host={self.at(number)}")
        return Child(self.folder / f"shard{number}", *own, *self.of_shards, *words, script=self.scripts[0])

    def begin_main(self, port: int, directory: Path | None = None, *words: str) -> Child:
        """Start a main server, which answers once it says ``serving '``."""
        each = [f"{self.at(number)}:{own}" for number, own in enumerate(self.ports)]
        step = self.replicas
        given = ",".join("|".join(each[at : at + step]) for at in range(0, len(each), step))
        own = ("serve", str((directory or self.directory) / MAIN), f"port={port}", f"shards={given}")
        return Child(self.folder / "main", *own, *self.words, *words, script=self.scripts[1])

    def ask(self, seed: int, samples: int = SAMPLES, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and answer of a request."""
        connection = http.client.HTTPConnection(self.host, timeout=60)
        connection.request("POST", f"{self.path}/infer", body(seed, samples), headers)
        response = connection.getresponse()
        found = response.status, json.loads(response.read())
        connection.close()
        return found

    def figures(self) -> str:
        """The main server's ``/metrics``."""
        connection = http.client.HTTPConnection(self.host, timeout=60)
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()

    def figure(self, name: str) -> float:
        """One of them."""
        found = re.search(rf"^recpipe_{name} ([\d.e+]+)$", self.figures(), re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def end(self) -> None:
        """Stop all of them."""
        children = [child for child in (self.main, *self.shards) if child.process.exitcode is None]
        for child in children:
            child.send(signal.SIGCONT)
            child.send(signal.SIGTERM)
        for child in children:
            assert child.ended().returncode == 0


@contextmanager
def fleet(directory: Path, folder: Path, count: int, *words: str, **more: Any) -> Iterator[Fleet]:
    """One in the block."""
    with ExitStack() as open_:
        own = Fleet(directory, folder, count, *words, **more)
        open_.callback(own.end)
        yield own


class Load:
    """Clients that ask until they are stopped, each on a kept connection, and compare every answer, bit by
    bit, with those of the ``versions`` of the package: a main server must have ``batch=1``, since a score's
    last bits depend on how many are computed at once.

    ``hosts`` may be changed meanwhile: a client whose connection ends goes to the next one.
    """

    def __init__(
        self, hosts: list[str], path: str, versions: Sequence[RequestScorer], count: int = 4
    ) -> None:
        self.hosts, self.path = hosts, f"{path}/infer"
        self.wanted = [[scored(own, seed) for own in versions] for seed in range(24)]
        assert all(len({str(own) for own in each}) == len(versions) for each in self.wanted)
        self.right = [0] * len(versions)
        """Answers, by the version whose they are."""
        self.found: Counter[str] = Counter()
        """What else came: ``wrong`` (or mixed), ``partial`` (and flagged), ``refused`` (503), ``other``
        statuses; requests whose connection ended (``lost``), and connections that were ``not taken``."""
        self.why: Counter[str] = Counter()
        """What refusals say."""
        self.count, self._stop, self._lock = count, threading.Event(), threading.Lock()

    @contextmanager
    def asking(self) -> Iterator[Load]:
        """Ask in the block, and tell at its end what came."""
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(self.count)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
            print(f"right {self.right}, {dict(self.found)}; {dict(self.why)}")

    def total(self, what: str) -> int:
        """How many of these there were."""
        return sum(self.right) if what == "right" else self.found[what]

    def more(self, what: str, number: int) -> None:
        """Wait until so many more of these have come."""
        wanted, until = self.total(what) + number, time.monotonic() + SECONDS
        while self.total(what) < wanted:
            assert time.monotonic() < until, f"no {what}: right {self.right}, {self.found}; {self.why}"
            time.sleep(0.01)

    def _ask(self, number: int) -> None:
        at, seed, connection = number, number, None
        while not self._stop.wait(PAUSE):
            seed = (seed + 1) % len(self.wanted)
            if connection is None:
                at += 1
                connection = http.client.HTTPConnection(self.hosts[at % len(self.hosts)], timeout=60)
                try:
                    connection.connect()
                except OSError:
                    connection = None
                    self._note("not taken")
                    continue
            try:
                connection.request("POST", self.path, body(seed))
                response = connection.getresponse()
                status, found, goes = response.status, json.loads(response.read()), response.will_close
            except (http.client.HTTPException, OSError):
                connection.close()
                connection = None
                self._note("lost")
                continue
            self._judge(seed, status, found)
            if goes:
                connection.close()
                connection = None

    def _note(self, what: str) -> None:
        with self._lock:
            self.found[what] += 1

    def _judge(self, seed: int, status: int, found: dict[str, Any]) -> None:
        with self._lock:
            if status == 503:
                self.found["refused"] += 1
                self.why[re.sub(r"\d{4,}", "N", found["error"])[:110]] += 1
            elif status != 200:
                self.found["other"] += 1
                self.why[f"{status} {found.get('error', '')[:100]}"] += 1
            elif "lost_shards" in found.get("parameters", {}):
                self.found["partial"] += 1
            elif (scores := found["outputs"][0]["data"]) in self.wanted[seed]:
                self.right[self.wanted[seed].index(scores)] += 1
            else:
                self.found["wrong"] += 1
