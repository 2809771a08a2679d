"""The cache of answers: exact where it must be, within its bound where it may err, and off where it
cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from recpipe_answer_cache.cache import AnswerCache
from recpipe_answer_cache.config import CacheConfig, KeyRule
from recpipe_answer_cache.control import Setting
from recpipe_answer_cache.entries import Floats
from recpipe_answer_cache.replay import true_errors
from recpipe_answer_cache.tests.requests import MANIFEST, request
from recpipe_serve import Asked

BY_HOUR = CacheConfig(
    bound=0.01, tolerance=1, keys=(KeyRule("hour", "round", 8),), levels=3, dwell=300, audit=0.1, beta_most=8
)
USERS = 60
BASE = request()


def asked_by(user: int, hour: float) -> Asked:
    """The request of a user at an hour."""
    return replace(
        BASE, ids=np.array([user, *BASE.ids[1:].tolist()]), dense=np.array([[30.0, hour]] * 2, np.float32)
    )


def model(effect: float) -> Callable[[Asked], Floats]:
    """Logits that depend on the user, and on the hour by as much as ``effect``."""

    def scores(asked: Asked) -> Floats:
        own = np.sin(asked.ids[asked.form.slices[0]].astype(np.float32) * 7)
        hour = asked.dense[:, 1]
        return (own + np.float32(effect) * np.sin(hour) + np.array([0.0, 0.5], np.float32)).astype(np.float32)

    return scores


def answered(
    cache: AnswerCache, right: Callable[[Asked], Floats], count: int, hours: int = 240
) -> tuple[list[Floats], list[Floats]]:
    """The answers to so many requests of returning users, and the model's."""
    rng = np.random.default_rng(3)
    users = rng.integers(0, USERS, count)
    times = rng.integers(0, hours, count) * (24 / hours)
    answers, wanted = [], []
    for user, hour in zip(users.tolist(), times.tolist(), strict=True):
        asked = asked_by(user, hour)
        wanted.append(right(asked))
        found, ticket = cache.find(asked)
        if found is None:
            found = right(asked)
            if ticket is not None:
                cache.keep(ticket, found)
        answers.append(found)
    return answers, wanted


def error(answers: list[Floats], wanted: list[Floats]) -> float:
    return true_errors(answers, wanted, MANIFEST["outputs"], 1).score


def test_bound_0_gives_the_models_bits_and_coarser_keys_do_not() -> None:
    exact = AnswerCache(CacheConfig(bound=0, keys=BY_HOUR.keys), MANIFEST)
    answers, wanted = answered(exact, model(0.5), 2000, hours=24)
    assert exact.counts.served > 500
    assert exact.counts.refreshed == exact.counts.audited == 0
    assert all(a.tobytes() == b.tobytes() for a, b in zip(answers, wanted, strict=True))
    coarse = AnswerCache(BY_HOUR, MANIFEST, fixed=Setting(3, 8.0))
    answers, wanted = answered(coarse, model(0.005), 2000, hours=24)
    assert any(a.tobytes() != b.tobytes() for a, b in zip(answers, wanted, strict=True))


def test_the_controller_goes_as_far_as_the_bound_allows_and_no_further() -> None:
    """240 x 60 different requests: exact keys alone answer few."""
    shares = {}
    for effect in (0.0, 1.0):
        cache = AnswerCache(BY_HOUR, MANIFEST)
        answers, wanted = answered(cache, model(effect), 4000)
        assert error(answers, wanted) <= BY_HOUR.bound
        shares[effect] = cache.counts.served / cache.counts.asked
        if effect == 0.0:
            assert cache.controller.setting == Setting(3, 8.0)
            assert error(answers, wanted) == 0.0
    assert shares[0.0] > 0.25 > 1.5 * shares[1.0]
    unbounded = AnswerCache(BY_HOUR, MANIFEST, fixed=Setting(3, 8.0))
    assert error(*answered(unbounded, model(1.0), 3000)) > BY_HOUR.bound, "the bound is not kept by itself"


def test_the_measured_error_is_the_true_one_within_its_interval() -> None:
    cache = AnswerCache(BY_HOUR, MANIFEST, fixed=Setting(2, 8.0))
    found, wanted = answered(cache, model(0.1), 4000)
    told = cache.told()["error"]
    true = error(found[-2000:], wanted[-2000:])
    assert true > 0.001
    assert told["audits"] == 100
    assert 0.7 * told["low"] <= true <= 1.3 * told["high"]
    assert told["high"] < 3 * told["low"]


def test_a_cache_that_answers_nothing_is_switched_off_and_begins_again_with_another_package() -> None:
    cache = AnswerCache(CacheConfig(bound=0.01, dwell=200), MANIFEST)
    answered(cache, model(0.0), 800, hours=100_000)
    assert cache.controller.off is not None
    assert "requests could be answered from the cache" in cache.controller.off
    assert cache.find(asked_by(1, 2.0)) == (None, None)
    cache.begin({**MANIFEST, "step": 2})
    assert cache.controller.off is None
    assert cache.find(asked_by(1, 2.0))[1] is not None


