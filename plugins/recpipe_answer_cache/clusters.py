"""Users by the nearest of some centres, which are learnt from the first requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from recpipe_serve import Asked, Scorer, Tables, offsets_of

from recpipe.plugin import PluginError
from recpipe_answer_cache.keys import Keys

Floats = NDArray[np.float32]
SAMPLE = 16
"""Requests that are seen for each centre before these are learnt, at most ``MOST_SEEN``."""
MOST_SEEN = 20_000
ROUNDS = 12
"""Of k-means."""


class UserVectors:
    """The mean rows of some features of a request, side by side, by its first sample's bags.

    ``features``: their places. ``PluginError`` for a package whose rows another plugin keeps, or whose
    features have none.
    """

    def __init__(self, scorer: Scorer, features: Sequence[int]) -> None:
        if type(scorer.tables) is not Tables:
            raise PluginError(
                "plugins.answer_cache.keys: by=cluster reads rows in memory, and another plugin keeps them; "
                "leave it out"
            )
        names = [scorer.manifest["sparse"][place]["name"] for place in features]
        parts: dict[str, Any] = {}
        for lookup in scorer.manifest["lookups"]:
            parts |= {feature: table for feature, table in lookup["parts"] if feature in names}
        lacking = next((name for name in names if name not in parts), None)
        if lacking is not None:
            raise PluginError(
                f"plugins.answer_cache.keys: '{lacking}' has no rows in the package, by=cluster"
            )
        self.features = features
        found = {"pooling": "mean", "parts": [[name, parts[name]] for name in names]}
        self._lookup = scorer.lookup(found, names)

    def of(self, asked: Asked) -> Floats:
        """float32 [D]."""
        ids, counts = [], []
        for place in self.features:
            bags = asked.bags(place)
            count = bags.lengths if isinstance(bags.lengths, int) else int(bags.lengths[0])
            ids.append(bags.ids[:count])
            counts.append(count)
        with torch.inference_mode():
            rows = torch.from_numpy(np.concatenate(ids))
            found: Floats = self._lookup(rows, offsets_of(torch.tensor(counts)), 1).numpy()[0]
        return found


class UserClusters:
    """The clusters of the features that ``keys`` put into clusters.

    The coarsest level has as many as the rule says, each finer one twice as many. Centres of a coarser level
    are those of the centres of the finer one, so that who is together stays together.
    """

    def __init__(self, scorer: Scorer, keys: Keys) -> None:
        rule = keys.rule_of(keys.of_clusters[0])
        self._counts = {
            level: int(rule.at(level, keys.levels)) for level in range(rule.first, keys.levels + 1)
        }
        self._finest = rule.first
        self._features = keys.of_clusters
        self.use(scorer)
        self._seen: list[Floats] = []
        self._enough = min(MOST_SEEN, SAMPLE * self._counts[self._finest])
        self._centres: Floats | None = None
        self._coarser: dict[int, NDArray[np.int64]] = {}
        """Of each level the cluster of each of the finest level's."""

    def use(self, scorer: Scorer) -> None:
        """Take rows of another version of the package; the centres stay."""
        self._vectors = UserVectors(scorer, self._features)

    def of(self, asked: Asked, level: int) -> int | None:
        """The number of the request's cluster at a level; None as long as too few requests were seen."""
        vector = self._vectors.of(asked)
        if self._centres is None:
            self._seen.append(vector)
            if len(self._seen) < self._enough:
                return None
            self._learn()
        assert self._centres is not None
        finest = int(((self._centres - vector) ** 2).sum(axis=1).argmin())
        return int(self._coarser[max(level, self._finest)][finest])

    def _learn(self) -> None:
        points = np.stack(self._seen)
        self._seen.clear()
        self._centres, _ = k_means(points, self._counts[self._finest])
        of_finest = np.arange(len(self._centres))
        centres = self._centres
        for level, count in self._counts.items():
            if level > self._finest:
                centres, nearest = k_means(centres, count)
                of_finest = nearest[of_finest]
            self._coarser[level] = of_finest


def k_means(points: Floats, count: int) -> tuple[Floats, NDArray[np.int64]]:
    """At most ``count`` centres float32 [C, D] of ``points`` [N, D], and the nearest one of each point, int64
    [N]. The first centres are drawn, with a seed of their own."""
    rng = np.random.default_rng(0)
    distinct = np.unique(points, axis=0)
    centres = distinct[rng.permutation(len(distinct))[:count]].astype(np.float32)
    nearest = _nearest(points, centres)
    for _ in range(ROUNDS):
        sums = np.zeros(centres.shape, np.float64)
        np.add.at(sums, nearest, points)
        counts = np.bincount(nearest, minlength=len(centres))[:, None]
        centres = np.where(counts > 0, sums / np.maximum(counts, 1), centres).astype(np.float32)
        nearest = _nearest(points, centres)
    return centres, nearest


def _nearest(points: Floats, centres: Floats) -> NDArray[np.int64]:
    squares = (centres**2).sum(axis=1)
    parts = [
        (squares - 2 * points[start : start + 1024] @ centres.T).argmin(axis=1)
        for start in range(0, len(points), 1024)
    ]
    return np.concatenate(parts)
