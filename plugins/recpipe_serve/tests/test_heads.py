"""Requests with the same JSON: it is read once, and the values of each are read and checked as always."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from recpipe_serve.errors import Refused
from recpipe_serve.http import features
from recpipe_serve.http.features import MOST, Heads
from recpipe_serve.http.protocol import parse
from recpipe_serve.tests.test_protocol import DENSE, FEATURES, A, B, body, tensor

Tensor = tuple[str, str, np.ndarray]


def request(*tensors: Tensor, more: bytes = b"", **about: Any) -> tuple[bytes, str]:
    """A request's body with binary values, and the length of its JSON."""
    inputs = [tensor(n, kind, list(own.shape), binary_data_size=own.nbytes) for n, kind, own in tensors]
    head = body(*inputs, **about)
    return head + b"".join(own.tobytes() for _, _, own in tensors) + more, str(len(head))


def tensors(seed: int, samples: int = 3, kind: str = "<i8", name: str = "INT64") -> list[Tensor]:
    """``b`` is shared by all samples, and comes first."""
    rng = np.random.default_rng(seed)
    return [
        ("b", name, rng.integers(0, 9, (1, 2)).astype(kind)),
        ("dense", "FP32", rng.random((samples, 2)).astype("<f4")),
        ("a", name, rng.integers(0, 50, samples).astype(kind)),
    ]


class Parsed:
    """Counts how often a request's JSON is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(features, "parse", self)

    def __call__(self, *asked: Any) -> Any:
        self.count += 1
        return parse(*asked)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parsed:
    return Parsed(monkeypatch)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_same_json_is_read_once_and_its_values_each_time(
    samples: int, order: tuple[int, ...], parsed: Parsed
) -> None:
    reader = Heads(FEATURES)
    for seed in range(4):
        made = tensors(seed, samples)
        sent = request(
            *(made[place] for place in order), parameters={"timeout": 7, "binary_data_output": True}
        )
        asked, found = reader.read(*sent)
        known = parse(*sent)
        wanted = FEATURES.asked(known.inputs)
        assert (asked.timeout, asked.binary, asked.outputs) == (known.timeout, True, None)
        np.testing.assert_array_equal(found.dense, wanted.dense)
        np.testing.assert_array_equal(found.ids, wanted.ids)
        assert found.form.shared == wanted.form.shared == ((1,) if samples > 1 else ())
        assert found.samples == samples
    assert parsed.count == 1


def test_wrong_values_and_wrong_sizes_are_refused_as_the_first_time(parsed: Parsed) -> None:
    reader = Heads(FEATURES)
    right = tensors(0)
    reader.read(*request(*right))
    (b, dense, a), nan = right, np.full((3, 2), np.nan, "<f4")
    wrong = {
        r"id 50 of 'a' is not in \[0, 50\)": request(b, dense, (*a[:2], np.array([1, 50, 2]))),
        r"id -1 of 'b' is not in \[0, 9\)": request((*b[:2], np.array([[3, -1]])), dense, a),
        "'x' of sample 0 is not a finite number": request(b, (*dense[:2], nan), a),
    }
    for message, sent in wrong.items():
        for read in (reader.read, Heads(FEATURES).read):
            with pytest.raises(Refused, match=message):
                read(*sent)
    assert parsed.count == 1 + len(wrong)
    with pytest.raises(Refused, match="3 bytes at the body's end belong to no input"):
        reader.read(*request(*right, more=b"abc"))
    whole, header = request(*right)
    with pytest.raises(Refused, match="input 'a' ends after the body's end"):
        reader.read(whole[:-1], header)
    with pytest.raises(Refused, match="Inference-Header-Content-Length is 9999"):
        reader.read(whole, "9999")


@pytest.mark.parametrize(
    "sent",
    [
        request(*tensors(0), id="r1"),
        request(*tensors(0, kind="<i4", name="INT32")),
        (body(DENSE, A, B), None),
        request(
            *tensors(0)[:2], ("a", "INT64", np.array([1, 2, 3])), ("a.lengths", "INT64", np.array([1, 1, 1]))
        ),
    ],
    ids=["with an id", "of another type", "lists", "with lengths"],
)
def test_other_requests_are_read_each_time(sent: Any, parsed: Parsed) -> None:
    reader = Heads(FEATURES)
    first, second = (reader.read(*sent)[1] for _ in range(2))
    np.testing.assert_array_equal(first.ids, second.ids)
    assert parsed.count == 2


def test_memory_is_bounded(parsed: Parsed) -> None:
    reader = Heads(FEATURES)
    for seed in range(MOST + 5):
        reader.read(*request(*tensors(0), parameters={"other": seed}))
    assert len(reader._known) <= MOST
    reader.read(*request(*tensors(0), parameters={"other": "x" * 20_000}))
    assert max(map(len, reader._known)) < 20_000


def outcome(reader: Heads, sent: tuple[bytes, str]) -> Any:
    """What came of reading a request: its inputs, or why it was refused."""
    try:
        _, found = reader.read(*sent)
    except Refused as refused:
        return refused.status, str(refused)
    return found.samples, found.dense.tolist(), found.ids.tolist()


def test_damaged_requests_are_refused_or_understood_as_if_each_was_the_first() -> None:
    draw = random.Random(0)
    whole, header = request(*tensors(0))
    reader, kinds = Heads(FEATURES), {"scored": 0, "refused": 0, "kept": 0}
    for _ in range(3000):
        damaged, given = bytearray(whole), header
        for _ in range(draw.randint(0, 2)):
            place = draw.randrange(len(damaged) if draw.random() < 0.3 else int(header), len(damaged) + 1)
            what = draw.randrange(3)
            damaged[place : place + (what != 0)] = b"" if what == 1 else bytes([draw.choice([0, 1, 7, 200])])
        if draw.random() < 0.05:
            given = str(int(header) + draw.randrange(-3, 4))
        sent = bytes(damaged), given
        kinds["kept"] += bytes(damaged[: int(header)]) in reader._known
        found = outcome(reader, sent)
        assert found == outcome(Heads(FEATURES), sent)
        kinds["scored" if len(found) == 3 else "refused"] += 1
    assert min(kinds.values()) > 500
