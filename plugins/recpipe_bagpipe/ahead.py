"""For several trainers: runs the oracle in a separate thread, which reads batches ahead of training and plans
them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from recpipe.kit import Batch
from recpipe_bagpipe.oracle import OraclePlan, Rows
from recpipe_bagpipe.waiting import size_of

S = TypeVar("S")
Lookups = tuple[Rows, ...]
"""For each trainer, the rows that its share of a batch looks up."""


def slack(lookahead: int, cleanup: int, around: int) -> int:
    """How many planned batches may wait to be asked for. ``around`` other streams read from this one; each
    reads a window ahead of training and lets some planned batches wait too."""
    return 2 * cleanup + around * (lookahead + 3 * cleanup + 2)


class Ahead(Generic[S]):
    """One stream of batches: ``batches`` yields them to training, ``steps`` yields what is made of their
    plans.

    Different threads read the two. Planning starts when the first batch is asked for.
    """

    def __init__(
        self,
        source: Iterator[Batch],
        lookups: Callable[[Batch], Lookups],
        plan: Callable[[Iterator[Lookups]], Iterator[OraclePlan]],
        step: Callable[[OraclePlan], S],
        slack: int,
    ) -> None:
        self.slack = slack
        """How many planned batches may wait to be asked for before the oracle pauses."""
        self.peak_bytes = 0
        """The most bytes of batches that have waited here at the same time."""
        self._source, self._lookups, self._plan, self._step = source, lookups, plan, step
        self._changed = threading.Condition()
        self._read: deque[Batch] = deque()
        self._batches: deque[Batch] = deque()
        self._steps: deque[S] = deque()
        self._bytes = 0
        self._done = False
        self._stopped = False
        self._fault: BaseException | None = None

    def batches(self) -> Iterator[Batch]:
        """The batches of the source, in order; raises the errors of reading and planning."""
        threading.Thread(target=self._run, name="recpipe-oracle", daemon=True).start()
        try:
            while (batch := self._next_batch()) is not None:
                yield batch
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()

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

    def _next_batch(self) -> Batch | None:
        with self._changed:
            self._changed.wait_for(lambda: self._batches or self._done)
            if not self._batches:
                self._check()
                return None
            batch = self._batches.popleft()
            self._bytes -= size_of(batch)
            return batch

    def _check(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _run(self) -> None:
        try:
            for plan in self._plan(self._reading()):
                self._hand_over(self._step(plan))
                if self._stopped:
                    break
        except BaseException as fault:
            self._fault = fault
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _reading(self) -> Iterator[Lookups]:
        for batch in self._source:
            if self._stopped:
                return
            with self._changed:
                self._read.append(batch)
                self._bytes += size_of(batch)
                self.peak_bytes = max(self.peak_bytes, self._bytes)
            yield self._lookups(batch)

    def _hand_over(self, step: S) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._steps) < self.slack or self._stopped)
            self._batches.append(self._read.popleft())
            self._steps.append(step)
            self._changed.notify_all()
