"""Limits of connections and headers, each counted; connections of workers in balance."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

from recpipe_serve.config import ServeConfig
from recpipe_serve.http import acceptor as door_module
from recpipe_serve.http.acceptor import Acceptor, Shares, connections_possible
from recpipe_serve.http.app import Server
from recpipe_serve.tests.test_protocol import DENSE, A, B, body
from recpipe_serve.tests.test_serving import INFER, MANIFEST, ask, score, served

INFER_LINE = f"POST {INFER} HTTP/1.1\r\nHost: x\r\n".encode()
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(header_bytes=4096, header_fields=20, header_seconds=0.4, body_seconds=0.4) as (found, _):
        yield found


def closed(port: int, reason: str) -> int:
    """How many connections the server says that it closed for this reason."""
    start = f'recpipe_connections_closed_total{{reason="{reason}"}}'
    lines = ask(port, "GET", "/metrics")[1].decode().splitlines()
    return int(float(next((line.split()[1] for line in lines if line.startswith(start)), "0")))


def rest_of(client: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    found = b""
    client.settimeout(10)
    try:
        while part := client.recv(65536):
            found += part
    except ConnectionResetError:  # since it had not read all that was sent
        pass
    return found


def flooded(port: int, start: bytes, endless: bytes, chunks: int = 100) -> bytes:
    """Send ``start`` and then the ``endless`` bytes; what the server says when it ends that."""
    with closing(socket.create_connection(("127.0.0.1", port))) as client:
        client.sendall(start)
        chunk = endless * (2**18 // len(endless))
        sent = 0
        with suppress(ConnectionError):
            while sent < chunks:
                client.sendall(chunk)
                sent += 1
        assert sent < chunks  # at most the buffers of two sockets
        return rest_of(client)


def anonymous_kib() -> int:
    """Memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize(
    ("start", "endless", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", b"X: a\r\n", "header_fields"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: ", b"a", "header_bytes"),
        (b"GET / HTTP/1.1\r\n", b"a", "header_bytes"),
        (b"GET /", b"a", "header_bytes"),
        (INFER_LINE + b"X: ", b"a", "header_bytes"),
        (INFER_LINE, b"Y: a\r\n", "header_fields"),
        # After a body in pieces come trailers.
        (INFER_LINE + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"X: a\r\n", "header_fields"),
        (INFER_LINE + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX: ", b"a", "header_bytes"),
    ],
)
def test_a_header_that_does_not_end_is_refused_and_counted(
    port: int, start: bytes, endless: bytes, reason: str
) -> None:
    before, memory = closed(port, reason), anonymous_kib()
    flooded(port, start, endless)
    assert closed(port, reason) == before + 1
    assert anonymous_kib() < memory + 20_000
    assert ask(port, "POST", INFER, body(DENSE, A, B))[0] == 200


def test_what_is_refused_is_said(port: int) -> None:
    for start, status, said in (
        (INFER_LINE + b"X: " + b"a" * 5000 + b"\r\n\r\n", b"431", b"at most 4096 bytes of headers"),
        (INFER_LINE + b"X: a\r\n" * 30, b"431", b"at most 20 headers"),
        (b"no HTTP\r\n\r\n", b"400", b"Invalid HTTP"),
        (INFER_LINE, b"408", b"the header did not come within 0.4 s"),
        (INFER_LINE + b"Content-Length: 9\r\n\r\n{", b"408", b"the body did not come within 0.4 s"),
    ):
        with closing(socket.create_connection(("127.0.0.1", port))) as client:
            client.sendall(start)
            answer = rest_of(client)
        assert answer.startswith(b"HTTP/1.1 " + status), answer
        assert said in answer
        assert b"connection: close" in answer
    assert closed(port, "malformed") >= 1
    assert closed(port, "header_slow") >= 1
    assert closed(port, "body_slow") >= 1


