"""A cold store in front of another one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.store import ColdStore, IoCounters, Rows


class FrontStore(ColdStore):
    """Changes the records or the time of ``gather`` and ``scatter``, and passes all else on to ``inner``.

    ``inner`` is owned: ``close`` closes it.
    """

    def __init__(self, inner: ColdStore) -> None:
        self.inner = inner
        self.layout, self.direct = inner.layout, inner.direct
        self.rounded, self.rounded_there = inner.rounded, inner.rounded_there
        self.shares_blocks = inner.shares_blocks

    @property
    def io(self) -> IoCounters:  # type: ignore[override]
        """The traffic of ``inner``."""
        return self.inner.io

    def staged(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of ``rows`` ``inner`` could write without reading what surrounds them first, bool [n]."""
        return self.inner.staged(rows)

    def flush(self) -> None:
        """Let ``inner`` have all as durably as it can."""
        self.inner.flush()

    def close(self) -> None:
        """Close ``inner``."""
        self.inner.close()

    def background(self) -> IoCounters:
        """What ``inner`` moved by itself between calls."""
        return self.inner.background()

    @property
    def cold_bytes(self) -> int:
        """What ``inner`` takes."""
        return self.inner.cold_bytes

    @property
    def overhead_bytes(self) -> int:
        """The memory that ``inner`` takes beside its rows."""
        return self.inner.overhead_bytes
