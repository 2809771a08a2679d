"""Every public method of tritonclient's four clients, unchanged: over HTTP and gRPC, waiting and asyncio."""

from __future__ import annotations

import asyncio
import inspect
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from recpipe_serve.tests.test_serving import Held, ask

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")
pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
pytest.importorskip("tritonclient.grpc", reason="recpipe[grpc] is not installed")
pytest.importorskip("aiohttp", reason="tritonclient[http] is not installed")

import grpc
import tritonclient.grpc as rpc
import tritonclient.grpc.aio as rpc_aio
import tritonclient.http as http
import tritonclient.http.aio as http_aio
from recpipe_serve.tests.test_triton import DENSE_VALUES, calls, inputs, request, served, told, wrong

SCORES = DENSE_VALUES[:, 0] + np.float32([7, 849, 101])
"""Of ``inputs``."""
KINDS = {"http": http, "http.aio": http_aio, "grpc": rpc, "grpc.aio": rpc_aio}
Call = Callable[[Any, Any], Any]
"""Calls a method of a client, with the module that has its inputs."""


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    with served() as found:
        yield found


def scored(result: Any) -> bool:
    return result.as_numpy("score").tobytes() == SCORES.tobytes()


def settings(found: Any) -> dict[str, Any]:
    """Settings as HTTP has them, of either protocol."""
    found = told(found)
    own = found.get("settings", found)
    return {name: next(iter(v.values())) if isinstance(v, dict) else v for name, v in own.items()}


def state(found: Any) -> list[str]:
    found = told(found)
    return [own["state"] for own in (found if isinstance(found, list) else found["models"])]


def answered_later(client: Any, kind: Any) -> Any:
    """What ``async_infer`` gives, by HTTP as a promise and by gRPC to a function."""
    if kind is http:
        return client.async_infer("m", inputs(kind), request_id="x").get_result(timeout=20)
    came: queue.Queue[Any] = queue.Queue()
    client.async_infer("m", inputs(kind), lambda result, error: came.put(error or result))
    return came.get(timeout=20)


def streamed(client: Any, kind: Any) -> Any:
    """The first answer of a stream."""
    came: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: came.put(error or result))
    client.async_stream_infer("m", inputs(kind), enable_empty_final_response=True)
    found = came.get(timeout=20)
    client.stop_stream()
    return found


async def streamed_later(client: Any, kind: Any) -> Any:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "m", "inputs": inputs(kind)}

    found = [own async for own in client.stream_infer(requests())]
    ((result, error),) = found
    return error or result


def posted(client: Any, kind: Any) -> Any:
    """Scores of a body that the client's helpers make and read, sent without it."""
    listed = [kind.InferRequestedOutput("score", binary_data=False)]
    body, length = client.generate_request_body(inputs(kind), outputs=listed)
    port = int(client.addressed.rpartition(":")[2])
    status, found = ask(port, "POST", "/v2/models/m/infer", body, Inference_Header_Content_Length=str(length))
    assert status == 200, found
    return client.parse_response_body(found)


def named(client: Any, kind: Any) -> Any:
    """An answer to a client with a plugin, which sends a header with each request."""
    client.register_plugin(lambda request: request.headers.update({"x-name": "me"}))
    assert client.plugin() is not None
    return client.is_server_live()


