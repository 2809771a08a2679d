"""What a server answers instead of scores."""

from __future__ import annotations


class Refused(Exception):
    """A request that is not scored: the HTTP status, one line for the client, and a word for the metrics."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


def bad(message: str) -> Refused:
    """A request that cannot be understood, or that does not fit the model."""
    return Refused(400, "bad_request", message)
