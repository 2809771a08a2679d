"""The queueing model of main servers and shards: closed forms, a small simulation of events, and limits."""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path

import numpy as np
import pytest
from recpipe_perf_model import Asked, Costs, Line, Link, Load, Servers, Shard, simulated
from recpipe_perf_model.queueing.servers import WARM, _played

from recpipe.errors import UserError

_UNIT = -np.log1p(-(np.arange(4001) + 0.5) / 4001)
EXPONENTIAL = tuple((_UNIT / _UNIT.mean()).tolist())
NONE = Line()


@pytest.mark.parametrize("load", [0.3, 0.5])
def test_one_request_a_batch_is_m_m_1(load: float) -> None:
    servers = Servers(NONE, Line(1.0), most=1, main_factors=EXPONENTIAL)
    found = simulated(servers, load, 40_000)
    assert found.times.mean() == pytest.approx(1 / (1 - load), rel=0.06)
    for share in (50, 95, 99):
        assert found.percentile(share) == pytest.approx(-log(1 - share / 100) / (1 - load), rel=0.08)
    assert found.main_busy == pytest.approx(load, rel=0.03)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_work_of_one_length_is_m_d_1(load: float) -> None:
    found = simulated(Servers(NONE, Line(1.0), most=1, front=0.5), load, 40_000)
    assert found.waited == pytest.approx(load / 2 / (1 - load), rel=0.06)
    assert found.times.mean() == pytest.approx(1.5 + found.waited)


def test_a_batch_waits_for_the_slowest_of_its_shards() -> None:
    """The largest of n exponential times: its mean is the harmonic number of n, and its distribution the nth
    power of one's."""
    for count in (1, 8):
        servers = Servers(NONE, NONE, shards=(Shard(Line(1.0)),) * count, shard_factors=EXPONENTIAL)
        found = simulated(servers, 1e-4, 4_000)
        assert found.times.mean() == pytest.approx(sum(1 / k for k in range(1, count + 1)), rel=0.03)
        for share in (0.5, 0.99):
            assert found.percentile(100 * share) == pytest.approx(-log(1 - share ** (1 / count)), rel=0.06)


def test_a_shard_of_many_main_servers_is_m_m_1_and_with_two_servers_m_m_2() -> None:
    for count, waited in ((1, 1.0), (2, 1 / 3)):
        servers = Servers(
            NONE,
            NONE,
            shards=(Shard(Line(1.0), servers=count),),
            mains=400,
            most=1,
            shard_factors=EXPONENTIAL,
        )
        found = simulated(servers, 0.5 * count, 8_000, seed=1)
        assert found.times.mean() == pytest.approx(1 + waited, rel=0.08)
        assert found.shard_busy[0] == pytest.approx(0.5, rel=0.04)


def test_batches_take_all_that_wait_and_links_are_shared() -> None:
    """By hand: two requests come while the first is served; bytes of both shards go through the main server's
    link one after the other."""
    shards = (Shard(Line(1.0), Line(10.0), Line(20.0, 10.0)), Shard(Line(2.0), Line(10.0), Line(20.0)))
    servers = Servers(Line(1.0), Line(0.0, 1.0), 0.5, shards=shards, link=Link(10.0, 0.25))
    # 1 second to ask; questions leave at 1.5 and 2, are through at 2.5 and 3.5, there at 2.75 and 3.75,
    # answered at 3.75 and 5.75, gone at 6.75 (30 bytes) and 8.75 (20 bytes, which wait for those), there at
    # 9; then 1 second.
    assert servers.batch_seconds(1) == pytest.approx(10.0)
    # With a bucket that holds all of it, bytes take no time: the second answer is there at 4.5.
    assert replace(servers, link=Link(10.0, 0.25, 50.0)).batch_seconds(1) == pytest.approx(5.5)
    found = _played(servers, [np.array([0.0, 3.0, 9.5])], 0)
    # The others are one batch from 10 on: its first answer has 40 bytes and is through at 17.75, the second
    # at 19.75.
    assert found.batches == 2
    assert sorted(found.times) == pytest.approx([22.0 - 9.5, 22.0 - 3.0])


