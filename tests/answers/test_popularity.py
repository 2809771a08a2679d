"""How often training looked up each row: counted in all samples or in some, and kept in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recpipe.answers import reference
from recpipe.answers.package import Options
from recpipe.answers.reference import FILE, lookups_in, read_lookups, write_lookups
from recpipe.answers.trained import open_trained
from recpipe.errors import UserError
from tests.answers.answers import Answers

PARTS = [("user", "t_user"), ("city", "t_city"), ("tags", "t_tags"), ("tags", "t_city")]
TABLES = {"t_user": 500, "t_city": 60, "t_tags": 60}


def test_all_samples_and_some(answers: Answers, tmp_path: Path) -> None:
    """A table that two features look up counts both."""
    trained = open_trained(answers.folder)
    counts = {table: np.zeros(rows, np.int64) for table, rows in TABLES.items()}
    for batch in trained.dataset.batches("train", 128):
        for feature, table in PARTS:
            np.add.at(counts[table], batch.sparse[feature].values().numpy(), 1)
    found, read = lookups_in(trained, TABLES, PARTS, 0, {})
    assert read == trained.dataset.size("train")
    for table, (rows, times) in found.items():
        assert np.array_equal(np.flatnonzero(counts[table]), rows)
        assert np.array_equal(counts[table][rows], times)
    some, few = lookups_in(trained, TABLES, PARTS, 300, {})
    assert few in (3 * 128, 2 * 128 + trained.dataset.size("train") % 128)
    assert all((some[t][1].sum() < found[t][1].sum()) and set(some[t][0]) <= set(found[t][0]) for t in TABLES)
    assert read_lookups(tmp_path) == {}
    write_lookups(tmp_path / FILE, found)
    again = read_lookups(tmp_path)
    assert again.keys() == found.keys()
    assert all(np.array_equal(a, b) for t in TABLES for a, b in zip(again[t], found[t], strict=True))


def test_counts_that_may_not_fit_are_kept_in_a_wider_type(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = open_trained(answers.folder)
    narrow, read = lookups_in(trained, TABLES, PARTS, 0, {})
    monkeypatch.setattr(reference, "_LARGEST", 500)  # reached in the first batches
    wide, again = lookups_in(trained, TABLES, PARTS, 0, {})
    assert read == again
    for table in TABLES:
        for a, b in zip(narrow[table], wide[table], strict=True):
            assert a.dtype == b.dtype == np.int64
            assert np.array_equal(a, b)


def test_what_can_be_asked_for() -> None:
    none, some = dict.fromkeys((False, "false", "False")), {5000: 5000, "5000": 5000}
    for word, samples in {**none, **some, True: 0, "true": 0}.items():
        assert Options(popularity=word).popularity == samples
    for text in ("yes", "-1", "0", "1.5", "9" * 5000):
        with pytest.raises(UserError, match="popularity=.*: give true, or how many training samples to read"):
            Options(popularity=text)
