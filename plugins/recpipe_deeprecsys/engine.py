"""Requests cut into parts, or put together into batches, for processes that score them."""

from __future__ import annotations

import multiprocessing
import os
import selectors
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from time import monotonic

import numpy as np

from recpipe.errors import UserError
from recpipe_deeprecsys.requests import Candidates, Range
from recpipe_deeprecsys.scoring import Job, packed, work

STOP = 10.0
"""Seconds that a process may take to end."""


@dataclass(frozen=True)
class Batching:
    """How requests become batches; what ``BenchOptions`` says of the same names."""

    batch: int
    wait_ms: float = 0.0
    merge: bool = True
    workers: int = 1
    threads: int = 1


@dataclass
class _Asked:
    """A request of which ``left`` candidates are not scored yet."""

    done: Callable[[], None]
    left: int


@dataclass(frozen=True)
class _Part:
    """Some candidates of a request."""

    asked: _Asked
    range: Range
    since: float

    @property
    def size(self) -> int:
        return self.range[1] - self.range[0]


@dataclass
class Worker:
    """One process, and the batches that it has been given and has not answered, in their order."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    batches: deque[list[_Part]] = field(default_factory=deque)


class Queue:
    """The requests that wait, and which part of them is scored next, without processes or a clock of its
    own."""

    def __init__(self, batching: Batching) -> None:
        self.batching = batching
        self.parts: deque[_Part] = deque()
        """Of each request what is not in a batch yet."""
        self.size = 0
        """Candidates that wait."""

    def put(self, asked: Range, done: Callable[[], None], now: float) -> None:
        """Add a request."""
        size = asked[1] - asked[0]
        self.parts.append(_Part(_Asked(done, size), asked, now))
        self.size += size

    def due(self, now: float) -> float | None:
        """In how many seconds the next batch is to be scored, at most 0 if now; None: nothing waits."""
        if not self.parts:
            return None
        if not self.batching.wait_ms or not self.batching.merge or self.size >= self.batching.batch:
            return 0.0
        return self.parts[0].since + self.batching.wait_ms / 1e3 - now

    def take(self) -> list[_Part]:
        """The next batch: a part of one request, or several whole ones.

        A request is cut into as few parts as there can be, none of them more than one longer than another."""
        most = self.batching.batch
        first = self.parts.popleft()
        low, high = first.range
        size = -(-first.size // -(-first.size // most))
        if size < first.size:
            self.parts.appendleft(replace(first, range=(low + size, high)))
        taken = [replace(first, range=(low, low + size))]
        while self.batching.merge and self.parts and size + self.parts[0].size <= most:
            taken.append(self.parts.popleft())
            size += taken[-1].size
        self.size -= size
        return taken


class Engine:
    """Processes that score, fed from one queue: whichever is free takes the next batch (``Target``).

    ``use`` sets how; the processes stay. ``ahead``: how many batches more a process is given while it scores
    one, so that it can have their rows read.
    """

    def __init__(
        self, workers: Sequence[Worker], requests: Sequence[Range], batching: Batching, ahead: int = 0
    ) -> None:
        self.workers, self.requests, self.ahead = list(workers), list(requests), ahead
        self._lock = threading.Lock()
        self._queue = Queue(batching)
        self._fault: str | None = None
        self._selector = selectors.DefaultSelector()
        for worker in self.workers:
            self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        self._wake, woken = Pipe()
        self._selector.register(woken, selectors.EVENT_READ)
        self.busy = 0.0
        """Seconds that the processes have scored for, together."""
        self.batches = 0
        self._thread = threading.Thread(target=self._receive, name="engine", daemon=True)
        self._thread.start()

    def use(self, batching: Batching) -> None:
        """Cut and put together in this way from now on; nothing may be waiting."""
        if batching.workers > len(self.workers):
            raise ValueError(f"{batching.workers} workers of {len(self.workers)}")
        with self._lock:
            assert not self._queue.parts, "requests wait"
            self._queue = Queue(batching)

    def submit(self, request: int, done: Callable[[], None]) -> None:
        """Have a request scored."""
        with self._lock:
            if self._fault is None:
                self._queue.put(self.requests[request], done, monotonic())
                self._feed()
                waits = self._queue.batching.wait_ms and self._queue.parts
            else:
                waits = 0
        if self._fault is not None:
            done()
        elif waits:
            self._wake.send_bytes(b"")  # it must be looked at again in time

    def check(self) -> None:
        """``UserError`` if a process has died."""
        if self._fault is not None:
            raise UserError(self._fault)

    def close(self) -> None:
        """End the thread; the processes are their owner's."""
        self._wake.send_bytes(b"end")
        self._thread.join()
        self._selector.close()

    def _feed(self) -> float | None:
        """Give batches to the processes that are free; returns in how many seconds to look again, if so."""
        own = self.workers[: self._queue.batching.workers]
        for given in range(1 + self.ahead):
            for worker in (each for each in own if len(each.batches) == given):
                due = self._queue.due(monotonic())
                if due is None or due > 0:
                    return due
                batch = self._queue.take()
                worker.batches.append(batch)
                with suppress(OSError):  # it has died, which its end of the connection says
                    worker.connection.send_bytes(packed([part.range for part in batch]))
        return None

    def _receive(self) -> None:
        """Take answers, and feed those who gave them."""
        again: float | None = None
        while True:
            done: list[Callable[[], None]] = []
            for key, _ in self._selector.select(again):
                worker: Worker | None = key.data
                if worker is None:
                    if key.fileobj.recv_bytes() == b"end":  # type: ignore[union-attr]
                        return
                    continue
                try:
                    seconds = float(np.frombuffer(worker.connection.recv_bytes())[0])
                except (EOFError, OSError):
                    done += self._died(worker)
                    continue
                with self._lock:
                    self.busy += seconds
                    self.batches += 1
                    done += self._answered(worker)
                    self._feed()
            with self._lock:
                again = self._feed()
            for call in done:
                call()

    def _answered(self, worker: Worker) -> list[Callable[[], None]]:
        """The requests that are done with the parts that ``worker`` has scored."""
        found = []
        for part in worker.batches.popleft():
            part.asked.left -= part.size
            if not part.asked.left:
                found.append(part.asked.done)
        return found

    def _died(self, worker: Worker) -> list[Callable[[], None]]:
        """All requests end, so that the load does."""
        self._selector.unregister(worker.connection)
        worker.process.join(STOP)
        with self._lock:
            self._fault = (
                f"a process that scores has ended with status {worker.process.exitcode}: see what it printed"
            )
            given = [part for own in self.workers for batch in own.batches for part in batch]
            parts = [*self._queue.parts, *given]
            self._queue.parts.clear()
            for own in self.workers:
                own.batches.clear()
            asked = {id(part.asked): part.asked for part in parts}
        return [own.done for own in asked.values()]


