"""The open inference protocol (KServe v2) with the binary tensor extension: from bytes to arrays and back.

A body is JSON, or JSON followed by the inputs' bytes in their order, little-endian; the header
``Inference-Header-Content-Length`` then says how long the JSON is.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from recpipe.errors import shown
from recpipe_serve.batching.forms import Array
from recpipe_serve.errors import bad

HEADER_LENGTH = b"inference-header-content-length"
TYPES: dict[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "INT64": np.dtype("<i8"),
    "INT32": np.dtype("<i4"),
    "UINT64": np.dtype("<u8"),
    "UINT32": np.dtype("<u4"),
}
"""The protocol's types that a model of ours can take."""
BYTES, RAW = "BYTES", "raw"
"""The protocol's type of text; and the parameter of requests whose tensors are raw values by column."""
REGION = "shared_memory_region"
NO_REGIONS = "tensors come with their requests: there are no regions of shared memory"
NO_CLASSES = "outputs are numbers: classification is not supported"
LARGEST_SIZE = 2**31 - 1
"""Most values of a tensor; keeps products of sizes from growing without bound."""


@dataclass(frozen=True)
class InferenceRequest:
    """A request, parsed."""

    id: str | None
    inputs: dict[str, Array]
    """Encoded values, by the names of tensors; none where there are ``rows``."""
    rows: list[dict[str, Any]]
    """Raw values, by the names of columns."""
    outputs: dict[str, bool] | None
    """The outputs asked for, and whether their values are sent in binary; None: all."""
    binary: bool
    """Whether outputs that are not named are sent in binary."""
    timeout: float | None
    """Seconds in which the client wants the answer."""
    places: dict[str, int]
    """Where the values of each binary input begin, in bytes after the JSON."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What else the client says, by name."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """What its response says beside the outputs (``parameters``)."""
    span: Any = None
    """Of OpenTelemetry (``Spans.begin``); None: it is not traced, or came by HTTP."""

    @property
    def priority(self) -> int | None:
        """1 is the highest; None: the client does not say. ``Refused`` for what is no whole number."""
        found = self.parameters.get("priority")
        if found is None or found == 0:  # as Triton has it
            return None
        if type(found) is not int or found < 0:
            raise bad("parameters.priority is no whole number")
        return found


def parse(body: bytes, header: str | None) -> InferenceRequest:
    """The request in ``body``; ``header``: the value of ``Inference-Header-Content-Length``. ``Refused`` for
    anything that does not follow the protocol."""
    length = json_length(header, len(body))
    try:
        found = json.loads(body[:length])
    except (ValueError, RecursionError) as fault:
        raise bad(f"the request is no JSON ({shown(fault, 100)})") from fault
    asked = _mapping(found, "the request")
    parameters = _mapping(asked.get("parameters", {}), "parameters")
    outputs = asked.get("outputs")
    named = None if outputs is None else _outputs(outputs, bool(parameters.get("binary_data_output")))
    ident = asked.get("id")
    if ident is not None and not isinstance(ident, str):
        raise bad("id is no text")
    data = memoryview(body)[length:]
    rows = _rows(asked, data) if "rows" in asked else []
    raw = parameters.get(RAW) is True
    inputs, places = ({}, {}) if rows else _inputs(asked.get("inputs"), data, raw)
    if raw and not rows:
        inputs, places, rows = {}, {}, rows_of(inputs)
    timeout = parameters.get("timeout")
    if timeout is not None:
        if type(timeout) is not int or timeout < 0:
            raise bad("parameters.timeout is no number of microseconds")
        timeout = min(timeout, 10**12) / 1e6
    binary = parameters.get("binary_data_output") is True
    return InferenceRequest(ident, inputs, rows, named, binary, timeout, places, parameters)


def json_length(header: str | None, size: int) -> int:
    """How many of a body's ``size`` bytes are JSON, by the value of ``Inference-Header-Content-Length``;
    ``Refused`` if it is none."""
    if header is None:
        return size
    if not (header.isascii() and header.isdecimal() and len(header) < 12) or int(header) > size:
        raise bad(f"Inference-Header-Content-Length is {shown(header)}, and the body has {size} bytes")
    return int(header)


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad(f"{what} is no JSON object")
    return value


def _outputs(outputs: object, binary: bool) -> dict[str, bool]:
    if not isinstance(outputs, list):
        raise bad("outputs is no list")
    found = {}
    for output in outputs:
        about = _mapping(output, "an output")
        if not isinstance(about.get("name"), str):
            raise bad("an output has no name")
        parameters = _mapping(about.get("parameters", {}), "an output's parameters")
        require_here(about["name"], parameters)
        found[about["name"]] = bool(parameters.get("binary_data", binary))
    return found


def require_here(output: str, parameters: Collection[str]) -> None:
    """``Refused`` if the ``parameters`` of an output ask for it elsewhere than in the response, or as
    classes."""
    if "classification" in parameters:
        raise bad(NO_CLASSES)
    if REGION in parameters:
        raise bad(f"output '{shown(output)}': {NO_REGIONS}")


def _rows(asked: Mapping[str, Any], data: memoryview) -> list[dict[str, Any]]:
    """The raw values of each sample: its own row, and what is ``shared`` by all."""
    rows, shared = asked["rows"], _mapping(asked.get("shared", {}), "shared")
    if "inputs" in asked or data:
        raise bad("a request has inputs, which are encoded, or rows, which are raw, and not both")
    if not isinstance(rows, list) or not rows:
        raise bad("rows is no list of samples")
    made = [{**shared, **_mapping(row, "a row")} for row in rows]
    twice = next((name for row in rows for name in row if name in shared), None)
    if twice is not None:
        raise bad(f"'{shown(twice)}' is shared, and in a row as well")
    return made


def rows_of(columns: Mapping[str, Array]) -> list[dict[str, Any]]:
    """A row of raw values for each sample, of tensors by the names of columns: [N], [N, K] for lists of K
    values, and for what all samples share 1 in the place of N. NaN is a missing value."""
    for name, values in columns.items():
        if values.ndim not in (1, 2) or not len(values):
            raise bad(f"column '{shown(name)}' is {list(values.shape)}, not [N] or [N, K]")
    samples = max(len(values) for values in columns.values())
    rows: list[dict[str, Any]] = [{} for _ in range(samples)]
    for name, values in columns.items():
        if len(values) not in (1, samples):
            raise bad(f"column '{shown(name)}' has {len(values)} samples, and another one has {samples}")
        listed = [None if own != own else own for own in values.tolist()]  # NaN alone differs from itself
        for place, row in enumerate(rows):
            row[name] = listed[0 if len(listed) == 1 else place]
    return rows


def texts(data: bytes | memoryview, count: int, what: str) -> Array:
    """``count`` texts object [N] of type BYTES: each is its length in 4 bytes, and its bytes in UTF-8.
    ``Refused`` if these are others."""
    found, at = [], 0
    try:
        for _ in range(count):
            (size,) = struct.unpack_from("<I", data, at)
            end = at + 4 + size
            if end > len(data):
                raise bad(f"{what}: its bytes end within a text")
            found.append(bytes(data[at + 4 : end]).decode())
            at = end
    except (struct.error, UnicodeDecodeError) as fault:
        raise bad(f"{what} has no texts of type BYTES ({shown(fault, 80)})") from fault
    if at != len(data):
        raise bad(f"{what} has {len(data)} bytes, and its {count} texts {at}")
    made = np.empty(count, object)
    made[:] = found
    return made


def _inputs(inputs: object, data: memoryview, raw: bool = False) -> tuple[dict[str, Array], dict[str, int]]:
    """The values of each input, and the first byte of those in binary; of ``raw`` ones some may be texts."""
    if not isinstance(inputs, list) or not inputs:
        raise bad("inputs is no list of tensors")
    found: dict[str, Array] = {}
    places: dict[str, int] = {}
    start = 0
    for one in inputs:
        about = _mapping(one, "an input")
        name = about.get("name")
        if not isinstance(name, str):
            raise bad("an input has no name")
        if name in found:
            raise bad(f"input '{shown(name)}' comes twice")
        given: Any = about.get("shape")
        word = about.get("datatype")
        sized = isinstance(given, list) and len(given) <= 8 and all(type(n) is int and n >= 0 for n in given)
        if not sized or prod(given) > LARGEST_SIZE:
            raise bad(f"input '{shown(name)}' has the shape {shown(given)}")
        parameters = _mapping(about.get("parameters", {}), "an input's parameters")
        if REGION in parameters:
            raise bad(f"input '{shown(name)}': {NO_REGIONS}")
        size = parameters.get("binary_data_size")
        if raw and word == BYTES:
            what = f"input '{shown(name)}'"
            if size is None:
                found[name] = _listed_texts(about.get("data"), prod(given), what).reshape(given)
                continue
            if type(size) is not int or size < 0 or start + size > len(data):
                raise bad(f"{what} ends after the body's end")
            found[name] = texts(data[start : start + size], prod(given), what).reshape(given)
            start += size
            continue
        if not isinstance(word, str) or word not in TYPES:
            raise bad(f"input '{shown(name)}' is of type {shown(word)}, not one of {', '.join(TYPES)}")
        shape, kind = tuple(given), TYPES[word]
        if size is None:
            found[name] = _listed(about.get("data"), shape, kind, name)
            continue
        if type(size) is not int or size != prod(shape) * kind.itemsize:
            raise bad(f"input '{shown(name)}' of shape {list(shape)} has {shown(size)} bytes")
        if start + size > len(data):
            raise bad(f"input '{shown(name)}' ends after the body's end")
        found[name] = np.frombuffer(data[start : start + size], kind).reshape(shape)
        places[name] = start
        start += size
    if start != len(data):
        raise bad(f"{len(data) - start} bytes at the body's end belong to no input")
    return found, places


def _listed_texts(data: object, count: int, what: str) -> Array:
    """Texts of a nested or flat list."""
    found = np.asarray(data, object).reshape(-1) if isinstance(data, list) else np.empty(0, object)
    if len(found) != count or not all(isinstance(own, str) for own in found):
        raise bad(f"{what} is no list of {count} texts")
    return found


def _listed(data: object, shape: tuple[int, ...], kind: np.dtype[Any], name: str) -> Array:
    """The values of nested or flat lists."""
    if not isinstance(data, list):
        raise bad(f"input '{shown(name)}' has neither data nor binary data")
    try:
        values = np.asarray(data)
    except (ValueError, OverflowError) as fault:
        raise bad(f"the data of input '{shown(name)}' is no rectangle of numbers") from fault
    if not values.size:
        values = values.astype(kind)
    wanted = "iuf" if kind.kind == "f" else "iu"
    if values.dtype.kind not in wanted:
        what = "numbers" if kind.kind == "f" else "whole numbers"
        raise bad(f"the data of input '{shown(name)}' is not made of {what}")
    if values.size != prod(shape):
        raise bad(f"input '{shown(name)}' of shape {list(shape)} has {values.size} values")
    if kind.kind != "f" and values.size:
        limits = np.iinfo(kind)
        if int(values.min()) < limits.min or int(values.max()) > limits.max:
            raise bad(f"a value of input '{shown(name)}' is too large for its type")
    return values.astype(kind).reshape(shape)


def answer(
    request: InferenceRequest, model: str, version: str, outputs: Mapping[str, Array]
) -> tuple[bytes, dict[str, str]]:
    """The response's body and headers for ``outputs``, float32 by name."""
    described: list[tuple[str, tuple[int, ...], bool]] = []
    parts: list[bytes] = []
    listed: list[Any] = []
    for name, values in outputs.items():
        binary = request.binary if request.outputs is None else request.outputs[name]
        described.append((name, values.shape, binary))
        if binary:
            parts.append(np.ascontiguousarray(values, "<f4").tobytes())
        else:
            listed.append(values.astype(float).tolist())
    if request.id is None and not listed and not request.told:
        text = _usual_head(model, version, tuple(described), (), None)
    else:
        text = _head(model, version, described, listed, request.id, request.told)
    if not parts:
        return text, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", "Inference-Header-Content-Length": str(len(text))}
    return b"".join([text, *parts]), headers


def _head(
    model: str,
    version: str,
    outputs: Sequence[tuple[str, tuple[int, ...], bool]],
    listed: Sequence[Any],
    ident: str | None,
    told: Mapping[str, Any] | None = None,
) -> bytes:
    """A response's JSON; ``outputs``: of each its name, its shape, and whether its values follow in binary.
    ``listed``: the values of the others."""
    values = iter(listed)
    described: list[dict[str, Any]] = []
    for name, shape, binary in outputs:
        about: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": list(shape)}
        if binary:
            about["parameters"] = {"binary_data_size": 4 * prod(shape)}
        else:
            about["data"] = next(values)
        described.append(about)
    head: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": described}
    if ident is not None:
        head["id"] = ident
    if told:
        head["parameters"] = dict(told)
    return json.dumps(head).encode()


_usual_head = lru_cache(1024)(_head)
"""``_head`` for binary answers without an id, which are mostly the same and are kept."""
