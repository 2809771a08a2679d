"""The open inference protocol: what requests may be, and what they may not be."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from recpipe_serve.batching.forms import together
from recpipe_serve.errors import Refused
from recpipe_serve.http.features import Features
from recpipe_serve.http.protocol import answer, parse

MANIFEST = {
    "dense": {"names": ["x", "y"]},
    "sparse": [{"name": "a", "rows": 50}, {"name": "b", "rows": 9}],
}
FEATURES = Features(MANIFEST, most_samples=8)


def tensor(name: str, kind: str, shape: list[int], data: Any = None, **parameters: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name, "datatype": kind, "shape": shape}
    if data is not None:
        made["data"] = data
    return made | ({"parameters": parameters} if parameters else {})


DENSE = tensor("dense", "FP32", [2, 2], [[1.0, 2], [3, 4.5]])
A = tensor("a", "INT64", [2], [7, 49])
B = tensor("b", "INT64", [2], [0, 8])


def body(*inputs: Any, **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def asked(data: bytes, header: str | None = None):
    return FEATURES.asked(parse(data, header).inputs)


def test_lists_and_binary_tensors_are_the_same_request() -> None:
    plain = asked(body(DENSE, A, B))
    raw = [np.array([1, 2, 3, 4.5], "<f4"), np.array([7, 49], "<i8"), np.array([0, 8], "<i4")]
    kinds = [("dense", "FP32", [2, 2]), ("a", "INT64", [2, 1]), ("b", "INT32", [2])]
    head = body(*(tensor(*k, binary_data_size=r.nbytes) for k, r in zip(kinds, raw, strict=True)))
    binary = asked(head + b"".join(r.tobytes() for r in raw), str(len(head)))
    for one in (plain, binary):
        assert one.samples == 2
        np.testing.assert_array_equal(one.dense, [[1, 2], [3, 4.5]])
        assert [(own.ids.tolist(), own.lengths) for own in map(one.bags, (0, 1))] == [
            ([7, 49], 1),
            ([0, 8], 1),
        ]


def test_bags_and_what_all_samples_share() -> None:
    one = asked(
        body(
            tensor("dense", "FP32", [1, 2], [1, 2]),
            tensor("a", "INT64", [3], [1, 2, 3]),
            tensor("a.lengths", "INT32", [3], [0, 2, 1]),
            tensor("b", "INT64", [1, 2], [4, 5]),
        )
    )
    assert one.samples == 3
    assert one.dense.tolist() == [[1, 2]] * 3
    assert [own.ids.tolist() for own in map(one.bags, (0, 1))] == [[1, 2, 3], [4, 5]]
    assert [own.samples for own in map(one.bags, (0, 1))] == [3, 1]
    dense, (side,) = together([one, asked(body(DENSE, A, B))])
    assert dense.tolist() == [[1, 2]] * 3 + [[1, 2], [3, 4.5]]
    assert side.ids.tolist() == [1, 2, 3, 7, 49, 4, 5, 4, 5, 4, 5, 0, 8]
    assert side.lengths.tolist() == [0, 2, 1, 1, 1, 2, 2, 2, 1, 1]
    assert (side.features, side.bags, side.of_sample) == ((0, 1), 5, None)


def test_what_the_samples_of_every_request_share_is_a_bag_a_request() -> None:
    dense = tensor("dense", "FP32", [1, 2], [1, 2])
    first = asked(body(dense, tensor("a", "INT64", [2], [3, 4]), tensor("b", "INT64", [1, 2], [5, 6])))
    second = asked(body(dense, tensor("a", "INT64", [3], [7, 8, 9]), tensor("b", "INT64", [1], [1])))
    found, (user, items) = together([first, second])
    assert len(found) == 5
    assert (user.features, user.ids.tolist(), user.lengths.tolist()) == ((1,), [5, 6, 1], [2, 1])
    assert user.of_sample is not None
    assert (user.bags, user.of_sample.tolist()) == (2, [0, 0, 1, 1, 1])
    assert (items.features, items.ids.tolist(), items.bags) == ((0,), [3, 4, 7, 8, 9], 5)
    alone = asked(body(dense, tensor("a", "INT64", [1], [3]), tensor("b", "INT64", [1], [1])))
    assert [side.features for side in together([alone, alone])[1]] == [(0, 1)]
    assert [side.features for side in together([first, alone])[1]] == [(1,), (0,)]


WRONG: list[tuple[bytes, str | None, str]] = [
    (b"", None, "the request is no JSON"),
    (b"[" * 100_000, None, "the request is no JSON"),
    (b"[]", None, "the request is no JSON object"),
    (b"{}", None, "inputs is no list of tensors"),
    (body(DENSE, A), None, "input 'b' is missing"),
    (body(A, B), None, "input 'dense' is missing"),
    (body(DENSE, A, B, B), None, "input 'b' comes twice"),
    (body(DENSE, A, B, B | {"name": "bb"}), None, r"no input 'bb'\. Did you mean 'b'"),
    (body(DENSE, A, B | {"datatype": "BYTES"}), None, "of type BYTES, not one of FP32"),
    (body(DENSE, A, B | {"shape": [3]}), None, r"'b' of shape \[3\] has 2 values"),
    (body(DENSE, A, B | {"shape": [-2]}), None, "has the shape"),
    (body(DENSE, A, B | {"shape": [2**40, 2**40]}), None, "has the shape"),
    (body(DENSE, A, B | {"data": [0, 9]}), None, r"id 9 of 'b' is not in \[0, 9\)"),
    (body(DENSE, A, B | {"data": [0, -1]}), None, r"id -1 of 'b' is not in \[0, 9\)"),
    (body(DENSE, A, B | {"data": [0, 1.5]}), None, "not made of whole numbers"),
    (body(DENSE, A, B | {"data": [0, "1"]}), None, "not made of whole numbers"),
    (body(DENSE, A, B | {"data": [True, False]}), None, "not made of whole numbers"),
    (body(DENSE, A, B | {"data": [[0], [1, 2]]}), None, "no rectangle"),
    (body(DENSE, A, B | {"data": [0, 2**70]}), None, "not made of whole numbers"),
    (body(DENSE, A, B | {"data": None}), None, "neither data nor binary data"),
    (body(DENSE | {"data": [1, 2, 3, float("nan")]}, A, B), None, "'y' of sample 1 is not a finite number"),
    (body(DENSE | {"data": [1, float("inf"), 3, 4]}, A, B), None, "'y' of sample 0 is not a finite number"),
    (body(DENSE | {"shape": [4, 1]}, A, B), None, r"not FP32 \[N, 2\]"),
    (body(DENSE, tensor("a", "INT64", [3], [1, 2, 3]), B), None, "has 2 samples, and another one has 3"),
    (body(DENSE, tensor("a", "INT64", [0], []), B), None, "'a' has 0 samples, and another one has 2"),
    (
        body(DENSE, tensor("a", "INT64", [9], [1] * 9), B),
        None,
        "the request has 9 samples, and 8 is the most",
    ),
    (body(DENSE, A, tensor("a.lengths", "INT64", [2], [1, 2]), B), None, "does not add up to the 2 ids"),
    (body(DENSE, A, tensor("a.lengths", "INT64", [2], [3, -1]), B), None, "does not add up to the 2 ids"),
    (body(DENSE, tensor("a", "INT64", [1, 1, 2], [1, 2]), B), None, r"not \[N\] or \[N, K\]"),
    (body(DENSE, A, B), "7", "the request is no JSON"),
    (body(DENSE, A, B), "-1", "Inference-Header-Content-Length is -1"),
    (body(DENSE, A, B), "9999", "Inference-Header-Content-Length is 9999"),
    (body(DENSE, A, B), "x" * 500, "Inference-Header-Content-Length is x"),
    (body(DENSE, A, tensor("b", "INT64", [2], binary_data_size=16)), None, "ends after the body's end"),
    (body(DENSE, A, tensor("b", "INT64", [2], binary_data_size=15)), None, "has 15 bytes"),
    (body(DENSE, A, tensor("b", "INT64", [2], binary_data_size=-1)), None, "has -1 bytes"),
    (body(DENSE, A, B, parameters={"timeout": "soon"}), None, "no number of microseconds"),
    (body(DENSE, A, B, outputs=[{"name": 3}]), None, "an output has no name"),
    (body(DENSE, A, B, id=3), None, "id is no text"),
]


@pytest.mark.parametrize(("data", "header", "message"), WRONG, ids=range(len(WRONG)))
def test_bad_requests_are_refused_in_one_line(data: bytes, header: str | None, message: str) -> None:
    with pytest.raises(Refused, match=message) as told:
        asked(data, header)
    assert told.value.status == 400
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 300


def test_bytes_that_belong_to_no_input() -> None:
    head = body(DENSE, A, tensor("b", "INT64", [2], binary_data_size=16))
    with pytest.raises(Refused, match="4 bytes at the body's end belong to no input"):
        asked(head + bytes(20), str(len(head)))


def test_damaged_requests_are_refused_or_understood_and_nothing_else() -> None:
    """Thousands of requests with some bytes changed, left out or put in."""
    draw = random.Random(0)
    head = body(DENSE, A, tensor("b", "INT64", [2], binary_data_size=16))
    whole = bytearray(head + np.array([3, 4], "<i8").tobytes())
    counts = {"scored": 0, "refused": 0}
    for _ in range(4000):
        damaged, header = bytearray(whole), str(len(head))
        for _ in range(draw.randint(0, 3)):
            place = draw.randrange(len(damaged))
            what = draw.randrange(3)
            damaged[place : place + (what != 0)] = b"" if what == 1 else bytes([draw.randrange(256)])
        if draw.random() < 0.1:
            header = str(draw.randrange(-5, 500))
        try:
            one = asked(bytes(damaged), header)
            together([one])
            counts["scored"] += 1
        except Refused as refused:
            counts["refused"] += refused.status == 400
    assert sum(counts.values()) == 4000
    assert min(counts.values()) > 500


def test_answers() -> None:
    scores = np.array([0.5, -1.25], np.float32)
    plain, headers = answer(parse(body(DENSE, A, B, id="7"), None), "m", "1", {"score": scores})
    assert headers == {"content-type": "application/json"}
    assert json.loads(plain) == {
        "model_name": "m",
        "model_version": "1",
        "id": "7",
        "outputs": [{"name": "score", "datatype": "FP32", "shape": [2], "data": [0.5, -1.25]}],
    }
    wanted = body(DENSE, A, B, outputs=[{"name": "score", "parameters": {"binary_data": True}}])
    data, headers = answer(parse(wanted, None), "m", "1", {"score": scores})
    length = int(headers["Inference-Header-Content-Length"])
    assert json.loads(data[:length])["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert data[length:] == scores.tobytes()
