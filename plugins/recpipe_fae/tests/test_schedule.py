"""Segments and the rate's rule."""

from __future__ import annotations

import threading

import pytest
from recpipe_fae.schedule import Scheduler, Segment, Sizes, plan

from recpipe.plugin.errors import PluginError


def test_a_full_rate_is_all_cold_then_all_hot() -> None:
    assert plan([], Sizes(7, 5), 100) == ([Segment(False, 0, 7), Segment(True, 0, 5)], True)


@pytest.mark.parametrize(("rate", "turns"), [(50, 2), (30, 4), (10, 10), (1, 100)])
def test_each_batch_is_in_one_of_2_ceil_100_r_segments(rate: float, turns: int) -> None:
    segments, _ = plan([], Sizes(200, 300), rate)
    assert len(segments) == 2 * turns
    assert [s.hot for s in segments] == [False, True] * turns
    for hot, size in ((False, 200), (True, 300)):
        covered = [n for s in segments if s.hot == hot for n in range(s.start, s.stop)]
        assert covered == list(range(size))


@pytest.mark.parametrize(("cold", "hot"), [(0, 4), (4, 0), (0, 0), (1, 1), (1, 100)])
def test_small_classes_lose_nothing(cold: int, hot: int) -> None:
    segments, _ = plan([], Sizes(cold, hot), 30)
    assert sum(s.stop - s.start for s in segments) == cold + hot
    assert all(s.stop > s.start for s in segments)


def test_the_rate_halves_when_the_loss_rises_and_doubles_after_four_falls() -> None:
    scheduler = Scheduler(50, adapts=True)
    assert [scheduler.observe(x) for x in (1.0, 1.1, 1.0, 0.9, 0.8, 0.7)] == [50, 25, 25, 25, 25, 50]
    assert [scheduler.observe(x) for x in (0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.09, 0.08)][-1] == 100
    for loss in range(1, 12):
        scheduler.observe(loss)
    assert scheduler.rate == 1


def test_a_waiting_loader_is_let_go() -> None:
    scheduler, found = Scheduler(50, adapts=True), []
    waiting = threading.Thread(target=lambda: found.append(scheduler.segment(1, 1, Sizes(4, 4))))
    waiting.start()
    scheduler.stop()
    waiting.join(20)
    assert found == [None]


def test_a_stream_that_reads_further_ahead_is_refused_where_it_would_wait_for_ever() -> None:
    scheduler = Scheduler(50, adapts=True)
    with pytest.raises(PluginError, match=r"after training batch 2.*plugins\.fae\.schedule=false"):
        scheduler.segment(1, 2, Sizes(4, 4))
    assert Scheduler(50, adapts=False).segment(1, 2, Sizes(4, 4)) == Segment(True, 0, 2)


def test_the_slice_trains_last_and_after_every_decision() -> None:
    segments, complete = plan([30.0] * 8, Sizes(22, 12, 2, 2))
    assert complete
    assert segments[-2:] == [Segment(False, 20, 22), Segment(True, 10, 12)]
    assert max(s.stop for s in segments[:-2] if s.hot) == 10
    assert not plan([30.0] * 7, Sizes(22, 12, 2, 2))[1], "the last decision but one leaves it open"
    assert plan([50.0], Sizes(0, 2, 0, 2)) == ([Segment(True, 0, 2)], True), "nothing to decide"


def test_a_trial_that_does_not_pay_leaves_the_rest_in_the_datas_order() -> None:
    for adapts in (True, False):
        scheduler, sizes = Scheduler(50, adapts, tries=True), Sizes(200, 100)
        assert scheduler.segment(0, 0, sizes) == Segment(False, 0, 20), "10 percent of each class"
        scheduler.trained = 20
        if adapts:
            scheduler.decide(1.0)
        assert scheduler.segment(1, 20, sizes) == Segment(True, 0, 10)
        scheduler.trained = 30
        scheduler.judge(separate=False)
        assert scheduler.segment(2, 30, sizes) is None
        saved = scheduler.state_dict()
        scheduler.check_state(saved)
        again = Scheduler(50, adapts, tries=True)
        again.load_state_dict(saved)
        assert again.segment(0, 0, sizes) == Segment(False, 0, 20), "a resumed epoch has the same beginning"
        assert again.segment(2, 30, sizes) is None
        again.end_epoch()
        assert again.segment(0, 0, sizes) is None
