"""A thread that runs jobs in the order in which they were handed over, and that no exit waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

Job = Callable[[], None]


class Worker:
    """One daemon thread and its queue.

    A job may be a collective that a lost peer never enters; the thread of an executor would then keep
    the process from ending, and the other ranks from noticing. After a job that raised, later ones are
    not run: they raise the same.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Job, Future[None]] | None] = SimpleQueue()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Future[None]:
        """Queue ``job``; its result is None or what it raised."""
        done: Future[None] = Future()
        self._jobs.put((job, done))
        return done

    def check(self) -> None:
        """Raise what a job raised, if one did."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Let the thread end after what is queued; does not wait for it."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (queued := self._jobs.get()) is not None:
            job, done = queued
            try:
                self.check()
                job()
            except BaseException as fault:
                self._fault = fault
                done.set_exception(fault)
            else:
                done.set_result(None)
