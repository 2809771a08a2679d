"""Preparing a source once: streamed into a cache directory, found again at the next run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from recpipe.data.columns import Columns
from recpipe.data.dataset import Schema
from recpipe.data.prepared import FORMAT_VERSION, PreparedWriter
from recpipe.errors import DataError

log = logging.getLogger(__name__)


class Source(Protocol):
    """Files of one format, read once from front to back.

    ``blocks`` yields cleaned samples, each time with the share of the input read so far, in [0, 1];
    ``rejected_rows`` is final when it ends. ``recipe`` holds all settings that its output depends on.
    """

    schema: Schema
    recipe: dict[str, Any]
    rejected_rows: int

    @property
    def files(self) -> Sequence[Path]:
        """The input files, in time order."""

    @property
    def multi_hot(self) -> Sequence[str]:
        """Names of the features that hold bags of ids."""

    def blocks(self) -> Iterator[tuple[Columns, float]]:
        """Samples in time order, in blocks of bounded size."""


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/recpipe``, by default ``~/.cache/recpipe``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recpipe"


def cache_key(source: Source) -> str:
    """Hash of the files' paths, sizes and modification times, the recipe and the format version."""
    files = []
    for path in source.files:
        stat = path.stat()
        files.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
    identity = json.dumps([FORMAT_VERSION, source.recipe, files], sort_keys=True)
    return hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()


def prepare(source: Source, cache_dir: Path | None = None) -> Path:
    """The directory with the prepared ``source``, written now or found from an earlier run.

    Written under a temporary name and renamed when whole: a killed run leaves nothing that looks valid.
    Processes that want the same data wait for the first one (a file lock) and use its result.
    """
    root = cache_dir or default_cache_dir()
    target = root / f"data-{cache_key(source)}"
    if target.exists():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        with _lock(target):
            if not target.exists():
                _write(source, target)
    except OSError as error:
        raise DataError(
            f"cannot write prepared data to {root} ({error.strerror or error}): "
            "free space there or pass data.cache_dir=DIR"
        ) from error
    return target


def _write(source: Source, target: Path) -> None:
    temporary = target.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    started = time.perf_counter()
    try:
        with PreparedWriter(temporary, source.schema, source.multi_hot) as writer, _progress() as show:
            for columns, share in source.blocks():
                writer.append(columns)
                show(share)
            meta = writer.finish(source.rejected_rows)
        if meta.samples == 0:
            raise DataError(f"{source.files[0]}: no usable rows ({meta.rejected_rows} rejected)")
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    seconds = time.perf_counter() - started
    rejected = f", {meta.rejected_rows:,} bad rows skipped" if meta.rejected_rows else ""
    rate = meta.samples / seconds
    log.info(
        "prepared %s samples in %.1f s (%s rows/s)%s", f"{meta.samples:,}", seconds, f"{rate:,.0f}", rejected
    )


@contextmanager
def _lock(target: Path, wait: bool = True) -> Iterator[None]:
    """Hold ``target``'s lock file; the system frees it when the holder ends, however it ends."""
    with target.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _remove_stale(root: Path) -> None:
    """Delete what killed runs left: a temporary directory whose lock nobody holds."""
    for temporary in root.glob(f"data-{'[0-9a-f]' * 24}.tmp"):  # named by ``cache_key``: nobody else's
        try:
            with _lock(temporary, wait=False):
                shutil.rmtree(temporary, ignore_errors=True)
        except BlockingIOError:
            continue


@contextmanager
def _progress() -> Iterator[Any]:
    """A bar on a terminal, nothing elsewhere; yields ``show(share)``, share of the input in [0, 1]."""
    console = Console(stderr=True)
    parts = (
        TextColumn("preparing data"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*parts, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("prepare", total=1.0)
        yield lambda share: progress.update(task, completed=share)
