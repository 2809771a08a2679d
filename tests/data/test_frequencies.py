"""Frequencies that are estimated as samples arrive, beside a dict, and back at any batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recpipe.data import frequencies
from recpipe.data.config import StreamConfig
from recpipe.data.frequencies import RECENT, Frequencies
from recpipe.data.stream.stream import Stream
from recpipe.errors import UserError


def reference(keys: list[int | None]) -> list[float]:
    """The mean distance of each key so far, at each sample: of its first ones exactly, then of the latest."""
    seen: dict[int, tuple[int, int, float]] = {}
    found = []
    for number, key in enumerate(keys, 1):
        if key is None:
            found.append(1.0)
            continue
        count, latest, mean = seen.get(key, (0, 0, 0.0))
        count = min(count + 1, RECENT)
        mean += (number - latest - mean) / count
        seen[key] = count, number, mean
        found.append(mean)
    return found


def batches(count: int = 90, size: int = 40) -> list[list[int | None]]:
    rng = np.random.default_rng(1)
    ids = rng.zipf(1.5, (count, size)) % 50
    return [[None if key == 7 else int(key) * 2**40 for key in batch] for batch in ids]


def counted(found: Frequencies, batch: list[int | None]) -> list[float]:
    keys = np.array([key or 0 for key in batch], np.int64)
    return found.log_q(keys, np.array([key is None for key in batch])).tolist()


def test_chances_are_those_of_a_dict() -> None:
    """At the end of each batch, in which an id may come several times."""
    every = batches()
    flat = [key for batch in every for key in batch]
    means, found, known = reference(flat), Frequencies(), dict[int, float]()
    for n, batch in enumerate(every):
        known |= {key: means[n * 40 + m] for m, key in enumerate(batch) if key is not None}
        wanted = [0.0 if key is None else -np.log(known[key]) for key in batch]
        np.testing.assert_allclose(counted(found, batch), wanted, rtol=1e-4, atol=1e-6)
    often = max(set(flat) - {None}, key=flat.count)
    assert flat.count(often) > 3 * RECENT, "and recent ones count more"
    assert known[often or 0] != pytest.approx(len(flat) / flat.count(often), rel=1e-3)


def test_of_rare_ids_it_is_the_share_of_the_samples_so_far() -> None:
    found = Frequencies()
    assert counted(found, [5, 9, 5, 8])[2] == pytest.approx(np.log(2 / 3), rel=1e-6)


def test_ids_that_share_a_slot_are_told_apart_by_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frequencies, "SLOTS", 61)
    one, both = Frequencies(), Frequencies()
    monkeypatch.setattr(frequencies, "_slots", lambda keys, own=frequencies._slots: own(keys)[:1])
    alone = [counted(one, batch) for batch in batches(30)][-1]
    monkeypatch.undo()
    monkeypatch.setattr(frequencies, "SLOTS", 61)
    found = [counted(both, batch) for batch in batches(30)][-1]
    assert all(a >= b - 1e-6 for a, b in zip(alone, found, strict=True))
    assert alone != found


def test_what_was_read_ahead_is_undone() -> None:
    every, found = batches(), Frequencies()
    later = [counted(found, batch) for batch in every]
    for back in (0, 1, 30, 60):
        rest = Frequencies.resumed(90 - back, found.state_after(90 - back))
        assert [counted(rest, batch) for batch in every[90 - back :]] == later[90 - back :]
        last, again = found.state_after(90), rest.state_after(90)
        assert all((last[name] == again[name]).all() for name in last)
    assert (found.state_after(90)["latest"] != found.state_after(60)["latest"]).any()


def stream(folder: Path, **rule: Any) -> Stream:
    features = {"labels": ["click"], "features": [{"name": "user", "rows": 50}, {"name": "item", "rows": 40}]}
    negatives = {"feature": "item", "sampling": "in_batch", **rule}
    own: dict[str, Any] = {"path": str(folder), "features": features, "negatives": negatives}
    return Stream(StreamConfig(settle=0.0, end="stop", idle=0.15, **own))


def test_batches_of_a_stream_have_the_chances_also_when_it_goes_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    item = [None if n % 9 == 0 else int(n) for n in rng.zipf(1.6, 100) % 30]
    lines = [json.dumps({"click": 1, "user": n % 20, "item": own}) for n, own in enumerate(item)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    whole = stream(tmp_path)
    found = [batch.log_q.tolist() for batch in whole.batches("train", 32)]
    again, wanted = Frequencies(), []
    for low in range(0, 100, 32):
        wanted.append(counted(again, item[low : low + 32]))
    assert [len(own) for own in found] == [32, 32, 32, 4]
    assert found == wanted
    rest = stream(tmp_path)
    rest.resume_at(2, whole.position_after(2), whole.counts_after(2))
    assert next(rest.batches("train", 32)).log_q.tolist() == found[0], "what is looked at before training"
    assert [batch.log_q.tolist() for batch in rest.batches("train", 32, 2)] == found[2:]
    rest.resume_at(2, whole.position_after(2))
    assert next(rest.batches("train", 32, 2)).log_q.tolist() != found[2], "without the counts"


def test_nothing_is_drawn_from_a_stream(tmp_path: Path) -> None:
    for match, rule in {
        "data.negatives.sampling=uniform: a stream is not known beforehand": {"sampling": "uniform"},
        "data.negatives.sampling=popularity": {"sampling": "popularity"},
    }.items():
        with pytest.raises(UserError, match=match):
            stream(tmp_path, **rule)
