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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import is_
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from recpipe_serve.answer_server import AnswerServer
from recpipe_serve.batching.forms import Array, Asked, sides_of, together
from recpipe_serve.batching.pace import Pace
from recpipe_serve.batching.scorer import Side
from recpipe_serve.batching.statistics import Took
from recpipe_serve.config import ServeConfig
from recpipe_serve.errors import Refused

log = logging.getLogger("recpipe")
SOON = 5e-3
"""Seconds: a batch that is expected to take no longer is scored by the thread of the event loop, which other
requests then wait for. A hand-over to another thread and back costs a tenth of a millisecond and more."""
UNSEEN, LATER = 2048, 0.25
"""Samples, and seconds, after which the monitor is told what was scored: many batches at once cost it hardly
more than one."""
IDLE = 2e-3
"""Seconds without a request after which one is scored as it comes: it is hardly one of several that came at
once, for which a turn of the event loop would be waited."""
Score = Callable[..., torch.Tensor]
"""Scores float32 [B] or [B, T] of dense features and ids (``RequestScorer``). If it has an ``ahead`` that is
not None, it takes a function, too, which it calls between its lookups and the rest; its ``at_hand`` says
whether it can score at once; its ``correct`` (``Corrected``), if it has one, corrects what it says."""


class _Batch(NamedTuple):
    """Requests put together as the model takes them."""

    asked: list[Asked]
    dense: torch.Tensor
    sides: list[Side]


