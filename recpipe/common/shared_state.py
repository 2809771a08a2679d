"""State of the whole process that several runs in it may need at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock


class Shared:
    """State that ``make`` sets up. The first user, in any thread, sets it up; the last one undoes it."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._lock = Lock()
        self._inside = 0
        self._made: AbstractContextManager[None] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """In the block, the state is set up."""
        with self._lock:
            if not self._inside:
                self._made = self._make()
                self._made.__enter__()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._made is not None:
                    self._made.__exit__(None, None, None)
