"""For several trainers: runs the oracle in a separate thread, which reads batches ahead of training and plans
them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from recpipe.plugin import Batch
from recpipe_bagpipe.oracle import OraclePlan, Rows
from recpipe_bagpipe.reading import ReadAhead
from recpipe_bagpipe.waiting import Waiting

S = TypeVar("S")
Lookups = tuple[Rows, ...]
"""For each trainer, the rows that its share of a batch looks up."""


def slack(lookahead: int, cleanup: int, around: int) -> int:
    """How many planned batches may wait to be asked for. ``around`` other streams read from this one; each
    reads a window ahead of training and lets some planned batches wait too."""
    return 2 * cleanup + around * (lookahead + 3 * cleanup + 2)


class Ahead(ReadAhead, Generic[S]):
    """One stream of batches: ``batches`` yields them to training, ``steps`` yields what is made of their
    plans.

    Different threads read the two.
    """

    def __init__(
        self,
        source: Iterator[Batch],
        lookups: Callable[[Batch], Lookups],
        plan: Callable[[Iterator[Lookups]], Iterator[OraclePlan]],
        step: Callable[[OraclePlan], S],
        slack: int,
    ) -> None:
        super().__init__(source)
        self.slack = slack
        """How many planned batches may wait to be asked for before the oracle pauses."""
        self._lookups, self._plan, self._step = lookups, plan, step
        self._unplanned: deque[Waiting] = deque()
        self._steps: deque[S] = deque()

    def steps(self, accept: Callable[[S], bool]) -> Iterator[S]:
        """The next steps, up to the first that is not accepted; waits for them."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._steps or self._done)
                if not self._steps:
                    self._check()
                    return
                if not accept(self._steps[0]):
                    return
                step = self._steps.popleft()
                self._changed.notify_all()
            yield step

    def _read(self) -> None:
        for plan in self._plan(self._reading()):
            self._hand_over(self._step(plan))
            if self._stopped:
                break

    def _reading(self) -> Iterator[Lookups]:
        for batch in self._source:
            if self._stopped:
                return
            self._unplanned.append(self._waits(batch, small=False))
            yield self._lookups(batch)

    def _hand_over(self, step: S) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._steps) < self.slack or self._stopped)
            self._batches.append(self._unplanned.popleft())
            self._steps.append(step)
            self._changed.notify_all()