def test_equal_requests_whose_answers_differ_switch_it_off() -> None:
    cache = AnswerCache(CacheConfig(bound=0.01, audit=1.0), MANIFEST)
    rng = np.random.default_rng(0)
    answered(cache, lambda asked: rng.normal(size=2).astype(np.float32), 1000, hours=1)
    assert cache.controller.off is not None
    assert "answers to equal requests were" in cache.controller.off


def test_answers_do_not_outlive_their_package_or_their_time() -> None:
    now = 0.0
    cache = AnswerCache(CacheConfig(bound=0, ttl=10), MANIFEST, clock=lambda: now)
    one, scores = request(), np.ones(2, np.float32)
    _, ticket = cache.find(one)
    assert ticket is not None
    cache.keep(ticket, scores)
    found, _ = cache.find(one)
    assert found is not None
    assert found is not scores
    now = 10.5
    found, late = cache.find(one)
    assert found is None
    assert late is not None
    assert cache.counts.expired == 1
    cache.keep(late, scores)
    assert cache.find(one)[0] is not None
    cache.begin(MANIFEST)
    cache.keep(late, scores)
    assert cache.find(one)[0] is None, "it was scored for the package before"


def test_of_changed_rows_the_requests_that_have_them_alone_are_scored_again() -> None:
    cache, right = AnswerCache(CacheConfig(bound=0), MANIFEST), model(0.0)

    def scored(user: int, seen: tuple[int, ...] = (1, 2)) -> bool:
        found, ticket = cache.find(request(user, seen))
        if ticket is not None:
            cache.keep(ticket, right(request(user, seen)))
        return found is None

    assert [scored(user) for user in (1, 2, 1, 2)] == [True, True, False, False]
    cache.changed({0: np.array([2, 7])})
    assert [scored(user) for user in (1, 2, 2)] == [False, True, False]
    cache.changed({1: np.array([5, 99_999])})
    assert [scored(1), scored(1, (5, 6))] == [False, True]
    cache.begin(MANIFEST)
    assert scored(1)


@pytest.mark.parametrize("users", [(1, 2), (-7, 2**60)])
def test_while_events_are_learnt_requests_that_they_change_are_not_answered(users: tuple[int, int]) -> None:
    user = MANIFEST["sparse"][0] | ({} if users == (1, 2) else {"map": "user"})  # keys, and no rows
    cache = AnswerCache(CacheConfig(bound=0), {**MANIFEST, "sparse": [user, *MANIFEST["sparse"][1:]]})
    right = model(0.0)

    def scored(number: int) -> bool:
        one = request(number)
        one.keys = np.array([users[number - 1], *one.ids[1:]])
        found, ticket = cache.find(one)
        if ticket is not None:
            cache.keep(ticket, right(one))
        return found is None

    first = {0: np.array([users[0]])}
    assert [scored(1), scored(2), scored(1), scored(2)] == [True, True, False, False]
    cache.learning(first)
    assert [scored(1), scored(1), scored(2)] == [True, True, False]
    cache.learnt(first)
    assert [scored(1), scored(1), scored(2)] == [True, False, False]
    cache.learning(None)
    assert [scored(1), scored(2)] == [True, True]
    cache.learnt(first)
    assert [scored(1), scored(2)] == [True, False]
    cache.learnt(None)
    assert [scored(1), scored(2)] == [True, True]


def test_the_share_of_changed_top_k_is_kept_within_its_bound() -> None:
    config = CacheConfig(
        bound=0.05, error="top_k", k=1, keys=BY_HOUR.keys, levels=3, dwell=300, audit=0.1, beta_most=8
    )

    def turning(asked: Asked) -> Floats:
        """The better one of two changes in the evening."""
        return np.array([0.0, 1.0 if asked.dense[0, 1] < 20 else -1.0], np.float32)

    cache = AnswerCache(config, MANIFEST)
    answers, wanted = answered(cache, turning, 4000)
    assert cache.counts.served > 500
    assert true_errors(answers, wanted, MANIFEST["outputs"], 1).top_k <= config.bound


@pytest.mark.parametrize("kind", ["score", "top_k"])
def test_errors_of_answers(kind: str) -> None:
    from recpipe_answer_cache.errors import ErrorOf

    outputs = [{"name": "a", "kind": "values"}, {"name": "b", "kind": "values"}]
    made = ErrorOf(outputs, kind, 1)
    right = np.array([[1.0, 2.0], [3.0, 2.0]], np.float32)
    made.gave(made.size(right))
    answer = np.array([[1.0, 3.0], [2.0, 2.0]], np.float32)
    assert made(right, right) == 0
    assert made(answer, right) == (pytest.approx(0.25) if kind == "score" else 0)
    assert made(right[::-1], right) == (pytest.approx(1.0) if kind == "score" else 1)
