"""Lock files. The system frees one when its owner ends, even if it is killed; until then the file names the
owner."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""Error numbers of ``flock`` on a file system without locks."""


class Taken(Exception):
    """Another process holds the lock. The message names it, if the file does."""


class LockFile:
    """An exclusive lock on the file ``name`` (in the directory ``dir_fd``, if given), until ``release``.

    The file is created if it is missing; symbolic links are not followed. Raises ``Taken``, and OSError if
    the file cannot be created or locked. ``text``: what is written into it, None: ``this_process``, "":
    nothing, so that what an earlier owner has left can be read.
    """

    def __init__(self, name: str | Path, dir_fd: int | None = None, text: str | None = None) -> None:
        self._name, self._dir_fd = name, dir_fd
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(name, flags, 0o644, dir_fd=dir_fd)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current():
                    if text != "":
                        with suppress(OSError):  # the disk is full, but the lock is held
                            self.write(text or f"{this_process()}\n")
                    return
            except OSError as fault:
                taken = fault.errno in (errno.EWOULDBLOCK, errno.EACCES)
                owner = self.content().strip()
                if not taken and text != "":
                    self.remove()  # without locks nobody can hold it
                self.release()
                if taken:
                    raise Taken(owner or "a process that has not said which") from fault
                raise
            self.release()  # its owner has just removed the file

    def content(self) -> str:
        """What is in the file, at most 16 MiB."""
        return os.pread(self._fd, 1 << 24, 0).decode(errors="replace")

    def write(self, text: str) -> None:
        """Replace what is in the file; OSError if the disk is full."""
        os.ftruncate(self._fd, os.pwrite(self._fd, text.encode(), 0))

    def _is_current(self) -> bool:
        try:
            there = os.stat(self._name, dir_fd=self._dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._fd))

    def remove(self) -> None:
        """Delete the file; this process keeps the lock."""
        if self._is_current():
            os.unlink(self._name, dir_fd=self._dir_fd)

    def release(self) -> None:
        """Release the lock; the file stays unless ``remove`` was called."""
        os.close(self._fd)


def this_process() -> str:
    """A description of this process: its id, its machine, the time."""
    return f"process {os.getpid()} on {socket.gethostname()}, started {time.strftime('%Y-%m-%dT%H:%M:%S%z')}"
