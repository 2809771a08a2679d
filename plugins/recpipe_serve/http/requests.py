"""A request for scores while it is read, and what is answered to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from recpipe.errors import shown
from recpipe_serve.errors import Refused, bad

Answer = tuple[int, bytes, Mapping[str, str]]
"""Status, body, and headers without the body's length."""


class _Nobody:
    """Stands for the event of a request that nobody waits for."""

    def set(self) -> None:
        """Nobody hears it."""


@dataclass(eq=False, slots=True)
class IncomingRequest:
    """A request for scores, read piece by piece. uvicorn keeps it as its connection's "cycle", and sets or
    reads what is under the line."""

    infer: Callable[[IncomingRequest], None]
    """Has it scored once it is whole, or answered with its ``fault``."""
    respond: Callable[[IncomingRequest, Answer], None]
    """Sends its answer on its connection."""
    headers: dict[bytes, bytes]
    began: float
    """When the request's header was whole, in seconds of ``perf_counter``."""
    keep_alive: bool
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    whole: bool = False
    fault: Refused | None = None
    """Why it is not scored."""
    turn: bool = False
    """Whether those before it on the connection are answered."""
    begun: bool = False
    # ---
    response_complete: bool = False
    disconnected: bool = False
    message_event: _Nobody = field(default_factory=_Nobody)

    @property
    def body(self) -> bytes:
        """All of it."""
        return self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)

    def go_on(self) -> None:
        """Have it scored, or refused, once it is its turn and enough of it is there."""
        if self.turn and not self.begun and (self.whole or self.fault is not None):
            self.begun = True
            self.infer(self)

    def refuse(self, fault: Refused) -> None:
        """Answer the request with ``fault``; what else comes of its body is thrown away."""
        self.fault = fault
        self.parts.clear()
        self.go_on()


def response(answer: Answer, keep_alive: bool, default: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """The bytes of an answer, with the server's ``default`` headers."""
    status, content, headers = answer
    parts = [STATUS_LINE[status]]
    for name, value in default:
        parts += [name, b": ", value, b"\r\n"]
    told = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    end = "" if keep_alive else "connection: close\r\n"
    parts += [f"{told}content-length: {len(content)}\r\n{end}\r\n".encode(), content]
    return b"".join(parts)


def error(message: str) -> bytes:
    """The body of an answer that is one line."""
    return json.dumps({"error": message}).encode()


def header_fault(headers: Mapping[bytes, bytes], most: int) -> Refused | None:
    """Why a request is refused by its header: a compressed body, or one of more than ``most`` bytes."""
    encoding, length = headers.get(b"content-encoding", b"identity"), headers.get(b"content-length", b"0")
    if encoding != b"identity":
        told = shown(encoding.decode("latin-1"))
        return Refused(415, "encoding", f"Content-Encoding {told} is not taken; send it as it is")
    if not length.isdigit():
        return bad("Content-Length is no number")
    return too_large(most) if len(length) > 18 or int(length) > most else None


def too_large(most: int) -> Refused:
    """A body of more bytes than are taken."""
    return Refused(413, "too_large", f"the body is larger than {most} bytes")
