"""A trace of requests answered in each way, by a model and vectors that are made up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_answer_cache import clusters, command, similar
from recpipe_answer_cache.clusters import UserClusters, k_means
from recpipe_answer_cache.command import Comparison, ReplayOptions
from recpipe_answer_cache.config import CacheConfig, KeyRule
from recpipe_answer_cache.keys import Keys
from recpipe_answer_cache.replay import policy_hits, replay
from recpipe_answer_cache.tests.requests import FEATURES, MANIFEST, request
from recpipe_answer_cache.trace import Rows, Trace, made_trace
from recpipe_serve import Asked

from recpipe.data.schema import Schema
from recpipe.errors import UserError
from recpipe.kit import SparseFeature

COUNT, USERS = 400, 20
SCHEMA = Schema(("age", "hour"), tuple(SparseFeature(f["name"], f["rows"]) for f in MANIFEST["sparse"]))
SCORER: Any = SimpleNamespace(manifest=MANIFEST)


def made_up(dense: torch.Tensor, sides: Any) -> torch.Tensor:
    """Scores by the first shared id, and a little by the hour."""
    return torch.sin(sides[0].ids[0].float()) + dense[:, 1] * 1e-3 + torch.arange(len(dense))


class FakeVectors:
    """The user's number as a vector."""

    def __init__(self, scorer: Any, features: Any) -> None: ...

    def of(self, asked: Asked) -> np.ndarray:
        return np.array([asked.ids[asked.form.slices[0]][0] % 7, 1.0], np.float32)


def rows() -> Rows:
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, USERS, COUNT), rng.zipf(1.5, COUNT) % 100
    dense = np.stack([np.full(COUNT, 30.0), np.arange(COUNT) / 20], axis=1).astype(np.float32)
    ids = [users, users % 5, items]
    return Rows(dense, [[np.array([one]) for one in own] for own in ids], np.arange(COUNT) * 60.0)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return made_trace(SCHEMA, FEATURES, rows(), ["item"], 6)


def test_a_request_is_a_rows_user_beside_the_candidates_that_come_most_often(trace: Trace) -> None:
    given = rows()
    items = np.concatenate(given.ids[2])
    often = sorted((np.count_nonzero(items == item) for item in {*items.tolist()}), reverse=True)[:6]
    assert trace.user == (0, 1)
    assert trace.users == COUNT, "each has an hour of its own"
    for n in (0, 77):
        asked = trace.asked[n]
        assert asked.samples == 6
        assert asked.bags(0).ids.tolist() == given.ids[0][n].tolist()
        assert [np.count_nonzero(items == item) for item in asked.bags(2).ids] == often
        np.testing.assert_array_equal(asked.dense, np.repeat(given.dense[n : n + 1], 6, axis=0))
    alone = made_trace(SCHEMA, FEATURES, given, [], 6)
    assert alone.asked[3].samples == 1
    priced = made_trace(SCHEMA, FEATURES, given, ["item", "age"], 6)
    assert priced.asked[3].dense[:, 1].tolist() == [given.dense[3, 1]] * 6
    with pytest.raises(UserError, match="items: the model has no feature 'itm'"):
        made_trace(SCHEMA, FEATURES, given, ["itm"], 6)


def test_ways_to_answer_are_compared(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RequestScorer", lambda scorer: made_up)
    monkeypatch.setattr(similar, "UserVectors", FakeVectors)
    config = CacheConfig(bound=0.5, keys=(KeyRule("hour", "skip"),), levels=1, dwell=100, ttl=36000.0)
    twice = replace(trace, asked=[*trace.asked, *trace.asked[:50]], times=np.arange(COUNT + 50) * 600.0)
    told = Comparison(SCORER, twice, config, ReplayOptions(package="p")).told()
    ways = {way["name"]: way for way in told["ways"]}
    assert ways["model"]["inferred"] == ways["exact"]["inferred"] == 1, (
        "the time of equal requests has passed"
    )
    for name in ("model", "exact"):
        assert ways[name]["errors"] == {"score": 0, "top_k": 0, "other_bits": 0}
    approximate = ways["approximate"]
    assert approximate["inferred"] < 1
    assert 0 < approximate["errors"]["score"] < config.bound
    assert approximate["errors"]["other_bits"] == round((1 - approximate["inferred"]) * (COUNT + 50))
    assert ways["approximate, settled"]["inferred"] < approximate["inferred"]
    assert ways["similar"]["errors"]["score"] < config.bound
    assert told["policies"][0]["capacity"] == 1
    command.print_table(told)


def test_policies_find_no_more_than_their_bound_and_the_model_knows_independent_requests() -> None:
    rng = np.random.default_rng(0)
    popularity = np.arange(1, 301, dtype=np.float64) ** -0.9
    drawn = rng.choice(300, 6000, p=popularity / popularity.sum()).tolist()
    for found in policy_hits([bytes([n % 256, n // 256]) for n in drawn], [10, 60]):
        assert max(found.measured.values()) == found.measured["bound"]
        for policy in ("lru", "ideal"):
            assert found.predicted[policy] == pytest.approx(found.measured[policy], abs=0.02)


def test_coarser_clusters_are_made_of_finer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "UserVectors", FakeVectors)
    rule = KeyRule("user", "cluster", 2)
    keys = Keys(MANIFEST, [rule], 3)
    keys.clusters = made = UserClusters(SCORER, keys)
    some = [request(user) for user in range(200)]
    assert keys.of(some[0], 1) is None, "nothing is learnt yet"
    for one in some:
        made.of(one, 1)
    numbers = {level: [made.of(one, level) for one in some] for level in (1, 2, 3)}
    assert [len({*numbers[level]}) for level in (1, 2, 3)] == [7, 4, 2]
    for finer, coarser in ((1, 2), (2, 3)):
        assert len({*zip(numbers[finer], numbers[coarser], strict=True)}) == len({*numbers[finer]})
    assert keys.of(some[0], 1) == keys.of(some[7], 1) != keys.of(some[1], 1)
    centres, nearest = k_means(np.array([[0.0], [0.1], [9.0]], np.float32), 2)
    assert sorted(centres[:, 0].tolist()) == pytest.approx([0.05, 9.0])
    assert nearest[0] == nearest[1] != nearest[2]


def test_a_similarity_cache_answers_within_its_radius_alone(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss", reason="recpipe[retrieval] is not installed")
    monkeypatch.setattr(similar, "UserVectors", FakeVectors)
    score: Any = made_up
    shares = [
        replay(score, trace.asked, similar.SimilarityCache(SCORER, trace.user, radius)).inferred
        for radius in (0.0, 1.0, 100.0)
    ]
    assert shares[0] == COUNT
    assert COUNT > shares[1] > shares[2] == 1
