"""A run's output: the same timed lines on the terminal and in recpipe.log.

Lines go through the logger "recpipe"; ``conf/train.yaml`` hands them to ``Screen`` and ``LogFile``. Of
several processes, only rank 0 prints more than warnings (``process.quiet_libraries``).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from io import BufferedWriter, FileIO, StringIO, TextIOWrapper
from pathlib import Path

from rich.console import Console

from recpipe.common.process import Shared

LOG_FILE = "recpipe.log"

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
silent: ContextVar[bool] = ContextVar("recpipe_silent", default=False)
"""Whether drawing on the terminal is switched off."""


@contextmanager
def capture_logs(directory: Path | None, screen: bool = True) -> Iterator[None]:
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
    tokens = _run.set(run), silent.set(not screen)
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
        silent.reset(tokens[1])


@contextmanager
def within() -> Iterator[None]:
    """In the block, runs within this one say nothing, and leave the handlers of this one as they are."""
    root = logging.getLogger()
    own = [handler for handler in root.handlers if isinstance(handler, Screen | LogFile)]
    for handler in own:
        root.removeHandler(handler)
    nowhere = logging.NullHandler()  # without any, logging's functions would make one that prints
    root.addHandler(nowhere)
    tokens = _run.set(object()), silent.set(True)
    try:
        yield
    finally:
        _run.reset(tokens[0])
        silent.reset(tokens[1])
        root.removeHandler(nowhere)
        for handler in own:
            root.addHandler(handler)


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
    if not silent.get():
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


class Stdout(TextIOWrapper):
    """Standard output of the command line: a character that the terminal's encoding lacks is escaped, and the
    program goes on, after a line, if nothing can be written."""

    fault: OSError | None = None
    """Why something could not be written."""

    @classmethod
    def install(cls) -> Stdout | None:
        """Put one in the place of ``sys.stdout``; None if that is another program's object."""
        before = sys.stdout
        if type(before) is not TextIOWrapper or before is not sys.__stdout__:
            return None
        before.flush()
        # A buffer of its own: that of before may have been made for another file under the same number.
        buffer = BufferedWriter(FileIO(before.fileno(), "w", closefd=False))
        sys.stdout = made = cls(
            buffer,
            before.encoding,
            "backslashreplace",
            line_buffering=before.line_buffering,
            write_through=before.write_through,
        )
        return made

    def write(self, text: str) -> int:
        """Write ``text``."""
        try:
            return super().write(text)
        except OSError as fault:
            self._lost(fault)
            return len(text)

    def flush(self) -> None:
        """Write what is left."""
        try:
            super().flush()
        except OSError as fault:
            self._lost(fault)

    def _lost(self, fault: OSError) -> None:
        if not isinstance(fault, BrokenPipeError):
            self.fault = fault
            print(f"error: cannot write standard output: {fault.strerror}", file=sys.stderr)
        nobody_reads()


def nobody_reads() -> None:
    """Discard further output, so that printing does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