@dataclass
class Batcher:
    """A queue of requests, and the one thread that scores those that take long. With ``wait_ms=0``, what has
    come while the batch before was scored is put together.

    ``saw``: called with the number of requests and samples of each batch; ``took``: with how long one took
    that was scored.
    """

    score: Score
    config: ServeConfig
    saw: Callable[[int, int], None] = lambda requests, samples: None
    took: Callable[[Took], None] = lambda batch: None
    scored: Callable[[Sequence[Side], Array], None] | None = None
    """Called with the ids and scores of some batches, some time after their requests have been answered
    (``tell``)."""
    answers: AnswerServer | None = None
    """What requests are put to before the model."""
    within: Callable[[Sequence[Asked]], AbstractContextManager[None]] | None = None
    """In which requests are scored (``Spans.within``)."""
    queue: deque[Asked] = field(default_factory=deque)
    """Requests that wait."""
    alive: bool = False
    """Whether requests are taken."""
    beside: bool = False
    """Whether the event loop's thread, which answers others, scores nothing."""
    _due: bool = False
    """Whether ``_turn`` will be called at once."""
    _busy: bool = False
    """Whether the thread scores a batch."""
    _filling: asyncio.TimerHandle | None = None
    """Ends the wait of a batch that is not full."""
    _unseen: list[tuple[Asked, Array]] = field(default_factory=list)
    """Requests and their scores that ``scored`` has not been told of, and their samples."""
    _unseen_samples: int = 0
    _next: _Batch | None = None
    """Requests that were put together before it was known who scores them; whoever scores has it."""
    _ended: float = 0.0
    """When a request came last, or a batch was answered."""
    _drained: list[asyncio.Future[None]] = field(default_factory=list)
    """Those who wait for the end of the batch that is being scored."""
    _scoring: int = 0
    """Samples of the batch that the thread scores."""
    _spent: tuple[float, float] = (0.0, 0.0)
    """Seconds in which the latest batch was put together, and scored."""
    _pace: Pace = field(default_factory=Pace)
    """How long batches take."""
    _each: float = float("inf")
    """Seconds that a sample of the latest batches took, rather less than more."""

    def start(self) -> None:
        """Begin to score, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "scores")
        self.alive = True

    def put(
        self,
        asked: Asked,
        done: Callable[[Array | Exception], None],
        timeout: float | None = None,
        priority: int | None = None,
    ) -> None:
        """Have a request scored. ``done`` is called in the event loop with its scores, float32 [N] or [N, T],
        or with why there are none: ``Refused`` if the deadline passes while it waits, or if one of a higher
        ``priority`` (1 is the highest, None the lowest) takes its place in a full queue. ``Refused`` if the
        queue is full, or if those before it are expected to take longer than it can wait."""
        if not self.alive:
            raise Refused(503, "stopping", "the server is stopping")
        if self.answers is not None and asked.taught is None:
            found, ticket = self.answers.find(asked)
            asked.done = done
            if found is not None:
                self._answer([asked], found)
                return
            part = None if ticket is None else self.answers.lacking(asked, ticket)
            if part is not None:
                part.whole, part.span = asked, asked.span
                asked = part
            asked.ticket = ticket
        now = monotonic()
        patience = self.config.deadline_ms / 1e3
        if timeout is not None:  # the client's
            patience = min(timeout, patience)
        asked.done, asked.since, asked.until = done, now, now + patience
        levels = self.config.priorities
        asked.level = levels if priority is None else min(max(priority, 1), levels)
        self._enqueue(asked, patience)
        idle, self._ended = now - self._ended > IDLE, now
        if idle and not self._due and not self._busy:
            self._turn()
        else:
            self._wake()

    def _enqueue(self, asked: Asked, patience: float) -> None:
        """Let a request wait behind those of its level; ``Refused`` if that cannot help it."""
        place = len(self.queue)
        while place and self.queue[place - 1].level > asked.level:
            place -= 1
        if self.config.shed and place:
            before = sum([one.samples for one in islice(self.queue, place)]) + self._scoring
            if self._pace.expected(before, self.config.batch) > patience:
                raise Refused(
                    503, "overload", "those before it take longer than the request can wait; try again later"
                )
        if len(self.queue) >= self.config.queue:
            if place == len(self.queue):
                raise Refused(
                    503, "queue_full", f"{self.config.queue} requests wait already; try again later"
                )
            self.queue.pop().done(Refused(503, "priority", "one of a higher priority took its place"))
        if place == len(self.queue):
            self.queue.append(asked)
        else:
            self.queue.insert(place, asked)

    async def close(self) -> None:
        """Score what waits, then stop."""
        self.alive = False
        while self.queue or self._busy:
            self._wake()
            await asyncio.sleep(1e-3)
        self.tell()
        self._thread.shutdown()

    def drained(self) -> asyncio.Future[None]:
        """Done once no batch is being scored that has been taken by now; later ones may be."""
        done: asyncio.Future[None] = self._loop.create_future()
        if self._busy:
            self._drained.append(done)
        else:
            done.set_result(None)
        return done

    def whole_again(self) -> None:
        """Have waiting requests, of which another version of the model has answered a part, scored as a
        whole: no answer mixes two versions."""
        for n, one in enumerate(self.queue):
            if one.whole is not None:
                whole = one.whole
                whole.done, whole.since, whole.until, whole.alone = one.done, one.since, one.until, one.alone
                whole.level = one.level
                self.queue[n] = whole

    def encode_anew(self, encoded: Callable[[Asked], Asked]) -> None:
        """Have the waiting requests ``encoded`` again, for what scores them from now on."""
        for one in list(self.queue):
            try:
                anew = encoded(one)
            except Refused as fault:
                self.queue.remove(one)
                one.done(fault)
                continue
            if anew is one:
                continue
            # Another object: what was put together of the one before is not this.
            anew.done, anew.since, anew.until, anew.alone = one.done, one.since, one.until, one.alone
            anew.taught, anew.level, anew.span = one.taught, one.level, one.span
            self.queue[self.queue.index(one)] = anew

    def _wake(self) -> None:
        """Take the next batch once the requests that have come by now are read."""
        if not self._due and not self._busy:
            self._due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._due = False
        if self._busy or not self._full():
            return
        # The next batch, without requests whose deadline has passed.
        batch: list[Asked] = []
        samples, now = 0, monotonic()
        while self.queue:
            one = self.queue[0]
            if now > one.until:
                self.queue.popleft().done(Refused(504, "deadline", "the deadline passed in the queue"))
            elif batch and (one.alone or batch[0].alone or samples + one.samples > self.config.batch):
                break
            else:
                batch.append(self.queue.popleft())
                samples += one.samples
        if batch:
            self.saw(len(batch), samples)
            soon = self._each * samples <= SOON and not self.beside
            if soon and self._at_hand(batch):
                try:
                    self._answer_batch(batch, now, self._scored(self.score, batch, False))
                except Exception as fault:
                    self._failed(batch, fault)
            else:
                self._busy, self._scoring = True, samples
                scored = self._loop.run_in_executor(self._thread, self._scored, self.score, batch, True)
                scored.add_done_callback(partial(self._scored_there, batch, now))
        if self.queue:
            self._wake()

    def _scored_there(self, batch: list[Asked], taken: float, scored: asyncio.Future[Array]) -> None:
        """The thread has scored a batch, which was ``taken`` then, or failed to."""
        self._busy, self._scoring = False, 0
        waiting, self._drained = self._drained, []
        for done in waiting:
            if not done.done():
                done.set_result(None)
        fault = scored.exception()
        if fault is None:
            self._answer_batch(batch, taken, scored.result())
        elif isinstance(fault, Exception):
            self._failed(batch, fault)
        if self.queue:
            self._wake()

    def _answer_batch(self, batch: list[Asked], taken: float, scores: Array) -> None:
        """Answer the requests of a batch that was ``taken`` then, and say how long it took."""
        began = perf_counter()
        self._answer(batch, scores)
        waited = taken * len(batch) - sum([one.since for one in batch])
        samples = sum([one.samples for one in batch])
        self.took(Took(len(batch), samples, waited, *self._spent, perf_counter() - began))

    def _answer(self, batch: list[Asked], scores: Array) -> None:
        self._ended, end = monotonic(), 0
        for one in batch:
            start, end = end, end + one.samples
            asked, answer = one, scores[start:end]
            if one.whole is not None:
                assert self.answers is not None
                asked, answer = one.whole, self.answers.completed(one.ticket, answer)
                asked.lacking = one.lacking
            one.done(answer)
            if one.ticket is not None and not one.lacking:
                self._keep(one.ticket, scores[start:end])
            if self.scored is None or one.taught is not None:
                continue
            if not self._unseen:
                self._loop.call_later(LATER, self.tell)
            elif self._unseen_samples < UNSEEN <= self._unseen_samples + asked.samples:
                self._loop.call_soon(self.tell)  # after the answers
            self._unseen.append((asked, answer))
            self._unseen_samples += asked.samples

    def _keep(self, ticket: Any, scores: Array) -> None:
        """Give what was just answered to what stands in front of the model."""
        assert self.answers is not None
        try:
            self.answers.keep(ticket, scores)
        except Exception:
            log.exception("an answer could not be kept")

    def tell(self) -> None:
        """Tell ``scored`` of all requests that it has not been told of."""
        unseen, self._unseen, self._unseen_samples = self._unseen, [], 0
        if unseen and self.scored is not None:
            asked, scores = zip(*unseen, strict=True)
            self.scored(sides_of(asked), np.concatenate(scores))

    def _failed(self, batch: list[Asked], fault: Exception) -> None:
        """One's fault is not another's: each is scored again, by itself. What is the server's is all of
        theirs."""
        if len(batch) == 1 or (isinstance(fault, Refused) and fault.status == 503):
            for one in batch:
                one.done(fault)
            return
        for one in reversed(batch):
            one.alone, one.until = True, float("inf")
            self.queue.appendleft(one)

    def _full(self) -> bool:
        """Whether the next batch is full, or has waited long enough; else it is looked at again in time."""
        if self._filling is not None:
            self._filling.cancel()
            self._filling = None
        if not self.queue or not self.config.wait_ms or not self.alive:
            return bool(self.queue)
        left = self.queue[0].since + self.config.wait_ms / 1e3 - monotonic()
        if left <= 0 or sum(one.samples for one in self.queue) >= self.config.batch:
            return True
        self._filling = self._loop.call_later(left, self._wake)
        return False

    def _scored(self, score: Score, asked: list[Asked], ahead: bool) -> Array:
        """Score these requests by ``score``. ``ahead``: have the rows of those that wait read meanwhile, if
        the scorer can. Where rows have been at hand, they mostly are the next time, too, and more requests
        come before that."""
        came = perf_counter()
        found, self._next = self._put_together(asked), None
        began = perf_counter()
        between = (self._read_ahead,) if ahead and self._ahead is not None else ()
        with nullcontext() if self.within is None else self.within(asked):
            scores = score(found.dense, found.sides, *between).numpy()
        lacking = getattr(score, "lacking", "")
        if lacking:
            for one in asked:
                one.lacking = lacking
        correct = getattr(score, "correct", None)
        if correct is not None:
            scores = correct(asked, found.dense, scores)
        spent = perf_counter() - began
        self._spent = began - came, spent
        self._pace.saw(len(scores), began - came + spent)
        each = spent / len(scores)
        self._each = each if each < self._each else self._each + (each - self._each) / 8
        return scores

    def _put_together(self, asked: list[Asked]) -> _Batch:
        made = self._next
        if made is None or len(made.asked) != len(asked) or not all(map(is_, made.asked, asked)):
            return _Batch(asked, *together(asked))
        return made

    def _at_hand(self, asked: list[Asked]) -> bool:
        """Whether all rows of these requests are in memory. One whose rows are not is for the thread, which
        waits for the disk."""
        if self._ahead is None:
            return True
        self._next = self._put_together(asked)
        try:
            at_hand: bool = self.score.at_hand(self._next.sides)  # type: ignore[attr-defined]
            return at_hand
        except Exception:
            return False  # scoring says it to those whose request it is

    @property
    def _ahead(self) -> Callable[[Sequence[Side]], None] | None:
        """Reads rows ahead, if the scorer can."""
        return getattr(self.score, "ahead", None)

    def _read_ahead(self) -> None:
        """Have the rows read of the requests that wait for the next batch, in the thread that scores. They
        are put together once: mostly it is they who are scored next."""
        try:
            asked: list[Asked] = []
            samples, now = 0, monotonic()
            for one in self.queue.copy():  # another thread's, who goes on meanwhile
                if now <= one.until:
                    samples += one.samples
                    if asked and samples > self.config.batch:
                        break
                    asked.append(one)
            if asked and self._ahead is not None:
                self._next = _Batch(asked, *together(asked))
                self._ahead(self._next.sides)
        except Exception:
            log.exception("rows could not be read ahead")