def test_a_usual_request_with_many_headers_is_taken(port: int) -> None:
    """Of 19 headers with 3,500 bytes, in pieces."""
    data = body(DENSE, A, B)
    headers = b"".join(b"X-%d: %s\r\n" % (n, b"v" * 190) for n in range(17))
    with closing(socket.create_connection(("127.0.0.1", port))) as client:
        request = INFER_LINE + headers + b"Content-Length: %d\r\n\r\n" % len(data) + data
        for start in range(0, len(request), 700):
            client.sendall(request[start : start + 700])
            time.sleep(0.005)
        client.settimeout(10)
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_idle_connections_go_and_kept_ones_do_not_before() -> None:
    with served(idle_seconds=0.5) as (port, _):
        with closing(socket.create_connection(("127.0.0.1", port))) as silent:
            assert rest_of(silent) == b""
        with closing(socket.create_connection(("127.0.0.1", port))) as kept:
            kept.settimeout(10)
            for _ in range(4):
                kept.sendall(LIVE)
                assert kept.recv(500).startswith(b"HTTP/1.1 200")
                time.sleep(0.2)
            assert rest_of(kept) == b""
        assert closed(port, "idle") == 2


def test_answers_that_nobody_reads_do_not_hold_a_connection() -> None:
    with served(idle_seconds=0.3) as (port, _), closing(socket.socket()) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", port))
        slow.settimeout(0.2)
        with suppress(OSError):
            slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 5000)
        until(lambda: closed(port, "not_read") == 1)


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until it is true, but not for ever."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def held(port: int, count: int, drip: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections that have sent the beginning of a request, or nothing."""
    clients = []
    try:
        for _ in range(count):
            client = socket.create_connection(("127.0.0.1", port))
            if drip:
                client.sendall(drip)
            clients.append(client)
        yield clients
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize("drip", [b"", b"POST /v2", INFER_LINE + b"Content-Length: 9\r\n\r\n{"])
def test_dripping_connections_do_not_shut_others_out(drip: bytes) -> None:
    with served(connections=100, address_connections=100) as (port, runner), held(port, 150, drip):
        for _ in range(3):
            assert ask(port, "POST", INFER, body(DENSE, A, B))[0] == 200
        assert runner.acceptor.count <= 101
        assert closed(port, "room") >= 50


def test_without_room_even_for_one_that_waits_a_new_one_is_refused() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*inputs: Any) -> Any:
        begun.set()
        go_on.wait(10)
        return score(*inputs)

    statuses: list[int] = []
    with served(slow, connections=1) as (port, _):
        asks = threading.Thread(
            target=lambda: statuses.append(ask(port, "POST", INFER, body(DENSE, A, B))[0])
        )
        asks.start()
        assert begun.wait(10)
        with closing(socket.create_connection(("127.0.0.1", port))) as second:
            answer = rest_of(second)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"all 1 connections are in use" in answer
        go_on.set()
        asks.join()
        assert statuses == [200]
        assert closed(port, "connections") == 1


def test_one_address_has_its_own_limit_and_gives_way_to_others() -> None:
    with served(connections=20, address_connections=8) as (port, runner), held(port, 12):
        until(lambda: len(runner.acceptor.open) == 8)
        others = [
            socket.create_connection(("127.0.0.1", port), source_address=(f"127.0.0.{n}", 0))
            for n in range(2, 18)
        ]
        wanted = {f"127.0.0.{n}" for n in range(2, 18)}
        until(lambda: wanted <= {own.address for own in list(runner.acceptor.open)})
        assert len(runner.acceptor.open) == 20, "the greedy address gave way"
        for other in others:
            other.close()


def test_requests_behind_each_other_are_answered_in_their_order(port: int) -> None:
    first, other = body(DENSE, A, B), body(DENSE, A, B, id="second")
    both = b"".join(
        INFER_LINE + b"Content-Length: %d\r\n\r\n" % len(data) + data for data in (first, other, b"{")
    )
    with closing(socket.create_connection(("127.0.0.1", port))) as client:
        client.sendall(LIVE + both + LIVE + INFER_LINE + b"Connection: close\r\nContent-Length: 1\r\n\r\n{")
        found = rest_of(client)
    statuses = [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"200", b"200", b"400", b"200", b"400"]
    assert found.count(b'"id": "second"') == 1


