"""From a request's tensors to a model's inputs, checked; and several requests put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recpipe.errors import did_you_mean, shown
from recpipe.inference.serving.errors import bad
from recpipe.inference.serving.protocol import Array
from recpipe.inference.serving.shared import Side

DENSE = "dense"
LENGTHS = ".lengths"
"""After a feature's name: how many ids each sample has."""

MOST_IDS = 1024
"""Most ids of a request, for each sample that one may have."""


@dataclass(frozen=True)
class Asked:
    """The inputs of one request of N samples."""

    dense: Array
    """float32 [N, D]."""
    ids: list[Array]
    """int64 for each feature, one sample's after the other's."""
    lengths: list[Array]
    """int64 for each feature: [N], or [1] for what all samples share."""
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
        unknown = next((name for name in inputs if name not in self._known), None)
        if unknown is not None:
            raise bad(f"the model has no input '{shown(unknown)}'.{did_you_mean(unknown, self._known)}")
        found = {name: self._bags(name, inputs) for name in self.rows}
        dense = self._dense(inputs)
        counts = {name: len(lengths) for name, (_, lengths) in found.items()} | {DENSE: len(dense)}
        if not self.dense:
            del counts[DENSE]
        samples = max(counts.values())
        if samples > self.most_samples:
            raise bad(f"the request has {samples} samples, and {self.most_samples} is the most")
        odd = next((name for name, count in counts.items() if count not in (1, samples)), None)
        if odd is not None or 0 in counts.values():
            name = odd or next(name for name, count in counts.items() if not count)
            raise bad(f"input '{shown(name)}' has {counts[name]} samples, and another one has {samples}")
        total = sum(len(ids) * (samples // len(own)) for ids, own in found.values())
        if total > self.most_samples * MOST_IDS:
            raise bad(f"the request has {total} ids, and {self.most_samples * MOST_IDS} is the most")
        if len(dense) != samples:
            dense = np.broadcast_to(dense, (samples, dense.shape[1]))
        bags = [found[name] for name in self.rows]
        return Asked(dense, [ids for ids, _ in bags], [lengths for _, lengths in bags], samples)

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
        if not np.isfinite(found).all():
            place = np.argwhere(~np.isfinite(found))[0]
            raise bad(f"'{shown(self.dense[place[1]])}' of sample {place[0]} is not a finite number")
        with np.errstate(over="ignore"):
            dense = found.astype(np.float32)
        if not np.isfinite(dense).all():
            raise bad(f"a value of input '{DENSE}' is too large for FP32")
        return dense

    def _bags(self, name: str, inputs: Mapping[str, Array]) -> tuple[Array, Array]:
        """Ids int64 and lengths int64 of a feature."""
        found, lengths = inputs.get(name), inputs.get(name + LENGTHS)
        if found is None:
            raise bad(f"input '{shown(name)}' is missing: INT64 [N], rows of a table of {self.rows[name]}")
        if found.dtype.kind not in "iu":
            raise bad(f"input '{shown(name)}' is {found.dtype}: ids are whole numbers")
        if found.size and not (int(found.min()) >= 0 and int(found.max()) < self.rows[name]):
            wrong = next(int(i) for i in found.reshape(-1) if not 0 <= int(i) < self.rows[name])
            raise bad(f"id {wrong} of '{shown(name)}' is not in [0, {self.rows[name]})")
        ids = found.astype(np.int64)
        if lengths is None:
            if ids.ndim not in (1, 2):
                raise bad(f"input '{shown(name)}' is {list(ids.shape)}, not [N] or [N, K]")
            each = 1 if ids.ndim == 1 else ids.shape[1]
            return ids.reshape(-1), np.full(len(ids), each, np.int64)
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or ids.ndim != 1:
            raise bad(f"'{shown(name)}' and '{shown(name)}{LENGTHS}' are not vectors of whole numbers")
        if (lengths.size and int(lengths.min()) < 0) or int(lengths.sum(dtype=object)) != len(ids):
            raise bad(f"'{shown(name)}{LENGTHS}' does not add up to the {len(ids)} ids of '{shown(name)}'")
        return ids, lengths.astype(np.int64)


def _repeated(ids: Array, lengths: Array, samples: int) -> tuple[Array, Array]:
    """For all ``samples`` if it is for one."""
    return (ids, lengths) if len(lengths) == samples else (np.tile(ids, samples), np.tile(lengths, samples))


def together(asked: Sequence[Asked]) -> tuple[torch.Tensor, list[Side]]:
    """All samples of these requests in their order: dense float32 [B, D], and the ids.

    Features that the samples of every request share make a side with one bag a request.
    """
    dense = np.concatenate([one.dense for one in asked])
    every = range(len(asked[0].ids))
    shared = [f for f in every if all(len(one.lengths[f]) == 1 for one in asked)]
    if all(one.samples == 1 for one in asked):
        shared = []  # a bag a request is a bag a sample
    own = [f for f in every if f not in shared]
    sides = []
    if shared:
        counts = torch.tensor([one.samples for one in asked])
        of_sample = torch.arange(len(asked)).repeat_interleave(counts)
        bags = [(one.ids[f], one.lengths[f]) for f in shared for one in asked]
        sides.append(_side(shared, bags, len(asked), of_sample))
    if own:
        bags = [_repeated(one.ids[f], one.lengths[f], one.samples) for f in own for one in asked]
        sides.append(_side(own, bags, len(dense), None))
    return torch.from_numpy(dense), sides


def _side(
    features: Sequence[int], bags: Sequence[tuple[Array, Array]], count: int, of_sample: torch.Tensor | None
) -> Side:
    ids = torch.from_numpy(np.concatenate([ids for ids, _ in bags]))
    lengths = torch.from_numpy(np.concatenate([lengths for _, lengths in bags]))
    return Side(tuple(features), ids, lengths, count, of_sample)
