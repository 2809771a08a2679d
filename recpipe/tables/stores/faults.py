"""Messages with a remedy for errors of the operating system."""

from __future__ import annotations

import errno
import os

from recpipe.errors import StoreError

ELSEWHERE = "set tiers.dir= to a directory on another disk"
REMEDIES = {
    0: "the file ends too early: it was cut or replaced; start again from a checkpoint (resume=)",
    errno.ENOSPC: f"the disk is full: free space or {ELSEWHERE}",
    errno.EDQUOT: f"the disk quota is used up: free space or {ELSEWHERE}",
    errno.EFBIG: f"files may not be that large here: raise the limit (ulimit -f) or {ELSEWHERE}",
    errno.EROFS: f"the file system is read-only: {ELSEWHERE}",
    errno.EACCES: f"no permission: grant write permission or {ELSEWHERE}",
    errno.EPERM: f"not permitted: grant write permission or {ELSEWHERE}",
    errno.ENOTDIR: "a part of the path is not a directory: set tiers.dir= to a directory",
    errno.EEXIST: "there is a file of that name that no store made: remove it or set tiers.dir= elsewhere",
    errno.ENOENT: "there is no such file: set tiers.dir= to a directory that can be made or exists",
    errno.ELOOP: "a store follows no symbolic link: remove it or set tiers.dir= elsewhere",
    errno.EMFILE: "too many open files, one is needed per table: raise the limit (ulimit -n)",
    errno.EIO: f"the device failed: check it (dmesg), {ELSEWHERE}, start again with resume=",
}


def store_error(doing: str, path: str | os.PathLike[str], code: int, remedy: str | None = None) -> StoreError:
    """``cannot <doing> <path>: <reason and remedy>`` for an errno; 0: the file ended early. ``remedy``:
    another one than training's."""
    if remedy is not None:
        reason = f"{os.strerror(code) if code else 'the file ends too early'}; {remedy}"
    else:
        reason = REMEDIES.get(code) or f"{os.strerror(code)}; {ELSEWHERE}"
    return StoreError(f"ssd store: cannot {doing} {os.fspath(path)}: {reason}")
