"""How likely each id is to be the next sample's, estimated as samples arrive: of streams nothing is counted
beforehand (Yi et al., "Sampling-bias-corrected neural modeling for large corpus item recommendations", 2019).

An id that comes every n-th sample has the chance 1 / n, so the mean distance to its sample before is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.common.loops import compiled
from recpipe.data.columns import Float32, Int64
from recpipe.data.sources.transforms import mix64

SLOTS = 1 << 19
"""Of each of the ``HASHES``; ids that share one look more frequent than they are."""
HASHES = 2
"""Slots of an id, of which the one that looks least frequent counts."""
RECENT = 100
"""Of so many of an id's latest distances a mean is about; of the first ones it is the mean of all."""
KEPT = 64
"""Batches that can be undone, beside those read ahead."""


class _Change(NamedTuple):
    """What was in the ``slots`` int64 [m] that a batch has changed, and how many samples there were."""

    slots: Int64
    latest: Int64
    distance: Float32
    seen: NDArray[np.int32]
    samples: int


class Frequencies:
    """Of each id of one feature, the mean distance between samples that have it, in a table of fixed size.

    Batches come in the order of training, maybe ahead of it: ``state_after`` goes back. Both may be called by
    different threads.
    """

    def __init__(self) -> None:
        self._latest = np.zeros(HASHES * SLOTS, np.int64)
        self._distance = np.zeros(HASHES * SLOTS, np.float32)
        self._seen = np.zeros(HASHES * SLOTS, np.int32)
        self._samples = self._batches = 0
        self._changes: deque[_Change] = deque()
        self._lock = Lock()

    def log_q(self, keys: Int64, missing: NDArray[np.bool_], ahead: int = 0) -> Float32:
        """The next batch's ids ``keys`` [n], of which some are ``missing``: the logarithm of the chance of
        each, float32 [n], this batch included; of missing ones 0. ``ahead``: batches that may be read before
        they are trained."""
        slots = _slots(keys)
        touched = np.unique(slots[:, ~missing])
        with self._lock:
            parts = self._latest[touched], self._distance[touched], self._seen[touched]
            self._changes.append(_Change(touched, *parts, self._samples))
            while len(self._changes) > KEPT + ahead:
                self._changes.popleft()
            _count(slots.ravel(), missing, self._samples, self._latest, self._distance, self._seen)
            self._samples += len(keys)
            self._batches += 1
            found = self._distance[slots].max(axis=0)
        return np.where(missing, 0, -np.log(np.maximum(found, 1))).astype(np.float32)

    def state_after(self, batches: int) -> dict[str, torch.Tensor]:
        """What was known after so many batches, in copies."""
        with self._lock:
            state: dict[str, NDArray[Any]] = {
                "latest": self._latest.copy(),
                "distance": self._distance.copy(),
                "seen": self._seen.copy(),
            }
            samples, undone = self._samples, self._batches - batches
            for change in [*self._changes][len(self._changes) - undone :][::-1]:
                for name, array in state.items():
                    array[change.slots] = getattr(change, name)
                samples = change.samples
        made = {name: torch.from_numpy(array) for name, array in state.items()}
        return made | {"samples": torch.tensor(samples)}

    @classmethod
    def resumed(cls, batches: int, state: Mapping[str, torch.Tensor]) -> Frequencies:
        """What ``state_after(batches)`` has given; of {} as if no sample had come."""
        found = cls()
        found._batches = batches
        if not state:
            return found
        found._latest, found._distance, found._seen = (
            state[name].numpy().copy() for name in ("latest", "distance", "seen")
        )
        found._samples = int(state["samples"])
        return found


def _slots(keys: Int64) -> Int64:
    """The slots of ``keys`` [n], int64 [``HASHES``, n]."""
    mixed = mix64(keys.astype(np.uint64))
    own = [(mixed >> np.uint64(32 * n)) % np.uint64(SLOTS) + np.uint64(n * SLOTS) for n in range(HASHES)]
    return np.stack(own).astype(np.int64)


@compiled
def _count(
    slots: NDArray[np.int64],
    missing: NDArray[np.bool_],
    samples: int,
    latest: NDArray[np.int64],
    distance: NDArray[np.float32],
    seen: NDArray[np.int32],
) -> None:
    """Count a batch's samples, those after the first ``samples``, one after another. ``slots``: those by the
    first hash of all samples, then those by the next one."""
    size = len(missing)
    for place in range(size):
        if missing[place]:
            continue
        number = samples + place + 1
        for own in range(place, len(slots), size):
            slot = slots[own]
            if seen[slot] < RECENT:
                seen[slot] += 1
            distance[slot] += np.float32((number - latest[slot] - distance[slot]) / seen[slot])
            latest[slot] = number