METHODS: dict[str, tuple[Call, Callable[[Any], Any] | str]] = {
    "is_server_live": (lambda c, k: c.is_server_live(), bool),
    "is_server_ready": (lambda c, k: c.is_server_ready(), bool),
    "is_model_ready": (lambda c, k: c.is_model_ready("m", "1"), bool),
    "get_server_metadata": (
        lambda c, k: c.get_server_metadata(),
        lambda own: "model_configuration" in told(own)["extensions"],
    ),
    "get_model_metadata": (
        lambda c, k: c.get_model_metadata("m"),
        lambda own: [tensor["name"] for tensor in told(own)["inputs"]] == ["dense", "a", "b"],
    ),
    "get_model_config": (
        lambda c, k: c.get_model_config("m"),
        lambda own: told(own).get("config", told(own))["name"] == "m",
    ),
    "get_model_repository_index": (
        lambda c, k: c.get_model_repository_index(),
        lambda own: state(own) == ["READY"],
    ),
    "load_model": (lambda c, k: c.load_model("m"), "not loaded and unloaded from afar"),
    "unload_model": (lambda c, k: c.unload_model("m"), "not loaded and unloaded from afar"),
    "get_inference_statistics": (
        lambda c, k: c.get_inference_statistics("m"),
        lambda own: told(own)["model_stats"][0]["name"] == "m",
    ),
    "get_trace_settings": (
        lambda c, k: c.get_trace_settings("m"),
        lambda own: settings(own) == {"trace_level": ["OFF"], "trace_mode": settings(own)["trace_mode"]},
    ),
    "update_trace_settings": (
        lambda c, k: c.update_trace_settings("m", {"trace_level": ["TIMESTAMPS"]}),
        "trace_level is not changed from afar: traces= of recpipe serve",
    ),
    "get_log_settings": (lambda c, k: c.get_log_settings(), lambda own: settings(own)["log_error"] is True),
    "update_log_settings": (
        lambda c, k: c.update_log_settings({"log_verbose_level": 2}),
        "log_verbose_level is not changed from afar",
    ),
    "get_system_shared_memory_status": (
        lambda c, k: c.get_system_shared_memory_status(),
        lambda own: not told(own),
    ),
    "register_system_shared_memory": (
        lambda c, k: c.register_system_shared_memory("r", "/key", 64),
        "there are no regions of shared memory",
    ),
    "unregister_system_shared_memory": (
        lambda c, k: c.unregister_system_shared_memory("r"),
        lambda own: own is None,
    ),
    "get_cuda_shared_memory_status": (
        lambda c, k: c.get_cuda_shared_memory_status(),
        lambda own: not told(own),
    ),
    "register_cuda_shared_memory": (
        lambda c, k: c.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 64),
        "there are no regions of shared memory",
    ),
    "unregister_cuda_shared_memory": (
        lambda c, k: c.unregister_cuda_shared_memory(),
        lambda own: own is None,
    ),
    "infer": (lambda c, k: c.infer("m", inputs(k)), scored),
    "async_infer": (answered_later, scored),
    "start_stream": (streamed, scored),
    "stop_stream": (lambda c, k: c.stop_stream(), lambda own: own is None),
    "async_stream_infer": (
        lambda c, k: c.async_stream_infer("m", inputs(k)),
        "stream not available",  # the client's own word: one is started first
    ),
    "stream_infer": (streamed_later, scored),
    "generate_request_body": (posted, scored),
    "parse_response_body": (posted, scored),
    "register_plugin": (named, bool),
    "plugin": (lambda c, k: c.plugin(), lambda own: own is None),
    "unregister_plugin": (lambda c, k: c.unregister_plugin(), "No plugin has been registered"),
    "close": (lambda c, k: c.close(), lambda own: own is None),
}


def methods(kind: Any) -> list[str]:
    found = inspect.getmembers(kind.InferenceServerClient, callable)
    return [name for name, _ in found if not name.startswith("_")]


@pytest.mark.parametrize(
    ("client", "method"),
    [
        pytest.param(client, name, id=f"{client}-{name}")
        for client in KINDS
        for name in methods(KINDS[client])
    ],
)
def test_every_method_of_every_client(ports: tuple[int, int], client: str, method: str) -> None:
    kind = KINDS[client]
    call, wanted = METHODS[method]  # a method that is new in tritonclient is missing here

    async def called() -> Any:
        address = f"127.0.0.1:{ports[client.startswith('grpc')]}"
        asks = kind.InferenceServerClient(address)
        asks.addressed = address
        try:
            found = call(asks, kind)
            return await found if inspect.isawaitable(found) else found
        finally:
            closed = asks.close()
            if inspect.isawaitable(closed):
                await closed

    if isinstance(wanted, str):
        with pytest.raises(kind.InferenceServerException, match=wanted):
            asyncio.run(called())
    else:
        found = asyncio.run(called())
        assert wanted(found), found


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, ports: tuple[int, int]) -> Iterator[tuple[Any, Any]]:
    kind = KINDS[request.param]
    made = kind.InferenceServerClient(f"127.0.0.1:{ports[request.param == 'grpc']}")
    yield made, kind
    made.close()


