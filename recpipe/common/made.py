"""Directories that recpipe has made, told from a user's own by a marker in them: it removes no others."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from recpipe.common.run_dir import unwritable

MARKER = ".made-by-recpipe"
_TEXT = "recpipe made this directory and removes it.\n"


def make_directory(path: Path) -> None:
    """Make ``path`` and what is missing above it, each with a marker in it; OSError where that fails."""
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
        return  # another rank was first
    (path / MARKER).write_text(_TEXT)


def remove_made(path: Path) -> None:
    """Remove ``path`` and what is above it, as far up as they have a marker and nothing else in them."""
    with suppress(OSError):  # not there, or another rank was first
        while [file.name for file in path.iterdir()] == [MARKER]:
            (path / MARKER).unlink()
            path.rmdir()
            path = path.parent


def scratch_directory(parent: Path, name: str) -> Path:
    """A new directory ``name-*`` in the run directory ``parent``, for its maker to remove whole.

    Those that killed runs left there are removed first: ``parent`` is one run's at a time. UserError where
    it cannot be made.
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
