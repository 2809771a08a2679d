"""What a run has done so far, noted at most ``INTERVALS`` times, from which the report's series are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from recpipe.plugin.collection import TableCollection, TierFigures
from recpipe.report.record import Series, rate

INTERVALS = 120
"""Most intervals of a run."""


@dataclass(frozen=True)
class _Sum:
    """Sums at the end of a step: of the whole run ``step``, ``samples`` and ``seconds``; of this part the
    others."""

    step: int
    samples: int
    seconds: float
    trained: int
    """Samples of this part."""
    done: int
    """Steps of this part."""
    loss: torch.Tensor
    """The sum of the steps' losses; on a GPU it is read when the run is over."""
    moved: tuple[int, int] | None
    """Bytes read and written; None if all rows are resident."""
    found: tuple[int, int] | None
    """Lookups and hits; None if they are not counted."""


class Intervals:
    """Notes sums after every ``every`` steps; if there are too many, forgets every other one and doubles
    ``every``."""

    def __init__(self, tables: TableCollection) -> None:
        self.tables = tables
        self.every = 1
        self._sums: list[_Sum] = []
        self._steps = self._noted = 0

    def begin(self, step: int, samples: int, seconds: float, loss: torch.Tensor) -> None:
        """Start before the first step of this part."""
        self._steps, self._sums = 0, []
        self.note(step, samples, seconds, 0, loss)

    def due(self) -> bool:
        """Count a step; whether its sums are to be noted."""
        self._steps += 1
        return self._steps % self.every == 0

    @property
    def complete(self) -> bool:
        """Whether the sums after the last step are noted."""
        return self._noted == self._steps

    def note(self, step: int, samples: int, seconds: float, trained: int, loss: torch.Tensor) -> None:
        """Note the sums after this step."""
        self._noted = self._steps
        moved, found = _of_tiers(self.tables.tier_figures())
        self._sums.append(_Sum(step, samples, seconds, trained, self._steps, loss, moved, found))
        if len(self._sums) > INTERVALS + 1 and self._steps % self.every == 0:
            self._sums = self._sums[::2]  # without the latest
            self.every, self._noted = 2 * self.every, -1

    def series(self, step_seconds: Sequence[float]) -> Series:
        """The differences between neighbouring sums; ``step_seconds``: of each step of this part."""
        sums, pairs = self._sums[1:], list(pairwise(self._sums))
        found = Series(
            step=[s.step for s in sums],
            steps=_differences([s.step for s in self._sums]),
            samples=[s.samples for s in sums],
            seconds=[_short(s.seconds) for s in sums],
            samples_per_second=[
                _short(rate(new.trained - old.trained, sum(step_seconds[old.done : new.done])))
                for old, new in pairs
            ],
            loss=[_short(float(new.loss - old.loss) / (new.step - old.step)) for old, new in pairs],
        )
        moved = [s.moved for s in self._sums if s.moved is not None]
        found.bytes_read, found.bytes_written = (_differences([m[n] for m in moved]) for n in (0, 1))
        counted = [s.found for s in self._sums if s.found is not None]
        found.lookups, found.hits = (_differences([c[n] for c in counted]) for n in (0, 1))
        return found


def _of_tiers(tiers: TierFigures | None) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """``moved`` and ``found`` as they are now: counters go on counting."""
    if tiers is None:
        return None, None
    moved = tiers.io.bytes_read, tiers.io.bytes_written
    return moved, None if tiers.lookups is None or tiers.hits is None else (tiers.lookups, tiers.hits)


def _differences(values: Sequence[int]) -> list[int]:
    return [new - old for old, new in pairwise(values)]


def _short(value: float) -> float:
    """Six digits, which keep report.json small."""
    return float(f"{value:.6g}")
