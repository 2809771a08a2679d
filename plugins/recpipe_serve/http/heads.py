"""The JSON of requests: a client mostly sends the same, which is then read once.

What is the same in all requests with one JSON is kept: the tensors' places in the body, the form, the outputs
asked for. Only values are read and checked anew. A request with an id has a JSON of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from recpipe_serve.batching.forms import Array, Asked, Form
from recpipe_serve.http.features import DENSE, LENGTHS, Features
from recpipe_serve.http.protocol import TYPES, InferenceRequest, json_length, parse

MOST = 256
"""Texts that are kept; when there are more, all are forgotten."""
LONGEST = 16384
"""Bytes of a text that is kept."""


@dataclass(frozen=True)
class _Head:
    request: InferenceRequest
    """Without its inputs."""
    form: Form
    dense: tuple[int, tuple[int, ...]] | None
    """The first byte after the JSON, and the shape."""
    ids: list[tuple[int, int]]
    """First bytes and numbers of ids that lie behind each other, in the form's order."""
    bytes: int
    """How many bytes the values of all inputs have."""


class Heads:
    """Reads requests for a model that takes ``features``."""

    def __init__(self, features: Features) -> None:
        self.features = features
        self._known: dict[bytes, _Head] = {}

    def read(self, body: bytes, header: str | None) -> tuple[InferenceRequest, Asked]:
        """The request in ``body``, and its inputs, checked; ``header``: see ``parse``. ``Refused`` for what
        is wrong."""
        length = json_length(header, len(body))
        text = body[:length]
        head = self._known.get(text)
        if head is not None and len(body) - length == head.bytes:
            return head.request, self._values(head, body, length)
        request = parse(body, header)
        asked = self.features.asked(request.inputs)
        if request.id is None and len(text) <= LONGEST:
            self._keep(text, request, asked.form)
        return request, asked

    def _values(self, head: _Head, body: bytes, length: int) -> Asked:
        ids = [np.frombuffer(body, TYPES["INT64"], count, length + at) for at, count in head.ids]
        dense: Array = np.empty((1, 0), np.float32)
        if head.dense is not None:
            at, shape = head.dense
            dense = np.frombuffer(body, TYPES["FP32"], shape[0] * shape[1], length + at).reshape(shape)
        return self.features.checked(dense, np.concatenate(ids), head.form)

    def _keep(self, text: bytes, request: InferenceRequest, form: Form) -> None:
        """Keep what the JSON says if all values are in binary and as the model takes them."""
        names = list(self.features.rows)
        inputs, places = request.inputs, request.places
        exact = [inputs[name].dtype == TYPES["INT64"] for name in names]
        if self.features.dense:
            exact.append(inputs[DENSE].dtype == TYPES["FP32"])
        if len(places) < len(inputs) or not all(exact) or any(name + LENGTHS in inputs for name in names):
            return
        runs: list[tuple[int, int]] = []
        for feature in form.order:
            at, count = places[names[feature]], inputs[names[feature]].size
            if runs and runs[-1][0] + 8 * runs[-1][1] == at:
                runs[-1] = (runs[-1][0], runs[-1][1] + count)
            else:
                runs.append((at, count))
        dense = (places[DENSE], inputs[DENSE].shape) if self.features.dense else None
        if len(self._known) >= MOST:
            self._known.clear()
        size = sum(values.nbytes for values in inputs.values())
        self._known[text] = _Head(replace(request, inputs={}), form, dense, runs, size)