def events(servers: Servers, arrivals: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """When requests came, and their times: the same system, event by event, without rates of links; each
    server has a queue of its own."""
    queue = [(when, n, "comes", main, 0) for n, (main, when) in enumerate(
        (main, when) for main, own in enumerate(arrivals) for when in own)]  # fmt: skip
    heapq.heapify(queue)
    number, times = len(queue), []
    waiting: list[list[float]] = [[] for _ in arrivals]
    batch: list[list[float]] = [[] for _ in arrivals]
    open_ = [0] * len(arrivals)
    line: list[list[tuple[int, int]]] = [[] for _ in servers.shards]
    busy = [False] * len(servers.shards)

    def later(when: float, what: str, who: int, which: int) -> None:
        nonlocal number
        number += 1
        heapq.heappush(queue, (when, number, what, who, which))

    def begin(main: int, now: float) -> None:
        if waiting[main] and not batch[main]:
            batch[main], waiting[main] = waiting[main][: servers.most], waiting[main][servers.most :]
            ready = now + servers.ask.of(len(batch[main]))
            for shard in range(len(servers.shards)):
                later(ready + (shard + 1) * servers.call + servers.link.delay, "asks", main, shard)

    def work(shard: int, now: float) -> None:
        if line[shard] and not busy[shard]:
            main, count = line[shard].pop(0)
            busy[shard] = True
            later(now + servers.shards[shard].work.of(count), "works", main, shard)

    while queue:
        now, _, what, main, shard = heapq.heappop(queue)
        if what == "comes":
            waiting[main].append(now)
            # Those that come at the same time are taken together.
            if not queue or queue[0][0] > now or queue[0][2:4] != ("comes", main):
                begin(main, now)
        elif what == "asks":
            line[shard].append((main, len(batch[main])))
            work(shard, now)
        elif what == "works":
            busy[shard] = False
            later(now + servers.link.delay + servers.shards[shard].wire, "answers", main, shard)
            work(shard, now)
        elif what == "answers":
            open_[main] += 1
            if open_[main] == len(servers.shards):
                open_[main] = 0
                later(now + servers.rest.of(len(batch[main])), "ends", main, 0)
        else:
            times += [(came, now - came) for came in batch[main]]
            batch[main] = []
            begin(main, now)
    return times


def test_a_simulation_of_events_gives_the_same_times() -> None:
    """Three main servers that compete for four uneven shards; at a load at which all of them wait."""
    shards = tuple(Shard(Line(0.3 + 0.1 * k, 0.05 * k), wire=0.02 * k) for k in range(4))
    servers = Servers(Line(0.4), Line(0.1, 0.2), 0.01, shards=shards, link=Link(delay=0.1), mains=3, most=4)
    draw = np.random.default_rng(4)
    arrivals = [np.cumsum(draw.exponential(1.6, 400)) for _ in range(3)]
    found, every = _played(servers, arrivals, 0), events(servers, [own.tolist() for own in arrivals])
    assert found.batches < 0.95 * 1200, "some batches have several requests"
    assert found.shard_busy.max() > 0.5
    assert len(every) == 1200
    last = max(came for came, _ in every)
    expected = [time for came, time in every if came > WARM * last]
    assert sorted(found.times) == pytest.approx(sorted(expected))


def test_cores_that_all_share_are_a_limit() -> None:
    apart = Servers(NONE, Line(0.1), shards=(Shard(Line(1.0)),) * 4)
    together = Servers(NONE, Line(0.1), shards=(Shard(Line(1.0)),) * 4, cores=2)
    assert apart.batch_seconds(1) == pytest.approx(1.1)
    assert together.batch_seconds(1) == pytest.approx(2.1)
    assert together.capacity()[0] == pytest.approx(1 / 2.1 * together.most)


def test_more_than_can_be_answered_is_refused() -> None:
    slow = Servers(NONE, Line(1.0), shards=(Shard(Line(0.1)), Shard(Line(0.1, 3.0))), mains=100, most=4)
    assert slow.capacity() == (pytest.approx(4 / 12.1), "shard 1")
    with pytest.raises(UserError, match=r"a load of 2 requests/s .* that is the limit of shard 1"):
        simulated(slow, 2.0)
    answers = Shard(NONE, Line(), Line(0.0, 100.0))
    narrow = Servers(NONE, NONE, shards=(answers,) * 2, link=Link(1000.0), mains=100)
    assert narrow.capacity() == (pytest.approx(10.0), "the network of shard 0")


def test_costs_add_up_and_come_back_from_their_file(tmp_path: Path) -> None:
    known = Costs(load=Load(samples=10, gbit=1.0))
    costs, none = known.costs, Asked(0, 0, 0, 0)
    asked = Asked(lookups=3, ids=20, read=10240, answered=2048)
    servers = costs.servers([asked, asked], none, known.load)
    (shard, _) = servers.shards
    assert shard.work.first == pytest.approx(1e-6 * (costs.shard_call_us + 3 * costs.shard_lookup_us))
    assert shard.work.each == pytest.approx(1e-6 * 12 * costs.shard_kib_us)
    assert servers.rest.each == pytest.approx(1e-6 * (10 * costs.sample_us + 4 * costs.answer_kib_us))
    assert servers.most == 102
    assert servers.link.rate == 125e6
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(known.content()))
    assert Costs.read(file) == known
    file.write_text(json.dumps({**known.content(), "costs": {"call": 3}}))
    with pytest.raises(UserError, match="costs"):
        Costs.read(file)
    with pytest.raises(UserError, match="has no service costs"):
        Costs.read(tmp_path / "none.json")