@contextmanager
def processes(
    package: Path, candidates: Candidates, count: int, threads: int, rows: Sequence[str] = ()
) -> Iterator[list[Worker]]:
    """``count`` processes that score the package, each on a core of its own if there are as many, over the
    same tables and candidates. ``UserError`` if it cannot be used."""
    cores = sorted(os.sched_getaffinity(0))
    own = cores if count * threads <= len(cores) and threads == 1 else [None] * count
    spawn = multiprocessing.get_context("spawn")
    found: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="recpipe-bench-") as folder:
        candidates.save(Path(folder))
        try:
            for number in range(count):
                ours, theirs = spawn.Pipe()
                job = Job(package, Path(folder), threads, own[number], tuple(rows))
                process = spawn.Process(target=work, args=(theirs, job), daemon=True)
                process.start()
                theirs.close()
                found.append(Worker(process, ours))
            for worker in found:
                try:
                    said = worker.connection.recv_bytes().decode()
                except EOFError:
                    worker.process.join(STOP)
                    said = f"a process that scores has ended with status {worker.process.exitcode}"
                if said:
                    raise UserError(said)
            yield found
        finally:
            for worker in found:
                worker.connection.close()
            for worker in found:
                worker.process.join(STOP)
                if worker.process.is_alive():
                    worker.process.kill()
                    worker.process.join()
