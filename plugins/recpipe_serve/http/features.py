"""From a request's tensors to a model's inputs, checked.

A client mostly sends the same JSON, which is then read once: the tensors' places in the body, the form and
the outputs asked for are kept, and only values are read and checked anew. A request with an id has a JSON of
its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from recpipe.answers.score import RowMap
from recpipe.data.preparation import Preparation
from recpipe.errors import did_you_mean, shown
from recpipe_serve.batching.forms import Array, Asked, FeatureBags, Form
from recpipe_serve.errors import WrongIds, bad
from recpipe_serve.http.protocol import TYPES, InferenceRequest, json_length, parse
from recpipe_serve.http.raw import DENSE, LENGTHS, WEIGHTS, RawValues

MOST_IDS = 1024
"""Most ids of a request, for each sample that one may have."""
FORMS = 1024
"""Forms of requests that are kept."""
MOST = 256
"""Texts of JSON that are kept; when there are more, all are forgotten."""
LONGEST = 16384
"""Bytes of a text that is kept."""


NO_MAPS: Mapping[int, RowMap] = {}


class Features:
    """What a package's model takes, by its manifest.

    Tensors of a request: ``dense`` FP32 [N, D]; each sparse feature by its name, INT64 [N] (an id for each
    sample), [N, K] (K ids for each), or a flat vector together with ``NAME.lengths`` [N]. Ids are rows of
    tables, or keys of features in ``maps``, which give rows to these. Where ids have weights,
    ``NAME.weights`` FP32 has one for each, in the shape of the ids. A tensor for one sample stands for all
    N, so that what candidates share is sent once.
    """

    def __init__(
        self, manifest: Mapping[str, Any], most_samples: int, maps: Mapping[int, RowMap] = NO_MAPS
    ) -> None:
        self.maps = maps
        self.dense: list[str] = manifest["dense"]["names"]
        self.rows: dict[str, int] = {feature["name"]: feature["rows"] for feature in manifest["sparse"]}
        self.most_samples = most_samples
        self._limits = np.array(list(self.rows.values()), np.uint64)
        places = {name: place for place, name in enumerate(self.rows)}
        sequences = manifest.get("sequences", {"single": [], "aligned": []})
        entities = [about["entity"] for about in manifest.get("effects", ())]
        self._single = [places[name] for name in dict.fromkeys([*sequences["single"], *entities])]
        self._aligned = [[places[name] for name in group] for group in sequences["aligned"]]
        self._known = {name + end for name in self.rows for end in ("", LENGTHS)}
        self.weighted = any(lookup.get("weighted") for lookup in manifest.get("lookups", ()))
        """Whether ids have weights."""
        self._weighs = {f["name"]: f["weights"] for f in manifest["sparse"] if "weights" in f}
        if self.weighted:
            self._known |= {name + WEIGHTS for name in self.rows}
        if self.dense:
            self._known.add(DENSE)
        self._kept = lru_cache(FORMS)(self._form)

    @property
    def weights(self) -> list[str]:
        """The names of the tensors of weights that requests need."""
        return [name + WEIGHTS for name in self.rows if self._weighs.get(name) == "given"]

    def asked(self, inputs: Mapping[str, Array]) -> Asked:
        """``inputs`` checked; ``Refused`` names the one that is missing or wrong."""
        if not inputs.keys() <= self._known:
            unknown = next(name for name in inputs if name not in self._known)
            raise bad(f"the model has no input '{shown(unknown)}'.{did_you_mean(unknown, self._known)}")
        bags = [self._bags(name, inputs) for name in self.rows]
        dense: Array = np.empty((1, 0), np.float32)
        if self.dense:
            wanted, found = f"FP32 [N, {len(self.dense)}]", inputs.get(DENSE)
            if found is None:
                raise bad(f"input '{DENSE}' is missing: {wanted}")
            if found.ndim != 2 or found.shape[1] != len(self.dense) or found.dtype.kind != "f":
                raise bad(f"input '{DENSE}' is {found.dtype} {list(found.shape)}, not {wanted}")
            with np.errstate(over="ignore"):
                dense = found.astype(np.float32, copy=False)
        of_each, lengths = tuple(own.samples for own in bags), tuple(own.lengths for own in bags)
        known = all(isinstance(own, int) for own in lengths)
        form = (self._kept if known else self._form)(len(dense), of_each, lengths)
        asked = self.checked(dense, np.concatenate([bags[f].ids for f in form.order]), form)
        if self.weighted:
            names = list(self.rows)
            own = [self._weights(names[f], inputs, bags[f]) for f in form.order]
            asked.weights = np.concatenate(own)
        return asked

    def _weights(self, name: str, inputs: Mapping[str, Array], bags: FeatureBags) -> Array:
        """The weights float32 of the ids of a feature, equal ones where only others have some; ``Refused``
        for those that are none."""
        found, ids = inputs.get(name + WEIGHTS), len(bags.ids)
        if found is None and self._weighs.get(name) == "mean":
            lengths = np.broadcast_to(bags.lengths, bags.samples)
            return np.repeat(1 / np.maximum(lengths, 1), lengths).astype(np.float32)
        if found is None and name not in self._weighs:
            return np.ones(ids, np.float32)
        if found is None or found.dtype.kind != "f" or found.size != ids:
            raise bad(f"input '{shown(name)}{WEIGHTS}' is not FP32, a weight for each of the {ids} ids")
        with np.errstate(over="ignore"):
            weights = found.reshape(-1).astype(np.float32)
        if not np.isfinite(weights).all():
            raise bad(f"'{shown(name)}{WEIGHTS}' has a number that is not finite in FP32")
        return weights

    def checked(self, dense: Array, ids: Array, form: Form) -> Asked:
        """The values of a request of this ``form``: ``dense`` float32 [N, D] or [1, D], and its ``ids``
        int64. ``Refused`` names the one that is wrong."""
        keys = None
        if self.maps:
            keys, ids = ids, ids.copy()
            for place, own in self.maps.items():
                mine = ids[form.slices[place]]
                mine[:] = own(torch.from_numpy(mine)).numpy()
        # Taken as a number without a sign, a negative id is larger than any table.
        if form.limits is None:
            form.limits = np.repeat(self._limits[list(form.order)], form.counts)
        wrong = ids.view(np.uint64) >= form.limits
        if wrong.any():
            features, first = np.repeat(form.order, form.counts), int(wrong.argmax())
            name = list(self.rows)[features[first]]
            counts = np.bincount(features[wrong], minlength=len(self.rows))
            raise WrongIds(f"id {ids[first]} of '{shown(name)}' is not in [0, {self.rows[name]})", counts)
        finite = np.isfinite(dense)
        if not finite.all():
            sample, place = np.argwhere(~finite)[0]
            raise bad(f"'{shown(self.dense[place])}' of sample {sample} is not a finite number of FP32")
        if len(dense) != form.samples:
            dense = np.broadcast_to(dense, (form.samples, dense.shape[1]))
        return Asked(dense, ids, form, keys=keys)

    def _form(self, dense: int, bags: Sequence[int], lengths: Sequence[Array | int]) -> Form:
        """The form of a request with so many rows of dense features and bags of each feature. ``Refused`` if
        inputs differ in it, if it is too large, or if the model needs other numbers of ids."""
        counts = dict(zip(self.rows, bags, strict=True))
        if self.dense:
            counts[DENSE] = dense
        samples = max(counts.values())
        if samples > self.most_samples:
            raise bad(f"the request has {samples} samples, and {self.most_samples} is the most")
        for name, count in counts.items():
            if count != samples and count != 1:
                raise bad(f"input '{shown(name)}' has {count} samples, and another one has {samples}")
        if not samples:
            raise bad("the request has 0 samples")
        form = Form(samples, bags, lengths)
        total = sum(int(n) * (samples // bags[f]) for f, n in zip(form.order, form.counts, strict=True))
        if total > self.most_samples * MOST_IDS:
            raise bad(f"the request has {total} ids, and {self.most_samples * MOST_IDS} is the most")
        names = list(self.rows)
        for place in self._single:
            if np.any(np.asarray(lengths[place]) != 1):
                raise bad(f"'{shown(names[place])}' has not one id for each sample, as the model needs")
        for first, *others in self._aligned:
            for other in others:
                if np.any(np.asarray(lengths[first]) != np.asarray(lengths[other])):
                    mine, theirs = shown(names[other]), shown(names[first])
                    raise bad(f"'{mine}' has not as many ids as '{theirs}' for each sample")
        return form

    def _bags(self, name: str, inputs: Mapping[str, Array]) -> FeatureBags:
        """The ids of a feature; ``Refused`` if there are none, or of another shape or type."""
        ids = inputs.get(name)
        if ids is None:
            raise bad(f"input '{shown(name)}' is missing: INT64 [N], rows of a table of {self.rows[name]}")
        if ids.dtype.kind not in "iu":
            raise bad(f"input '{shown(name)}' is {ids.dtype}: ids are whole numbers")
        ids = ids.astype(np.int64, copy=False)
        lengths = inputs.get(name + LENGTHS)
        if lengths is None:
            if ids.ndim not in (1, 2):
                raise bad(f"input '{shown(name)}' is {list(ids.shape)}, not [N] or [N, K]")
            return FeatureBags(ids.reshape(-1), 1 if ids.ndim == 1 else ids.shape[1], len(ids))
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or ids.ndim != 1:
            raise bad(f"'{shown(name)}' and '{shown(name)}{LENGTHS}' are not vectors of whole numbers")
        if (lengths.size and int(lengths.min()) < 0) or int(lengths.sum(dtype=object)) != len(ids):
            raise bad(f"'{shown(name)}{LENGTHS}' does not add up to the {len(ids)} ids of '{shown(name)}'")
        return FeatureBags(ids, lengths.astype(np.int64, copy=False), len(lengths))


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
    """Reads requests for a model that takes ``features``, and keeps what their JSON says."""

    def __init__(self, features: Features, preparation: Preparation | None = None) -> None:
        self.features = features
        self._known: dict[bytes, _Head] = {}
        self.use(preparation)

    def use(self, preparation: Preparation | None) -> None:
        """Encode raw values by this ``preparation`` from now on; None: refuse them."""
        self._raw = None if preparation is None else RawValues(preparation)
        features = None if preparation is None else preparation.features
        self.columns = () if features is None else tuple(features.inputs)
        """The columns that raw values have."""

    def read(self, body: bytes, header: str | None) -> tuple[InferenceRequest, Asked]:
        """The request in ``body``, and its inputs, checked; ``header``: see ``parse``. ``Refused`` for what
        is wrong."""
        request, asked = self.read_or_rows(body, header)
        return request, self.encoded(request.rows) if asked is None else asked

    def read_or_rows(self, body: bytes, header: str | None) -> tuple[InferenceRequest, Asked | None]:
        """``read``, but that rows of raw values are not made inputs: None stands for these."""
        length = json_length(header, len(body))
        text = body[:length]
        head = self._known.get(text)
        if head is not None and len(body) - length == head.bytes:
            ids = [np.frombuffer(body, TYPES["INT64"], count, length + at) for at, count in head.ids]
            dense: Array = np.empty((1, 0), np.float32)
            if head.dense is not None:
                at, shape = head.dense
                dense = np.frombuffer(body, TYPES["FP32"], shape[0] * shape[1], length + at).reshape(shape)
            return head.request, self.features.checked(dense, np.concatenate(ids), head.form)
        request = parse(body, header)
        if request.rows:
            return request, None
        asked = self.features.asked(request.inputs)
        if request.id is None and len(text) <= LONGEST:
            self._keep(text, request, asked.form)
        return request, asked

    def encoded(self, rows: Sequence[Mapping[str, Any]]) -> Asked:
        """The inputs of raw values, checked. ``Refused`` for what is wrong."""
        if self._raw is None:
            raise bad("the package does not say how raw values are encoded: send inputs, encoded")
        self.require_few(rows)
        return replace(self.features.asked(self._raw.inputs(rows)), rows=rows)

    def require_few(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """``Refused`` for more rows than a request may have."""
        if len(rows) > self.features.most_samples:
            raise bad(f"the request has {len(rows)} samples, and {self.features.most_samples} is the most")

    def anew(self, asked: Asked) -> Asked:
        """The inputs of a request that another package was to score. ``Refused`` for what is wrong."""
        if asked.rows:
            return self.encoded(asked.rows)
        if asked.keys is None:
            return asked
        return replace(self.features.checked(asked.dense, asked.keys, asked.form), weights=asked.weights)

    def _keep(self, text: bytes, request: InferenceRequest, form: Form) -> None:
        """Keep what the JSON says if all values are in binary and as the model takes them."""
        if self.features.weighted:
            return
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
