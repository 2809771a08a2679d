"""Generated clicks with skewed ids and a planted click model; any number of samples, none of them stored."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from recpipe.common import machine
from recpipe.data.batch import Batch
from recpipe.data.columns import BatchMaker, Columns, Float32, MultiHot, concatenate, offsets_of
from recpipe.data.config import SyntheticConfig
from recpipe.data.dataset import NumberedDataset, Schema, SparseFeature
from recpipe.data.preparation import Preparation
from recpipe.data.sources.clicks import ClickModel, id_traits
from recpipe.data.sources.skew import TABLE_ROWS, Popularity
from recpipe.errors import UserError, shown

DENSE_FEATURES = 13
BLOCK = 8192
CALIBRATED = 32_768
"""Samples that the click model is calibrated on."""
_VERSION = 1
# The number of the block that the click model is calibrated on; no sample of the data is in it.
_CALIBRATION = 2**62


class SyntheticDataset(NumberedDataset):
    """Samples from a counter-based generator: block i depends on the recipe, the seed and i alone.

    Samples therefore depend neither on the batch size nor on where reading starts, and any position costs the
    same. Blocks are generated whole, so a trainer's share of a batch costs less than the batch only if the
    batch is larger than a block. ``pooling`` 1 makes one-hot features; p > 1 makes bags of 1 to 2p - 1 ids, p
    on average.
    """

    def __init__(self, config: SyntheticConfig, seed: int) -> None:
        super().__init__(config.samples, config.eval_fraction)
        tables = config.tables or {f"C{index + 1}": rows for index, rows in enumerate(TABLE_ROWS)}
        for name, rows in tables.items():
            if rows * config.table_scale >= 2**31:
                raise UserError(
                    f"data.table_scale={config.table_scale} makes table {shown(name)} larger than 2147483647 "
                    "rows; lower it"
                )
        scaled = {name: max(2, round(rows * config.table_scale)) for name, rows in tables.items()}
        self.pooling = _pooling(config.pooling, len(scaled))
        needed = {"generated ids": 4 * CALIBRATED * sum(p for p in self.pooling if p > 1)}
        machine.require(needed, torch.device("cpu"), "lower data.pooling")
        dense = tuple(f"I{index + 1}" for index in range(DENSE_FEATURES))
        self.schema = Schema(dense, tuple(SparseFeature(name, rows) for name, rows in scaled.items()))
        self.rejected_rows = 0
        lists = tuple(name for name, p in zip(scaled, self.pooling, strict=True) if p > 1)
        self.preparation = Preparation("unchanged", "unchanged", lists=lists)
        identity = f"{_VERSION} {self.schema} {self.pooling} {config.samples} {config.eval_fraction!r} {seed}"
        self.fingerprint = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        self._seed = seed
        self._prepare()

    def _prepare(self) -> None:
        features = self.schema.sparse
        rows = np.array([feature.rows for feature in features], np.int64)
        self._single = np.flatnonzero(np.array(self.pooling) == 1)
        self._multi = np.flatnonzero(np.array(self.pooling) > 1)
        self._draw_single = Popularity(rows[self._single], self._single)
        self._draw_multi = {index: Popularity(rows[[index]], np.array([index])) for index in self._multi}
        self._make = BatchMaker(self.schema, [features[index].name for index in self._multi])
        self._cached: tuple[int, Columns] | None = None
        self._clicks = ClickModel(DENSE_FEATURES, len(features), self._seed)
        _, raw = self._features(
            np.random.Generator(np.random.Philox(key=[self._seed, _CALIBRATION])), CALIBRATED
        )
        self._clicks.calibrate(raw)

    def samples_between(self, low: int, high: int) -> Batch:
        """Samples ``low`` to ``high`` (excluded), generated at the time of the call."""
        return self._make(self.columns(low, high))

    def columns(self, low: int, high: int) -> Columns:
        """Samples ``low`` to ``high`` (excluded) of the whole sequence, train and eval."""
        parts: list[Columns] = []
        while low < high or not parts:
            index, offset = divmod(low, BLOCK)
            stop = min(BLOCK, offset + high - low)
            parts.append(self._block(index)[offset:stop])
            low += stop - offset
        return concatenate(parts)

    def probabilities(self, low: int, high: int) -> Float32:
        """The true click probabilities of samples ``low`` to ``high``: the best any model can predict."""
        columns = self.columns(low, high)
        return self._clicks.probability(self._score(columns))

    def _block(self, index: int) -> Columns:
        cached = self._cached
        if cached is None or cached[0] != index:
            rng = np.random.Generator(np.random.Philox(key=[self._seed, index]))
            columns, raw = self._features(rng, BLOCK)
            chance = rng.random(BLOCK, np.float32)
            columns.labels = (chance < self._clicks.probability(raw)).astype(np.float32)
            self._cached = cached = (index, columns)
        return cached[1]

    def _features(self, rng: np.random.Generator, size: int) -> tuple[Columns, Float32]:
        """Unlabelled samples and their raw click scores."""
        dense = rng.standard_normal((size, DENSE_FEATURES), np.float32)
        single = self._draw_single.ids(self._draw_single.ranks(rng.random((size, len(self._single)))))
        bags = {}
        for index, draw in self._draw_multi.items():
            lengths = rng.integers(1, 2 * self.pooling[index], size)
            uniform = rng.random((int(lengths.sum()), 1))
            values = draw.ids(draw.ranks(uniform))[:, 0].astype(np.int32)
            bags[self.schema.sparse[index].name] = MultiHot(values, offsets_of(lengths))
        columns = Columns(np.zeros(size, np.float32), dense, single.astype(np.int32), bags)
        return columns, self._score(columns)

    def _score(self, columns: Columns) -> Float32:
        """Raw click scores. A bag's trait is the mean of its ids' traits times the square root of the mean
        bag size."""
        shape = (len(columns), len(self.schema.sparse))
        effects, traits = np.empty(shape, np.float32), np.empty(shape, np.float32)
        salts = self._clicks.salts
        pair = id_traits(columns.ids.astype(np.int64), salts[self._single])
        effects[:, self._single], traits[:, self._single] = pair
        for index in self._multi:
            bag = columns.bags[self.schema.sparse[index].name].trimmed()
            lengths = np.diff(bag.offsets)
            for target, values in zip(
                (effects, traits), id_traits(bag.values.astype(np.int64), salts[index]), strict=True
            ):
                sums = np.add.reduceat(values, bag.offsets[:-1])
                target[:, index] = sums / lengths * np.float32(self.pooling[index] ** 0.5)
        return self._clicks.raw(columns.dense, effects, traits)


def _pooling(value: int | list[int], features: int) -> list[int]:
    """Mean bag length of each feature, from one number for all or a list with one for each."""
    pooling = value if isinstance(value, list) else [value] * features
    if len(pooling) != features:
        raise UserError(f"data.pooling lists {len(pooling)} features, but there are {features}")
    return pooling
