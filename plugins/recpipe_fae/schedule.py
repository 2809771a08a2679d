"""The Shuffle Scheduler: decides which share of a class trains before the other class's turn."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recpipe.kit import Damaged, entries, within
from recpipe.plugin import PluginError

FALLS = 4
"""After so many falls of the slice's loss in a row the rate doubles."""
TRIAL_RATE = 10.0
"""Percent of each class that train before ``phases=auto`` judges whether separating pays."""
TRIAL_BATCHES = 8
"""At least so many mini-batches of the smaller class are in that trial, if it has as many."""


@dataclass(frozen=True)
class Sizes:
    """How many mini-batches each class has; the last ``cold_tail`` and ``hot_tail`` of them hold the slice
    and train at the epoch's end."""

    cold: int
    hot: int
    cold_tail: int = 0
    hot_tail: int = 0

    @property
    def all(self) -> int:
        """The number of mini-batches of an epoch."""
        return self.cold + self.hot

    @property
    def trial_rate(self) -> float:
        """Percent of each class in the trial of ``phases=auto``."""
        smaller = min(self.cold - self.cold_tail, self.hot - self.hot_tail)
        return min(100.0, max(TRIAL_RATE, 100 * TRIAL_BATCHES / max(1, smaller)))


@dataclass(frozen=True)
class Segment:
    """Mini-batches ``start`` to ``stop`` of one class."""

    hot: bool
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def plan(rates: Sequence[float], sizes: Sizes, final: float | None = None) -> tuple[list[Segment], bool]:
    """The epoch's segments at ``rates`` (percent, one per segment), then the remaining ones at ``final``, if
    given; and whether these are all of them.

    Cold and hot take turns, cold first. A segment takes the share of its class given by its rate. Once one
    class is used up, the rest of the other is one segment. The mini-batches with the slice come last, the
    cold ones before the hot ones. Segments without a batch are left out.
    """
    counts = {False: sizes.cold - sizes.cold_tail, True: sizes.hot - sizes.hot_tail}
    done, segments = {False: 0.0, True: 0.0}, list[Segment]()
    kind = False
    while min(done.values()) < 100:
        if len(segments) >= len(rates) and final is None:
            return segments, False
        rate = rates[len(segments)] if len(segments) < len(rates) else final
        assert rate is not None
        if done[kind] < 100:
            alone = done[not kind] >= 100 or not counts[not kind]
            start = int(counts[kind] * done[kind] / 100)
            done[kind] = 100.0 if alone else min(100.0, done[kind] + rate)
            stop = int(counts[kind] * done[kind] / 100)
            if stop > start:
                segments.append(Segment(kind, start, stop))
        kind = not kind
    tails = (Segment(False, counts[False], sizes.cold), Segment(True, counts[True], sizes.hot))
    return segments + [tail for tail in tails if len(tail)], True


class Scheduler:
    """Decides rates, and whether to go on with phases; shared by the training thread and the loader's."""

    def __init__(self, rate: float, adapts: bool, tries: bool = False) -> None:
        self.start, self.adapts, self.tries = rate, adapts, tries
        """The start rate; whether the slice's loss changes it; whether a trial decides on phases."""
        self.rate = rate
        self.rates: list[float] | None = None
        """The decided rates of this epoch's segments; None: no segment has been asked for."""
        self.history: list[float] = [rate]
        self.losses: list[float] = []
        self.falls = 0
        self.swaps = 0
        self.trained = 0
        """How many batches of this epoch have been trained."""
        self.judged = not tries
        """Whether it has been decided if phases go on."""
        self.plain_from: int | None = None
        """From which batch of the epoch on samples train in the data's order; None: mini-batches are
        separated."""
        self.stopped = False
        """Whether no decision will come any more."""
        self._changed = threading.Condition()

    def plan(self, sizes: Sizes) -> tuple[list[Segment], bool]:
        """The epoch's segments as far as they are decided, and whether these are all of them."""
        if self.rates is None:  # a run's first epoch begins with the trial's
            first = min(self.rate, sizes.trial_rate) if self.tries else self.rate
            self.rates = [first] if self.adapts else [first] * 2 if self.tries else []
        return plan(self.rates, sizes, None if self.adapts else self.start)

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

    def decide(self, loss: float) -> None:
        """Publish the rate of the next segment; the loader may be waiting for it."""
        with self._changed:
            rate = self.observe(loss)
            assert self.rates is not None, "a segment has been trained"
            self.rates = [*self.rates, rate if self.judged else min(rate, self.rates[0])]
            self._changed.notify_all()

    def judge(self, separate: bool) -> None:
        """End the trial: go on in phases, or from here on in the data's order."""
        with self._changed:
            self.judged = True
            self.plain_from = None if separate else self.trained
            self._changed.notify_all()

    def end_epoch(self) -> None:
        """Begin the next epoch with the current rate."""
        with self._changed:
            self.trained = 0
            self.rates = [self.rate] if self.adapts else []
            self.plain_from = None if self.plain_from is None else 0

    def segment(self, number: int, start: int, sizes: Sizes) -> Segment | None:
        """The epoch's segment ``number``, waiting for the decisions before it; None if samples train in the
        data's order from here on, or when stopped.

        ``start`` counts the batches before it. The last of them is in training when a loader that is one
        batch ahead asks. If more were missing, the decision would wait for this very batch.
        """

        def plain() -> bool:
            return self.plain_from is not None and start >= self.plain_from

        def known() -> bool:
            if plain():
                return True
            segments, complete = self.plan(sizes)
            return (complete or len(segments) > number) and (self.judged or number < 2)

        with self._changed:
            if not known() and self.trained < start - 1 and not self.stopped:
                raise PluginError(
                    f"plugins.fae decides after training batch {start}, but another plugin's stream asks for "
                    f"the next one after {self.trained}; set plugins.fae.schedule=false and "
                    "plugins.fae.phases=always, or drop that plugin"
                )
            self._changed.wait_for(lambda: self.stopped or known())
            if self.stopped or plain():
                return None
            return self.plan(sizes)[0][number]

    def stop(self) -> None:
        """Release a waiting loader, since no decision will come."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def go(self) -> None:
        """Note that training starts, so that decisions will come."""
        with self._changed:
            self.stopped = False

    def state_dict(self) -> dict[str, Any]:
        """Everything that later decisions depend on."""
        return {name: getattr(self, name) for name in _STATE}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """``Damaged`` if the state cannot be a result of ``state_dict()``."""
        found = entries(_STATE, state)
        for name in ("falls", "swaps", "trained"):
            within(found, name, 0)
        if found["plain_from"] is not None:
            within(found, "plain_from", 0, found["trained"] + 1)
        for rate in (found["rate"], *(found["rates"] or ())):
            if not 0 < rate <= 100:
                raise Damaged(f"a rate is {rate}, not above 0 and at most 100")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for name in _STATE:
            value = state[name]
            setattr(self, name, list(value) if isinstance(value, list) else value)


_STATE = {
    "rate": float,
    "rates": list[float] | None,
    "history": list[float],
    "losses": list[float],
    "falls": int,
    "swaps": int,
    "trained": int,
    "judged": bool,
    "plain_from": int | None,
}
"""The entries of a ``Scheduler`` in a checkpoint, and their types."""
