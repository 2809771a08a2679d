"""The processes of runs: settings of this one before it starts, and runs in processes of their own."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from recpipe.backend.allocator import bound_kernel_caches, tune_allocator
from recpipe.common.files import unwritable
from recpipe.common.own_cache import own_compilers_caches
from recpipe.common.process import calm_threads
from recpipe.errors import UserError
from recpipe.tasks.doctor import check_versions

TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node={}"
_SIGNAL_AT_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of prctl(2)
_GRACE_SECONDS = 40  # torchrun gives its ranks 30 seconds


def prepare_process() -> None:
    """The process settings that the command line makes first, as far as they can still take effect."""
    calm_threads()
    tune_allocator()
    bound_kernel_caches()
    own_compilers_caches()
    check_versions()


def started(
    command: list[str], output: BinaryIO | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A run as a process in its own session: Ctrl-C reaches only this process, which then ends the run
    properly. It gets SIGTERM if this process is killed. ``output``: where it prints, None: where this one
    does."""
    library, parent = ctypes.CDLL(None), os.getpid()

    def ends_with_parent() -> None:
        library.prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGTERM)
        if os.getppid() != parent:  # it has died meanwhile
            os._exit(1)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        preexec_fn=ends_with_parent if sys.platform == "linux" else None,
    )


def end(run: subprocess.Popen[bytes]) -> None:
    """Ask a run in its own session to stop, so that it can save a checkpoint and close its stores.

    It and its ranks are killed if it does not stop, or when the next signal comes. Only the one process gets
    the signal: torchrun passes SIGTERM on to its ranks, and a second one would end them at once.
    """
    run.terminate()
    try:
        run.wait(timeout=_GRACE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        groups = [run.pid]
        # torchrun's children lead process groups of their own; without /proc they are not found.
        with suppress(OSError):  # a process that has just ended
            for file in Path(f"/proc/{run.pid}/task").glob("*/children"):
                groups += [pid for pid in map(int, file.read_text().split()) if os.getpgid(pid) == pid]
        for group in reversed(groups):
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        run.wait()


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block if SIGINT or SIGTERM came in it."""
    came: list[int] = []
    both = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda found, _: came.append(found)) for number in both}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """In the block, SIGTERM raises KeyboardInterrupt, so that the current run ends with the comparison."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class OutOfTime(Exception):
    """The time for a run is over; it was ended."""


def run_apart(
    arguments: list[str], directory: Path, ranks: int = 1, seconds: float | None = None
) -> dict[str, Any]:
    """Run ``python -m recpipe arguments`` to its end and return its ``directory/report.json`` ({} if there is
    none).

    A fresh process each time: no allocator state, cached page or thread pool leaks from one run into the
    next. Several ``ranks`` are started by torchrun. Its output goes to ``directory/run.log``. Raises
    UserError with the run's own message if it has one; for any other failure the message names the log. After
    ``seconds`` the run is ended, and ``OutOfTime`` raised.
    """
    log = directory / "run.log"
    checkpoints = directory / "checkpoints"
    earlier = checkpoints.exists()
    starter = TORCHRUN.format(ranks).split() if ranks > 1 else []
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        opened = log.open("wb")
    except OSError as fault:
        raise unwritable(log, fault) from fault
    with opened as output:
        run = None
        try:
            with interrupts_deferred():  # one that comes meanwhile would leave it running
                run = started([sys.executable, *starter, "-m", "recpipe", *arguments], output)
            status = run.wait(seconds)
        except BaseException as fault:
            if run is not None:
                end(run)
            if isinstance(fault, subprocess.TimeoutExpired):
                raise OutOfTime from None
            raise
    # A comparison needs no checkpoints, and those of all runs would fill the disk.
    if not earlier:
        shutil.rmtree(checkpoints, ignore_errors=True)
    if status != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        if errors:
            raise UserError(errors[-1].removeprefix("error: "))
        how = f"was killed by signal {-status}" if status < 0 else f"failed with status {status}"
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        raise UserError(f"the run {how} ({last[:200]}); its output is in {log}")
    report = directory / "report.json"
    content: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return content
