"""A worker's connections, held to limits, and the requests for scores that come on them.

uvicorn reads HTTP by its httptools protocol. ``Connection`` adds limits to it, and has requests for scores
answered without an ASGI application: what that needs for each request (a scope, a task, events) would be a
good part of their time beside the model.
"""

from __future__ import annotations

import json
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from time import perf_counter, time_ns
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from recpipe_serve.access.record import Observer, Record
from recpipe_serve.errors import Refused, bad
from recpipe_serve.http.acceptor import Acceptor
from recpipe_serve.http.compression import decoded, encoding_fault, too_large

HEADER, BODY, IDLE, ANSWERED = "header_slow", "body_slow", "idle", "answered"
"""What a connection waits for, as the metrics name it where it has waited too long: the rest of a header, or
of a body; its next request; or, without a limit, an answer by the model."""
ENCODING, TRACEPARENT = b"content-encoding", b"traceparent"
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

    infer: Infer
    """Has it scored once it is whole, or answered with its ``fault``."""
    respond: Callable[[IncomingRequest, Answer], None]
    """Sends its answer on its connection."""
    headers: dict[bytes, bytes]
    began: float
    """When the request's header was whole, in seconds of ``perf_counter``."""
    keep_alive: bool
    path: str = ""
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    whole: bool = False
    fault: Refused | None = None
    """Why it is not scored."""
    span: Any = None
    """Of OpenTelemetry (``Spans.begin``), once it is scored, if it is traced."""
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

    @property
    def traceparent(self) -> str | None:
        """The header of W3C Trace Context, as it came."""
        found = self.headers.get(TRACEPARENT)
        return None if found is None else found.decode("latin-1")

    def whole_body(self, most: int) -> bytes:
        """The body as it was before it was compressed, at most ``most`` bytes; ``Refused`` if it is
        larger."""
        encoding = self.headers.get(ENCODING)
        return self.body if encoding is None else decoded(self.body, encoding, most)

    def refuse(self, fault: Refused) -> None:
        """Answer the request with ``fault``; what else comes of its body is thrown away."""
        self.fault = fault
        self.parts.clear()
        self.go_on()


Infer = Callable[[IncomingRequest], None]
"""Answers requests for scores."""


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
    """Why a request is refused by its header: an unknown encoding, or a body of more than ``most`` bytes."""
    fault = encoding_fault(headers[ENCODING]) if ENCODING in headers else None
    length = headers.get(b"content-length", b"0")
    if fault is None and not length.isdigit():
        fault = bad("Content-Length is no number")
    if fault is None and (len(length) > 18 or int(length) > most):
        fault = too_large(most)
    return fault


