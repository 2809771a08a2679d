"""The same load through HTTP: a client of many connections, and a server that is started for it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from recpipe.errors import UserError, shown
from recpipe_deeprecsys.engine import Batching
from recpipe_deeprecsys.requests import Candidates, Range

NAME = "bench"
"""The model's name in the address of a server that is started here."""
MOST_BYTES = 2**29
"""Of all requests' bodies, which are made beforehand: fewer requests are asked for the rest."""
FEWEST = 16
STARTS = 600.0
"""Seconds that a server may take to start."""
LATER = 1e-3
"""Seconds after which a request that the server has no room for is sent again: it is late, not lost."""
FULL = (503, 504)
_SERVING = re.compile(r"serving '[^']*' at (http://\S+?);")


def body_of(manifest: Mapping[str, Any], candidates: Candidates, asked: Range) -> bytes:
    """The head and the body of a request by the open inference protocol, tensors in binary."""
    low, high = asked
    inputs: list[dict[str, Any]] = []
    parts: list[bytes] = []

    def add(name: str, kind: str, values: np.ndarray[Any, Any]) -> None:
        parts.append(np.ascontiguousarray(values).tobytes())
        size = {"binary_data_size": len(parts[-1])}
        inputs.append({"name": name, "datatype": kind, "shape": list(values.shape), "parameters": size})

    if manifest["dense"]["names"]:
        add("dense", "FP32", candidates.dense[low:high])
    for place, feature in enumerate(manifest["sparse"]):
        offsets = candidates.offsets[place, low : high + 1]
        ids, lengths = candidates.ids[place][offsets[0] : offsets[-1]], np.diff(offsets)
        if bool((lengths == lengths[0]).all()) and lengths[0] > 0:
            ids = ids if lengths[0] == 1 else ids.reshape(len(lengths), -1)
        else:
            add(f"{feature['name']}.lengths", "INT64", lengths)
        add(feature["name"], "INT64", ids)
        if candidates.weighted:
            add(f"{feature['name']}.weights", "FP32", np.ones(ids.size, np.float32))
    said = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = said + b"".join(parts)
    head = f"Inference-Header-Content-Length: {len(said)}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def bodies_of(manifest: Mapping[str, Any], candidates: Candidates, requests: Sequence[Range]) -> list[bytes]:
    """Those of as many of the requests as ``MOST_BYTES`` hold, of at least ``FEWEST``."""
    found: list[bytes] = []
    size = 0
    for asked in requests:
        found.append(body_of(manifest, candidates, asked))
        size += len(found[-1])
        if size > MOST_BYTES and len(found) >= FEWEST:
            break
    return found


class Client:
    """Sends requests over ``connections`` that stay open (``Target``). What waits for a free connection
    waits in its latency."""

    def __init__(self, address: str, bodies: Sequence[bytes], connections: int) -> None:
        found = urlsplit(address)
        if found.scheme != "http" or not found.hostname:
            raise UserError(f"address={shown(address)}: say http://HOST:PORT/v2/models/NAME")
        self.place = found.hostname, found.port or 80
        line = f"POST {found.path.rstrip('/')}/infer HTTP/1.1\r\nHost: {found.netloc}\r\n"
        self._line, self._bodies = line.encode(), bodies
        self._fault: str | None = None
        self._queue: SimpleQueue[tuple[int, Callable[[], None]] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._send, daemon=True) for _ in range(connections)]
        for thread in self._threads:
            thread.start()

    def submit(self, request: int, done: Callable[[], None]) -> None:
        """Send a request when a connection is free."""
        self._queue.put((request % len(self._bodies), done))

    def check(self) -> None:
        """``UserError`` if a request was refused or the server has gone."""
        if self._fault is not None:
            raise UserError(self._fault)

    def close(self) -> None:
        """End all connections."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        connection: socket.socket | None = None
        while (asked := self._queue.get()) is not None:
            number, done = asked
            try:
                while self._fault is None:
                    connection = connection or socket.create_connection(self.place)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connection.sendall(self._line + self._bodies[number])
                    status, said = _answer(connection)
                    if status == 200:
                        break
                    if status not in FULL:
                        self._fault = f"the server answered {status}: {said[:200]!r}"
                    sleep(LATER)
            except OSError as fault:
                self._fault = f"http://{self.place[0]}:{self.place[1]}: {fault.strerror or fault}"
            done()
        if connection is not None:
            connection.close()


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    """The status and the body of a response."""
    found = bytearray()
    while (end := found.find(b"\r\n\r\n")) < 0:
        found += _received(connection)
    head = bytes(found[:end]).lower()
    length = re.search(rb"content-length: *(\d+)", head)
    size = int(length[1]) if length else 0
    while len(found) < end + 4 + size:
        found += _received(connection)
    return int(head.split(b" ", 2)[1]), bytes(found[end + 4 : end + 4 + size])


def _received(connection: socket.socket) -> bytes:
    found = connection.recv(2**18)
    if not found:
        raise ConnectionError("the server closed a connection")
    return found


@contextmanager
def server(package: Path, batching: Batching, words: Sequence[str], log: Path) -> Iterator[str]:
    """``recpipe serve`` of the package on a free port; yields its address. Its lines go into ``log``.
    ``UserError`` if it does not start."""
    own = {
        "port": 0,
        "name": NAME,
        "workers": batching.workers,
        "threads": batching.threads,
        "batch": batching.batch,
        "wait_ms": f"{batching.wait_ms:g}",
        "queue": 100_000,
        "deadline_ms": 60_000,
        "samples": 65_536,
        "body_bytes": 2**30,
    }
    arguments = [sys.executable, "-m", "recpipe", "serve", str(package)]
    with log.open("wb") as lines:
        process = subprocess.Popen(
            [*arguments, *(f"{key}={value}" for key, value in own.items()), *words],
            stdout=lines,
            stderr=subprocess.STDOUT,
        )
    try:
        until = monotonic() + STARTS
        while (found := _SERVING.search(log.read_text(errors="replace").replace("\n", " "))) is None:
            if process.poll() is not None or monotonic() > until:
                said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
                last = said[-1] if said else f"recpipe serve {package} did not start"
                raise UserError(last.removeprefix("error: "))
            sleep(0.05)
        yield found[1]
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Served:
    """A package behind a server of its own, started anew for each batching, or behind the one at
    ``address``."""

    def __init__(
        self,
        package: Path,
        bodies: Sequence[bytes],
        connections: int,
        words: Sequence[str],
        log: Path,
        address: str | None = None,
    ) -> None:
        self.package, self.bodies, self.connections = package, bodies, connections
        self.words, self.log, self.address = words, log, address
        self._stack = ExitStack()
        self._now: tuple[Batching, Client] | None = None

    def use(self, batching: Batching) -> Client:
        """What sends to a server with this batching."""
        if self._now is None or (self._now[0] != batching and self.address is None):
            self.close()
            address = self.address or self._stack.enter_context(
                server(self.package, batching, self.words, self.log)
            )
            client = Client(address, self.bodies, self.connections)
            self._stack.callback(client.close)
            self._now = batching, client
        return self._now[1]

    def close(self) -> None:
        """End client and server."""
        self._stack.close()
        self._now = None
