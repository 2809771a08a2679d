"""Load for an HTTP server, from one process: as fast as some connections go, or at times fixed beforehand.

A general client spends as much time on a request as the server does, on the same cores; this one sends bytes
that are ready and reads the answer's length. ``open_loop`` counts a request's time from when it was to be
sent, not from when a connection was free, so that a server that stalls is charged for all who waited.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np
import uvloop
from numpy.typing import NDArray

Figures = NDArray[np.float64]
T = TypeVar("T")


@dataclass
class Load:
    """What came of a load; times in seconds."""

    begins: Figures
    """When each request was sent, or was to be sent."""
    times: Figures
    """From then to the end of its answer."""
    failed: int
    """Answers other than 200, and connections that were lost."""
    seconds: float

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.times) / self.seconds

    def percentile(self, share: float) -> float:
        """Of the times, in milliseconds."""
        return 1e3 * float(np.percentile(self.times, share))


class Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self._came = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send ``request``; the answer's status and body. ``ConnectionError`` if it is lost."""
        if self._transport.is_closing():
            raise ConnectionResetError
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        """Take in a part of the answer."""
        self._came += data
        end = self._came.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._came[:end]).lower()
        at = head.find(b"content-length:") + len(b"content-length:")
        length = int(head[at:].partition(b"\r")[0])
        if len(self._came) >= end + 4 + length and self._answer is not None:
            body = bytes(self._came[end + 4 : end + 4 + length])
            self._came.clear()
            answer, self._answer = self._answer, None
            answer.set_result((int(head[9:12]), body))

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits is told."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionResetError())

    def close(self) -> None:
        """Close it."""
        self._transport.close()


async def connected(port: int) -> Connection:
    """A connection to this machine's ``port``."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    return connection


def run(load: Coroutine[Any, Any, T]) -> T:
    """Run ``load`` to its end."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(load)


async def closed_loop(port: int, requests: Sequence[bytes], connections: int, seconds: float) -> Load:
    """Each connection sends the next request when it has its answer."""
    given = itertools.cycle(requests)
    begins: list[float] = []
    times: list[float] = []
    failed = 0
    began = perf_counter()

    async def client() -> None:
        nonlocal failed
        connection = await connected(port)
        while (now := perf_counter()) < began + seconds:
            status, _ = await connection.ask(next(given))
            begins.append(now)
            times.append(perf_counter() - now)
            failed += status != 200
        connection.close()

    await asyncio.gather(*(client() for _ in range(connections)))
    return Load(np.array(begins) - began, np.array(times), failed, perf_counter() - began)


async def open_loop(port: int, requests: Sequence[bytes], arrivals: Figures, connections: int = 64) -> Load:
    """Sends a request at each of ``arrivals``, seconds from the start, over whichever connection is free."""
    free: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()
    for _ in range(connections):
        free.put_nowait(await connected(port))
    given = itertools.cycle(requests)
    times = np.zeros(len(arrivals))
    failed = 0
    began = perf_counter() + 0.05

    async def one(number: int) -> None:
        nonlocal failed
        connection = await free.get()
        try:
            status, _ = await connection.ask(next(given))
            failed += status != 200
        except ConnectionError:
            failed += 1
            connection = await connected(port)
        times[number] = perf_counter() - began - arrivals[number]
        free.put_nowait(connection)

    tasks = []
    for number, when in enumerate(arrivals):
        left = began + when - perf_counter()
        if left > 0:
            await asyncio.sleep(left)
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    while not free.empty():
        free.get_nowait().close()
    return Load(arrivals, times, failed, perf_counter() - began)


def arrivals(rate: float, seconds: float, seed: int) -> Figures:
    """Times of requests that come independently of each other, ``rate`` a second on average."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, int(rate * seconds))
    return np.cumsum(gaps)
