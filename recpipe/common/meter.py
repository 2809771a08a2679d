"""How far long work is: a bar on a terminal, and a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from datetime import timedelta
from threading import Event, Lock, Thread
from time import perf_counter
from types import TracebackType

from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from recpipe.common.console import Output, log, silent

LINE_SECONDS = 10.0
"""Seconds between the lines of a ``Meter``."""
FIRST_SECONDS = 3.0
"""Seconds until its first line."""
REDRAW_SECONDS = 0.2
"""Seconds between a ``Meter``'s redraws on a terminal; one costs as much as a small model's optimizer
step."""
_BAR_WIDTH = 20
_WITH_BAR = 80
"""Columns that a terminal must have for a bar beside the text."""
TICK_SECONDS = 0.2
"""Seconds between two looks at whether something is to be shown."""


class Meter:
    """Shows the progress of long work: a bar on a terminal, a line every ``LINE_SECONDS`` elsewhere.

    The first line comes after ``FIRST_SECONDS``. ``first``: the share of the work that was done before. Call
    ``due`` as often as you like, and ``show`` when it is true. Use it in a with statement, which removes the
    bar.
    """

    def __init__(self, first: float = 0.0) -> None:
        self._first = first
        self._began = self._shown = perf_counter()
        self._pause = min(FIRST_SECONDS, LINE_SECONDS)
        # Not in files, pipes and notebooks, nor with TERM=dumb: nothing can be redrawn there.
        redraws = sys.stdout.isatty() and not Output().is_dumb_terminal
        self._task = _new_line() if redraws and not silent.get() else None
        self.inner = 0
        """How many meters are open that were opened inside this one's work."""
        self._outer = _working.meters
        for outer in self._outer:
            outer.inner += 1

    @property
    def due(self) -> bool:
        """Whether it is time to show something."""
        pause = self._pause if self._task is None else REDRAW_SECONDS
        return perf_counter() - self._shown >= pause

    def pause(self) -> None:
        """Wait the whole time until ``due`` again, after other work that is not to be shown."""
        self._shown, self._pause = perf_counter(), LINE_SECONDS

    def show(self, share: float, text: str) -> None:
        """Show ``text`` and the time left; ``share``, in [0, 1], of the work is done."""
        self._shown, self._pause = perf_counter(), LINE_SECONDS
        if share > self._first:
            left = (self._shown - self._began) * (1 - share) / (share - self._first)
            text += f"  {timedelta(seconds=round(left))} left"
        if self._task is None:
            log.info(text)
        elif _lines is not None:
            _lines.update(self._task, completed=share, description=text, visible=True, refresh=True)

    def close(self) -> None:
        """Remove the bar. Calling it again does nothing."""
        global _lines
        if self._task is not None and _lines is not None:
            _lines.remove_task(self._task)
            if not _lines.task_ids:
                _lines.stop()
                _lines = None
        self._task = None
        for outer in self._outer:
            outer.inner -= 1
            outer._shown = perf_counter()
        self._outer = ()

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Working(threading.local):
    meters: tuple[Meter, ...] = ()
    """The meters of the work that this thread is in."""


_working = _Working()


_lines: Progress | None = None
"""The lines at the bottom of the terminal that are redrawn, one for each open ``Meter``."""


def _new_line() -> TaskID:
    global _lines
    if _lines is None:
        console = Output()
        text = TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
        )
        _lines = Progress(
            *([BarColumn(_BAR_WIDTH)] if console.width >= _WITH_BAR else []),
            text,
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),
        )
        _lines.start()
    return _lines.add_task("", total=1.0, visible=False)


@contextmanager
def counting(doing: str, whole: int = 0) -> Iterator[Callable[[int], None]]:
    """In the block, shows by a ``Meter`` how much is done of the ``whole`` (rows or bytes), or of other work
    (``whole`` 0) since when it goes on; the function that it gives adds to what is done, and may be called as
    often as you like.

    A thread shows it where nothing is added for a while, so that no call is too long. Blocks inside show
    what is theirs in its place. As a decorator it is for each call of a function.
    """
    work = _Work(doing, whole)
    with work.meter as meter:
        _working.meters = (*_working.meters, meter)
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
            _working.meters = tuple(other for other in _working.meters if other is not meter)


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
