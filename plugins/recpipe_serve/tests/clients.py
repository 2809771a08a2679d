"""Clients that load a server, each of whose requests can be told from all others by its scores."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from recpipe.answers.score import Scorer

SAMPLES = 3
"""Of a request."""
PAUSE = 0.02
"""Seconds between an answer and the next request: the processes that a test waits for need the cores."""
CLOSE = 1e-4
"""Scores of one sample differ by less, whatever it is scored together with; those of two by more."""


class Clients:
    """``count`` connections that send requests until they are stopped, and check every answer.

    ``scorers``: of the packages that may answer, in the order in which they come.
    """

    def __init__(self, address: str, scorers: Sequence[Scorer], count: int = 6) -> None:
        self.host, _, path = address.removeprefix("http://").partition("/")
        self.path = f"/{path}/infer"
        self.scorers = list(scorers)
        self.lost = 0
        """Requests whose connection ended without an answer."""
        self.wrong: list[str] = []
        self.by = [0] * len(self.scorers)
        """Answers, by the package that has scored them."""
        self._count, self._stop, self._lock = count, threading.Event(), threading.Lock()
        self._threads: list[threading.Thread] = []

    @contextmanager
    def asking(self) -> Iterator[Clients]:
        """Ask in the block."""
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(self._count)]
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    def _ask(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        connection = http.client.HTTPConnection(self.host, timeout=60)
        asked, newest = 0, 0
        while not self._stop.wait(PAUSE):
            asked += 1
            ident = f"{number}.{asked}"
            dense, ids = self.drawn(generator)
            try:
                connection.request("POST", self.path, self.body(ident, dense, ids))
                response = connection.getresponse()
                status, answer = response.status, json.loads(response.read())
            except (http.client.HTTPException, ConnectionError):
                connection.close()
                with self._lock:
                    self.lost += 1
                continue
            newest = self._check(ident, status, answer, dense, ids, newest)
        connection.close()

    def drawn(self, generator: torch.Generator) -> tuple[torch.Tensor, list[torch.Tensor]]:
        manifest = self.scorers[0].manifest
        dense = torch.randn(SAMPLES, len(manifest["dense"]["names"]), generator=generator)
        rows = [feature["rows"] for feature in manifest["sparse"]]
        return dense, [torch.randint(0, count, (SAMPLES,), generator=generator) for count in rows]

    def body(self, ident: str, dense: torch.Tensor, ids: Sequence[torch.Tensor]) -> bytes:
        names = [feature["name"] for feature in self.scorers[0].manifest["sparse"]]
        shape = list(dense.shape)
        tensors: list[dict[str, Any]] = [
            {"name": "dense", "datatype": "FP32", "shape": shape, "data": dense.tolist()}
        ]
        for name, own in zip(names, ids, strict=True):
            tensors.append({"name": name, "datatype": "INT64", "shape": [SAMPLES], "data": own.tolist()})
        return json.dumps({"id": ident, "inputs": tensors}).encode()

    def _check(
        self,
        ident: str,
        status: int,
        answer: dict[str, Any],
        dense: torch.Tensor,
        ids: Sequence[torch.Tensor],
        newest: int,
    ) -> int:
        """The number of the package that has answered, which is not an earlier one than before."""
        with self._lock:
            if status != 200 or answer.get("id") != ident:
                self.wrong.append(f"{ident}: {status} {answer}")
                return newest
            found = torch.tensor(answer["outputs"][0]["data"])
            ones = torch.ones(len(ids) * SAMPLES, dtype=torch.int64)
            for place, scorer in enumerate(self.scorers):
                if torch.allclose(found, scorer(dense, torch.cat(list(ids)), ones), rtol=0, atol=CLOSE):
                    self.by[place] += 1
                    if place < newest:
                        self.wrong.append(f"{ident}: by package {place} after {newest}")
                    return place
            self.wrong.append(f"{ident}: scores of no package, or of two: {found}")
            return newest


def damaged_requests(host: str, path: str, whole: bytes, count: int) -> None:
    """Send ``count`` requests with some bytes of ``whole`` changed, or one of which all is repeated; each one
    is answered, with 200, 400 or 413."""
    draw = random.Random(1)
    statuses: dict[int, int] = {}
    connection = http.client.HTTPConnection(host, timeout=20)
    for _ in range(count):
        data, headers = bytearray(whole), {}
        for _ in range(draw.randint(0, 4)):
            place = draw.randrange(len(data))
            what = draw.randrange(3)
            data[place : place + (what != 0)] = b"" if what == 1 else bytes([draw.randrange(256)])
        if draw.random() < 0.3:
            headers["Inference-Header-Content-Length"] = str(draw.randrange(-9, 400))
        if draw.random() < 0.01:
            data *= 20
        connection.request("POST", path, bytes(data), headers)
        response = connection.getresponse()
        response.read()
        statuses[response.status] = statuses.get(response.status, 0) + 1
        if response.will_close:
            connection.close()
    connection.close()
    assert set(statuses) == {200, 400, 413}, statuses
    assert sum(statuses.values()) == count


def children(pid: int) -> list[int]:
    """The processes that ``pid`` has started."""
    return [int(c) for file in Path(f"/proc/{pid}/task").glob("*/children") for c in file.read_text().split()]


def mapped_bytes(pid: int, folder: Path) -> tuple[int, int]:
    """Of the files in ``folder`` that ``pid`` has mapped: bytes in memory, and its share of them."""
    sizes = {"Rss": 0, "Pss": 0}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            inside = str(folder) in rest
        elif inside and first.removesuffix(":") in sizes:
            sizes[first.removesuffix(":")] += 1024 * int(rest.split()[0])
    return sizes["Rss"], sizes["Pss"]
