"""Which requests have one key."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from recpipe_answer_cache.config import KeyRule, config_of
from recpipe_answer_cache.keys import Keys
from recpipe_answer_cache.tests.requests import FEATURES, MANIFEST, request

from recpipe.errors import UserError
from recpipe.plugin import PluginError

NAMES = [feature["name"] for feature in MANIFEST["sparse"]]


def keys(*rules: KeyRule, levels: int = 3) -> Keys:
    return Keys(MANIFEST, rules, levels)


def alike(made: Keys, level: int, one, other) -> bool:
    return made.of(one, level) == made.of(other, level)


def test_without_rules_equal_requests_alone_are_alike() -> None:
    made = keys()
    for level in (0, 1):
        assert alike(made, level, request(), request())
        for other in (request(2), request(seen=(1, 2)), request(seen=(3, 2, 1)), request(age=30.5)):
            assert not alike(made, level, request(), other)
    assert not alike(made, 0, request(), replace(request(), weights=np.ones(6, np.float32)))
    assert made.of(request(), 0) != made.of(request(), 1), "levels do not share keys"


def test_a_tensor_for_all_samples_and_one_for_each_are_two_forms_of_one_request() -> None:
    both = np.array([[30.0, 12.0]] * 2, np.float32)
    each = FEATURES.asked(
        {"dense": both, "user": np.array([1, 1]), "seen": np.array([[1, 2, 3]] * 2), "item": np.array([5, 6])}
    )
    assert not alike(keys(), 0, request(), each)


@pytest.mark.parametrize(
    ("rule", "same", "other"),
    [
        (KeyRule("user", "skip"), request(900), request(seen=(1, 2))),
        (KeyRule("user", "bucket", 10), request(99), request(100)),
        (KeyRule("seen", "history", 2), request(seen=(9, 9, 9, 2, 3)), request(seen=(1, 3, 2))),
        (KeyRule("hour", "round", 6), request(hour=17.9), request(hour=18.0)),
        (KeyRule("[ah]*", "skip"), request(hour=1.0, age=1.0), request(2)),
    ],
)
def test_a_rule_at_the_coarsest_level(rule: KeyRule, same, other) -> None:
    made = keys(rule)
    assert alike(made, 3, request(), same)
    assert not alike(made, 3, request(), other)
    assert not alike(made, 0, request(), same), "level 0 is exact"


def test_finer_levels_part_what_coarser_ones_join_and_never_the_other_way_round() -> None:
    made = keys(KeyRule("user", "bucket", 8), KeyRule("hour", "round", 8), KeyRule("seen", "skip", first=2))
    rng = np.random.default_rng(0)
    some = [
        request(int(u), hour=float(h))
        for u, h in zip(rng.integers(0, 1000, 300), rng.random(300) * 24, strict=True)
    ]
    groups = [{made.of(one, level): None for one in some} for level in range(4)]
    assert len(groups[0]) > len(groups[1]) > len(groups[2]) > len(groups[3]) > 1
    for level in (1, 2):
        coarser = {made.of(one, level): made.of(one, level + 1) for one in some}
        assert all(coarser[made.of(one, level)] == made.of(one, level + 1) for one in some)
    assert not alike(made, 1, request(), request(seen=(4,)))
    assert alike(made, 2, request(), request(seen=(4,)))


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ([{"feature": "usr", "by": "skip"}], "no feature 'usr'; it has age, hour, user"),
        ([{"feature": "user", "by": "round", "size": 2}], "'user' has ids, which are not rounded"),
        ([{"feature": "age", "by": "bucket", "size": 2}], "'age' has numbers, and no ids"),
        ([{"feature": "age", "by": "round"}], r"keys\[0\].size is missing: the width of a step of 'age'"),
        ([{"feature": "age", "by": "skip", "size": 2}], "size=2 of 'age' means nothing by=skip"),
        ([{"feature": "age", "by": "rounded"}], r"keys\[0\].by"),
        ([{"feature": "age", "by": "round", "size": 0}], "is not above 0"),
        ([{"feature": "age", "by": "skip", "first": 4}], "begins at level 4, and there are 3"),
    ],
)
def test_a_wrong_rule_is_one_line(rules: list[dict], says: str) -> None:
    with pytest.raises((UserError, PluginError), match=says):
        Keys(MANIFEST, config_of({"keys": rules}).keys, 3)


def test_a_candidate_is_known_again_among_others() -> None:
    """By what it shares with the request's others, and what is its own."""
    made = keys(KeyRule("hour", "round", 6), KeyRule("seen", "history", 2))

    def digests(items: tuple[int, ...], level: int = 0, **user: Any) -> list[bytes]:
        one = request(items=items, **user)
        found, coarser = made.of_candidates(one, level)
        assert coarser == (level > 0)
        return [own.tobytes() for own in (found[:, 2:] if level else found[:, :2])]

    of = digests((5, 6, 7, 8))
    assert len({*of}) == 4
    assert digests((8, 6)) == [of[3], of[1]]
    for other in ({"user": 2}, {"seen": (1, 2)}, {"hour": 12.5}):
        assert not {*digests((5, 6), **other)} & {*of}, other
    coarse = digests((5, 6, 7, 8), 3)
    assert digests((7, 5), 3, hour=17.5, seen=(9, 9, 2, 3)) == [coarse[2], coarse[0]]
    for other in ({"user": 2}, {"seen": (1, 2)}, {"hour": 18.5}):
        assert not {*digests((5, 6), 3, **other)} & {*coarse}, other


def test_bags_of_other_features_do_not_run_into_each_other() -> None:
    def asked(*bags: list[list[int]]) -> bytes:
        lengths = {
            f"{n}.lengths": np.array([len(b) for b in own]) for n, own in zip(NAMES, bags, strict=True)
        }
        ids = {n: np.array([*chain(*own)], np.int64) for n, own in zip(NAMES, bags, strict=True)}
        one = FEATURES.asked({"dense": np.zeros((2, 2), np.float32), **ids, **lengths})
        return made.of_candidates(one, 0)[0][0, :2].tobytes()

    made = keys()
    first = asked([[1, 2], [9]], [[3], [9]], [[4], [9]])
    assert first == asked([[1, 2], [8]], [[3], [9, 9]], [[4], [7]])
    assert first != asked([[1], [9]], [[2, 3], [9]], [[4], [9]])


def test_entities_with_coefficients_are_told_apart_by_their_keys() -> None:
    """Of a user without a row in the model the rows say nothing; without coefficients that is all there
    is."""
    known = {"name": "user", "rows": 1000, "map": "user"}
    plain = {**MANIFEST, "sparse": [known, *MANIFEST["sparse"][1:]]}
    corrected = {**plain, "effects": [{"entity": "user"}]}
    one, two = (replace(request(0), keys=np.array([key, *request(0).ids[1:]])) for key in (-5, 2**60))
    for manifest, same in ((plain, True), (corrected, False)):
        made = Keys(manifest, [KeyRule("hour", "round", 8)], 3)
        assert [alike(made, level, one, two) for level in (0, 3)] == [same, same]
        digests = [made.of_candidates(each, 3)[0] for each in (one, two)]
        assert [np.array_equal(*(own[:, part] for own in digests)) for part in (0, 2)] == [same, same]
    assert alike(Keys(corrected, [KeyRule("user", "skip")], 3), 3, one, two)
    with pytest.raises(PluginError, match="'user' has coefficients by its ids as they come"):
        Keys(corrected, [KeyRule("user", "bucket", 4)], 3)
