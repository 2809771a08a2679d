"""The cache of answers candidate by candidate: what is known is not scored, what is scored is exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from recpipe_answer_cache.candidates import CandidateCache
from recpipe_answer_cache.config import CacheConfig, KeyRule
from recpipe_answer_cache.control import Setting
from recpipe_answer_cache.entries import Floats
from recpipe_answer_cache.replay import true_errors
from recpipe_answer_cache.tests.requests import MANIFEST, request
from recpipe_serve import Asked

EXACT = CacheConfig(bound=0, unit="candidate", capacity=4096)
BY_HOUR = CacheConfig(
    bound=0.01,
    unit="candidate",
    tolerance=1,
    keys=(KeyRule("hour", "round", 8),),
    levels=3,
    dwell=100,
    audit=0.1,
    beta_most=8,
)


def model(effect: float = 0.0) -> Callable[[Asked], Floats]:
    """Logits that depend on the user and the item, and on the hour by as much as ``effect``."""

    def scores(asked: Asked) -> Floats:
        user, item = (asked.bags(place, True).ids.astype(np.float32) for place in (0, 2))
        own = np.sin(user * 7) + np.sin(item * 3) + np.float32(effect) * np.sin(asked.dense[:, 1])
        return own.astype(np.float32)

    return scores


def ask(cache: CandidateCache, asked: Asked, right: Callable[[Asked], Floats]) -> tuple[Floats, int]:
    """The answer, and how many candidates the model scored for it."""
    found, ticket = cache.find(asked)
    if found is not None:
        return found, 0
    if ticket is None:
        return right(asked), asked.samples
    part = cache.lacking(asked, ticket)
    scores = right(asked if part is None else part)
    answer = cache.completed(ticket, scores)
    cache.keep(ticket, scores)
    return answer, len(scores)


def test_of_a_request_of_which_some_are_known_the_model_scores_the_others() -> None:
    cache, right = CandidateCache(EXACT, MANIFEST), model()
    for items, scored in (
        (range(50), 50),
        (range(10, 60), 10),
        ((3, 70, 4, 5), 1),
        ((5, 4, 3), 0),
        ((71,), 1),
    ):
        one = request(items=tuple(items))
        answer, count = ask(cache, one, right)
        assert answer.tobytes() == right(one).tobytes()
        assert count == scored
    assert ask(cache, request(2, items=(1, 2)), right)[1] == 2, "another user's"
    told = cache.told()
    assert (told["requests"], told["entries"], told["evicted"]) == (6, 64, 0)
    assert told["missed"] == 64
    assert told["served"] == 40 + 3 + 3


def test_who_was_asked_for_longest_ago_gives_way() -> None:
    cache, right = CandidateCache(CacheConfig(bound=0, unit="candidate", capacity=8), MANIFEST), model()
    ask(cache, request(items=tuple(range(8))), right)
    assert ask(cache, request(items=(1, 2)), right)[1] == 0
    ask(cache, request(items=(20,)), right)
    assert cache.told()["evicted"] == 1
    assert ask(cache, request(items=(1, 2)), right)[1] == 0


def test_answers_do_not_outlive_their_time_their_package_or_their_rows() -> None:
    now = 0.0
    config = CacheConfig(bound=0, unit="candidate", ttl=10)
    cache, right = CandidateCache(config, MANIFEST, clock=lambda: now), model()
    one = request(items=(1, 2, 3))
    assert [ask(cache, one, right)[1] for _ in range(2)] == [3, 0]
    cache.changed({2: np.array([2, 9])})
    assert [ask(cache, one, right)[1] for _ in range(2)] == [1, 0], "the row of one has changed"
    cache.changed({1: np.array([50])})
    assert ask(cache, one, right)[1] == 0
    cache.changed({1: np.array([3])})
    assert [ask(cache, one, right)[1] for _ in range(2)] == [3, 0], "all have seen row 3"
    cache.learning({2: np.array([2])})
    assert [ask(cache, one, right)[1] for _ in range(2)] == [1, 1], "of one more will be learnt"
    cache.learnt({2: np.array([2])})
    assert [ask(cache, one, right)[1] for _ in range(2)] == [1, 0]
    now = 10.5
    assert [ask(cache, one, right)[1] for _ in range(2)] == [3, 0]
    _, ticket = cache.find(request(items=(7,)))
    cache.begin(MANIFEST)
    assert ticket is not None
    cache.keep(ticket, np.ones(1, np.float32))
    assert ask(cache, request(items=(7,)), right)[1] == 1, "it was scored for the package before"


def test_its_error_stays_within_the_bound_and_no_bound_is_kept_by_itself() -> None:
    users, count, samples = 6, 1200, 6
    base = [request(user, items=(0,) * samples) for user in range(users)]

    def answered(cache: CandidateCache, right: Callable[[Asked], Floats]) -> tuple[float, float]:
        """The share of candidates that the model scored, and the true error."""
        rng, scored, answers, wanted = np.random.default_rng(3), 0, list[Floats](), list[Floats]()
        for _ in range(count):
            user = base[int(rng.integers(0, users))]
            ids = np.concatenate([user.ids[:-samples], rng.permutation(10)[:samples]])
            one = replace(user, ids=ids, dense=np.array([[30.0, rng.random() * 24]] * samples, np.float32))
            found, own = ask(cache, one, right)
            answers.append(found)
            wanted.append(right(one))
            scored += own
        return scored / count / samples, true_errors(answers, wanted, MANIFEST["outputs"], 1).score

    same = answered(CandidateCache(BY_HOUR, MANIFEST), model(0.0))
    assert same[0] < 0.65
    assert same[1] == 0
    share, error = answered(CandidateCache(BY_HOUR, MANIFEST), model(0.3))
    assert share > same[0]
    assert error <= BY_HOUR.bound
    unbounded = CandidateCache(BY_HOUR, MANIFEST, fixed=Setting(3, 8.0))
    assert answered(unbounded, model(1.0))[1] > BY_HOUR.bound
    assert unbounded.told()["wrong"] > 0
