"""Main servers and the shards that they ask, as a network of queues.

Requests come independently of each other, each to one of the main servers. One that is free takes all that
wait, as many as a batch may have, and is busy with them until all are answered: it puts the batch together,
asks each shard in turn, does meanwhile what needs no answer, and once the last answer is there does the rest.
A shard's server answers one question at a time, in the order in which they come. Messages go through the main
server's own link and the shard's, each of which has a rate, and take a delay besides. Work takes a line
through the number of requests, times a factor that is drawn from those that were seen.

With one request a batch and no shards a main server is the M/G/1 queue; a shard that many main servers ask is
M/G/1, or M/G/c with several servers; a batch waits for the largest of its shards' times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recpipe.errors import UserError

Figures = NDArray[np.float64]
WARM = 0.1
"""The share of the requests, the first ones, that are not counted: the servers were idle before them."""


class Line(NamedTuple):
    """Seconds of work, or bytes, of a batch: ``first``, and ``each`` for each of its requests."""

    first: float = 0.0
    each: float = 0.0

    def of(self, requests: float) -> float:
        """Of a batch of so many."""
        return self.first + self.each * requests


class Link(NamedTuple):
    """Between a main server and a shard."""

    rate: float = inf
    """Bytes a second, of each server and in each direction."""
    delay: float = 0.0
    """Seconds in one direction."""
    burst: float = 0.0
    """Bytes that pass at once after a rest, as a token bucket has them."""


NOTHING, DIRECT = Line(), Link()


@dataclass(frozen=True)
class Shard:
    """The servers that have some rows."""

    work: Line
    """Seconds that a server is busy with a question."""
    asked: Line = NOTHING
    """Bytes of a question."""
    answered: Line = NOTHING
    """Bytes of an answer."""
    wire: float = 0.0
    """Seconds of a question and its answer besides, in which nobody is busy: sockets, threads that wake."""
    servers: int = 1


@dataclass(frozen=True)
class Servers:
    """All that answer a model's requests. Times in seconds."""

    ask: Line
    """A main server's work on a batch until the first question can leave."""
    rest: Line
    """Its work once the last answer is there."""
    call: float = 0.0
    """Its work on each question."""
    beside: Line = NOTHING
    """Its work while answers are on their way."""
    front: float = 0.0
    """What a request takes besides, before and after it is part of a batch."""
    shards: tuple[Shard, ...] = ()
    link: Link = DIRECT
    mains: int = 1
    most: int = 16
    """Requests of a batch."""
    cores: int | None = None
    """Of the one machine that all servers run on; None: each has a core of its own."""
    main_factors: tuple[float, ...] = (1.0,)
    """How many times as long as usual a main server's work on a batch takes, one of them at random."""
    shard_factors: tuple[float, ...] = (1.0,)
    """The same of a shard's work on a question, and of ``Shard.wire``."""

    def batch_seconds(self, requests: int) -> float:
        """What a batch takes where nothing else is going on."""
        usual = replace(self, main_factors=(1.0,), shard_factors=(1.0,))
        state = _State(usual, np.random.default_rng(0))
        return state.answered(0, state.asked(0.0, requests), requests)

    def capacity(self) -> tuple[float, str]:
        """Requests a second that cannot be exceeded, and whose limit it is."""
        most, rate = self.most, self.link.rate
        limits = {"the main servers": self.mains * most / self.batch_seconds(most)}
        work = self.ask.of(most) + len(self.shards) * self.call + self.beside.of(most) + self.rest.of(most)
        for number, own in enumerate(self.shards):
            seconds = own.work.of(most)
            work += seconds
            limits[f"shard {number}"] = own.servers * most / seconds if seconds else inf
            sent = max(own.asked.of(most), own.answered.of(most))
            limits[f"the network of shard {number}"] = most * rate / sent if sent else inf
        if self.cores is not None:
            limits["the machine's cores"] = self.cores * most / work
        least = min(limits, key=lambda name: limits[name])
        return limits[least], least


