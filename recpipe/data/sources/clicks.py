"""The planted click model of the synthetic data, which a model can learn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recpipe.data.columns import Float32
from recpipe.data.sources.transforms import mix64

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
