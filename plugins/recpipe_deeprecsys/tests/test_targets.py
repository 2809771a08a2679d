"""What is loaded beside one engine: servers through HTTP, and several models at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from recpipe_deeprecsys.colocated import Colocated
from recpipe_deeprecsys.command import fitting
from recpipe_deeprecsys.config import BenchOptions
from recpipe_deeprecsys.over_http import Client, bodies_of, body_of
from recpipe_deeprecsys.requests import Candidates
from recpipe_serve.http.protocol import parse

from recpipe.errors import UserError

MANIFEST: dict[str, Any] = {
    "dense": {"names": ["x"]},
    "sparse": [{"name": "one"}, {"name": "three"}, {"name": "some"}],
}
CANDIDATES = Candidates(
    np.arange(4, dtype=np.float32).reshape(4, 1),
    [np.arange(4), np.arange(12), np.arange(3)],
    np.array([[0, 1, 2, 3, 4], [0, 3, 6, 9, 12], [0, 0, 2, 3, 3]]),
)


def test_bodies_are_what_the_protocol_reads() -> None:
    head, _, body = body_of(MANIFEST, CANDIDATES, (1, 4)).partition(b"\r\n\r\n")
    length = head.split(b"\r\n")[0].split(b": ")[1].decode()
    asked = parse(body, length)
    assert asked.binary
    inputs = asked.inputs
    assert inputs["dense"].tolist() == [[1], [2], [3]]
    assert inputs["one"].tolist() == [1, 2, 3]
    assert inputs["three"].tolist() == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert inputs["some.lengths"].tolist() == [2, 1, 0]
    assert inputs["some"].tolist() == [0, 1, 2]


def test_bodies_are_as_many_as_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [(0, 4)] * 40
    assert len(bodies_of(MANIFEST, CANDIDATES, requests)) == 40
    monkeypatch.setattr("recpipe_deeprecsys.over_http.MOST_BYTES", 10)
    assert len(bodies_of(MANIFEST, CANDIDATES, requests)) == 16


class Server(ThreadingHTTPServer):
    """Answers with ``statuses``, one after the other, then with 200."""

    def __init__(self, statuses: list[int]) -> None:
        self.statuses, self.seen = statuses, [b""]
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}/v2/models/m"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.server.seen.append(self.rfile.read(int(self.headers["Content-Length"])))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        said = json.dumps({"path": self.path}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def answers() -> Iterator[Callable[[list[int]], Server]]:
    started: list[Server] = []

    def start(statuses: list[int]) -> Server:
        started.append(Server(statuses))
        threading.Thread(target=started[-1].serve_forever, daemon=True).start()
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def asked_once(client: Client) -> None:
    done = threading.Event()
    client.submit(3, done.set)
    assert done.wait(30)
    client.close()


def test_a_full_server_is_asked_again(answers: Callable[[list[int]], Server]) -> None:
    server = answers([503, 504])
    client = Client(server.address, [b"Content-Length: 2\r\n\r\nhi", b"Content-Length: 3\r\n\r\nyou"], 2)
    asked_once(client)
    client.check()
    assert server.seen[1:] == [b"you"] * 3


def test_a_refusal_is_one_line(answers: Callable[[list[int]], Server]) -> None:
    client = Client(answers([400]).address, [b"Content-Length: 2\r\n\r\nhi"], 1)
    asked_once(client)
    with pytest.raises(UserError, match=r"the server answered 400: .*v2/models/m/infer"):
        client.check()


def test_a_server_that_is_not_there_is_one_line() -> None:
    client = Client("http://127.0.0.1:9/v2/models/m", [b"Content-Length: 2\r\n\r\nhi"], 1)
    asked_once(client)
    with pytest.raises(UserError, match=r"http://127.0.0.1:9: "):
        client.check()
    with pytest.raises(UserError, match="address=m: say http://"):
        Client("m", [b""], 1)


class AtOnce:
    """An engine that answers at once; every second one fails."""

    def __init__(self, fault: str | None = None) -> None:
        self.asked: list[int] = []
        self.fault = fault

    def submit(self, request: int, done: Callable[[], None]) -> None:
        self.asked.append(request)
        done()

    def check(self) -> None:
        if self.fault:
            raise UserError(self.fault)


def test_models_beside_each_other_get_as_many_requests() -> None:
    engines = [AtOnce(), AtOnce(), AtOnce("third")]
    together = Colocated(engines)  # type: ignore[arg-type]
    done: list[int] = []
    for request in range(9):
        together.submit(request, lambda request=request: done.append(request))  # type: ignore[misc]
    assert done == list(range(9))
    assert [engine.asked for engine in engines] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert [own["queries"] for own in together.figures()] == [3, 3, 3]
    assert all(own["latency_ms"]["50"] <= own["latency_ms"]["99"] for own in together.figures())
    together.begin()
    assert [own["queries"] for own in together.figures()] == [0, 0, 0]
    with pytest.raises(UserError, match="third"):
        together.check()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (BenchOptions(copies=2, http=True), "beside= and copies="),
        (BenchOptions(copies=2, search=True), "search=true is for one model"),
        (BenchOptions(search=True, address="http://a/b"), "search=true starts servers"),
        (BenchOptions(merge=False, http=True), "merge=false"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(options: BenchOptions, said: str) -> None:
    with pytest.raises(UserError, match=said):
        fitting(options)
