"""Generated clicks with skewed ids and a planted click model; any number of samples, none of them stored."""

from __future__ import annotations

import hashlib
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.common import machine
from recpipe.data.columns import BatchMaker, Columns, Float32, MultiHot, concatenate, offsets_of
from recpipe.data.config import SyntheticConfig
from recpipe.data.dataset import NumberedDataset
from recpipe.data.preparation import Preparation
from recpipe.data.schema import Schema
from recpipe.data.sources.transforms import mix64
from recpipe.errors import UserError, shown
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import SparseFeature

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
        for name, size in tables.items():
            if size * config.table_scale >= 2**31:
                raise UserError(
                    f"data.table_scale={config.table_scale} makes table {shown(name)} larger than 2147483647 "
                    "rows; lower it"
                )
        scaled = {name: max(2, round(rows * config.table_scale)) for name, rows in tables.items()}
        own = config.pooling
        self.pooling = own if isinstance(own, list) else [own] * len(scaled)
        if len(self.pooling) != len(scaled):
            raise UserError(f"data.pooling lists {len(self.pooling)} features, but there are {len(scaled)}")
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


POSITIVE_RATE = 0.22
# Standard deviation of the logit. With it the click probability itself ranks clicks at an AUC of 0.83.
LOGIT_SCALE = 1.65
# Shares of the logit's variance before scaling: dense values, single ids, pairs of ids.
DENSE_SHARE, ID_SHARE, PAIR_SHARE = 0.3, 0.5, 0.2
_ROOT3 = 3.0**0.5


def id_traits(ids: NDArray[np.int64], salts: NDArray[np.uint64]) -> tuple[Float32, Float32]:
    """Two independent numbers per id, uniform with mean 0 and variance 1: its own effect and its part in
    pairs.

    They are hashes of (table, id): popular and rare ids have similar effects, and nothing is stored.
    """
    keys = ids.view(np.uint64) + salts
    words = mix64(keys).view(np.int32).reshape(*keys.shape, 2).astype(np.float32)
    words *= np.float32(_ROOT3 / 2**31)
    return words[..., 0], words[..., 1]


class ClickModel:
    """Log-odds of a click: a + b * (dense part + id effects + products of the traits of paired features)."""

    def __init__(self, dense: int, features: int, seed: int) -> None:
        rng = np.random.default_rng([seed, 0xC11C])
        self.salts = rng.integers(0, 2**63, features, dtype=np.uint64)
        self._linear = _unit(rng.normal(size=dense)).astype(np.float32) * 0.8
        self._square = _unit(rng.normal(size=dense)).astype(np.float32) * 0.6 / 2**0.5
        self._weights = _unit(rng.uniform(0.5, 1.5, features)).astype(np.float32)
        order = rng.permutation(features)
        half = min(features // 2, 4)
        self._left, self._right = order[:half], order[half : 2 * half]
        self._bias, self._scale = 0.0, 1.0

    def raw(self, dense: Float32, effects: Float32, traits: Float32) -> Float32:
        """The logit before calibration [n], from dense [n, D], effects [n, F] and traits [n, F]."""
        score = dense @ self._linear + (dense * dense - 1.0) @ self._square
        score *= np.float32(DENSE_SHARE**0.5)
        score += np.float32(ID_SHARE**0.5) * (effects @ self._weights)
        if len(self._left):
            pairs = (traits[:, self._left] * traits[:, self._right]).sum(1)
            score += np.float32((PAIR_SHARE / len(self._left)) ** 0.5) * pairs
        return np.asarray(score, np.float32)

    def calibrate(self, raw: Float32) -> None:
        """Choose scale and bias so that ``raw`` scores of a sample give ``POSITIVE_RATE`` clicks."""
        self._scale = float(LOGIT_SCALE / max(raw.std(), 1e-6))
        low, high = -30.0, 30.0
        for _ in range(50):
            self._bias = (low + high) / 2 - self._scale * float(raw.mean())
            rate = float(self.probability(raw).mean())
            low, high = ((low + high) / 2, high) if rate < POSITIVE_RATE else (low, (low + high) / 2)

    def probability(self, raw: Float32) -> Float32:
        """Click probabilities of raw scores."""
        logit = raw * np.float32(self._scale) + np.float32(self._bias)
        return np.asarray(1.0 / (1.0 + np.exp(-logit)), np.float32)


def _unit(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    return vector / np.linalg.norm(vector)


# 26 tables of mixed sizes, 980,290 rows in all.
TABLE_ROWS = (
    *(4000, 900, 200000, 120000, 600, 100, 12000, 1500, 3, 40000, 6000, 180000, 3000),
    *(50, 15000, 140000, 12, 6000, 2500, 200, 160000, 25, 400, 50000, 8000, 30000),
)
# (s, b) of each class, q = R^b; None: q = 0.
CLASSES: tuple[tuple[float, float | None], ...] = ((1.33, 0.735), (0.89, None), (2.6, 0.745))


class Popularity:
    """How often each id is looked up: a power law per table, fitted to published reuse histograms. Draws ids
    for F tables at once; the arithmetic broadcasts over a last axis of length F.

    In a table of R rows the density of the (continuous) popularity rank x in [1, R + 1) is proportional to
    (x + q)^-s (Zipf-Mandelbrot), and the rank is its whole part. Tables take one of three classes of (s, q)
    in turn. Constants and table sizes are fitted to Meta's histogram of a batch of 65,536 samples over 856
    tables (2021) in facebookresearch/dlrm_datasets (MIT): the share of distinct ids and of lookups for each
    reuse count up to 1, 2, 4, ... 32768. For 65,536 samples the generator stays within 0.017 of the published
    CDF over ids and within 0.022 of the one over lookups, with 6.8 lookups per distinct id (published: 6.9).
    For the 2022 histogram (131,072 samples, 788 tables), which was not used in the fit, it is 0.087 and
    0.045.
    """

    def __init__(self, rows: NDArray[np.int64], first_class: NDArray[np.int64]) -> None:
        classes = [CLASSES[index % len(CLASSES)] for index in first_class]
        self.rows = rows.astype(np.int64)
        shift = [0.0 if b is None else float(r) ** b for (_, b), r in zip(classes, rows, strict=True)]
        self._shift = np.array(shift)
        self._power = np.array([1.0 - s for s, _ in classes])
        self._low = (1.0 + self._shift) ** self._power
        self._span = (rows + 1.0 + self._shift) ** self._power - self._low
        self._inverse = 1.0 / self._power
        self._step = np.array([_coprime(int(r)) for r in rows], np.int64)
        self._start = (self.rows * 7) // 10

    def ranks(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """Popularity ranks from 0 (the most popular id) for uniform numbers [..., F] in [0, 1)."""
        place = uniform * self._span
        place += self._low
        np.log(place, out=place)
        place *= self._inverse
        np.exp(place, out=place)
        place -= self._shift
        ranks: NDArray[np.int64] = place.astype(np.int64)
        ranks -= 1
        np.clip(ranks, 0, self.rows - 1, out=ranks)
        return ranks

    def ids(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids of ranks, by an affine permutation of the rows, so that popular ids are scattered."""
        ids = ranks * self._step
        ids += self._start
        ids %= self.rows
        return ids


def _coprime(rows: int) -> int:
    """A multiplier near the golden section of ``rows`` that has no divisor in common with it."""
    step = max(1, round(rows * 0.6180339887))
    while gcd(step, rows) != 1:
        step += 1
    return step
