"""Directories that recpipe has made. A marker file tells them from a user's own, which recpipe never
removes."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from recpipe.common.run_dir import unwritable

MARKER = ".made-by-recpipe"
_TEXT = "recpipe made this directory and removes it.\n"


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
