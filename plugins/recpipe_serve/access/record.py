"""One answered request, as access logs and traces have it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
"""Of W3C Trace Context: version, trace, parent span, flags."""


class Record(NamedTuple):
    """A request and its answer."""

    protocol: str
    """http, or grpc."""
    method: str
    path: str
    status: int
    """HTTP's; over gRPC that of the same answer."""
    ended: int
    """When it was answered, nanoseconds of the epoch."""
    seconds: float
    """From its header to its answer."""
    received: int
    """Bytes of its body."""
    sent: int
    """Bytes of the answer's."""
    address: str
    """The client's."""
    traceparent: str | None
    """The header of W3C Trace Context, as it came."""
    span: Any = None
    """The request's span of OpenTelemetry (``Spans.begin``), if it was begun when the request came."""

    @property
    def trace(self) -> str | None:
        """The trace that it belongs to, 32 hexadecimal digits; None: none, or what came is none."""
        found = None if self.traceparent is None else TRACEPARENT.fullmatch(self.traceparent)
        return None if found is None or not int(found[1], 16) else found[1]


Observer = Callable[[Record], None]
"""Is told of each request, in the event loop's thread."""