@dataclass(frozen=True)
class Answered:
    """What came of a load."""

    times: Figures
    """Seconds of each request."""
    seconds: float
    batches: int
    waited: float
    """Seconds that a request waited until it was part of a batch, on average."""
    fetched: float
    """Seconds of a batch between its last question and its last answer, on average."""
    main_busy: float
    """The share of the time in which a main server is busy with a batch."""
    shard_busy: Figures
    """The share of the time in which the servers of each shard work."""

    def percentile(self, share: float) -> float:
        """Of the times, in seconds."""
        return float(np.percentile(self.times, share))


def simulated(servers: Servers, rate: float, requests: int = 20_000, seed: int = 0) -> Answered:
    """Play ``requests`` that come at ``rate`` a second. With the same ``seed`` two systems get the same
    requests, and the same luck. ``UserError`` if so many cannot be answered."""
    most, limit = servers.capacity()
    if rate >= most:
        raise UserError(
            f"a load of {rate:,.6g} requests/s is beyond what can be answered, {most:,.6g}/s: that is the "
            f"limit of {limit}"
        )
    draw = np.random.default_rng([seed, 0])
    arrivals = np.cumsum(draw.exponential(1.0 / rate, requests))
    of_main = draw.integers(servers.mains, size=requests)
    return _played(servers, [arrivals[of_main == main] for main in range(servers.mains)], seed)


def _played(servers: Servers, arrivals: Sequence[Figures], seed: int) -> Answered:
    """Requests that come to each main server at these times."""
    state = _State(servers, np.random.default_rng([seed, 1]))
    ends, began = [np.empty_like(own) for own in arrivals], [own.copy() for own in arrivals]
    taken = [0] * len(arrivals)
    # When a main server takes a batch (0 requests), or has put one together; in the order of time.
    events = [(float(own[0]), main, 0) for main, own in enumerate(arrivals) if len(own)]
    heapify(events)
    batches, busy, fetched = 0, 0.0, 0.0
    while events:
        now, main, count = heappop(events)
        own, first = arrivals[main], taken[main]
        if not count:
            count = min(int(own.searchsorted(now, "right")) - first, servers.most)
            began[main][first : first + count] = now
            heappush(events, (state.asked(now, count), main, count))
            continue
        end = state.answered(main, now, count)
        ends[main][first : first + count] = end
        taken[main] = first + count
        batches, busy, fetched = batches + 1, busy + end - began[main][first], fetched + state.fetched
        if taken[main] < len(own):
            heappush(events, (max(end, float(own[taken[main]])), main, 0))
    came, start, over = (np.concatenate(each) for each in (arrivals, began, ends))
    counted = came > WARM * came.max()
    seconds = float(came.max())
    counts = np.array([shard.servers for shard in servers.shards], np.float64)
    return Answered(
        (over - came)[counted] + servers.front,
        seconds,
        batches,
        float((start - came)[counted].mean()),
        fetched / batches,
        busy / servers.mains / seconds,
        state.worked / seconds / counts,
    )


