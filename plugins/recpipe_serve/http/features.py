"""From a request's tensors to a model's inputs, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from recpipe.errors import did_you_mean, shown
from recpipe_serve.batching.forms import Array, Asked, FeatureBags, Form
from recpipe_serve.errors import WrongIds, bad

DENSE = "dense"
LENGTHS = ".lengths"
"""After a feature's name: how many ids each sample has."""

MOST_IDS = 1024
"""Most ids of a request, for each sample that one may have."""
FORMS = 1024
"""Forms of requests that are kept."""


class Features:
    """What a package's model takes, by its manifest.

    Tensors of a request: ``dense`` FP32 [N, D]; each sparse feature by its name, INT64 [N] (an id for each
    sample), [N, K] (K ids for each), or a flat vector together with ``NAME.lengths`` [N]. Ids are rows of
    tables. A tensor for one sample stands for all N, so that what candidates share is sent once.
    """

    def __init__(self, manifest: Mapping[str, Any], most_samples: int) -> None:
        self.dense: list[str] = manifest["dense"]["names"]
        self.rows: dict[str, int] = {feature["name"]: feature["rows"] for feature in manifest["sparse"]}
        self.most_samples = most_samples
        self._limits = np.array(list(self.rows.values()), np.uint64)
        places = {name: place for place, name in enumerate(self.rows)}
        sequences = manifest.get("sequences", {"single": [], "aligned": []})
        self._single = [places[name] for name in sequences["single"]]
        self._aligned = [[places[name] for name in group] for group in sequences["aligned"]]
        self._known = {name + end for name in self.rows for end in ("", LENGTHS)}
        if self.dense:
            self._known.add(DENSE)
        self._kept = lru_cache(FORMS)(self._form)

    def described(self) -> list[dict[str, Any]]:
        """The inputs in the protocol's words."""
        sparse = [{"name": name, "datatype": "INT64", "shape": [-1]} for name in self.rows]
        dense = {"name": DENSE, "datatype": "FP32", "shape": [-1, len(self.dense)]}
        return [dense, *sparse] if self.dense else sparse

    def asked(self, inputs: Mapping[str, Array]) -> Asked:
        """``inputs`` checked; ``Refused`` names the one that is missing or wrong."""
        if not inputs.keys() <= self._known:
            unknown = next(name for name in inputs if name not in self._known)
            raise bad(f"the model has no input '{shown(unknown)}'.{did_you_mean(unknown, self._known)}")
        bags = [self._bags(name, inputs) for name in self.rows]
        dense = self._dense(inputs)
        of_each, lengths = tuple(own.samples for own in bags), tuple(own.lengths for own in bags)
        known = all(isinstance(own, int) for own in lengths)
        form = (self._kept if known else self._form)(len(dense), of_each, lengths)
        return self.checked(dense, np.concatenate([bags[f].ids for f in form.order]), form)

    def checked(self, dense: Array, ids: Array, form: Form) -> Asked:
        """The values of a request of this ``form``: ``dense`` float32 [N, D] or [1, D], and its ``ids``
        int64. ``Refused`` names the one that is wrong."""
        # Taken as a number without a sign, a negative id is larger than any table.
        if form.limits is None:
            form.limits = np.repeat(self._limits[list(form.order)], form.counts)
        wrong = ids.view(np.uint64) >= form.limits
        if wrong.any():
            raise self._wrong(ids, wrong, form)
        finite = np.isfinite(dense)
        if not finite.all():
            sample, place = np.argwhere(~finite)[0]
            raise bad(f"'{shown(self.dense[place])}' of sample {sample} is not a finite number of FP32")
        if len(dense) != form.samples:
            dense = np.broadcast_to(dense, (form.samples, dense.shape[1]))
        return Asked(dense, ids, form)

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
        self._require_numbers(lengths)
        return form

    def _require_numbers(self, lengths: Sequence[Array | int]) -> None:
        """``Refused`` for another number of ids than the model needs of a feature."""
        names = list(self.rows)
        for place in self._single:
            if np.any(np.asarray(lengths[place]) != 1):
                raise bad(f"'{shown(names[place])}' has not one id for each sample, as the model needs")
        for first, *others in self._aligned:
            for other in others:
                if np.any(np.asarray(lengths[first]) != np.asarray(lengths[other])):
                    mine, theirs = shown(names[other]), shown(names[first])
                    raise bad(f"'{mine}' has not as many ids as '{theirs}' for each sample")

    def _wrong(self, ids: Array, wrong: Array, form: Form) -> WrongIds:
        """Names the first of the ids that are not in their table."""
        features = np.repeat(form.order, form.counts)
        place = int(wrong.argmax())
        name = list(self.rows)[features[place]]
        counts = np.bincount(features[wrong], minlength=len(self.rows))
        return WrongIds(f"id {ids[place]} of '{shown(name)}' is not in [0, {self.rows[name]})", counts)

    def _dense(self, inputs: Mapping[str, Array]) -> Array:
        if not self.dense:
            return np.empty((1, 0), np.float32)
        found = inputs.get(DENSE)
        if found is None:
            raise bad(f"input '{DENSE}' is missing: FP32 [N, {len(self.dense)}]")
        if found.ndim != 2 or found.shape[1] != len(self.dense) or found.dtype.kind != "f":
            raise bad(
                f"input '{DENSE}' is {found.dtype} {list(found.shape)}, not FP32 [N, {len(self.dense)}]"
            )
        with np.errstate(over="ignore"):
            return found.astype(np.float32, copy=False)

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
