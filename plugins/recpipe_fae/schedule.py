"""The Shuffle Scheduler: decides which share of a class trains before the other class's turn."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recpipe.kit import Damaged, entries, within
from recpipe.plugin import PluginError

FALLS = 4
"""After so many falls of the held-out loss in a row the rate doubles."""


@dataclass(frozen=True)
class Segment:
    """Mini-batches ``start`` to ``stop`` of one class."""

    hot: bool
    start: int
    stop: int


def plan(rates: Sequence[float], cold: int, hot: int, final: float | None = None) -> list[Segment]:
    """The epoch's segments at ``rates`` (percent, one per segment), then the remaining ones at ``final``, if
    given.

    Cold and hot take turns, cold first. A segment takes the share of its class given by its rate. Once one
    class is used up, the rest of the other is one segment. Segments without a batch are left out.
    """
    sizes, done, segments = {False: cold, True: hot}, {False: 0.0, True: 0.0}, list[Segment]()
    kind = False
    while min(done.values()) < 100:
        if len(segments) >= len(rates) and final is None:
            break
        rate = rates[len(segments)] if len(segments) < len(rates) else final
        assert rate is not None
        if done[kind] < 100:
            alone = done[not kind] >= 100 or not sizes[not kind]
            start = int(sizes[kind] * done[kind] / 100)
            done[kind] = 100.0 if alone else min(100.0, done[kind] + rate)
            stop = int(sizes[kind] * done[kind] / 100)
            if stop > start:
                segments.append(Segment(kind, start, stop))
        kind = not kind
    return segments


class Scheduler:
    """Adapts rates to the held-out loss; shared by the training thread and the loader's."""

    def __init__(self, rate: float, adapts: bool) -> None:
        self.start, self.adapts = rate, adapts
        self.rate = rate
        self.rates = [rate]
        """The decided rates of this epoch's segments."""
        self.history: list[float] = [rate]
        self.losses: list[float] = []
        self.falls = 0
        self.swaps = 0
        self.trained = 0
        """How many batches of this epoch have been trained."""
        self._stopped = False
        self._changed = threading.Condition()

    def observe(self, loss: float) -> float:
        """Update the rate after a swap: halve it if ``loss`` rose, double it after four falls in a row."""
        if self.losses:
            if loss > self.losses[-1]:
                self.rate, self.falls = max(1.0, self.rate / 2), 0
            else:
                self.falls = self.falls + 1 if loss < self.losses[-1] else 0
                if self.falls == FALLS:
                    self.rate, self.falls = min(100.0, self.rate * 2), 0
        self.losses.append(loss)
        self.history.append(self.rate)
        return self.rate

    def decide(self, loss: float, *, epoch_ends: bool) -> None:
        """Publish the rate of the next segment; the loader may be waiting for it."""
        with self._changed:
            rate = self.observe(loss)
            self.rates = [rate] if epoch_ends else [*self.rates, rate]
            self._changed.notify_all()

    def segment(self, number: int, start: int, cold: int, hot: int) -> Segment | None:
        """The epoch's segment ``number``, waiting for its rate; None after the last, or when stopped.

        ``start`` counts the batches before it. The last of them is in training when a loader that is one
        batch ahead asks. If more were missing, the decision would wait for this very batch.
        """
        if not self.adapts:
            return _at(plan([], cold, hot, self.start), number)
        with self._changed:
            if len(self.rates) <= number and self.trained < start - 1 and not self._stopped:
                raise PluginError(
                    f"plugins.fae.schedule=true decides after training batch {start}, but another plugin's "
                    f"stream asks for the next one after {self.trained}; set plugins.fae.schedule=false, or "
                    "drop that plugin"
                )
            self._changed.wait_for(lambda: self._stopped or len(self.rates) > number)
            return None if self._stopped else _at(plan(self.rates, cold, hot), number)

    def stop(self) -> None:
        """Release a waiting loader, since no decision will come."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def go(self) -> None:
        """Note that training starts, so that decisions will come."""
        with self._changed:
            self._stopped = False

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on."""
        return {name: getattr(self, name) for name in _STATE}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """``Damaged`` if the state cannot be a result of ``state_dict()``."""
        found = entries(_STATE, state)
        for name in ("falls", "swaps", "trained"):
            within(found, name, 0)
        for rate in (found["rate"], *found["rates"]):
            if not 0 < rate <= 100:
                raise Damaged(f"a rate is {rate}, not above 0 and at most 100")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for name, value in state.items():
            setattr(self, name, list(value) if isinstance(value, list) else value)


_STATE = {
    "rate": float,
    "rates": list[float],
    "history": list[float],
    "losses": list[float],
    "falls": int,
    "swaps": int,
    "trained": int,
}
"""The entries of a ``Scheduler`` in a checkpoint, and their types."""


def _at(segments: list[Segment], number: int) -> Segment | None:
    return segments[number] if number < len(segments) else None
