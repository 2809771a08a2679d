"""Which ids get a row of their own: after so many sightings, counted exactly or by a sketch, or by chance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.data.sources.transforms import mix64
from recpipe.plugin.tables import Growth

Keys = NDArray[np.int64]
DEPTH = 4
"""Counters of each id in a sketch."""


class Sightings(ABC):
    """How often ids without a row were seen."""

    @abstractmethod
    def add(self, keys: Keys, counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], Any]:
        """Note that the distinct ``keys`` were seen so many times more; how often they were seen so far, and
        what ``undo`` takes."""

    @abstractmethod
    def leave(self, keys: Keys) -> None:
        """Forget ``keys``, which have got rows."""

    @abstractmethod
    def undo(self, before: Any) -> None:
        """Undo the latest ``add`` that has not been undone, and the ``leave`` after it."""

    @abstractmethod
    def copied(self) -> Sightings:
        """A copy."""

    @abstractmethod
    def arrays(self) -> dict[str, NDArray[Any]]:
        """What is saved."""

    @abstractmethod
    def load(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Go on from what was saved."""


class ExactSightings(Sightings):
    """A count for each id that was seen, for as long as it waits: some 100 bytes each."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, keys: Keys, counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
        before = [(key, self.counts.get(key, 0)) for key in keys.tolist()]
        total = counts + np.array([count for _, count in before], np.int64)
        self.counts.update(zip(keys.tolist(), total.tolist(), strict=True))
        return total, before

    def leave(self, keys: Keys) -> None:
        for key in keys.tolist():
            del self.counts[key]

    def undo(self, before: list[tuple[int, int]]) -> None:
        for key, count in before:
            if count:
                self.counts[key] = count
            else:
                self.counts.pop(key, None)

    def copied(self) -> ExactSightings:
        made = ExactSightings()
        made.counts = dict(self.counts)
        return made

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"waiting": np.array(sorted(self.counts.items()), np.int64).reshape(-1, 2)}

    def load(self, arrays: dict[str, NDArray[Any]]) -> None:
        self.counts = dict(arrays["waiting"].tolist())


class SketchedSightings(Sightings):
    """A count-min sketch of bytes, which never says too few (up to 255), and too many where ids share all
    their counters. An id that has got a row stays counted. Cormode and Muthukrishnan, 2005."""

    def __init__(self, width: int, seed: int) -> None:
        self.cells = np.zeros((DEPTH, width), np.uint8)
        rng = np.random.default_rng([seed, 0x5E7C])
        self._odd = rng.integers(0, 2**63, (DEPTH, 1), np.uint64) * np.uint64(2) + np.uint64(1)

    def add(self, keys: Keys, counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], Any]:
        places = self._places(keys)
        before = places, np.take_along_axis(self.cells, places, 1)
        for cells, own in zip(self.cells, places, strict=True):
            changed, which = np.unique(own, return_inverse=True)
            more = np.bincount(which, counts)
            cells[changed] = np.minimum(cells[changed] + more, 255)
        return np.take_along_axis(self.cells, places, 1).min(0).astype(np.int64), before

    def leave(self, keys: Keys) -> None:
        pass  # what others have added to its counters cannot be told apart

    def undo(self, before: tuple[NDArray[np.int64], NDArray[np.uint8]]) -> None:
        np.put_along_axis(self.cells, *before, 1)

    def copied(self) -> SketchedSightings:
        made = SketchedSightings(1, 0)
        made.cells, made._odd = self.cells.copy(), self._odd
        return made

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"sketch": self.cells}

    def load(self, arrays: dict[str, NDArray[Any]]) -> None:
        self.cells = arrays["sketch"]

    def _places(self, keys: Keys) -> NDArray[np.int64]:
        mixed = mix64(keys.view(np.uint64))[None] * self._odd
        width = np.uint64(self.cells.shape[1])
        return (((mixed >> np.uint64(32)) * width) >> np.uint64(32)).astype(np.int64)


def sightings_of(growth: Growth, capacity: int, seed: int) -> Sightings | None:
    """What counts the sightings of ids that wait; None if none has to."""
    if growth.admit_after == 1:
        return None
    return ExactSightings() if growth.admit_by == "exact" else SketchedSightings(max(64, capacity // 2), seed)


def by_chance(keys: Keys, probability: float, seed: int, now: int) -> NDArray[np.bool_]:
    """Whether each of ``keys`` has luck in batch ``now``, with this probability."""
    stream = mix64(mix64(np.array([seed], np.uint64)) + np.uint64(now))
    units = mix64(keys.view(np.uint64) ^ stream) >> np.uint64(11)
    return units.astype(np.float64) < probability * 2.0**53
