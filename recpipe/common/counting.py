"""Shows how far long work is, also while one of its calls takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from datetime import timedelta
from threading import Event, Lock, Thread
from time import perf_counter

from recpipe.common.console import FIRST_SECONDS, Meter, inside

TICK_SECONDS = 0.2
"""Seconds between two looks at whether something is to be shown."""


@contextmanager
def counting(doing: str, whole: int = 0) -> Iterator[Callable[[int], None]]:
    """In the block, shows by a ``Meter`` how much is done of the ``whole`` (rows or bytes), or of other work
    (``whole`` 0) since when it goes on; the function that it gives adds to what is done, and may be called as
    often as you like.

    A thread shows it where nothing is added for a while, so that no call is too long. Blocks inside show
    what is theirs in its place. As a decorator it is for each call of a function.
    """
    work = _Work(doing, whole)
    with work.meter, inside(work.meter):
        ended = Event()

        def watch() -> None:
            while not ended.wait(TICK_SECONDS):
                work.tell()

        watcher = Thread(target=copy_context().run, args=(watch,), name="recpipe-counting", daemon=True)
        watcher.start()
        try:
            yield work.add
        finally:
            ended.set()
            watcher.join()


class _Work:
    """What is being done, and how much of it is."""

    def __init__(self, doing: str, whole: int) -> None:
        self.doing, self.whole, self.done = doing, whole, 0
        self.meter = Meter()
        self._latest = perf_counter()
        self._telling = Lock()

    def add(self, more: int) -> None:
        self.done += more
        self._latest = perf_counter()
        self.tell()

    def tell(self) -> None:
        """Show it when it is time."""
        with self._telling:
            if not self.meter.due or self.meter.inner:
                return
            seconds = perf_counter() - self._latest
            since = timedelta(seconds=round(seconds))
            if not self.whole:
                self.meter.show(0.0, f"{self.doing}  {since}")
                return
            waits = f"  waiting {since}" if seconds >= FIRST_SECONDS else ""
            share = min(1.0, self.done / self.whole)
            self.meter.show(share, f"{self.doing}  {self.done:,}/{self.whole:,}{waits}")
