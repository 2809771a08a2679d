"""A run's output: the same timed lines on the terminal and in recpipe.log, and progress bars on a terminal.

Lines go through the logger "recpipe"; ``conf/train.yaml`` hands them to ``Screen`` and ``LogFile``. Of
several processes, only rank 0 prints more than warnings (``quiet.quiet_libraries``).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from io import StringIO, TextIOWrapper
from pathlib import Path
from time import perf_counter
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from recpipe.common.shared_state import Shared
from recpipe.common.stdout import nobody_reads

LOG_FILE = "recpipe.log"
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

log = logging.getLogger("recpipe")


class Lines(logging.Formatter):
    """Formats ``12:34:56  message``. Warnings are marked as such; a record that is ``plain`` has no time."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s  %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The text of ``record``."""
        return record.getMessage() if getattr(record, "plain", False) else super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The text without a traceback."""
        if record.levelno >= logging.WARNING:
            record.message = f"{record.levelname.lower()}: {record.message}"
        return super().formatMessage(record)


class Screen(logging.Handler):
    """Prints to the current ``sys.stdout``; while there are bars, lines appear above them."""

    def __init__(self, stream: None = None) -> None:
        super().__init__()
        self.setFormatter(Lines())

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line; a reader that has gone away (``| head``) does not end the run."""
        try:
            text = self.format(record)
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
        except BrokenPipeError:
            nobody_reads()
        except OSError:
            return
        except Exception:
            self.handleError(record)


class Output(Console):
    """Standard output; a reader that has gone away does not end the run here either."""

    def on_broken_pipe(self) -> None:
        """Stop printing. rich would exit the process, before all reports are written."""
        self.quiet = True
        nobody_reads()


class LogFile(logging.FileHandler):
    """Writes recpipe.log, which is created with its first line. If it cannot be written, the run goes on
    without it."""

    def __init__(self, filename: str) -> None:
        super().__init__(filename, encoding="utf-8", delay=True, errors="backslashreplace")
        self.setFormatter(Lines())
        self._refused = False

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    def emit(self, record: logging.LogRecord) -> None:
        """Append one line."""
        try:
            super().emit(record)
        except OSError:  # opening the file failed; later errors go to handleError by themselves
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn once that the file cannot be written."""
        fault = sys.exception()
        if not isinstance(fault, OSError):
            super().handleError(record)
        elif not self._refused:
            self._refused = True
            why = f"cannot write {self.baseFilename}: {fault.strerror}; going on without it"
            print(f"warning: {why}", file=sys.stderr)

    def close(self) -> None:
        """Close the file; a line that could not be written is not tried again."""
        with suppress(OSError):
            super().close()


_run: ContextVar[object] = ContextVar("recpipe_run", default=None)
"""The run whose lines this thread logs; None: not known, so that the handlers of all runs get them."""
_silent: ContextVar[bool] = ContextVar("recpipe_silent", default=False)
"""Whether drawing on the terminal is switched off."""


@contextmanager
def heard(directory: Path | None, screen: bool = True) -> Iterator[None]:
    """In the block, a run that Hydra did not start logs as others do: on the terminal if ``screen``, and into
    recpipe.log in ``directory`` if one is given.

    If two runs share a process, each logs its own lines and those of both runs' worker threads.
    """
    root = logging.getLogger()
    for left in [h for h in root.handlers if isinstance(h, Screen | LogFile)]:
        root.removeHandler(left)  # of an earlier run in this process that Hydra started
        left.close()
    handlers: list[logging.Handler] = [Screen()] if screen else []
    if directory is not None:
        handlers.append(LogFile(str(directory / LOG_FILE)))
    run = object()
    tokens = _run.set(run), _silent.set(not screen)
    for handler in handlers:
        handler.addFilter(lambda record: _run.get() in (None, run))
        log.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()
        _run.reset(tokens[0])
        _silent.reset(tokens[1])


@contextmanager
def _alone() -> Iterator[None]:
    before, log.propagate = log.propagate, False
    try:
        yield
    finally:
        log.propagate = before


alone = Shared(_alone)
"""In the block, lines do not go to the surrounding program's handlers, which would print them again."""


def show(draw: Callable[[Console], None], console: Console | None = None) -> None:
    """Print what ``draw`` draws, in colours if the console has them, and as plain text into recpipe.log."""
    out = console or Output()
    if not _silent.get():
        draw(out)
    text = StringIO()
    draw(Console(file=text, width=out.width))
    append_to_log(text.getvalue())


def append_to_log(text: str) -> None:
    """Append ``text`` as it is to recpipe.log alone, after it has been shown in another form."""
    record = log.makeRecord(
        log.name, logging.INFO, __file__, 0, text.rstrip("\n"), (), None, extra={"plain": True}
    )
    for handler in (*log.handlers, *logging.getLogger().handlers):
        if isinstance(handler, LogFile):
            handler.handle(record)


def on_terminal() -> bool:
    """Whether output can be redrawn, unlike in files, pipes and notebooks, and with TERM=dumb."""
    return sys.stdout.isatty() and not Output().is_dumb_terminal


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
        self._task = _bars.add() if on_terminal() and not _silent.get() else None
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
        else:
            _bars.draw(self._task, share, text)

    def close(self) -> None:
        """Remove the bar. Calling it again does nothing."""
        if self._task is not None:
            _bars.remove(self._task)
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


@contextmanager
def inside(meter: Meter) -> Iterator[None]:
    """In the block, this thread is in the work of ``meter``."""
    _working.meters = (*_working.meters, meter)
    try:
        yield
    finally:
        _working.meters = tuple(other for other in _working.meters if other is not meter)


class _Bars:
    """The lines at the bottom of the terminal that are redrawn, one for each open ``Meter``."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def add(self) -> TaskID:
        if self._progress is None:
            console = Output()
            bar = [BarColumn(_BAR_WIDTH)] if console.width >= _WITH_BAR else []
            text = TextColumn(
                "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
            )
            self._progress = Progress(
                *bar,
                text,
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._progress.start()
        return self._progress.add_task("", total=1.0, visible=False)

    def draw(self, task: TaskID, share: float, text: str) -> None:
        assert self._progress is not None
        self._progress.update(task, completed=share, description=text, visible=True, refresh=True)

    def remove(self, task: TaskID) -> None:
        assert self._progress is not None
        self._progress.remove_task(task)
        if not self._progress.task_ids:
            self._progress.stop()
            self._progress = None


_bars = _Bars()
