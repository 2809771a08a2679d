"""The server, over HTTP: a client that is not ours, deadlines, stopping, and requests that are wrong."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_serve.batching.batcher import Batcher
from recpipe_serve.batching.forms import Asked, Form
from recpipe_serve.batching.scorer import Side
from recpipe_serve.config import ServeConfig
from recpipe_serve.errors import Refused
from recpipe_serve.tests.clients import damaged_requests
from recpipe_serve.tests.test_protocol import DENSE, A, B, body, tensor

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

from recpipe_serve.http.app import Server
from recpipe_serve.tests.listening import listening

MANIFEST: dict[str, Any] = {
    "dense": {"names": ["x", "y"]},
    "sparse": [{"name": "a", "rows": 50}, {"name": "b", "rows": 9}],
    "outputs": [{"name": "score", "kind": "clicks"}],
}


def score(dense: torch.Tensor, sides: Sequence[Side]) -> torch.Tensor:
    """x + the sum of a's ids + 100 times that of b's, for each sample."""
    scores = dense[:, 0]
    for side in sides:
        bags = torch.repeat_interleave(torch.arange(len(side.lengths)), side.lengths)
        sums = torch.zeros(len(side.lengths)).index_add(0, bags, side.ids.float()).view(-1, side.bags)
        for feature, own in zip(side.features, sums, strict=True):
            scores = scores + 100**feature * (own if side.of_sample is None else own[side.of_sample])
    return scores


@contextmanager
def served(score: Any = score, **bounds: Any) -> Iterator[tuple[int, Any]]:
    """A server on a free port, and its object."""
    server = Server(score, MANIFEST, "m", ServeConfig(**bounds))
    with listening(server) as found:
        yield found


def ask(port: int, method: str, path: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, data, {k.replace("_", "-"): v for k, v in headers.items()})
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


INFER = "/v2/models/m/infer"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(body_bytes=1000, body_seconds=0.5) as (found, _):
        yield found


def test_health_metadata_and_a_request_by_hand(port: int) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/m/ready"):
        assert ask(port, "GET", path)[0] == 200
    assert "binary_tensor_data" in json.loads(ask(port, "GET", "/v2")[1])["extensions"]
    about = json.loads(ask(port, "GET", "/v2/models/m")[1])
    assert [tensor["name"] for tensor in about["inputs"]] == ["dense", "a", "b"]
    status, found = ask(port, "POST", INFER, body(DENSE, A, B))
    assert (status, json.loads(found)["outputs"][0]["data"]) == (200, [8.0, 852.0])


def test_an_unchanged_client_of_the_protocol(port: int) -> None:
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m")
    assert client.get_model_metadata("m")["outputs"][0]["name"] == "score"
    inputs = []
    for name, values in (
        ("dense", np.array([[1.5, 2]], np.float32)),
        ("a", np.array([7, 49, 1])),
        ("b", np.array([[0], [8], [1]])),
    ):
        kind = "FP32" if values.dtype == np.float32 else "INT64"
        inputs.append(triton.InferInput(name, values.shape, kind))
        inputs[-1].set_data_from_numpy(values)
    for outputs in (None, [triton.InferRequestedOutput("score", binary_data=False)]):
        found = client.infer("m", inputs, request_id="9", outputs=outputs)
        np.testing.assert_array_equal(found.as_numpy("score"), np.array([8.5, 850.5, 102.5], np.float32))
    with pytest.raises(triton.InferenceServerException, match="input 'b' is missing"):
        client.infer("m", inputs[:2])
    client.close()


@pytest.mark.parametrize(
    ("path", "data", "headers", "status"),
    [
        ("/v2/models/n/infer", body(DENSE, A, B), {}, 404),
        ("/v2/models/m/versions/3/infer", body(DENSE, A, B), {}, 404),
        (INFER, b"not json", {}, 400),
        (INFER, body(DENSE, A), {}, 400),
        (INFER, body(DENSE, A, B, outputs=[{"name": "nothing"}]), {}, 400),
        (INFER, b" " * 1001, {}, 413),
        (INFER, body(DENSE, A, B), {"Content_Encoding": "br"}, 415),
        (INFER, body(DENSE, A, B), {"Content_Encoding": "gzip"}, 400),
        (INFER, body(DENSE, A, B), {"Inference_Header_Content_Length": "1e3"}, 400),
    ],
)
def test_wrong_requests_get_a_status_and_a_line_and_are_counted(
    port: int, path: str, data: bytes, headers: dict[str, str], status: int
) -> None:
    def counted() -> float:
        lines = ask(port, "GET", "/metrics")[1].decode().splitlines()
        found = [line for line in lines if line.startswith(f'recpipe_requests_total{{status="{status}"}}')]
        return float(found[0].split()[1]) if found else 0.0

    before = counted()
    found, said = ask(port, "POST", path, data, **headers)
    assert found == status
    assert set(json.loads(said)) == {"error"}
    assert counted() == before + 1
    assert ask(port, "POST", INFER, body(DENSE, A, B))[0] == 200


def test_labels_by_http_and_what_the_monitor_and_the_metrics_say_then() -> None:
    wrong = tensor("a", "INT64", [2], [50, -1])
    with served() as (port, _):
        ask(port, "POST", INFER, body(DENSE, wrong, B))
        ask(port, "POST", INFER, body(DENSE, A, B, id="r1"))
        posted = json.dumps({"labels": [{"id": "r1", "label": [0, 1]}, {"id": "r2", "label": [1]}]}).encode()
        status, said = ask(port, "POST", "/v2/models/m/labels", posted)
        assert (status, json.loads(said)) == (200, {"joined": 1, "unknown": 1, "again": 0, "samples": 2})
        for path, data, refused in (
            ("/v2/models/m/labels", b"{", 400),
            ("/v2/models/m/labels", posted.replace(b"[0, 1]", b"[0, 1, 1]"), 400),
            ("/v2/models/n/labels", posted, 404),
        ):
            status, said = ask(port, "POST", path, data)
            assert (status, set(json.loads(said))) == (refused, {"error"})
        assert ask(port, "GET", "/v2/models/n/monitor")[0] == 404
        page = json.loads(ask(port, "GET", "/v2/models/m/monitor")[1])
        assert page["samples"] == {"window": 2, "since_start": 2, "reference": None}
        assert page["ids"]["a"]["out_of_range"] == 2
        assert page["labels"]["requests"] == {"joined": 1, "unknown": 1, "again": 0}
        assert page["labels"]["tasks"]["score"]["auc"]["value"] == 1.0
        metrics = ask(port, "GET", "/metrics")[1].decode().splitlines()
    assert 'recpipe_monitor_ids_out_of_range_total{feature="a"} 2.0' in metrics
    assert 'recpipe_monitor_ids_out_of_range_total{feature="b"} 0.0' in metrics
    assert 'recpipe_monitor_labels_total{result="unknown"} 1.0' in metrics
    assert "recpipe_monitor_refused_posts_total 2.0" in metrics
    assert 'recpipe_monitor_quality{figure="auc",of="window",task="score"} 1.0' in metrics


def test_a_body_without_a_length_is_cut_off_at_the_limit_too(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", INFER, iter([b" " * 600, b" " * 600]), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_slow_client_is_sent_away_and_holds_nobody_up(port: int) -> None:
    slow = socket.create_connection(("127.0.0.1", port))
    slow.sendall(f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{{".encode())
    assert ask(port, "POST", INFER, body(DENSE, A, B))[0] == 200
    assert slow.recv(100).startswith(b"HTTP/1.1 408")
    slow.close()


def flood(client: socket.socket, data: bytes) -> None:
    for _ in range(200):
        client.sendall(data)


def test_a_client_that_does_not_read_its_answers_holds_nobody_up() -> None:
    with served(body_bytes=10**6, samples=4096) as (port, _):
        ids = tensor("a", "INT64", [4096], [7] * 4096)
        data = body(tensor("dense", "FP32", [1, 2], [1.0, 2.0]), ids, tensor("b", "INT64", [1], [0]))
        head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", port))
        slow.settimeout(0.5)
        with pytest.raises(TimeoutError):  # the server does not take more of its requests, either
            flood(slow, 100 * (head.encode() + data))
        for _ in range(3):
            assert ask(port, "POST", INFER, body(DENSE, A, B))[0] == 200
        slow.close()


def test_a_fault_of_the_model_is_500_and_the_next_request_is_answered() -> None:
    calls = []

    def faulty(*inputs: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("secret")
        return score(*inputs)

    with served(faulty) as (port, _):
        status, said = ask(port, "POST", INFER, body(DENSE, A, B))
        assert status == 500
        assert b"secret" not in said
        assert ask(port, "POST", INFER, body(DENSE, A, B))[0] == 200


def test_a_stopping_server_answers_what_it_has() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def held(*inputs: torch.Tensor) -> torch.Tensor:
        begun.set()
        go_on.wait(10)
        return score(*inputs)

    found: list[tuple[int, bytes]] = []
    with served(held) as (port, runner):
        client = threading.Thread(target=lambda: found.append(ask(port, "POST", INFER, body(DENSE, A, B))))
        client.start()
        begun.wait(10)
        runner.should_exit = True
        go_on.set()
        client.join()
    assert found[0][0] == 200


async def scores_of(batcher: Batcher, asked: Asked, timeout: float | None = None) -> Any:
    """Its scores, or the error that it is answered with."""
    found = asyncio.get_running_loop().create_future()
    batcher.put(asked, found.set_result, timeout)
    scores = await found
    if isinstance(scores, Exception):
        raise scores
    return scores


def one(a: int, samples: int = 1) -> Asked:
    ids = np.repeat([a, 0], samples)
    return Asked(np.zeros((samples, 2), np.float32), ids, Form(samples, (samples, samples), (1, 1)))


class Held:
    """Scores when it is let go on; notes the batches."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.waiting = threading.Event()
        """Others wait."""

    def __call__(
        self, dense: torch.Tensor, sides: Sequence[Side], between: Callable[[], None] | None = None
    ) -> torch.Tensor:
        self.batches.append(len(dense))
        self.begun.set()
        if between is not None:
            assert self.waiting.wait(10)
            between()
        assert self.go_on.wait(10)
        return score(dense, sides)


