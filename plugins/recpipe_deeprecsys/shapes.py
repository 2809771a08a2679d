"""``data=deeprecsys``: generated samples whose tables, lookups and dense inputs have any shape.

A table of ``lookups`` n is looked up exactly n times for each sample, as in the papers' models, where
``data=synthetic`` draws how often.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval, MinLen
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.validation import Positive, Text, one_of, typed
from recpipe.data.schema import LabelColumn
from recpipe.data.sources.synthetic import Popularity
from recpipe.data.sources.transforms import mix64
from recpipe.kit import NumberedDataset, SamplesConfig, Schema, SparseFeature
from recpipe.plugin import Batch

IDS = ("uniform", "skewed")
BLOCK = 256
"""Samples that are drawn together."""
_ROOT3 = 3.0**0.5


@dataclass
class Tables:
    """``count`` tables of the same shape."""

    rows: Annotated[int, Interval(ge=2, le=2**31 - 1)]
    count: Positive = 1
    lookups: Positive = 1
    """Ids of a sample, whose rows are added up."""
    history: Annotated[int, Interval(ge=0)] = 0
    """Further ids of a sample, in order, as what its first ones are compared with; 0: it has none."""


@dataclass
class ShapesConfig(SamplesConfig):
    """``conf/data/deeprecsys``."""

    samples: Positive = 100_000
    """In all splits together."""
    dense: Annotated[int, Interval(ge=0)] = 0
    """Dense inputs, normally distributed."""
    tables: Annotated[list[dict[str, Any]], MinLen(1)] = field(default_factory=list)
    """Each a ``Tables``."""
    table_scale: Annotated[float, Interval(gt=0)] = 1.0
    """Multiplies the rows of every table."""
    ids: Annotated[str, one_of(*IDS)] = "uniform"
    labels: list[Text] = field(default_factory=list)
    """Their names; []: one without a name."""


def open_shapes(config: ShapesConfig, seed: int) -> Shapes:
    """The samples of a recipe."""
    return Shapes(config, seed)


class Shapes(NumberedDataset):
    """Samples of which block i depends on the recipe, the seed and i alone.

    The logit of a click is a sum over all ids of a hash of each, and over dense inputs, so that a model that
    is trained learns something.
    """

    def __init__(self, config: ShapesConfig, seed: int) -> None:
        super().__init__(config.samples, config.eval_fraction)
        features: list[SparseFeature] = []
        self.lookups: list[int] = []
        given = [typed(Tables, own, f"data.tables[{i}]") for i, own in enumerate(config.tables)]
        each = [own for own in given for _ in range(own.count)]
        for number, own in enumerate(each):
            name, rows = f"t{number}", max(2, round(own.rows * config.table_scale))
            features.append(SparseFeature(name, rows, table=name if own.history else None))
            self.lookups.append(own.lookups)
            if own.history:
                features.append(SparseFeature(f"{name}_history", rows, table=name, sequence=own.history))
                self.lookups.append(own.history)
        dense = tuple(f"d{number}" for number in range(config.dense))
        labels = tuple(LabelColumn(name) for name in config.labels)
        self.schema: Schema = Schema(dense, tuple(features), labels)
        self._columns = np.repeat(np.arange(len(features)), self.lookups)
        """The feature of each id of a sample."""
        rows_of = np.array([feature.rows for feature in features], np.int64)
        self.draw = Ids(rows_of[self._columns], self._columns, config.ids)
        self._seed, self._labels = seed, len(labels)
        said = f"1 {asdict(config)} {seed}"
        self.fingerprint = hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    def samples_between(self, low: int, high: int) -> Batch:
        """Samples ``low`` to ``high`` (excluded)."""
        dense, ids = self._between(low, high)
        count = high - low
        lengths = np.repeat(self.lookups, count).astype(np.int32)
        values = np.concatenate(
            [np.ascontiguousarray(part).reshape(-1) for part in np.split(ids, self._ends(), axis=1)]
        )
        assert self.schema is not None
        sparse = KeyedJaggedTensor(
            keys=[feature.name for feature in self.schema.sparse],
            values=torch.from_numpy(values),
            lengths=torch.from_numpy(lengths),
        )
        return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(self._clicks(low, dense, ids)))

    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.lookups)[:-1]

    def _between(self, low: int, high: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        assert self.schema is not None
        width = len(self.schema.dense)
        dense = [np.empty((0, width), np.float32)]
        ids = [np.empty((0, len(self._columns)), np.int64)]
        for block in range(low // BLOCK, -(-high // BLOCK)):
            rng = np.random.Generator(np.random.Philox(key=[self._seed, block]))
            taken = slice(max(0, low - block * BLOCK), min(BLOCK, high - block * BLOCK))
            dense.append(rng.standard_normal((BLOCK, width), np.float32)[taken])
            ids.append(self.draw(rng, BLOCK)[taken])
        return np.concatenate(dense), np.concatenate(ids)

    def _clicks(self, low: int, dense: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Labels float32 [B] or [B, L]."""
        salts = mix64(np.arange(len(self.lookups), dtype=np.uint64))[self._columns]
        effects = mix64(ids.view(np.uint64) + salts).view(np.int64).astype(np.float64) * (_ROOT3 / 2**63)
        logits = effects.sum(1) / len(self._columns) ** 0.5 - 1.0
        if dense.shape[1]:
            logits += dense.sum(1) / dense.shape[1] ** 0.5
        places = (
            np.arange(low, low + len(ids)) + (np.arange(max(1, self._labels))[:, None] << 40) + self._seed
        )
        chance = mix64(places.astype(np.uint64))
        labels = (chance.view(np.int64) * 2.0**-64 + 0.5 < 1 / (1 + np.exp(-logits))).astype(np.float32)
        return np.ascontiguousarray(labels.T) if self._labels else labels[0]


class Ids:
    """Draws ids for columns of tables with so many ``rows`` [C]: ``uniform``, or ``skewed`` as
    ``data=synthetic`` has them, by the class that the number of each column's feature gives it."""

    def __init__(self, rows: NDArray[np.int64], features: NDArray[np.int64], how: str) -> None:
        self.rows = rows
        self._popularity = Popularity(rows, features) if how == "skewed" else None

    def __call__(self, rng: np.random.Generator, samples: int) -> NDArray[np.int64]:
        """int64 [samples, C]."""
        if self._popularity is None:
            return rng.integers(0, self.rows, (samples, len(self.rows)))
        return self._popularity.ids(self._popularity.ranks(rng.random((samples, len(self.rows)))))
