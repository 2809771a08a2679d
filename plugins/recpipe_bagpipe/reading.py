"""What the oracles of one and of several trainers share: a thread that reads batches ahead of training."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator

from recpipe.plugin import Batch
from recpipe_bagpipe.waiting import Waiting


class ReadAhead(ABC):
    """One stream of batches, which ``batches`` yields to training and ``_read`` reads in a thread of its own.

    Reading starts when the first batch is asked for. ``_changed`` guards everything that both threads use.
    """

    def __init__(self, source: Iterator[Batch]) -> None:
        self.peak_bytes = 0
        """The most bytes that have waited here at the same time."""
        self._source = source
        self._changed = threading.Condition()
        self._batches: deque[Waiting] = deque()
        """Batches that training may take."""
        self._bytes = 0
        self._done = self._stopped = False
        self._fault: BaseException | None = None

    def batches(self) -> Iterator[Batch]:
        """The batches of the source, in order; raises the errors of reading and planning them."""
        thread = threading.Thread(target=self._run, name="recpipe-oracle", daemon=True)
        thread.start()
        try:
            while (batch := self._next_batch()) is not None:
                yield batch
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            if thread is not threading.current_thread():  # which may collect this generator as garbage
                thread.join()

    @abstractmethod
    def _read(self) -> None:
        """Read the source to its end, or until ``_stopped``; fill ``_batches``."""

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as fault:
            self._fault = fault
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _waits(self, batch: Batch, small: bool = True) -> Waiting:
        """``batch`` in the form in which it waits, ``small`` or as it is."""
        waiting = Waiting(batch, small)
        with self._changed:
            self._take(waiting.nbytes)
        return waiting

    def _take(self, size: int) -> None:
        """Note that ``size`` more bytes wait."""
        self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _next_batch(self) -> Batch | None:
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._done)
            if not self._batches:
                self._check()
                return None
            waiting = self._batches.popleft()
            self._bytes -= waiting.nbytes
            self._changed.notify_all()
        return waiting.batch()

    def _check(self) -> None:
        """Raise the thread's error, if it had one."""
        if self._fault is not None:
            raise self._fault