class Connection(HttpToolsProtocol):
    """One connection. What ``addresses`` has for a path is given the whole requests for scores that are
    posted to it, or those with a ``fault``, and must have each answered by ``respond``."""

    cycle: Any
    pipeline: deque[Any]

    def __init__(
        self,
        acceptor: Acceptor,
        addresses: Mapping[bytes, Infer],
        **given: Any,
    ) -> None:
        super().__init__(**given)
        self.acceptor, self.addresses = acceptor, addresses
        self.bounds = acceptor.bounds
        self.address = ""
        self._size = self._silent = 0
        self._whole, self._news, self._held = True, False, False
        self._too_large = ""
        self._unread: float | None = None
        self._wait(IDLE, self.bounds.idle_seconds)

    @property
    def waits(self) -> bool:
        """Whether it waits for a request, or for the rest of one."""
        return self.why != ANSWERED

    def _wait(self, why: str, seconds: float) -> None:
        self.why, self.since = why, self.loop.time()
        self.deadline = self.since + seconds

    def look(self, now: float) -> None:
        """End what has taken too long."""
        if self.transport.get_write_buffer_size():
            self._unread = self._unread or now
            if now > self._unread + self.bounds.idle_seconds:
                self.end("not_read")
            return
        self._unread = None
        answers = self.cycle is not None and not self.cycle.response_complete
        if now < self.deadline or self.flow.read_paused or (answers and self.why != BODY):
            return
        if self.why == HEADER:
            self.refuse(408, HEADER, f"the header did not come within {self.bounds.header_seconds:g} s")
        elif self.why == BODY and isinstance(self.cycle, IncomingRequest) and not self.cycle.begun:
            self.acceptor.metrics.closed.labels(BODY).inc()
            self.cycle.keep_alive = False
            self.cycle.refuse(
                Refused(408, "slow", f"the body did not come within {self.bounds.body_seconds:g} s")
            )
        else:
            self.end(self.why)

    def end(self, why: str) -> None:
        """Close it without a word to the client."""
        self.acceptor.metrics.closed.labels(why).inc()
        self.acceptor.leaves(self)
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait until the client reads
        else:
            self.transport.close()

    def refuse(self, status: int, why: str, message: str) -> None:
        """Say in one line why it is closed."""
        told = {"content-type": "application/json"}
        self.transport.write(response((status, error(message), told), keep_alive=False))
        self.end(why)

    def send_400_response(self, msg: str) -> None:
        """uvicorn's, for what is no HTTP."""
        self.refuse(400, "malformed", msg)

    def connection_made(self, transport: Any) -> None:
        """asyncio's: it is there."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.acceptor.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's: it is closed."""
        self.acceptor.gone(self)
        lost = self.cycle
        super().connection_lost(exc)
        if isinstance(lost, IncomingRequest) and not lost.begun:
            lost.turn = True
            lost.refuse(Refused(499, "client_gone", "the client has gone"))

    def data_received(self, data: bytes) -> None:
        """asyncio's: some bytes, at most 256 KiB."""
        self._news = False
        super().data_received(data)
        if not self._whole and not self._news:
            # The parser keeps a name or a value until it ends, and says nothing of it.
            self._silent += len(data)
            if self._silent > self.bounds.header_bytes:
                self._too_large = self._too_large or "header_bytes"
        if self._too_large and not self.transport.is_closing():
            most = f"{self.bounds.header_bytes} bytes of headers"
            if self._too_large == "header_fields":
                most = f"{self.bounds.header_fields} headers"
            self.refuse(431, self._too_large, f"a request has at most {most}")

    def _unset_keepalive_if_required(self) -> None:
        """uvicorn's, which has a timer for each answer; here ``look`` sees to all of them."""

    def on_message_begin(self) -> None:
        """The parser's: a request begins."""
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._whole, self._news = False, True
        self._size = self._silent = 0
        self._wait(HEADER, self.bounds.header_seconds)

    def on_url(self, url: bytes) -> None:
        """The parser's: a piece of the address."""
        self._size += len(url)
        if self._size > self.bounds.header_bytes:
            self._too_large = "header_bytes"
        else:
            self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser's: a header, or a trailer."""
        self._size += len(name) + len(value)
        if self._too_large:
            return
        if self._size > self.bounds.header_bytes:
            self._too_large = "header_bytes"
        elif len(self.headers) >= self.bounds.header_fields:
            self._too_large = "header_fields"
        else:
            name = name.lower()
            self.headers.append((name, value))
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True

    def on_headers_complete(self) -> None:
        """The parser's: the body begins."""
        if self._too_large:
            return
        self._wait(BODY, self.bounds.body_seconds)
        path = self.url.partition(b"?")[0]
        infer = self.addresses.get(path)
        if infer is None and b"%" in path:
            infer = self.addresses.get(unquote_to_bytes(path))
        if infer is None or self.parser.get_method() != b"POST":
            # uvicorn's scope of a request for the application; others need none.
            url, headers, waits = self.url, self.headers, self.expect_100_continue
            super().on_message_begin()
            self.url, self.expect_100_continue = url, waits
            self.headers.extend(headers)
            super().on_headers_complete()
            return
        before = self.cycle
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        self.cycle = request = IncomingRequest(
            infer, self.respond, dict(self.headers), perf_counter(), keep_alive, path.decode("latin-1")
        )
        request.fault = header_fault(request.headers, self.bounds.body_bytes)
        if before is None or (before.response_complete and not self._held):
            self._start_asgi_task(request, None)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((request, None))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """uvicorn's: it is this request's turn."""
        if not isinstance(cycle, IncomingRequest):
            super()._start_asgi_task(cycle, app)
            return
        cycle.turn = True
        if self.expect_100_continue and cycle is self.cycle and cycle.fault is None and not cycle.whole:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        cycle.go_on()

    def on_body(self, body: bytes) -> None:
        """The parser's: a piece of the body."""
        self._news = True
        request = self.cycle
        if self._too_large:
            return
        if not isinstance(request, IncomingRequest):
            super().on_body(body)
        elif request.fault is None:
            request.size += len(body)
            request.parts.append(body)
            if request.size > self.bounds.body_bytes:
                request.refuse(too_large(self.bounds.body_bytes))

    def on_message_complete(self) -> None:
        """The parser's: the request is whole."""
        if self._too_large:
            return
        self._whole = self._news = True
        request = self.cycle
        if request.response_complete:
            self._wait(IDLE, self.bounds.idle_seconds)
        else:
            self._wait(ANSWERED, inf)
        if not isinstance(request, IncomingRequest):
            super().on_message_complete()
            return
        request.whole = True
        request.go_on()

    def respond(self, request: IncomingRequest, answer: Answer) -> None:
        """Send the answer of a request; the next one on the connection has its turn then."""
        request.response_complete = True
        if self.acceptor.observers:
            self._observe(request, answer)
        if self.transport.is_closing():
            return
        self.transport.write(response(answer, request.keep_alive, self.server_state.default_headers))
        if not request.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def _observe(self, request: IncomingRequest, answer: Answer) -> None:
        """Tell those who observe requests."""
        record = Record(
            "http",
            "POST",
            request.path,
            answer[0],
            time_ns(),
            perf_counter() - request.began,
            request.size,
            len(answer[1]),
            self.address,
            request.traceparent,
            request.span,
        )
        for observer in self.acceptor.observers:
            observer(record)

    def on_response_complete(self) -> None:
        """uvicorn's: a request is answered."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.write_paused:  # nobody reads the answers: no more requests are taken
            self._held = True
            self.flow.pause_reading()
            return
        self._next()

    def resume_writing(self) -> None:
        """asyncio's: the client has read."""
        super().resume_writing()
        if self._held and not self.transport.is_closing():
            self._held = False
            self._next()

    def _next(self) -> None:
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._whole:
            self._wait(IDLE, self.bounds.idle_seconds)
        else:
            self._wait(self.why, self.deadline - self.since)


