"""Which answers are kept, and when one is inferred again."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from recpipe_answer_cache.config import config_of
from recpipe_answer_cache.entries import Clairvoyant, Entries, Entry, Lfu, Lru, Popular, entries_of
from recpipe_answer_cache.model import refreshes, zipf

from recpipe.errors import UserError
from recpipe.plugin import PluginError


def entry() -> Entry:
    return Entry(np.zeros(1, np.float32), 0.0)


def hits(entries: Entries, trace: bytes) -> str:
    """h or m for each request, whose keys are letters."""
    found = ""
    for letter in trace:
        key = bytes([letter])
        if entries.find(key) is None:
            found += "m"
            entries.put(key, entry())
        else:
            found += "h"
        assert len(entries) <= entries.capacity
    return found


def test_who_gives_way() -> None:
    trace = b"aababcacb"
    assert hits(Lru(2), trace) == "mhmhhmmhm"
    assert hits(Lfu(2), trace) == "mhmhhmhhm"
    assert hits(Popular(2, [bytes([n]) for n in trace]), trace) == "mhmhhmhmh"
    assert hits(Clairvoyant(2, [bytes([n]) for n in trace]), trace) == "mhmhhmhhm"


def test_nothing_finds_more_than_the_bound_and_all_find_as_much_where_there_is_room() -> None:
    rng = np.random.default_rng(1)
    trace = bytes(rng.choice(200, 800, p=zipf(200, 0.8)).astype(np.uint8))
    keys = [bytes([n]) for n in trace]
    for capacity in (2, 20, 200):
        found = {
            name: hits(made, trace).count("h")
            for name, made in {
                "lru": Lru(capacity),
                "lfu": Lfu(capacity),
                "recpipe's lru": entries_of("recpipe.kit:Lru", capacity),
                "ideal": Popular(capacity, keys),
                "bound": Clairvoyant(capacity, keys),
            }.items()
        }
        assert max(found.values()) == found["bound"]
        assert found["recpipe's lru"] == found["lru"]
        assert (len({*found.values()}) == 1) == (capacity == 200)


def test_rows_of_a_cache_policy_are_given_out_anew_when_they_run_out() -> None:
    made = entries_of("recpipe.kit:Lru", 2)
    for number in range(200):
        key = number.to_bytes(2, "little")
        assert made.find(key) is None
        made.put(key, entry())
        assert made.find(key) is not None
        assert len(made) <= 2


@pytest.mark.parametrize("beta", [1.0, 1.2, 1.5, 2.0, 10.0])
def test_hits_are_inferred_again_at_powers_of_beta_and_from_the_first_one_on_after_a_mistake(
    beta: float,
) -> None:
    powers = (
        sorted({int(np.ceil(beta**n)) for n in range(200) if beta**n < 200}) if beta > 1 else range(1, 200)
    )
    one = entry()
    due = []
    for _ in range(199):
        one.hits += 1
        if one.is_due(beta):
            due.append(one.hits)
    assert due == [hit for hit in powers if hit < 200]
    assert due[:5] == [*islice(refreshes(beta), 5)][: len(due)]
    one.refreshed(entry(), wrong=False)
    assert one.hits == 199
    one.refreshed(entry(), wrong=True)
    one.hits += 1
    assert one.is_due(beta)
    one = Entry(np.zeros(1, np.float32), 0.0, hits=100, due=1000.0, looked=100)
    assert [one.is_due(1.5) for one.hits in range(101, 151)] == [False] * 49 + [True], (
        "a smaller beta counts at once"
    )


def test_a_wrong_policy_is_one_line() -> None:
    with pytest.raises(UserError, match="policy=mru: choose lru, lfu, or MODULE:CLASS"):
        config_of({"keys": [], "policy": "mru"})
    for policy, says in {
        "nothing:Mru": "cannot be imported",
        "recpipe.kit:Mru": "cannot be imported",
        "recpipe.kit:Amount": "is no recpipe.plugin.CachePolicy",
        "recpipe.plugin:CachePolicy": "cannot be made of a RowSpace alone",
    }.items():
        with pytest.raises(PluginError, match=says):
            entries_of(policy, 4)