def test_a_client_that_asks_whether_to_go_on_is_told(port: int) -> None:
    data = body(DENSE, A, B)
    with closing(socket.create_connection(("127.0.0.1", port))) as client:
        client.settimeout(10)
        client.sendall(INFER_LINE + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(data))
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(data)
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_an_address_may_be_written_in_other_ways(port: int) -> None:
    for path in (INFER + "?x=1", INFER.replace("infer", "%69nfer"), "/v2/models/m/versions/1/infer"):
        assert ask(port, "POST", path, body(DENSE, A, B))[0] == 200


def test_as_many_connections_as_files_can_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [10**6, 10**6]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    monkeypatch.setattr(door_module.os, "listdir", lambda _: ["x"] * 10)
    assert connections_possible(1024) == 1024
    limits[:] = 256, 4096
    assert connections_possible(1024) == 1024
    assert limits[0] == 1024 + 64 + 10
    limits[:] = 256, 256
    assert connections_possible(1024) == 256 - 64 - 10


@contextmanager
def workers(count: int, folder: Path) -> Iterator[tuple[int, list[Acceptor]]]:
    """So many servers on one socket, each in a thread of its own, as workers are in processes."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    runners, threads = [], []
    for number in range(count):
        server = Server(score, MANIFEST, "m", ServeConfig())
        acceptor = Acceptor(server.config, server.metrics, Shares(count, number, folder / "connections"))
        runners.append(server.listener(acceptor, stop=1))
        threads.append(threading.Thread(target=runners[-1].run, args=([listening.dup()],)))
        threads[-1].start()
    try:
        until(lambda: all(runner.started for runner in runners))
        yield listening.getsockname()[1], [runner.acceptor for runner in runners]
    finally:
        for runner in runners:
            runner.should_exit = True
        for thread in threads:
            thread.join()
        listening.close()


@pytest.mark.parametrize("count", [2, 3])
def test_kept_connections_are_spread_over_the_workers(count: int, tmp_path: Path) -> None:
    with workers(count, tmp_path) as (port, doors):
        for burst in range(3):
            with held(port, 16, LIVE) as clients:
                for client in clients:
                    client.settimeout(10)
                    assert client.recv(500).startswith(b"HTTP/1.1 200")
                counts = [acceptor.count for acceptor in doors]
                assert sum(counts) == 16
                assert max(counts) - min(counts) <= 1, (burst, counts)
            until(lambda: not any(acceptor.count for acceptor in doors))


def test_a_worker_that_is_gone_has_no_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (Shares(2, number, tmp_path / "connections") for number in range(2))
    assert one.fair(9), "the other one has not begun"
    two.say(3)
    assert [one.fair(count) for count in (2, 3, 4)] == [True, True, False]
    two.say(3, alive=False)
    assert one.fair(9)
    two.say(3)
    now = time.monotonic()
    monkeypatch.setattr(door_module, "monotonic", lambda: now + 2)
    assert one.fair(9), "it has said nothing for two seconds"
    assert Shares().fair(9)


def test_a_stopping_worker_takes_no_more(tmp_path: Path) -> None:
    with workers(2, tmp_path) as (port, doors):
        loop = doors[0]._loop
        asyncio.run_coroutine_threadsafe(_close(doors[0]), loop).result(10)
        with held(port, 4, LIVE) as clients:
            for client in clients:
                client.settimeout(10)
                assert client.recv(500).startswith(b"HTTP/1.1 200")
            assert [acceptor.count for acceptor in doors] == [0, 4]


async def _close(acceptor: Acceptor) -> None:
    acceptor.close()
