"""Messages that one rank leaves for all others in the run's key-value store. Unlike with a channel, nobody
waits for who reads them, so that it does not matter which rank stops first."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from recpipe.distributed.launch import run_store

PIECE = 4 << 20
"""Bytes of a value; torch's store takes 8 MiB at most."""
OFTEN, SELDOM = 0.001, 0.05
"""Seconds between two looks for a message at first, and at last."""


class Mail:
    """The messages under one ``name``, the same on all ranks of a run; each has a key of its own."""

    def __init__(self, name: str) -> None:
        self._store = PrefixStore(name, run_store())

    def leave(self, key: str, content: bytes = b"") -> None:
        """Leave a message."""
        pieces = [content[low : low + PIECE] for low in range(0, len(content), PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{key}/{number}", piece)  # type: ignore[arg-type]
        # A rank's values come in the order in which it sets them.
        self._store.set(key, str(len(pieces)))

    def has(self, key: str) -> bool:
        """Whether the message has been left."""
        return bool(self._store.check([key]))

    def read(self, key: str, gives_up: Callable[[], bool] = lambda: False) -> bytes | None:
        """The message, once it is there; None if it is not and ``gives_up``."""
        wait = OFTEN
        while not self.has(key):
            if gives_up():
                return None
            time.sleep(wait)
            wait = min(SELDOM, wait * 1.1)
        pieces = int(self._store.get(key))
        return b"".join(self._store.get(f"{key}/{number}") for number in range(pieces))

    def remove(self, key: str) -> None:
        """Remove a message, which nobody reads any more."""
        for number in range(int(self._store.get(key))):
            self._store.delete_key(f"{key}/{number}")
        self._store.delete_key(key)
