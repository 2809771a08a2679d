"""Scores requests together: those that wait are one batch for the model, within a budget of time.

A model whose rows are not all in memory is told what waits for the next batch, and reads it while one is
scored.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import NamedTuple

import numpy as np
import torch

from recpipe.inference.serving.errors import Refused
from recpipe.inference.serving.forms import Asked, together
from recpipe.inference.serving.protocol import Array
from recpipe.inference.serving.shared import Side

log = logging.getLogger("recpipe")
SOON = 5e-3
"""Seconds: a batch that is expected to take no longer is scored by the thread of the event loop, which other
requests then wait for. A hand-over to another thread and back costs a tenth of a millisecond and more."""
Score = Callable[..., torch.Tensor]
"""Scores float32 [B] or [B, T] of dense features and ids (``RequestScorer``). If it has an ``ahead`` that is
not None, it takes a function, too, which it calls between its lookups and the rest."""


@dataclass(frozen=True)
class Limits:
    """How requests are put together."""

    batch: int = 1024
    """Most samples of a batch; a larger request is a batch of its own."""
    wait: float = 0.0
    """Seconds that a batch which is not full waits for more requests, from its first one's arrival. With 0,
    what has come while the batch before was scored is put together."""
    queue: int = 256
    """Most requests that wait; another one is refused with 503."""
    deadline: float = 1.0
    """Seconds after which a request that still waits is refused with 504, unless the client wants it
    sooner."""


@dataclass
class _Waiting:
    asked: Asked
    scores: asyncio.Future[Array]
    since: float
    until: float


class _Together(NamedTuple):
    """Requests put together as the model takes them."""

    asked: list[Asked]
    dense: torch.Tensor
    sides: list[Side]


@dataclass
class Batcher:
    """A queue of requests, and the one thread that scores those that take long.

    ``saw``: called with the number of requests and samples of each batch.
    """

    score: Score
    limits: Limits
    saw: Callable[[int, int], None] = lambda requests, samples: None
    scored: Callable[[Sequence[Side], Array], None] | None = None
    """Called with each batch's ids and scores, after its requests have been answered."""
    _queue: deque[_Waiting] = field(default_factory=deque)
    _closing: bool = False
    _next: _Together | None = None
    """What waited for the next batch when it was read ahead; the thread that scores has it."""
    _each: float = float("inf")
    """Seconds that a sample of the latest batches took, rather less than more."""

    def start(self) -> None:
        """Begin to score, in the running event loop."""
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "scores")
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return not self._closing and not self._task.done()

    async def scores(self, asked: Asked, timeout: float | None = None) -> Array:
        """Scores float32 [N] or [N, T]. ``Refused`` if the queue is full, or the deadline passes while the
        request waits."""
        if self._closing:
            raise Refused(503, "stopping", "the server is stopping")
        if len(self._queue) >= self.limits.queue:
            raise Refused(503, "queue_full", f"{self.limits.queue} requests wait already; try again later")
        now = monotonic()
        patience = self.limits.deadline if timeout is None else min(timeout, self.limits.deadline)
        found: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(asked, found, now, now + patience))
        self._arrived.set()
        return await found

    async def close(self) -> None:
        """Score what waits, then stop."""
        self._closing = True
        self._arrived.set()
        await self._task
        self._thread.shutdown()

    async def _run(self) -> None:
        while self._queue or not self._closing:
            await self._arrived.wait()
            await self._fill()
            batch = self._take()
            if not batch:
                continue
            self.saw(len(batch), sum(one.asked.samples for one in batch))
            await self._answer(batch)
            await asyncio.sleep(0)  # requests that have come meanwhile are read before the next batch

    async def _answer(self, batch: list[_Waiting]) -> None:
        """Score a batch; if that fails, each of its requests, so that one's fault is not another's."""
        loop = asyncio.get_running_loop()
        asked = [one.asked for one in batch]
        try:
            if self._soon(sum(one.samples for one in asked)):
                sides, scores = self._scored(asked)
            else:
                sides, scores = await loop.run_in_executor(self._thread, self._scored, asked)
        except Exception as fault:
            if len(batch) == 1:
                _fail(batch[0], fault)
                return
            for one in batch:
                await self._answer([one])
            return
        ends = np.cumsum([one.samples for one in asked])
        for one, own in zip(batch, np.split(scores, ends[:-1]), strict=True):
            if not one.scores.done():  # the client may have gone
                one.scores.set_result(own)
        if self.scored is not None:
            loop.call_soon(self.scored, sides, scores)  # after those whom set_result wakes

    async def _fill(self) -> None:
        """Wait until the batch is full, or its first request has waited long enough."""
        while self._queue and not self._closing:
            left = self._queue[0].since + self.limits.wait - monotonic()
            if left <= 0 or sum(one.asked.samples for one in self._queue) >= self.limits.batch:
                return
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return

    def _take(self) -> list[_Waiting]:
        """The next batch, without requests whose client has gone or whose deadline has passed."""
        batch: list[_Waiting] = []
        samples, now = 0, monotonic()
        while self._queue:
            one = self._queue[0]
            if one.scores.done():
                self._queue.popleft()
            elif now > one.until:
                _fail(self._queue.popleft(), Refused(504, "deadline", "the deadline passed in the queue"))
            elif batch and samples + one.asked.samples > self.limits.batch:
                break
            else:
                batch.append(self._queue.popleft())
                samples += one.asked.samples
        if self._queue or self._closing:
            self._arrived.set()
        else:
            self._arrived.clear()
        return batch

    def _scored(self, asked: list[Asked]) -> tuple[list[Side], Array]:
        found, self._next = self._next, None
        if found is None or not _same(found.asked, asked):
            found = _Together(asked, *together(asked))
        began = perf_counter()
        between = () if self._ahead is None else (self._read_ahead,)
        scores = self.score(found.dense, found.sides, *between).numpy()
        each = (perf_counter() - began) / len(found.dense)
        self._each = each if each < self._each else self._each + (each - self._each) / 8
        return found.sides, scores

    def _soon(self, samples: int) -> bool:
        """Whether a batch of so many is expected to be scored within ``SOON``."""
        return self._each * samples <= SOON and self._ahead is None

    @property
    def _ahead(self) -> Callable[[Sequence[Side]], None] | None:
        """Reads rows ahead, if the scorer can."""
        return getattr(self.score, "ahead", None)

    def _read_ahead(self) -> None:
        """Have the rows read of the requests that wait for the next batch, in the thread that scores. They
        are put together once: mostly it is they who are scored next."""
        try:
            asked = self._waiting()
            if asked and self._ahead is not None:
                self._next = _Together(asked, *together(asked))
                self._ahead(self._next.sides)
        except Exception:
            log.exception("rows could not be read ahead")

    def _waiting(self) -> list[Asked]:
        """The requests of the next batch, as far as they have come."""
        found: list[Asked] = []
        samples, now = 0, monotonic()
        for one in self._queue.copy():  # another thread's, who goes on meanwhile
            if one.scores.done() or now > one.until:
                continue
            samples += one.asked.samples
            if found and samples > self.limits.batch:
                break
            found.append(one.asked)
        return found


def _same(one: Sequence[Asked], other: Sequence[Asked]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _fail(one: _Waiting, fault: Exception) -> None:
    if not one.scores.done():
        one.scores.set_exception(fault)
