"""Compiled loops, made before the first test by all of pytest's processes together.

On a machine that has not run recpipe yet, each of them would make all of them itself, which takes half a
minute. Servers of ``tests.processes`` then load them once for all processes that they fork.
"""

from __future__ import annotations

import fcntl
from pathlib import Path

from recpipe.common import loops


def make_loops(number: int, processes: int, locks: Path) -> None:
    """Load all loops that modules have brought until now, and make those that nobody has made.

    ``number``: of this process among ``processes`` that do so at the same time. Each begins with another
    loop, and waits for what another one is making.
    """
    waiting, loops._WAITING[:] = list(loops._WAITING), []
    first = number * len(waiting) // processes
    for loop in waiting[first:] + waiting[:first]:
        with (locks / f"{loop.loop.__module__}.{loop.loop.__qualname__}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            loop.load()