@dataclass
class _State:
    """Until when each server and each link is taken."""

    servers: Servers
    draw: np.random.Generator
    fetched: float = field(default=0.0, init=False)
    """Of the latest batch."""

    def __post_init__(self) -> None:
        own = self.servers.shards
        self._lines = [np.array([getattr(s, name) for s in own]).reshape(-1, 2).T
                       for name in ("work", "asked", "answered")]  # fmt: skip
        self._wire = np.array([shard.wire for shard in own])
        self._calls = self.servers.call * np.arange(1, len(own) + 1)
        most = max((shard.servers for shard in own), default=1)
        self._free = np.array([[0.0] * s.servers + [inf] * (most - s.servers) for s in own])
        self._rows = np.arange(len(own))
        self._in, self._out = _Links(len(own)), _Links(len(own))
        """Each shard's link, for questions and for answers."""
        self._sent, self._came = [-inf] * self.servers.mains, [-inf] * self.servers.mains
        """Until when each main server's link is taken by questions, and by answers."""
        self._cores = [0.0] * (self.servers.cores or 0)
        self._factors = [
            _Drawn(f, self.draw) for f in (self.servers.main_factors, self.servers.shard_factors)
        ]
        self.worked = np.zeros(len(own))
        """Seconds of each shard."""

    def asked(self, now: float, requests: int) -> float:
        """When the first question of a batch can leave that is taken ``now``."""
        return self._worked(now, self.servers.ask.of(requests) * self._factors[0].one())

    def answered(self, main: int, ready: float, requests: int) -> float:
        """When a batch is answered whose first question can leave when it is ``ready``."""
        servers = self.servers
        sent = last = ready
        if servers.shards:
            sent = self._worked(ready, float(self._calls[-1]))
            last = self._fetch(main, sent - self._calls[-1] + self._calls, requests)
        self.fetched = last - sent
        factor = self._factors[0].one()
        beside = self._worked(sent, servers.beside.of(requests) * factor) if any(servers.beside) else sent
        return self._worked(max(beside, last), servers.rest.of(requests) * factor)

    def _worked(self, ready: float, seconds: float) -> float:
        """When a main server has done work that it could begin when it was ``ready``."""
        if not self._cores or not seconds:
            return ready + seconds
        end = max(ready, self._cores[0]) + seconds
        heapreplace(self._cores, end)
        return end

    def _fetch(self, main: int, leave: Figures, requests: int) -> float:
        """When the last answer is there to questions that ``leave`` then."""
        rate, delay, burst = self.servers.link
        saved = burst / rate
        work, asked, answered = (first + each * requests for first, each in self._lines)
        factors = self._factors[1].several(len(work))
        took = asked / rate
        through = _through(leave - saved, took, self._sent[main])
        self._sent[main] = float(through[-1])
        came = np.maximum(np.maximum(leave, through), self._in.sent(leave, took, saved)) + delay
        seconds = work * factors
        self.worked += seconds
        ends = self._alone(came, seconds) if not self._cores else self._shared(came, seconds)
        took = answered / rate
        out = self._out.sent(ends, took, saved)
        order = np.argsort(ends, kind="stable")
        through = _through(ends[order] - saved, took[order], self._came[main])
        self._came[main] = float(through[-1])
        there = np.maximum(through, out[order]) + (self._wire * factors)[order]
        return float(there.max()) + delay

    def _alone(self, came: Figures, seconds: Figures) -> Figures:
        """When shards have done their work, on cores of their own."""
        which = self._free.argmin(axis=1)
        ends: Figures = np.maximum(came, self._free[self._rows, which]) + seconds
        self._free[self._rows, which] = ends
        return ends

    def _shared(self, came: Figures, seconds: Figures) -> Figures:
        """The same where all share some cores: who comes first is first."""
        ends = np.empty_like(came)
        for own in np.argsort(came, kind="stable"):
            which = int(self._free[own].argmin())
            start = max(came[own], self._free[own, which], self._cores[0])
            ends[own] = self._free[own, which] = start + seconds[own]
            heapreplace(self._cores, float(ends[own]))
        return ends


def _through(leave: Figures, took: Figures, free: float) -> Figures:
    """When messages have gone through one link that is ``free`` then, one after the other, in the order in
    which they ``leave``."""
    ends = np.cumsum(took)
    gone: Figures = ends + np.maximum.accumulate(np.maximum(leave, free) - (ends - took))
    return gone


class _Links:
    """Links that each send one message at a time. Several servers of a shard may be done in another order
    than they have begun: so what counts is how much is left to send, and not until when."""

    def __init__(self, count: int) -> None:
        self._left, self._when = np.zeros(count), np.zeros(count)

    def sent(self, ready: Figures, took: Figures, saved: float) -> Figures:
        """When messages, one on each, have been sent that are ``ready`` then and take so long, less what a
        rest has ``saved``."""
        self._left = np.maximum(0.0, self._left - np.maximum(0.0, ready - self._when)) + took
        self._when = np.maximum(self._when, ready)
        gone: Figures = ready + np.maximum(0.0, self._left - saved)
        return gone


class _Drawn:
    """Factors, drawn some thousand at a time."""

    def __init__(self, factors: Sequence[float], draw: np.random.Generator) -> None:
        self._all, self._draw = np.array(factors, np.float64), draw
        self._kept, self._at = np.empty(0), 0

    def several(self, count: int) -> Figures:
        """So many."""
        if len(self._all) == 1:
            return np.full(count, self._all[0])
        if self._at + count > len(self._kept):
            self._kept, self._at = self._draw.choice(self._all, max(count, 4096)), 0
        self._at += count
        return self._kept[self._at - count : self._at]

    def one(self) -> float:
        """One."""
        return float(self.several(1)[0])
