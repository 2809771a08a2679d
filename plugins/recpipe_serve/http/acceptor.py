"""Accepts a worker's connections up to its share, and closes idle ones for new ones."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from recpipe_serve.access.record import Observer
from recpipe_serve.config import ServeConfig

if TYPE_CHECKING:
    from recpipe_serve.http.connections import Connection
    from recpipe_serve.http.metrics import DoorMetrics

log = logging.getLogger("recpipe")
BEAT = 0.2
"""Seconds between two looks at the connections' deadlines; a worker then says that it is alive, too."""
DEAD = 1.0
"""Seconds after which a worker that has not said so does not count."""
PAUSE = 2e-3
"""Seconds that a worker with more than its share leaves a connection to the others."""
SPARE_FILES = 64
"""Files that a worker may open beside its connections."""


class Shares:
    """How many connections each of some workers has. ``file``: where they tell each other; None: there is
    one. ``number``: this one's."""

    def __init__(self, workers: int = 1, number: int = 0, file: Path | None = None) -> None:
        size = 16 * workers
        buffer = mmap.mmap(-1, size)
        if file is not None:
            with file.open("a+b") as stream:
                stream.truncate(size)
                buffer = mmap.mmap(stream.fileno(), size)
        self._all = np.frombuffer(buffer, np.float64).reshape(workers, 2)
        """float64 [workers, 2]: how many connections each worker has, and when it last said so."""
        self._mine, self._others = self._all[number], np.delete(np.arange(workers), number)

    def say(self, count: int, alive: bool = True) -> None:
        """This worker has so many."""
        self._mine[:] = count, monotonic() if alive else 0.0

    def fair(self, count: int) -> bool:
        """Whether a worker with so many may take another one: none of the others has fewer."""
        others = self._all[self._others]
        alive = others[:, 1] > monotonic() - DEAD
        return not alive.any() or count <= others[alive, 0].min()


class Acceptor:
    """Takes connections from a listening socket, closes those that wait too long, and makes room.

    A worker that has more connections than another one leaves new ones to that one: they share a socket, and
    whoever wakes first would take all of a burst. Where there is no room, one that waits for a request goes
    for the new one: of the address that has the most, the one that has waited longest.
    """

    def __init__(
        self,
        bounds: ServeConfig,
        metrics: DoorMetrics,
        shares: Shares | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.observers = observers
        """Are told of each request that was answered."""
        self.bounds, self.metrics, self.shares = bounds, metrics, shares or Shares()
        self.count = 0
        """Connections that were taken and are not gone."""
        self.open: dict[Connection, None] = {}
        """Connections that are not being closed, the oldest first."""
        self._of: Counter[str] = Counter()
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def listen(self, listening: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        """Take connections in the running event loop, each with a protocol of its own."""
        self._loop, self._make, self._socket = asyncio.get_running_loop(), make, listening
        self.most = connections_possible(self.bounds.connections)
        listening.setblocking(False)
        self._resume()
        self._beat()

    def close(self) -> None:
        """Take no more."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket = None
            self.shares.say(self.count, alive=False)

    async def wait_closed(self) -> None:
        """uvicorn awaits its servers' end; nothing is left to wait for."""

    def _resume(self) -> None:
        if self._socket is not None:
            self._loop.add_reader(self._socket, self._take)

    def _pause(self, seconds: float) -> None:
        assert self._socket is not None
        self._loop.remove_reader(self._socket)
        self._loop.call_later(seconds, self._resume)

    def _take(self) -> None:
        """Take one connection, unless another worker should."""
        assert self._socket is not None
        if not self.shares.fair(self.count):
            self._pause(PAUSE)
            return
        try:
            taken, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another worker was faster, or the client has gone
        except OSError as fault:  # no files are left
            log.warning("no connection can be taken: %s", fault.strerror)
            self.make_room(self.open)
            self._pause(BEAT)
            return
        self.count += 1
        self.shares.say(self.count)
        task = self._loop.create_task(self._connected(taken))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self, taken: socket.socket) -> None:
        try:
            taken.setblocking(False)
            taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._make, taken)
        except OSError:
            taken.close()
            self.gone()

    def came(self, connection: Connection) -> None:
        """A connection is there."""
        self.open[connection] = None
        self._of[connection.address] += 1
        own = self._of[connection.address]
        if own > self.bounds.address_connections:
            same = [other for other in self.open if other.address == connection.address]
            if not self.make_room(same, connection):
                connection.refuse(503, "address", f"{own - 1} connections from your address are in use")
        elif len(self.open) > self.most and not self.make_room(self.open, connection):
            connection.refuse(503, "connections", f"all {self.most} connections are in use")

    def make_room(self, among: Iterable[Connection], newest: Connection | None = None) -> bool:
        """End one that waits for a request, or for the rest of one; whether there was one."""
        waiting = [own for own in among if own is not newest and own.waits]
        if not waiting:
            return False
        victim = max(waiting, key=lambda own: (self._of[own.address], -own.since))
        victim.end("room")
        return True

    def leaves(self, connection: Connection) -> None:
        """A connection is being closed."""
        if connection in self.open:
            del self.open[connection]
            self._of[connection.address] -= 1
            if not self._of[connection.address]:
                del self._of[connection.address]

    def gone(self, connection: Connection | None = None) -> None:
        """A connection is closed; None: one that was taken and did not come."""
        if connection is not None:
            self.leaves(connection)
        self.count -= 1
        self.shares.say(self.count, alive=self._socket is not None)

    def _beat(self) -> None:
        if self._socket is None and not self.open:
            return
        now = self._loop.time()
        for connection in list(self.open):
            connection.look(now)
        self.shares.say(self.count, alive=self._socket is not None)
        self.metrics.connections.set(self.count)
        self._loop.call_later(BEAT, self._beat)


def connections_possible(wanted: int) -> int:
    """How many connections can be open at once, at most ``wanted``: the limit of open files is raised as far
    as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_FILES + len(os.listdir("/proc/self/fd"))  # noqa: PTH208  names alone
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        found = max(1, wanted - (needed - soft))
        if found < wanted:
            log.warning(
                "connections=%d: this process may open %d files, so that it takes %d", wanted, soft, found
            )
        return found
    return wanted
