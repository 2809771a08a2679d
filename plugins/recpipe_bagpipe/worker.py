"""A thread that runs jobs in the order in which they were submitted, and that does not delay the process's
exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

Job = Callable[[], None]


class Worker:
    """One daemon thread and its queue.

    A job may be a collective that a lost peer never enters. An executor's thread would then keep the process
    from ending, and the other ranks from noticing. After a job that failed, later ones are not run but raise
    the same error.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Job, Future[None]] | None] = SimpleQueue()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Future[None]:
        """Queue ``job``; the result is None or its error."""
        done: Future[None] = Future()
        self._jobs.put((job, done))
        return done

    def check(self) -> None:
        """Raise a job's error, if one failed."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Let the thread end after its queue, without waiting for it."""
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