class Observed:
    """An ASGI application, of whose requests ``observers`` are told."""

    def __init__(self, app: Any, observers: Sequence[Observer]) -> None:
        self.app, self.observers = app, observers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI's."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, received, sent = perf_counter(), 500, 0, 0

        async def receiving() -> Any:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def sending(message: Any) -> None:
            nonlocal status, sent
            status, sent = message.get("status", status), sent + len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receiving, sending)
        finally:
            trace = dict(scope["headers"]).get(TRACEPARENT)
            record = Record(
                "http",
                scope["method"],
                scope["path"],
                status,
                time_ns(),
                perf_counter() - began,
                received,
                sent,
                (scope["client"] or ("",))[0],
                None if trace is None else trace.decode("latin-1"),
            )
            for observer in self.observers:
                observer(record)


class Listener(uvicorn.Server):
    """uvicorn's server, whose connections come through ``acceptor``."""

    def __init__(
        self,
        app: Any,
        acceptor: Acceptor,
        addresses: Mapping[bytes, Infer],
        stop: float = 10.0,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                Observed(app, acceptor.observers) if acceptor.observers else app,
                ws="none",
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=max(1, round(stop)),
            )
        )
        self.acceptor, self.addresses = acceptor, addresses

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections from the one socket."""
        assert sockets is not None
        (listening,) = sockets
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(3)
        self.servers = [cast(Any, self.acceptor)]
        make = partial(
            Connection,
            self.acceptor,
            self.addresses,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.acceptor.listen(listening, make)
        self.started = True
