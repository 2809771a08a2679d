"""From a request's tensors to a model's inputs, checked; and several requests put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from recpipe.errors import did_you_mean, shown
from recpipe.inference.serving.errors import WrongIds, bad
from recpipe.inference.serving.protocol import Array
from recpipe.inference.serving.shared import Side

DENSE = "dense"
LENGTHS = ".lengths"
"""After a feature's name: how many ids each sample has."""

MOST_IDS = 1024
"""Most ids of a request, for each sample that one may have."""


class Bags(NamedTuple):
    """What a request has of one feature."""

    ids: Array
    """int64, one sample's after the other's."""
    lengths: Array | int
    """How many ids each sample has, or all of them."""
    samples: int

    def of(self, samples: int) -> Bags:
        """One for each of ``samples``, if there is one for all."""
        if self.samples == samples:
            return self
        lengths = self.lengths if isinstance(self.lengths, int) else np.tile(self.lengths, samples)
        return Bags(np.tile(self.ids, samples), lengths, samples)


@dataclass(frozen=True)
class Asked:
    """The inputs of one request of N samples."""

    dense: Array
    """float32 [N, D]."""
    bags: list[Bags]
    """Of each feature: N, or one that all samples share."""
    samples: int
    """N."""


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
        self._limits = np.array(list(self.rows.values()))
        places = {name: place for place, name in enumerate(self.rows)}
        sequences = manifest.get("sequences", {"single": [], "aligned": []})
        self._single = [places[name] for name in sequences["single"]]
        self._aligned = [[places[name] for name in group] for group in sequences["aligned"]]
        self._known = {name + end for name in self.rows for end in ("", LENGTHS)}
        if self.dense:
            self._known.add(DENSE)

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
        self._require_rows(bags)
        dense = self._dense(inputs)
        samples = self._samples(bags, dense)
        self._require_numbers(bags)
        if len(dense) != samples:
            dense = np.broadcast_to(dense, (samples, dense.shape[1]))
        return Asked(dense, bags, samples)

    def _samples(self, bags: Sequence[Bags], dense: Array) -> int:
        """N; ``Refused`` if inputs differ in it, or if it or the number of ids is too large."""
        counts = dict(zip(self.rows, (own.samples for own in bags), strict=True))
        if self.dense:
            counts[DENSE] = len(dense)
        samples = max(counts.values())
        if samples > self.most_samples:
            raise bad(f"the request has {samples} samples, and {self.most_samples} is the most")
        for name, count in counts.items():
            if count != samples and count != 1:
                raise bad(f"input '{shown(name)}' has {count} samples, and another one has {samples}")
        if not samples:
            raise bad("the request has 0 samples")
        total = sum(len(own.ids) * (samples // own.samples) for own in bags)
        if total > self.most_samples * MOST_IDS:
            raise bad(f"the request has {total} ids, and {self.most_samples * MOST_IDS} is the most")
        return samples

    def _require_numbers(self, bags: Sequence[Bags]) -> None:
        """``Refused`` for another number of ids than the model needs of a feature."""
        names = list(self.rows)
        for place in self._single:
            if np.any(np.asarray(bags[place].lengths) != 1):
                raise bad(f"'{shown(names[place])}' has not one id for each sample, as the model needs")
        for first, *others in self._aligned:
            for other in others:
                if np.any(np.asarray(bags[first].lengths) != np.asarray(bags[other].lengths)):
                    mine, theirs = shown(names[other]), shown(names[first])
                    raise bad(f"'{mine}' has not as many ids as '{theirs}' for each sample")

    def _require_rows(self, bags: Sequence[Bags]) -> None:
        """``Refused`` for an id that is not in its table; all of them are compared at once."""
        ids = np.concatenate([own.ids for own in bags])
        features = np.repeat(np.arange(len(bags)), [len(own.ids) for own in bags])
        wrong = (ids < 0) | (ids >= self._limits[features])
        if wrong.any():
            place = int(wrong.argmax())
            name = list(self.rows)[features[place]]
            counts = np.bincount(features[wrong], minlength=len(bags))
            raise WrongIds(f"id {ids[place]} of '{shown(name)}' is not in [0, {self.rows[name]})", counts)

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
            dense = found.astype(np.float32, copy=False)
        finite = np.isfinite(dense)
        if not finite.all():
            sample, place = np.argwhere(~finite)[0]
            raise bad(f"'{shown(self.dense[place])}' of sample {sample} is not a finite number of FP32")
        return dense

    def _bags(self, name: str, inputs: Mapping[str, Array]) -> Bags:
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
            return Bags(ids.reshape(-1), 1 if ids.ndim == 1 else ids.shape[1], len(ids))
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or ids.ndim != 1:
            raise bad(f"'{shown(name)}' and '{shown(name)}{LENGTHS}' are not vectors of whole numbers")
        if (lengths.size and int(lengths.min()) < 0) or int(lengths.sum(dtype=object)) != len(ids):
            raise bad(f"'{shown(name)}{LENGTHS}' does not add up to the {len(ids)} ids of '{shown(name)}'")
        return Bags(ids, lengths.astype(np.int64, copy=False), len(lengths))


def together(asked: Sequence[Asked]) -> tuple[torch.Tensor, list[Side]]:
    """All samples of these requests in their order: dense float32 [B, D], and the ids.

    Features that the samples of every request share make a side with one bag a request.
    """
    dense = torch.from_numpy(np.concatenate([one.dense for one in asked]))
    every = range(len(asked[0].bags))
    shared = [f for f in every if all(one.bags[f].samples == 1 for one in asked)]
    if all(one.samples == 1 for one in asked):
        shared = []  # a bag a request is a bag a sample
    own = [f for f in every if f not in shared]
    sides = []
    if shared:
        counts = torch.tensor([one.samples for one in asked])
        of_sample = torch.arange(len(asked)).repeat_interleave(counts)
        sides.append(_side(shared, [one.bags[f] for f in shared for one in asked], len(asked), of_sample))
    if own:
        sides.append(_side(own, [one.bags[f].of(one.samples) for f in own for one in asked], len(dense)))
    return dense, sides


def _side(
    features: Sequence[int], bags: Sequence[Bags], count: int, of_sample: torch.Tensor | None = None
) -> Side:
    ids = np.concatenate([own.ids for own in bags])
    lengths = np.empty(len(features) * count, np.int64)
    end = 0
    for own in bags:
        lengths[end : end + own.samples] = own.lengths
        end += own.samples
    return Side(tuple(features), torch.from_numpy(ids), torch.from_numpy(lengths), count, of_sample)
