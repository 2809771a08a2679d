"""Places that recpipe writes outside of a run's directory, and directories that it has made.

Several runs may be told to write one place; it belongs to one of them. A file in the place, or beside it,
names the owner: process, machine, the run's directory and its recipe. It is locked while the owner writes.
Afterwards the file stays in a directory that runs fill, so that another run neither replaces nor mixes with
what is there, unless the user says ``overwrite=true``. A marker file tells directories that recpipe has made,
and removes when they are empty, from a user's own.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recpipe.common.files import NO_LOCKS, LockFile, Taken, unwritable
from recpipe.common.saved import parse_json, typed_as
from recpipe.errors import UserError, shown

OWNER = ".owner.json"
MARKER = ".made-by-recpipe"
_TEXT = "recpipe made this directory and removes it.\n"


@dataclass(frozen=True)
class Owner:
    """Who writes a place, or wrote it last."""

    pid: int
    ticks: int
    """When the process started, by the kernel's clock: another process may get its id later."""
    host: str
    since: str
    run: str
    """The run's directory; of a command, its words."""
    checkpoints: str | None
    """Where the run keeps its checkpoints: a run that goes on from there owns its places, too."""
    recipe: Any

    @classmethod
    def here(cls, run: str, checkpoints: Path | None = None, recipe: Any = None) -> Owner:
        """This process."""
        since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        kept = None if checkpoints is None else str(checkpoints.absolute())
        return cls(os.getpid(), _ticks(os.getpid()), socket.gethostname(), since, run, kept, recipe)

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """From a file; None if that is empty, cut off or of something else."""
        try:
            return typed_as(cls, parse_json(text))
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, {shown(self.run, 200)}, since {self.since}"

    @property
    def alive(self) -> bool:
        """Whether the process still runs, as far as this machine can tell; one of another machine does."""
        return self.host != socket.gethostname() or (self.ticks != 0 and _ticks(self.pid) == self.ticks)


@dataclass(frozen=True)
class Writer:
    """The run that asks for places. ``resume``: the checkpoint that it goes on from."""

    owner: Owner
    resume: Path | None
    overwrite: bool

    def goes_on(self, before: Owner | None, place: Path) -> bool:
        """Whether what ``before`` has left in ``place`` is this run's own."""
        if before is not None and before.run == self.owner.run:
            return True
        kept = str(place.absolute()) if before is None else before.checkpoints
        if kept is None or self.resume is None:
            return False
        return self.resume.resolve().is_relative_to(Path(kept).resolve())

    @contextmanager
    def owning(self, key: str, place: Path, holds: Callable[[Path], bool]) -> Iterator[bool]:
        """In the block, the directory ``place``, the value of ``key``, is this run's alone; whether what is
        there is another run's, to be replaced.

        ``holds``: whether a directory has results. ``UserError`` if another process owns it, if it has
        another run's results and ``overwrite`` is not set, and if it cannot be written.
        """
        made = not place.exists()

        def check(before: Owner | None) -> None:
            if holds(place) and not self.overwrite and not self.goes_on(before, place):
                whose = f"another run ({before})" if before else "another run, which does not say which"
                raise UserError(
                    f"{_said(key, place)} has results of {whose}: choose another directory, or pass "
                    "overwrite=true to replace them"
                )

        with _locked(key, place, place / OWNER, self.owner, check) as before:
            yield holds(place) and not self.goes_on(before, place)
            if not holds(place):
                (place / OWNER).unlink(missing_ok=True)
        if made:
            with suppress(OSError):  # it has results, or other files
                place.rmdir()


@contextmanager
def written_alone(key: str, target: Path, overwrite: bool, words: Sequence[str] = ()) -> Iterator[None]:
    """In the block, no other process writes ``target``, a file or directory that gets its name when it is
    whole. ``UserError`` if one does, or if ``target`` exists and ``overwrite`` is not set."""

    require_absent(key, target, overwrite)
    beside = target.with_name(f".{target.name}.{OWNER}")
    owner = Owner.here(" ".join(("recpipe", *words)))
    with _locked(key, target, beside, owner, lambda before: require_absent(key, target, overwrite)):
        try:
            yield
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)


def require_absent(key: str, target: Path, overwrite: bool) -> None:
    """``UserError`` if ``target``, the value of ``key`` (empty: a word of its own), exists and is not to be
    replaced. An empty directory is nothing."""
    if not overwrite and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        kind = "directory" if target.is_dir() else "file"
        raise UserError(
            f"{_said(key, target)}: exists already; choose another {kind}, or pass overwrite=true"
        )


def _said(key: str, place: Path) -> str:
    return f"{key}={shown(place, 300)}" if key else shown(place, 300)


@contextmanager
def _locked(
    key: str, place: Path, file: Path, owner: Owner, check: Callable[[Owner | None], None]
) -> Iterator[Owner | None]:
    """Hold ``file`` in the name of ``owner`` in the block; gives who held it before. ``check`` refuses what
    is there by an error, and the file then stays as it is."""
    said = _said(key, place)
    lock = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = LockFile(file, text="")
            content = lock.content()
        except OSError as fault:
            if fault.errno not in NO_LOCKS:
                raise
            content = file.read_text(encoding="utf-8") if file.exists() else ""
            before = Owner.parse(content)
            if before is not None and before.alive:
                raise Taken(content) from fault
        before = Owner.parse(content)
        check(before)
        text = json.dumps(asdict(owner), indent=1, default=str) + "\n"
        if lock is not None:
            lock.write(text)
        else:
            file.write_text(text, encoding="utf-8")
    except Taken as taken:
        holder = Owner.parse(str(taken))
        raise UserError(
            f"{said} is being written by {holder or taken}: wait for it, or choose another place"
        ) from taken
    except OSError as fault:
        if lock is not None:
            lock.release()
        code = OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) if fault.errno == errno.EEXIST else fault
        raise unwritable(said, code, "choose another place") from fault
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    try:
        yield before
    finally:
        if lock is not None:
            lock.release()


def holds_arrays(directory: Path) -> bool:
    """Whether ``directory`` has exported numpy files."""
    return any(directory.glob("*.np[yz]"))


def remove_arrays(directory: Path) -> None:
    """Remove what ``holds_arrays`` finds."""
    for file in directory.glob("*.np[yz]"):
        file.unlink(missing_ok=True)


def _ticks(pid: int) -> int:
    """When the process started, in clock ticks since the machine did; 0 if there is none, or no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def make_directory(path: Path) -> None:
    """Make ``path`` and its missing parents, each with a marker in it; OSError if that fails."""
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
        return  # another rank has made it
    (path / MARKER).write_text(_TEXT)


def remove_made(path: Path) -> None:
    """Remove ``path`` and its parents, as long as they have a marker and nothing else in them."""
    with suppress(OSError):  # it does not exist, or another rank has removed it
        while [file.name for file in path.iterdir()] == [MARKER]:
            (path / MARKER).unlink()
            path.rmdir()
            path = path.parent


def scratch_directory(parent: Path, name: str) -> Path:
    """Make a new directory ``name-*`` in the run directory ``parent``; the caller removes it.

    Directories that killed runs have left there are removed first, since ``parent`` belongs to one run at a
    time. UserError if it cannot be made.
    """
    for left in parent.glob(f"{name}-*"):
        if (left / MARKER).is_file():
            shutil.rmtree(left, ignore_errors=True)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
        (made / MARKER).write_text(_TEXT)
    except OSError as fault:
        raise unwritable(parent, fault) from fault
    return made
