"""Similarity caching, to compare with: the answer of the nearest request within a radius is given."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from recpipe_serve import Asked, Scorer

from recpipe.errors import UserError
from recpipe_answer_cache.cache import InFront
from recpipe_answer_cache.clusters import UserVectors

Floats = NDArray[np.float32]
NEIGHBOURS = 16
"""Of a vector in the graph that is searched."""


class SimilarityCache(InFront):
    """Answers by the mean rows of the features at ``user``, and dense values, within Euclidean distance
    ``radius``. What is not the user's must be equal. No answer gives way; none is inferred again."""

    def __init__(self, scorer: Scorer, user: Sequence[int], radius: float) -> None:
        try:
            import faiss
        except ImportError as fault:
            raise UserError("similarity caching needs FAISS: pip install 'recpipe[retrieval]'") from fault
        self._faiss: Any = faiss
        self.radius = radius
        self._vectors = UserVectors(scorer, user)
        self._items = [n for n in range(len(scorer.manifest["sparse"])) if n not in user]
        self._indices: dict[bytes, tuple[Any, list[Floats]]] = {}
        self.nearest: list[float] = []
        """Distances to the nearest, where there was one."""

    def find(self, asked: Asked) -> tuple[Floats | None, tuple[bytes, Floats]]:
        """The nearest answer, or None; and by what to keep another."""
        vector = np.concatenate([self._vectors.of(asked), asked.dense[0]]).reshape(1, -1)
        items = blake2b(asked.samples.to_bytes(4, "little"), digest_size=16)
        for place in self._items:
            items.update(asked.ids[asked.form.slices[place]].tobytes())
        key = items.digest()
        index, answers = self._indices.get(key, (None, []))
        if answers:
            squares, places = index.search(vector, 1)
            distance = float(np.sqrt(max(0.0, squares[0, 0])))
            self.nearest.append(distance)
            if distance <= self.radius:
                return answers[places[0, 0]], (key, vector)
        return None, (key, vector)

    def keep(self, ticket: tuple[bytes, Floats], scores: Floats) -> None:
        """Keep what the model gave."""
        key, vector = ticket
        if key not in self._indices:
            self._indices[key] = self._faiss.IndexHNSWFlat(vector.shape[1], NEIGHBOURS), []
        index, answers = self._indices[key]
        index.add(vector)
        answers.append(scores.copy())