async def behind(
    model: Held, config: ServeConfig, *waiting: Asked, timeout: float | None = None
) -> list[Any]:
    """The answers of a first request that is being scored, and of those that come ``waiting`` meanwhile."""
    batcher = Batcher(model, config)
    batcher.start()
    first = asyncio.create_task(scores_of(batcher, one(1)))
    while not model.begun.is_set():
        await asyncio.sleep(0.001)
    others = [asyncio.create_task(scores_of(batcher, asked, timeout)) for asked in waiting]
    await asyncio.sleep(0)
    model.waiting.set()
    await asyncio.sleep(0.05)
    model.go_on.set()
    found = await asyncio.gather(first, *others, return_exceptions=True)
    await batcher.close()
    return found


def test_requests_that_wait_are_scored_together_each_with_its_own_scores() -> None:
    model = Held()
    found = asyncio.run(behind(model, ServeConfig(batch=6), one(2), one(3, 3), one(4, 2), one(5), one(6, 9)))
    assert [scores.tolist() for scores in found] == [[1], [2], [3] * 3, [4] * 2, [5], [6] * 9]
    assert model.batches == [1, 6, 1, 9]


@pytest.mark.parametrize(("soon", "own"), [(3600.0, True), (0.0, False)])
def test_short_batches_are_scored_by_the_loops_thread_once_it_is_known_that_they_are(
    soon: float, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def model(dense: torch.Tensor, sides: Sequence[Side]) -> torch.Tensor:
        threads.append(threading.current_thread() is threading.main_thread())
        if len(threads) == 3:
            raise RuntimeError
        return score(dense, sides)

    async def four() -> list[Any]:
        batcher = Batcher(model, ServeConfig())
        batcher.start()
        found = [await asyncio.gather(scores_of(batcher, one(a)), return_exceptions=True) for a in range(4)]
        await batcher.close()
        return [each[0] for each in found]

    monkeypatch.setattr("recpipe_serve.batching.batcher.SOON", soon)
    first, second, fault, last = asyncio.run(four())
    assert [first.tolist(), second.tolist(), last.tolist()] == [[0], [1], [3]]
    assert isinstance(fault, RuntimeError)
    assert threads == [False, own, own, own]


def test_the_loops_thread_scores_what_is_at_hand_and_the_other_what_is_to_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of 3 are not at hand, and whether those of 4 are cannot be said."""

    class Reads:
        def __init__(self) -> None:
            self.own: list[bool] = []

        def __call__(
            self, dense: torch.Tensor, sides: Sequence[Side], between: Callable[[], None] | None = None
        ) -> torch.Tensor:
            self.own.append(threading.current_thread() is threading.main_thread())
            assert (between is None) == self.own[-1], "only what reads for itself reads for others"
            if between is not None:
                between()
            return score(dense, sides)

        def ahead(self, sides: Sequence[Side]) -> None:
            raise AssertionError("nothing waits")

        def at_hand(self, sides: Sequence[Side]) -> bool:
            if 4 in sides[0].ids:
                raise RuntimeError
            return 3 not in sides[0].ids

    async def five() -> list[Any]:
        batcher = Batcher(model, ServeConfig())
        batcher.start()
        found = [await scores_of(batcher, one(a)) for a in (1, 2, 3, 4, 5)]
        await batcher.close()
        return found

    monkeypatch.setattr("recpipe_serve.batching.batcher.SOON", 3600.0)
    model = Reads()
    assert [scores.tolist() for scores in asyncio.run(five())] == [[1], [2], [3], [4], [5]]
    assert model.own == [False, True, False, False, True]


def test_a_full_queue_refuses_and_a_deadline_passes_in_it() -> None:
    model = Held()
    found = asyncio.run(behind(model, ServeConfig(queue=2), one(2), one(3), one(4)))
    assert [scores.tolist() for scores in found[:3]] == [[1], [2], [3]]
    assert isinstance(found[3], Refused)
    assert found[3].status == 503
    model = Held()
    found = asyncio.run(behind(model, ServeConfig(), one(2), timeout=0.001))
    assert found[0].tolist() == [1]
    assert found[1].status == 504
    assert model.batches == [1]


def test_a_batch_that_is_not_full_waits_for_more_but_no_longer_than_it_may() -> None:
    async def two(wait: float) -> list[int]:
        model = Held()
        model.go_on.set()
        batcher = Batcher(model, ServeConfig(batch=2, wait_ms=1e3 * wait))
        batcher.start()
        tasks = [asyncio.create_task(scores_of(batcher, one(1)))]
        await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(scores_of(batcher, one(2))))
        assert [scores.tolist() for scores in await asyncio.gather(*tasks)] == [[1], [2]]
        await batcher.close()
        return model.batches

    assert asyncio.run(two(0.0)) == [1, 1]
    assert asyncio.run(two(30.0)) == [2]


class Reading(Held):
    """Notes the first id of each request that it is told of ahead."""

    def __init__(self, *faults: int) -> None:
        super().__init__()
        self.told: list[int] = []
        self.faults = set(faults)

    def ahead(self, sides: Sequence[Side]) -> None:
        ids = sides[0].ids.view(2, -1)[0].tolist()
        self.told += ids
        if set(ids) & self.faults:
            raise RuntimeError("cannot read")


def test_rows_are_read_of_what_waits_for_the_next_batch_while_one_is_scored() -> None:
    model = Reading()
    found = asyncio.run(behind(model, ServeConfig(batch=3), one(2), one(3), one(4), one(5)))
    assert [scores.tolist() for scores in found] == [[1], [2], [3], [4], [5]]
    assert model.told[:3] == [2, 3, 4], "and nobody's twice"
    assert 1 not in model.told
    assert 5 not in model.told[:3], "that is not in the next batch"


def test_a_request_whose_rows_were_read_may_never_be_scored() -> None:
    model = Reading()
    found = asyncio.run(behind(model, ServeConfig(), one(2), timeout=0.04))
    assert found[1].status == 504
    assert model.told == [2]
    assert model.batches == [1]


def test_a_fault_of_reading_ahead_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = Reading(2)
    found = asyncio.run(behind(model, ServeConfig(), one(2), one(3)))
    assert [scores.tolist() for scores in found] == [[1], [2], [3]]
    assert "rows could not be read ahead" in caplog.text


def test_one_requests_fault_is_not_that_of_others_in_its_batch() -> None:
    class Faulty(Held):
        def __call__(self, dense: torch.Tensor, sides: Sequence[Side]) -> torch.Tensor:
            if 3 in sides[0].ids:
                raise RuntimeError("a row cannot be read")
            return super().__call__(dense, sides)

    model = Faulty()
    found = asyncio.run(behind(model, ServeConfig(), one(2), one(3), one(4)))
    assert [found[n].tolist() for n in (0, 1, 3)] == [[1], [2], [4]]
    assert str(found[2]) == "a row cannot be read"


@pytest.mark.soak
def test_a_hundred_thousand_damaged_requests_are_answered_without_a_fault() -> None:
    with served(body_bytes=2000) as (port, _):
        damaged_requests(f"127.0.0.1:{port}", INFER, body(DENSE, A, B, id="x"), 100_000)
        assert ask(port, "POST", INFER, body(DENSE, A, B))[0] == 200
