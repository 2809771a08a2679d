"""tritonclient, unchanged, over HTTP and gRPC: all that it asks a server for, and what is refused."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from recpipe_serve.config import ServeConfig
from recpipe_serve.tests.test_protocol import DENSE, A, B, body, tensor
from recpipe_serve.tests.test_serving import INFER, MANIFEST, Held, ask, score

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")
pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
pytest.importorskip("tritonclient.grpc", reason="recpipe[grpc] is not installed")

import grpc
import tritonclient.grpc as rpc
import tritonclient.http as http
from recpipe_serve.grpc.listener import answering, at, reserved_port
from recpipe_serve.grpc.messages import messages, read_response, write_request
from recpipe_serve.grpc.service import InferenceService
from recpipe_serve.http.app import Server
from recpipe_serve.tests.listening import listening
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from recpipe.errors import UserError


@contextmanager
def served(score: Any = score, **bounds: Any) -> Iterator[tuple[int, int]]:
    """The ports of a server by HTTP and by gRPC."""
    server = Server(score, MANIFEST, "m", ServeConfig(**bounds))
    with reserved_port("127.0.0.1", 0) as held:
        own = held.getsockname()[1]
        around = answering(InferenceService(server.models), at("127.0.0.1", own), 2**20, 5)
        with listening(server, around) as (port, _):
            yield port, own


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    with served(body_bytes=100_000) as found:
        yield found


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, ports: tuple[int, int]) -> Iterator[tuple[Any, Any]]:
    """A client, and the module that has its inputs."""
    kind, port = (http, ports[0]) if request.param == "http" else (rpc, ports[1])
    made = kind.InferenceServerClient(f"127.0.0.1:{port}")
    yield made, kind
    made.close()


def told(found: Any) -> Any:
    """JSON of an answer, which gRPC has as a message."""
    from google.protobuf.json_format import MessageToDict

    if isinstance(found, dict | list):
        return found
    return MessageToDict(found, preserving_proto_field_name=True)


DENSE_VALUES = np.array([[1.5, 2], [-0.1, 3], [7, 0.3]], np.float32)


def inputs(kind: Any) -> list[Any]:
    made = []
    for name, values in (
        ("dense", DENSE_VALUES),
        ("a", np.array([7, 49, 1])),
        ("b", np.array([[0], [8], [1]], np.int32)),
    ):
        word = {"f4": "FP32", "i8": "INT64", "i4": "INT32"}[values.dtype.str[1:]]
        made.append(kind.InferInput(name, values.shape, word))
        made[-1].set_data_from_numpy(values)
    return made


def test_both_answer_all_of_it_with_the_same_bits(client: tuple[Any, Any]) -> None:
    asks, kind = client
    assert asks.is_server_live()
    assert asks.is_server_ready()
    assert asks.is_model_ready("m")
    assert asks.is_model_ready("m", "1")
    assert "statistics" in told(asks.get_server_metadata())["extensions"]
    about = told(asks.get_model_metadata("m"))
    assert [own["name"] for own in about["inputs"]] == ["dense", "a", "b"]
    config = told(asks.get_model_config("m"))
    config = config.get("config", config)
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert [int(n) for n in config["input"][0]["dims"]] == [-1, 2]
    assert config["parameters"]["batch"]["string_value"] == "1024"
    index = told(asks.get_model_repository_index())
    index = index if isinstance(index, list) else index["models"]
    assert [(own["name"], own["version"], own["state"]) for own in index] == [("m", "1", "READY")]
    before = statistics(asks)
    found = asks.infer("m", inputs(kind), request_id="7", model_version="1")
    np.testing.assert_array_equal(found.as_numpy("score"), DENSE_VALUES[:, 0] + np.float32([7, 849, 101]))
    named = asks.infer("m", inputs(kind), outputs=[kind.InferRequestedOutput("score")])
    assert named.as_numpy("score").tobytes() == found.as_numpy("score").tobytes()
    after = statistics(asks)
    assert after["inference_count"] == before["inference_count"] + 6
    assert after["success"] == before["success"] + 2
    assert after["infer_ns"] > before["infer_ns"]
    for what in (asks.load_model, asks.unload_model):
        with pytest.raises(kind.InferenceServerException, match="not loaded and unloaded from afar"):
            what("m")
    for wrong, message in (("n", "no model 'n' of version 1 here"), ("m", "input 'b' is missing")):
        with pytest.raises(kind.InferenceServerException, match=message):
            asks.infer(wrong, inputs(kind)[: 3 if wrong == "n" else 2])
    assert statistics(asks)["fail"] == before["fail"] + 1


def statistics(client: Any) -> dict[str, int]:
    (own,) = told(client.get_inference_statistics("m"))["model_stats"]
    stages = own.get("inference_stats", {})
    return {
        "inference_count": int(own.get("inference_count", 0)),
        "success": int(stages.get("success", {}).get("count", 0)),
        "fail": int(stages.get("fail", {}).get("count", 0)),
        "infer_ns": int(stages.get("compute_infer", {}).get("ns", 0)),
    }


def test_statistics_count_batches_by_their_size_and_the_wait_in_the_queue() -> None:
    model = Held()
    with served(model) as (port, own):
        stub, waiting = calls(own), []
        for n in range(3):
            waiting.append(stub.ModelInfer.future(request()))
            assert n or model.begun.wait(10)
        model.go_on.set()
        assert len([one.result() for one in waiting]) == 3
        (found,) = json.loads(ask(port, "GET", "/v2/models/stats")[1])["model_stats"]
    assert found["inference_count"] == sum(model.batches) == 6
    sizes = {own["batch_size"]: own["compute_infer"]["count"] for own in found["batch_stats"]}
    assert sizes == {size: model.batches.count(size) for size in model.batches}
    stages = found["inference_stats"]
    assert {stages[name]["count"] for name in ("success", "queue", "compute_infer", "compute_output")} == {3}
    assert stages["success"]["ns"] >= stages["queue"]["ns"] + stages["compute_infer"]["ns"] > 0


def calls(port: int) -> Any:
    return GRPCInferenceServiceStub(grpc.insecure_channel(f"127.0.0.1:{port}"))


def request() -> Any:
    ids = {"a": np.array([7, 49]), "b": np.array([0, 8])}
    return write_request("m", {"dense": np.array([[1, 2], [3, 4.5]], np.float32)} | ids)


def test_values_that_are_not_sent_as_bytes_are_the_same_request(ports: tuple[int, int]) -> None:
    message = messages.ModelInferRequest(model_name="m", id="x")
    message.inputs.add(name="dense", datatype="FP32", shape=[2, 2]).contents.fp32_contents.extend(
        [1, 2, 3, 4.5]
    )
    message.inputs.add(name="a", datatype="INT64", shape=[2]).contents.int64_contents.extend([7, 49])
    message.inputs.add(name="b", datatype="UINT32", shape=[2]).contents.uint_contents.extend([0, 8])
    answer = calls(ports[1]).ModelInfer(message)
    assert (answer.id, answer.model_version) == ("x", "1")
    by_bytes = calls(ports[1]).ModelInfer(request())
    assert answer.raw_output_contents == by_bytes.raw_output_contents
    assert read_response(by_bytes).values["score"].tolist() == [8.0, 852.0]
    listed = json.loads(ask(ports[0], "POST", INFER, body(DENSE, A, B))[1])["outputs"][0]["data"]
    assert listed == [8.0, 852.0]


def wrong(change: Any) -> Any:
    message = request()
    change(message)
    return message


WRONG: list[tuple[Any, str, str]] = [
    (lambda m: m.raw_input_contents.pop(), "INVALID_ARGUMENT", "there are 3 inputs, and the bytes of 2"),
    (lambda m: m.inputs.add(name="a", datatype="INT64", shape=[0]) and m.raw_input_contents.append(b""),
     "INVALID_ARGUMENT", "input 'a' comes twice"),
    (lambda m: m.inputs[1].shape.__setitem__(0, -2), "INVALID_ARGUMENT", "input 'a' has the shape"),
    (lambda m: m.inputs[1].shape.__setitem__(0, 3), "INVALID_ARGUMENT", r"'a' of shape \[3\] has 16 bytes"),
    (lambda m: setattr(m.inputs[1], "datatype", "BYTES"), "INVALID_ARGUMENT", "'a' is of type BYTES"),
    (lambda m: setattr(m.inputs[1], "datatype", "FP64"), "INVALID_ARGUMENT", "ids are whole numbers"),
    (lambda m: m.outputs.add(name="other"), "INVALID_ARGUMENT", "the model has no output 'other'"),
    (lambda m: setattr(m.parameters["timeout"], "string_param", "x"), "INVALID_ARGUMENT", "microseconds"),
    (lambda m: setattr(m, "model_version", "3"), "NOT_FOUND", "no model 'm' of version 3 here"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "code", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_has_a_code_and_a_line(
    ports: tuple[int, int], change: Any, code: str, message: str
) -> None:
    with pytest.raises(grpc.RpcError, match=message) as fault:
        calls(ports[1]).ModelInfer(wrong(change))
    assert fault.value.code() is grpc.StatusCode[code]
    assert calls(ports[1]).ModelInfer(request()).outputs[0].name == "score"


def test_a_value_that_its_type_cannot_have_is_refused(ports: tuple[int, int]) -> None:
    message = messages.ModelInferRequest(model_name="m")
    message.inputs.add(name="b", datatype="UINT8", shape=[1]).contents.uint_contents.extend([256])
    with pytest.raises(grpc.RpcError, match="input 'b' has a value that is too large for UINT8"):
        calls(ports[1]).ModelInfer(message)


def test_a_clients_deadline_is_that_of_its_request_and_a_large_message_is_refused() -> None:
    model = Held()
    with served(model) as (_, own):
        first = calls(own).ModelInfer.future(request())
        assert model.begun.wait(10)
        with pytest.raises(grpc.RpcError) as fault:
            calls(own).ModelInfer(request(), timeout=0.05)
        assert fault.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        large = write_request("m", {"a": np.zeros(2**18, np.int64)})
        with pytest.raises(grpc.RpcError) as fault:
            calls(own).ModelInfer(large)
        assert fault.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        model.go_on.set()
        assert len(first.result().raw_output_contents) == 1


@pytest.mark.parametrize("word", ["gzip", "deflate"])
def test_bodies_are_compressed_both_ways(ports: tuple[int, int], word: str) -> None:
    client = http.InferenceServerClient(f"127.0.0.1:{ports[0]}")
    found = client.infer(
        "m", inputs(http), request_compression_algorithm=word, response_compression_algorithm=word
    )
    np.testing.assert_array_equal(found.as_numpy("score"), DENSE_VALUES[:, 0] + np.float32([7, 849, 101]))
    client.close()
    squeeze = {"gzip": gzip.compress, "deflate": zlib.compress}[word]
    expand = {"gzip": gzip.decompress, "deflate": zlib.decompress}[word]
    many = 1024
    whole = body(
        tensor("dense", "FP32", [1, 2], [1.0, 2.0]),
        tensor("a", "INT64", [many], [7] * many),
        tensor("b", "INT64", [1], [0]),
    )
    plain = ask(ports[0], "POST", INFER, squeeze(whole), Content_Encoding=word)
    small = ask(ports[0], "POST", INFER, whole, Accept_Encoding=f"br, {word};q=0.5")
    assert (plain[0], small[0]) == (200, 200)
    assert len(small[1]) < len(plain[1]) / 4
    assert expand(small[1]) == plain[1]
    assert ask(ports[0], "POST", INFER, whole, Accept_Encoding=f"{word};q=0")[1] == plain[1]


def test_what_is_damaged_or_grows_beyond_the_limit_is_refused(ports: tuple[int, int]) -> None:
    whole = gzip.compress(body(DENSE, A, B))
    for data, status, message in (
        (b"x" * 50, 400, "not what Content-Encoding says"),
        (whole[:-5], 400, "does not end where"),
        (whole + b"more", 400, "does not end where"),
        (gzip.compress(b" " * 100_001), 413, "larger than 100000 bytes"),
    ):
        for path in (INFER, "/v2/models/m/labels"):
            found, said = ask(ports[0], "POST", path, data, Content_Encoding="gzip")
            assert (found, message in json.loads(said)["error"]) == (status, True), said


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/nothing", 404, "nothing is at GET /nothing"),
        ("GET", "/v2/models/m/infer", 405, "is not taken"),
        ("POST", "/v2/repository/models/n/load", 404, "no model 'n'"),
        ("GET", "/v2/models/n/config", 404, "no model 'n'"),
        ("GET", "/v2/models/m/versions/2/stats", 404, "of version 2"),
        ("POST", "/v2/systemsharedmemory/region/x/register", 501, "no regions of shared memory"),
        ("GET", "/v2/cudasharedmemory/region/x/status", 404, "no regions of shared memory"),
    ],
)
def test_every_fault_is_json(
    ports: tuple[int, int], method: str, path: str, status: int, message: str
) -> None:
    found, said = ask(ports[0], method, path)
    assert (found, message in json.loads(said)["error"]) == (status, True), said


def test_a_port_that_another_server_has_is_refused(ports: tuple[int, int]) -> None:
    with pytest.raises(UserError, match=f"port {ports[1]}: Address already in use"):
        reserved_port("127.0.0.1", ports[1])
