"""Decides by measured times whether a mechanism that may make training steps shorter does so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from statistics import fmean, median

from recpipe.common.machine import Load, disturbance

WATCHED = 16
"""Steps without the mechanism over which the most that it could save is measured."""
RARE = 2
"""So many of these steps, those that it could save most of, are left out: what delays single steps, as many
new rows at once, is no reason to change all."""
LEAST = 0.03
"""The share of the time that it must be able to save, or it is not tried."""
BLOCK = 6
"""Steps in turn with and without it while it is tried ..."""
SETTLING = 2
"""... of which the first ones do not count: they are of batches that were read before the change."""
PAIRS = 5
"""The most pairs of blocks of one trial."""
CLEAR = 0.08
"""From the second pair on, the trial ends if steps with it are shorter or longer by more than this share."""
COSTLY = 1.25
"""It ends after the first pair if steps with it take more than so many times as long."""
WORTH = 0.98
"""It stays on if a step with it takes at most this share of the time of one without it."""
HOLD = 250
"""Steps after a trial until the next one, at first; each trial doubles them."""
OUTLIER = 3.0
"""Steps so many times longer than the median are left out: an evaluation or a checkpoint came between."""


class Phase(Enum):
    """What the next steps are for."""

    WATCH = "without the mechanism, to see what it could save"
    TRIAL = "with and without it in turn"
    HOLD = "as decided"


class Trial:
    """``on`` says whether to use the mechanism; ``step`` may change it after a trained step.

    The steps at which it may change do not depend on measured times, and all decisions are made of
    ``agreed`` values, so that several trainers decide alike. ``agreed`` gives the largest of a value over all
    of them; it is called by all of them after the same steps.

    ``load`` gives the machine's load, and None to each of several trainers. A decision that was found while
    other programs used the machine is not kept for long: the next trial comes as soon as the one after it
    would have.
    """

    def __init__(
        self,
        agreed: Callable[[float], float] = lambda value: value,
        load: Callable[[], Load | None] = lambda: None,
    ) -> None:
        self.on = False
        self.steps = 0
        self.decided = 0
        """The number of steps at the end of the last trial; 0 before."""
        self.with_it = self.without = 0.0
        """Mean seconds of a step in the last trial."""
        self.disturbed = ""
        """What disturbed the last trial; empty: nothing."""
        self._load, self._began = load, load()
        self.watched = 0
        """How many times ``could_save`` was measured."""
        self.could_save = 0.0
        """The share of the time that it could have saved, in the last steps that were watched, without those
        that are rare."""
        self._agreed = agreed
        self._phase = Phase.WATCH
        self._left = WATCHED
        self._hold = HOLD
        self._saved: list[float] = []
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._block: list[float] = []
        self._blocks = 0

    @property
    def compares(self) -> bool:
        """Whether it trains with and without the mechanism in turn."""
        return self._phase is Phase.TRIAL

    def step(self, seconds: float, saving: float) -> None:
        """Note a trained step: its ``seconds``, and the most of them that the mechanism could have saved (if
        it was off)."""
        self.steps += 1
        self._block.append(seconds)
        self._saved.append(min(saving, seconds))
        self._left -= 1
        if self._left:
            return
        if self._phase is Phase.WATCH:
            self.watched += 1
            usually = sorted(zip(self._saved, self._block, strict=True))[:-RARE]
            saved, total = (sum(each) for each in zip(*usually, strict=True))
            self.could_save = self._agreed(saved / max(total, 1e-9))
            self._begin(Phase.TRIAL if self.could_save >= LEAST else Phase.WATCH)
        elif self._phase is Phase.TRIAL:
            self._tried()
        else:
            self._begin(Phase.TRIAL if self.on else Phase.WATCH)

    def _begin(self, phase: Phase) -> None:
        self._phase = phase
        self._left = {Phase.WATCH: WATCHED, Phase.TRIAL: BLOCK, Phase.HOLD: self._hold}[phase]
        self._block, self._saved = [], []
        if phase is Phase.TRIAL:
            self._began = self._load()
            self._times, self._blocks = {True: [], False: []}, 0
            self.on = not self.on

    def _tried(self) -> None:
        """A block of the trial has ended: judge after each pair of them, or try the other way."""
        self._times[self.on] += usual(self._block[SETTLING:])
        self._block, self._saved, self._left = [], [], BLOCK
        self._blocks += 1
        pairs, odd = divmod(self._blocks, 2)
        if not odd:
            self.with_it, self.without = (self._agreed(fmean(self._times[on])) for on in (True, False))
            ratio = self.with_it / max(self.without, 1e-9)
            if (ratio > COSTLY if pairs == 1 else abs(ratio - 1) > CLEAR) or pairs >= PAIRS:
                self.on, self.decided, now = ratio <= WORTH, self.steps, self._load()
                self.disturbed = disturbance(None if now is None else now.others_since(self._began))
                self._begin(Phase.HOLD)
                self._hold *= 1 if self.disturbed else 2
                return
        self.on = not self.on


def usual(seconds: Sequence[float]) -> list[float]:
    """``seconds`` without those far above the median."""
    limit = OUTLIER * median(seconds)
    return [each for each in seconds if each <= limit]
