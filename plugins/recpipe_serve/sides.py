"""A user beside candidates: what is of each side is made inputs once, and what is of both for each pair."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recpipe.answers.candidates import sides_in
from recpipe.data.preparation import Preparation
from recpipe_serve.batching.forms import Array
from recpipe_serve.http.raw import DENSE, LENGTHS, WEIGHTS, RawValues

Places = NDArray[np.int64]
"""Of candidates, in the order of the index."""


class Pairs(Sequence[Mapping[str, Any]]):
    """The raw values of a user beside those of each candidate, made when they are asked for."""

    def __init__(self, user: Mapping[str, Any], items: pa.Table, places: Places) -> None:
        self.user, self.items, self.places = user, items, places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, at: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Mapping[str, Any]]: ...
    def __getitem__(self, at: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        return {**self.user, **self.items.slice(int(self.places[at]), 1).to_pylist()[0]}


class Side:
    """The features of these ``names`` among those of ``preparation``, made of raw values."""

    def __init__(self, preparation: Preparation, names: Collection[str]) -> None:
        assert preparation.features is not None
        features = preparation.features.alone(names)
        self.preparation, self.names = Preparation.of(features, preparation.learned), {*names}
        self.columns, self.raw = sorted({*features.inputs}), RawValues(self.preparation)

    def inputs(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
        """The inputs of rows of raw values, of which it reads its own columns; dense ones by their names."""
        own = [{name: row[name] for name in self.columns if name in row} for row in rows]
        return self.named(self.raw.inputs(own))

    @cached_property
    def own(self) -> list[str]:
        """The names of its inputs, whether or not there are some."""
        features, ends = self.raw.features, ("", LENGTHS, WEIGHTS)
        dense = [f"{DENSE}.{name}" for f in features.dense if f.name in self.names for name in f.names]
        return dense + [f.name + end for f in features.sparse if f.name in self.names for end in ends]

    def named(self, made: Mapping[str, Array]) -> dict[str, Array]:
        """What ``raw`` has made, dense inputs by their names."""
        found: dict[str, Array] = {}
        at = 0
        for feature in self.raw.features.dense:
            for name in feature.names:
                if feature.name in self.names:
                    found[f"{DENSE}.{name}"] = made[DENSE][:, at]
                at += 1
        for feature in self.raw.features.sparse:
            if feature.name in self.names:
                found |= {n: made[n] for end in ("", LENGTHS, WEIGHTS) if (n := feature.name + end) in made}
        return found


class Beside:
    """Makes a model's inputs of one user and some of the candidates: what is of the candidates alone was made
    beforehand, what is of the user alone is made once, and only what is of both is made for each pair."""

    def __init__(self, preparation: Preparation, items: pa.Table) -> None:
        assert preparation.features is not None
        self.features, self.items = preparation.features, items
        sides = sides_in(self.features, items.column_names)
        self._own = {side: Side(preparation, names) for side, names in sides.items() if names}
        self.columns = {*self.features.inputs} - {*items.column_names}
        """Those of the user."""
        self._items: dict[str, Array] = {}
        if "item" in self._own:
            own = self._own["item"]
            (batch,) = items.select(own.columns).combine_chunks().to_batches()
            self._items = own.named(own.raw.of_batch(batch))

    @property
    def user(self) -> Side | None:
        """The features of the user alone; None: there are none."""
        return self._own.get("user")

    def inputs(
        self, user: Mapping[str, Any], made: Mapping[str, Array], places: Places | None
    ) -> dict[str, Array]:
        """The tensors that ``Features`` takes, for each of the candidates at ``places``; None: for the user
        alone, with any values of candidates. ``made``: the inputs of ``user``'s features."""
        found = dict(made)
        if places is None:
            found |= self._any_candidate()
        else:
            found |= _taken(self._items, places)
            if "both" in self._own:
                found |= self._own["both"].inputs(Pairs(user, self.items, places))
        dense = [found.pop(f"{DENSE}.{name}") for f in self.features.dense for name in f.names]
        if dense:
            found[DENSE] = np.stack(np.broadcast_arrays(*dense), axis=1).astype(np.float32)
        return found

    def _any_candidate(self) -> dict[str, Array]:
        """One id of each feature that is not the user's alone, and numbers of 0."""
        found: dict[str, Array] = {}
        for side in ("item", "both"):
            for feature in self.features.dense:
                if side in self._own and feature.name in self._own[side].names:
                    found |= {f"{DENSE}.{name}": np.zeros(1, np.float32) for name in feature.names}
            for feature in self.features.sparse:
                if side in self._own and feature.name in self._own[side].names:
                    found[feature.name] = np.zeros(1, np.int64)
                    found |= {feature.name + WEIGHTS: np.ones(1, np.float32)} if feature.weights else {}
        return found


class Users:
    """Makes the inputs of a user for two models: once for both, where they read features alike."""

    def __init__(self, *models: Beside) -> None:
        self._sides = [model.user for model in models]
        one, other = self._sides
        joined = None if one is None or other is None else one.preparation.joined(other.preparation)
        self._both: Side | None = None
        if one is not None and other is not None and joined is not None:
            self._both = Side(joined, one.names | other.names)

    def __call__(self, user: Mapping[str, Any]) -> list[dict[str, Array]]:
        """The inputs of each model's features of the user alone, of their raw values. ``Refused`` for what
        cannot be."""
        if self._both is None:
            return [{} if side is None else side.inputs([user]) for side in self._sides]
        made = self._both.inputs([user])
        return [{} if s is None else {n: made[n] for n in s.own if n in made} for s in self._sides]


def _taken(inputs: Mapping[str, Array], places: Places) -> dict[str, Array]:
    """The inputs of the candidates at ``places``."""
    found: dict[str, Array] = {}
    for name, values in inputs.items():
        of = name.removesuffix(WEIGHTS)
        lengths = inputs.get(of + LENGTHS)
        if lengths is None or name.endswith(LENGTHS):
            found[name] = values[places]
            continue
        counts = lengths[places]
        starts = (np.cumsum(lengths) - lengths)[places] - (np.cumsum(counts) - counts)
        found[name] = values[np.repeat(starts, counts) + np.arange(counts.sum())]
    return found
