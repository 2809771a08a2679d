"""Messages of the open inference protocol: arrays become their tensors, and back.

The messages and the service are those that tritonclient's wheel brings (the extra ``grpc``), generated from
the protocol's own definition by those who keep it: a server and its clients then have the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as messages

from recpipe.errors import shown
from recpipe_serve.batching.forms import Array
from recpipe_serve.errors import bad
from recpipe_serve.http.protocol import (
    BYTES,
    LARGEST_SIZE,
    NO_REGIONS,
    RAW,
    REGION,
    InferenceRequest,
    require_here,
    rows_of,
    texts,
)
from recpipe_serve.models import Outputs

DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
"""The protocol's types that arrays of numbers have."""
WORDS = {kind: word for word, kind in DATATYPES.items()}
CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
"""Where the values of a tensor are that does not send them as bytes. FP16 is always bytes."""
Parameter = bool | int | float | str


def read_request(message: Any, remaining: float | None = None) -> InferenceRequest:
    """The request in a ``ModelInferRequest``; ``remaining``: seconds until its client's deadline. ``Refused``
    for anything that does not follow the protocol."""
    parameters = read_parameters(message.parameters)
    timeout = parameters.get("timeout")
    if timeout is not None:
        if type(timeout) is not int or timeout < 0:
            raise bad("parameters.timeout is no number of microseconds")
        remaining = min(timeout / 1e6, float("inf") if remaining is None else remaining)
    for output in message.outputs:
        require_here(output.name, output.parameters)
    outputs = {output.name: True for output in message.outputs} or None
    inputs = read_tensors(message.inputs, message.raw_input_contents, "input", parameters.get(RAW) is True)
    rows = rows_of(inputs) if parameters.get(RAW) is True else []
    own = {} if rows else inputs
    return InferenceRequest(message.id or None, own, rows, outputs, True, remaining, {}, parameters)


def write_request(
    model: str,
    inputs: Mapping[str, Array],
    version: str = "",
    ident: str = "",
    outputs: Iterable[str] = (),
    parameters: Mapping[str, Parameter] | None = None,
) -> Any:
    """A ``ModelInferRequest`` of arrays of numbers, sent as bytes."""
    message = messages.ModelInferRequest(model_name=model, model_version=version, id=ident)
    _write_parameters(message.parameters, parameters or {})
    _write_tensors(message.inputs, message.raw_input_contents, inputs)
    for name in outputs:
        message.outputs.add(name=name)
    return message


def read_response(message: Any) -> Outputs:
    """The outputs in a ``ModelInferResponse``; ``Refused`` if they do not follow the protocol."""
    values = read_tensors(message.outputs, message.raw_output_contents, "output")
    return Outputs(values, read_parameters(message.parameters))


def write_response(model: str, version: str, ident: str | None, outputs: Outputs) -> Any:
    """A ``ModelInferResponse``."""
    message = messages.ModelInferResponse(model_name=model, model_version=version, id=ident or "")
    _write_parameters(message.parameters, outputs.parameters)
    _write_tensors(message.outputs, message.raw_output_contents, outputs.values)
    return message


def read_tensors(tensors: Any, raw: Any, what: str, textual: bool = False) -> dict[str, Array]:
    """Arrays by name of messages of tensors, whose values are ``raw``, all of them, or none. ``textual``:
    some may be texts, which are arrays of objects then."""
    region = next((tensor.name for tensor in tensors if REGION in tensor.parameters), None)
    if region is not None:
        raise bad(f"{what} '{shown(region)}': {NO_REGIONS}")
    if raw and len(raw) != len(tensors):
        raise bad(f"there are {len(tensors)} {what}s, and the bytes of {len(raw)}")
    found: dict[str, Array] = {}
    for place, tensor in enumerate(tensors):
        name = tensor.name
        if name in found:
            raise bad(f"{what} '{shown(name)}' comes twice")
        try:
            found[name] = _array(tensor, raw[place] if raw else None, textual)
        except ValueError as fault:
            raise bad(f"{what} '{shown(name)}' {fault}") from fault
    return found


def _array(tensor: Any, raw: bytes | None, textual: bool) -> Array:
    """The values of a tensor; ``ValueError`` says what is wrong with it."""
    shape, word = tuple(tensor.shape), tensor.datatype
    size, kind = prod(shape), DATATYPES.get(word)
    if len(shape) > 8 or (shape and min(shape) < 0) or size > LARGEST_SIZE:
        raise ValueError(f"has the shape {shown(list(shape))}")
    if textual and word == BYTES:
        if raw is None:
            raw = b"".join(len(own).to_bytes(4, "little") + own for own in tensor.contents.bytes_contents)
        return texts(raw, size, f"input '{shown(tensor.name)}'").reshape(shape)
    if kind is None:
        raise ValueError(f"is of type {shown(word)}, not one of {', '.join(DATATYPES)}")
    if raw is not None:
        if len(raw) != size * kind.itemsize:
            raise ValueError(f"of shape {list(shape)} has {len(raw)} bytes")
        return np.frombuffer(raw, kind).reshape(shape)
    values = getattr(tensor.contents, CONTENTS[word]) if word in CONTENTS else ()
    if len(values) != size:
        raise ValueError(f"of shape {list(shape)} has {len(values)} values")
    if kind.itemsize < 4 and kind.kind in "iu" and len(values):  # the message has them in 32 bits
        limits = np.iinfo(kind)
        if min(values) < limits.min or max(values) > limits.max:
            raise ValueError(f"has a value that is too large for {word}")
    return np.array(values, kind).reshape(shape)


def _write_tensors(tensors: Any, raw: Any, arrays: Mapping[str, Array]) -> None:
    for name, values in arrays.items():
        kind = values.dtype.newbyteorder("<")
        tensors.add(name=name, datatype=WORDS[kind], shape=values.shape)
        raw.append(np.ascontiguousarray(values, kind).tobytes())


def read_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a message's parameters."""
    found: dict[str, Any] = {}
    for name, value in parameters.items():
        which = value.WhichOneof("parameter_choice")
        found[name] = None if which is None else getattr(value, which)
    return found


def _write_parameters(into: Any, parameters: Mapping[str, Parameter]) -> None:
    for name, value in parameters.items():
        if isinstance(value, bool):
            into[name].bool_param = value
        elif isinstance(value, int):
            into[name].int64_param = value
        elif isinstance(value, float):
            into[name].double_param = value
        else:
            into[name].string_param = value
