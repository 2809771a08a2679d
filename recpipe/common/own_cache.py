"""What is compiled, measured or prepared once and loaded by later runs, in folders that the user alone can
write.

Who can write such a folder decides what code a run carries out and which numbers it believes. Every folder of
this kind goes through ``own_folder`` or ``require_own`` before anything in it is read.
"""

from __future__ import annotations

import atexit
import grp
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from recpipe.common.process import Shared
from recpipe.errors import UserError, shown

CACHE_HOME = "XDG_CACHE_HOME"
COMPILERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Compilers' variables for the folder of what they compile, and its name in recpipe's own."""
_MOST_LINKS = 40
_chosen: ContextVar[Path | None] = ContextVar("recpipe_cache_dir", default=None)


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/recpipe``, by default ``~/.cache/recpipe``; in a ``cached_in`` block its
    directory."""
    return _chosen.get() or user_cache_dir()


def user_cache_dir() -> Path:
    """The same, also in a ``cached_in`` block."""
    return Path(os.environ.get(CACHE_HOME) or Path.home() / ".cache") / "recpipe"


@contextmanager
def cached_in(directory: Path | None) -> Iterator[None]:
    """In the block, ``directory`` is this thread's ``default_cache_dir``; None: the usual one."""
    token = _chosen.set(directory)
    try:
        yield
    finally:
        _chosen.reset(token)


def own_folder(path: Path, setting: str = CACHE_HOME) -> Path:
    """``path``, one of recpipe's own folders: made if it is missing, checked, of mode 0700.

    ``setting``: what the user says to have it elsewhere. ``UserError`` as ``require_own`` has it, and OSError
    if it cannot be made.
    """
    with private_files():
        path.mkdir(parents=True, exist_ok=True)
    require_own(path, setting)
    found = path.stat()
    if found.st_mode & 0o077 and found.st_uid == os.geteuid():
        path.chmod(0o700)
    return path


def require_own(path: Path, setting: str = CACHE_HOME) -> None:
    """``UserError`` if somebody else than this user (and root) owns or can write ``path``, a folder on the
    way to it, or anything in it. A ``path`` that does not exist is right."""
    places = list(_way(path.absolute()))
    for place in places:
        try:
            found = place.lstat()
        except OSError:  # what cannot be reached cannot be loaded either
            return
        # In a sticky folder such as /tmp, others can neither remove nor rename what is not theirs.
        _check(place, found, setting, sticky=place is not places[-1])
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            place = Path(folder, name)
            with suppress(FileNotFoundError):  # another process has removed it
                _check(place, place.lstat(), setting, sticky=False)


def write_own(path: Path, text: str) -> None:
    """Replace the file ``path`` atomically; nobody else can read or write it. OSError if that fails."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        draft.unlink(missing_ok=True)
        draft.touch(0o600, exist_ok=False)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


@contextmanager
def _private_files() -> Iterator[None]:
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


private_files = Shared(_private_files)
"""In the block, nobody else can read or write the files and folders that this process makes."""


def own_compilers_caches() -> None:
    """Let torch's compilers keep what they compile in folders of recpipe, not of a name in /tmp that anybody
    can make first. Folders that the user has named are checked."""
    for variable, name in COMPILERS.items():
        named = os.environ.get(variable)
        # torch itself sets it to that name when it is imported.
        if named and not named.startswith(str(Path(tempfile.gettempdir(), "torchinductor_"))):
            require_own(Path(named), variable)
            continue
        try:
            folder = own_folder(user_cache_dir() / name)
        except OSError:  # it cannot be written: what is compiled is kept for this process alone
            folder = Path(tempfile.mkdtemp(prefix=f"recpipe-{name}-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[variable] = str(folder)


def _way(path: Path) -> Iterator[Path]:
    """The folders and links through which the system reaches the absolute ``path``, and ``path`` itself."""
    here, left, links = Path(path.anchor), list(reversed(path.parts[1:])), 0
    yield here
    while left:
        part = left.pop()
        if part == "..":
            here = here.parent
            continue
        here /= part
        yield here
        if here.is_symlink() and links < _MOST_LINKS:
            links += 1
            target = here.readlink()
            here = Path(target.anchor) if target.is_absolute() else here.parent
            left += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _check(place: Path, found: os.stat_result, setting: str, sticky: bool) -> None:
    """``UserError`` if others own ``place`` or can write it. ``sticky``: a folder in which nobody can remove
    or rename what is another's is right."""
    mode = found.st_mode
    by_others = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _alone_in(found.st_gid))
    kept_safe = sticky and stat.S_ISDIR(mode) and mode & stat.S_ISVTX
    if found.st_uid not in (os.geteuid(), 0):
        fault = f"belongs to {_user(found.st_uid)}, not to {_user(os.geteuid())}"
        remedy = "remove it"
    elif stat.S_ISLNK(mode) or kept_safe or not by_others:
        return
    else:
        fault = f"belongs to {_user(found.st_uid)}, and others can write it (mode {mode & 0o7777:04o})"
        remedy = "remove it, or chmod go-w it if you trust what is in it"
    raise UserError(
        f"{shown(place, 300)} {fault}: runs load what is compiled, measured or prepared there, so you alone "
        f"may write it; {remedy}, or set {setting} to a folder of yours"
    )


def _alone_in(gid: int) -> bool:
    """Whether the group is the user's own, which has the user's name and no other member. Many systems make
    one for each user, whose folders it can write by default."""
    if os.geteuid() == 0:
        return False
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