def test_settings_that_are_as_they_were_are_answered(client: tuple[Any, Any]) -> None:
    asks, kind = client
    same = asks.update_trace_settings(settings={"trace_level": "OFF", "trace_mode": None})
    assert settings(same)["trace_level"] == ["OFF"]
    assert settings(asks.update_log_settings({"log_warning": True}))["log_warning"] is True
    with pytest.raises(kind.InferenceServerException, match="no model 'n'"):
        asks.get_trace_settings("n")
    with pytest.raises(kind.InferenceServerException, match="'trace_rat' is not changed|trace_rat is not"):
        asks.update_trace_settings(settings={"trace_rat": "5"})
    with pytest.raises(kind.InferenceServerException, match="'config' is not taken: a model is loaded as it"):
        asks.load_model("m", config="{}")
    with pytest.raises(kind.InferenceServerException, match="no regions of shared memory"):
        asks.get_system_shared_memory_status("r")


def test_what_is_elsewhere_than_in_the_request_is_refused(client: tuple[Any, Any]) -> None:
    asks, kind = client
    elsewhere = inputs(kind)
    elsewhere[1].set_shared_memory("region", 24)
    output = kind.InferRequestedOutput("score")
    output.set_shared_memory("region", 12)
    classes = kind.InferRequestedOutput("score", class_count=2)
    for own, outputs, message in (
        (elsewhere, None, "input 'a': tensors come with their requests"),
        (inputs(kind), [output], "output 'score': tensors come with their requests"),
        (inputs(kind), [classes], "classification is not supported"),
    ):
        with pytest.raises(kind.InferenceServerException, match=message):
            asks.infer("m", own, outputs=outputs)
    assert scored(asks.infer("m", inputs(kind)))


@pytest.mark.parametrize("word", ["gzip", "deflate"])
def test_messages_are_compressed_over_grpc(ports: tuple[int, int], word: str) -> None:
    client = rpc.InferenceServerClient(f"127.0.0.1:{ports[1]}")
    assert scored(client.infer("m", inputs(rpc), compression_algorithm=word))
    client.close()


def streamed_requests(*changes: Any) -> list[Any]:
    return [
        wrong(lambda m, n=n, change=change: (setattr(m, "id", str(n)), change and change(m)))
        for n, change in enumerate(changes)
    ]


def test_a_stream_goes_on_after_a_wrong_request_in_the_order_of_requests(ports: tuple[int, int]) -> None:
    def lacks(message: Any) -> None:
        message.raw_input_contents.pop()

    def other(message: Any) -> None:
        message.model_name = "n"

    found = list(calls(ports[1]).ModelStreamInfer(iter(streamed_requests(None, lacks, None, other, None))))
    assert [own.infer_response.id for own in found] == ["0", "1", "2", "3", "4"]
    faults = [own.error_message for own in found]
    assert [bool(fault) for fault in faults] == [False, True, False, True, False]
    assert "the bytes of 2" in faults[1]
    assert "no model 'n'" in faults[3]
    scores = [np.frombuffer(own.infer_response.raw_output_contents[0], "<f4").tolist() for own in found[::2]]
    assert scores == [[8.0, 852.0]] * 3
    assert all(own.infer_response.parameters["triton_final_response"].bool_param for own in found[::2])


def test_requests_of_a_stream_are_scored_together() -> None:
    model = Held()
    with served(model) as (_, own):
        answers = calls(own).ModelStreamInfer(iter(streamed_requests(*[None] * 5)))
        assert model.begun.wait(10)
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED|Deadline"):
            # The first one is being scored, and the others wait behind it: so does this one.
            calls(own).ModelInfer(request(), timeout=0.1)
        model.go_on.set()
        assert [answer.infer_response.id for answer in answers] == ["0", "1", "2", "3", "4"]
    assert max(model.batches) > 2


def test_a_stream_whose_client_has_gone_ends(ports: tuple[int, int]) -> None:
    class Waits:
        def __init__(self) -> None:
            self.sent = False

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            if not self.sent:
                self.sent = True
                return request()
            raise StopIteration

    answers = calls(ports[1]).ModelStreamInfer(Waits())
    assert next(answers).error_message == ""
    answers.cancel()
    with pytest.raises(grpc.RpcError):
        next(answers)
    assert calls(ports[1]).ModelInfer(request()).outputs[0].name == "score"
