"""What a server answers instead of scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Refused(Exception):
    """A request that is not scored: the HTTP status, one line for the client, and a word for the metrics."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class WrongIds(Refused):
    """A request with ids that are not in their tables, ``counts`` [F] of each feature."""

    def __init__(self, message: str, counts: NDArray[np.int64]) -> None:
        super().__init__(400, "bad_request", message)
        self.counts: NDArray[Any] = counts


def bad(message: str) -> Refused:
    """A request that cannot be understood, or that does not fit the model."""
    return Refused(400, "bad_request", message)
