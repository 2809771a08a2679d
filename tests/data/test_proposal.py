"""A proposal for files that nobody has described: what it reads of them, what it makes of each column, which
columns it suspects, and that the yaml says the same."""

from __future__ import annotations

import datetime as dt
import decimal
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from recpipe.data.config import FilesConfig
from recpipe.data.feature_yaml import parse_features, read_features
from recpipe.data.listing import input_files
from recpipe.data.make import open_dataset
from recpipe.data.proposal import reading
from recpipe.data.proposal import sample as sampling
from recpipe.data.proposal.column import Column, Counts
from recpipe.data.proposal.leaks import FEWEST, auc
from recpipe.data.proposal.propose import Proposal, propose
from recpipe.data.proposal.sample import take_sample
from recpipe.errors import DataError, UserError

N = 2000
RNG = np.random.default_rng(3)
CLICK = (RNG.random(N) < 0.3).astype(int)
USER = RNG.integers(1, 150, N)
ITEM = RNG.integers(1, 90, N)
GENRES = ["Comedy", "Drama", "War", "Sci-Fi"]
HISTORY = [RNG.integers(1, 90, n).tolist() for n in RNG.integers(0, 7, N)]


def proposed(tmp_path: Path, columns: dict[str, object], label: Any = "click", **config: object) -> Proposal:
    """What is proposed for a parquet file with these ``columns``, of 2,000 rows, beside ``click``."""
    file = tmp_path / "file.parquet"
    pq.write_table(pa.table({"click": CLICK, **columns}), file)
    return propose(FilesConfig(path=str(file), features="auto", label=label or None, **config))


def entry(proposal: Proposal, name: str) -> dict[str, object]:
    (found,) = [choice for choice in proposal.choices if choice.column.name == name]
    return dict(found.entry) if found.role == "feature" else {"role": found.role, "why": found.reason}


# -- what is read -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["n.parquet", "n.csv", "n.jsonl", "n.arrow", "one.arrow"])
def test_rows_are_of_the_first_middle_and_last_parts(tmp_path: Path, name: str) -> None:
    """The rows carry their number; no row is there twice."""
    count, file = 30_000, tmp_path / name
    table = pa.table({"n": range(count), "pad": ["some text"] * count})
    if name.endswith("csv"):
        file.write_text("n,pad\n" + "".join(f"{n},some text\n" for n in range(count)))
    elif name.endswith("jsonl"):
        file.write_text("".join(f'{{"n": {n}, "pad": "some text"}}\n' for n in range(count)))
    elif name.endswith("arrow"):
        with pa.ipc.new_file(file, table.schema) as out:
            out.write_table(table, max_chunksize=count if name == "one.arrow" else 1000)
    else:
        pq.write_table(table, file, row_group_size=7000)
    found = take_sample(input_files(str(file)), 3000)
    rows = np.array([int(n) for n in found.rows["n"].to_pylist()])
    assert 2900 <= len(rows) <= 3000
    assert len(set(rows)) == len(rows)
    assert all(((rows >= low) & (rows < low + 3000)).sum() > 900 for low in (0, 14_000, 27_000))
    assert not found.whole
    assert abs(found.total / count - 1) < 0.02
    assert "first, middle and last part" in found.says


def test_of_packed_text_the_first_part_is_read(tmp_path: Path) -> None:
    file = tmp_path / "n.csv.gz"
    with pa.CompressedOutputStream(str(file), "gzip") as out:
        out.write(("n,pad\n" + "".join(f"{n},text\n" for n in range(5000))).encode())
    found = take_sample(input_files(str(file)), 1000)
    assert found.rows["n"].to_pylist() == [str(n) for n in range(1000)]
    assert "from the first part" in found.says
    assert take_sample(input_files(str(file)), 5000).whole


def test_lines_within_quotes_are_no_rows_of_a_sample(tmp_path: Path) -> None:
    """A part that begins within a text is left out, and not misread."""
    file = tmp_path / "q.csv"
    text = '"two\nlines, quoted"'
    file.write_text("n,text\n" + "".join(f"{n},{text}\n" for n in range(3000)))
    found = take_sample(input_files(str(file)), 600)
    assert set(found.rows["text"].to_pylist()) <= {"two\nlines, quoted"}


def test_of_many_files_some_are_read_and_none_without_a_word(tmp_path: Path) -> None:
    for n in range(20):
        pq.write_table(pa.table({"click": [0, 1] * 50, "part": [n] * 100}), tmp_path / f"part_{n}.parquet")
    found = take_sample(input_files(str(tmp_path)), 10_000)
    parts = {n for n in range(20) if n in found.rows["part"].to_pylist()}
    assert {0, 19} <= parts
    assert len(parts) == sampling.PARTS
    assert abs(found.total - 2000) < 100
    assert "9 of 20 files" in found.says


def test_a_column_that_changes_between_files_is_one_line(tmp_path: Path) -> None:
    pq.write_table(pa.table({"click": [0, 1], "user": [1, 2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"click": [0, 1], "user": ["x", "y"]}), tmp_path / "b.parquet")
    with pytest.raises(
        DataError, match=r"b.parquet, column user: holds string here and int64 in .*a.parquet"
    ):
        take_sample(input_files(str(tmp_path)), 10)


def test_a_column_that_a_file_lacks_is_left_out_and_told(tmp_path: Path) -> None:
    pq.write_table(pa.table({"click": [0, 1], "user": [1, 2], "new": [3, 4]}), tmp_path / "a.parquet")
    pq.write_table(
        pa.table({"click": pa.array([0, 1], pa.int8()), "user": [1.0, None]}), tmp_path / "b.parquet"
    )
    found = propose(FilesConfig(path=str(tmp_path), features="auto", label=["click"]))
    assert found.content()["unread"] == ["new"]
    assert "new: left out" in found.suspicions[-1]
    assert "b.parquet" in found.suspicions[-1]


# -- what it makes of columns -------------------------------------------------------------------


def test_each_kind_of_column_is_what_a_person_would_make_of_it(tmp_path: Path) -> None:
    found = proposed(
        tmp_path,
        {
            "user": USER,
            "item": ITEM.astype(float),
            "price": RNG.lognormal(3, 1, N),
            "balance": RNG.normal(0, 100, N),
            "profit": RNG.lognormal(3, 2, N) - 50,
            "share": RNG.random(N),
            "views": (RNG.pareto(1, N) * 2).astype(int),
            "genres": [
                "|".join(GENRES[i] for i in RNG.permutation(4)[: RNG.integers(1, 4)]) for _ in range(N)
            ],
            "history": [(each + [0] * 6)[:6] for each in HISTORY],
            "cost": [decimal.Decimal("1.50"), None] * (N // 2),
            "new": RNG.random(N) < 0.5,
            "brand": pa.array([f"b{n}" for n in ITEM]).dictionary_encode(),
            "time": [dt.datetime(2026, 3, 1) + dt.timedelta(seconds=n) for n in range(N)],
            "vector": pa.array(RNG.random((N, 3)).tolist(), pa.list_(pa.float32(), 3)),
            "nothing": pa.nulls(N),
            "same": ["x"] * N,
            "row": range(N),
            "nested": [{"a": n} for n in range(N)],
        },
    )
    assert entry(found, "user") == {"name": "user", "kind": "id", "ids": "vocabulary"}
    assert entry(found, "item") == {"name": "item", "kind": "id", "ids": "vocabulary"}
    assert entry(found, "price") == {"name": "price", "kind": "dense", "scale": "log1p"}
    assert entry(found, "balance") == {"name": "balance", "kind": "dense", "scale": "standard"}
    assert entry(found, "profit") == {"name": "profit", "kind": "dense", "scale": "log"}
    assert entry(found, "share") == {"name": "share", "kind": "dense"}
    assert entry(found, "views") == {"name": "views", "kind": "dense", "scale": "log1p"}
    genres = {"name": "genres", "kind": "multi_hot", "separator": "|", "type": "text", "ids": "vocabulary"}
    assert entry(found, "genres") == genres
    history = {"name": "history", "kind": "sequence", "padding": ["0"], "max_length": 6}
    assert entry(found, "history") == {**history, "table": "item", "ids": "vocabulary"}
    assert entry(found, "cost") == {"name": "cost", "kind": "dense"}
    assert entry(found, "new") == {"name": "new", "kind": "dense"}
    assert entry(found, "brand") == {"name": "brand", "kind": "id", "type": "text", "ids": "vocabulary"}
    assert entry(found, "vector") == {"name": "vector", "kind": "vector", "size": 3}
    unread = {"time", "nothing", "same", "row", "nested"}
    assert set(found.content()["unread"]) == unread
    assert all(entry(found, name)["role"] == "unread" for name in unread)


MARCH = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ([MARCH + dt.timedelta(hours=n) for n in range(N)], {"as": ["hour", "weekday"], "zone": "UTC"}),
        ([(MARCH + dt.timedelta(hours=n % 40)).replace(tzinfo=None) for n in range(N)], {"as": ["hour"]}),
        ([MARCH.date() + dt.timedelta(days=n % 30) for n in range(N)], {"as": ["weekday"]}),
        ([f"2026-03-{1 + n % 30:02d} 07:00" for n in range(N)], {"as": ["weekday"], "format": "iso"}),
        ([1_772_000_000 + 3600 * n for n in range(N)], {"as": ["hour", "weekday"], "unit": "s"}),
        ([1_772_000_000_000 + 3_600_000 * n for n in range(N)], {"as": ["hour", "weekday"], "unit": "ms"}),
        ([MARCH + dt.timedelta(minutes=n // 4) for n in range(N)], None),
        (["2026-03-01 07:00", "2026-02-30 07:00"] * (N // 2), None),
    ],
)
def test_of_times_the_parts_that_come_again_are_taken(
    tmp_path: Path, values: list[object], more: dict[str, object] | None
) -> None:
    found = proposed(tmp_path, {"user": USER, "x": values})
    if more is None:
        assert "times" in entry(found, "x")["why"]
    else:
        assert entry(found, "x") == {"name": "x", "kind": "timestamp", **more}
    found.features()


def test_more_ids_than_a_vocabulary_is_good_for_are_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a list that shares a table."""
    monkeypatch.setattr(reading, "MOST_WORDS", 85)
    found = proposed(
        tmp_path, {"user": USER, "item": ITEM, "history": HISTORY, "city": ["x", "y"] * (N // 2)}
    )
    assert entry(found, "user") == {"name": "user", "kind": "id", "rows": 300}
    assert entry(found, "item") == {"name": "item", "kind": "id", "rows": 180}
    history = {"name": "history", "kind": "sequence", "max_length": 6, "rows": 180, "table": "item"}
    assert entry(found, "history") == history
    assert entry(found, "city")["ids"] == "vocabulary"
    found.features()


@pytest.mark.parametrize("gap", [2, 40])
def test_whole_numbers_without_a_telling_name_are_told_apart_by_their_values(
    tmp_path: Path, gap: int
) -> None:
    """Counts have large values seldom; ids have frequent ones anywhere."""
    counts = (RNG.pareto(0.8, N) * gap).astype(int)
    ids = RNG.permutation(5000)[(RNG.pareto(1, N) * 20).astype(int) % 800]
    found = proposed(tmp_path, {"x": counts, "z": ids})
    assert entry(found, "x")["kind"] == "dense"
    assert entry(found, "z")["kind"] == "id"


def csv(tmp_path: Path, header: str, rows: list[str], encoding: str = "utf-8") -> FilesConfig:
    file = tmp_path / "file.csv"
    file.write_text("\n".join([header, *rows]) + "\n", encoding=encoding)
    return FilesConfig(path=str(file), features="auto", label="click", encoding=encoding)


def test_what_others_misread_is_kept_as_it_is_or_told(tmp_path: Path) -> None:
    """007, NA, a date with two readings, latin-1."""
    rows = [
        f"{CLICK[n]},{n % 40:03d},{'NA' if n % 10 == 0 else n % 30},{1 + n % 12:02d}/{1 + n % 28:02d}/2024"
        f",Zürich{n % 5},{'NA' if n % 10 == 0 else n % 30 + 0.5},{-1 if n % 9 == 0 else n % 30 + 0.5}"
        for n in range(400)
    ]
    found = propose(csv(tmp_path, "click,code,user,day,city,price,left", rows, "latin-1"))
    said = "\n".join(found.suspicions)
    assert entry(found, "code") == {"name": "code", "kind": "id", "type": "text", "ids": "vocabulary"}
    assert "code: has numbers with zeros in front (007), which are kept as text" in said
    user = {"name": "user", "kind": "id", "type": "integer", "missing": ["NA"], "ids": "vocabulary"}
    assert entry(found, "user") == user
    assert "user, price: has 'NA' in 40 rows between its numbers: taken as missing" in said
    assert "could be swapped" in entry(found, "day")["why"]
    assert entry(found, "city")["type"] == "text"
    assert entry(found, "price") == {"name": "price", "kind": "dense", "scale": "standard", "missing": ["NA"]}
    assert entry(found, "left") == {"name": "left", "kind": "dense", "scale": "standard"}
    assert "left: has '-1' in 45 rows: if that means missing" in said


def test_words_among_text_are_suspected_and_not_applied(tmp_path: Path) -> None:
    found = proposed(tmp_path, {"city": [["Rome", "unknown", "Oslo", None][n % 4] for n in range(N)]})
    assert "missing" not in entry(found, "city")
    (said,) = found.suspicions
    assert said == (
        "city: has 'unknown' in 500 rows: if that means missing, add missing: [\"unknown\"]; it is a value "
        "as it stands"
    )


@pytest.mark.parametrize(
    ("values", "separator"),
    [
        (["a|b", "b|c", "c|a", "a"], "|"),
        (["a^b", "b^c", "c^a", "a"], "^"),
        (["1,2", "2,3", "3,1", "1"], ","),
        (["1 2", "2 3", "3 1", "1"], " "),
        (["New York, NY", "Rome, IT", "Oslo, NO", "x"], None),
        (["one word", "two words", "three words", "x"], None),
        (["2026-03-01 10:00", "2026-03-02 10:00", "x", "y"], None),
    ],
)
def test_separators_are_found_where_pieces_come_again(values: list[str], separator: str | None) -> None:
    assert Column("x", pa.array(values * 20)).separator == separator


@pytest.mark.parametrize(
    ("rows", "padding"),
    [
        ([[1, 2, 0], [3, 0, 0], [4, 5, 6]], "0"),
        ([[0, 1, 2], [0, 0, 3], [4, 5, 6]], "0"),
        ([[1, 2, -1], [3, -1, -1], [4, 5, 6]], "-1"),
        ([[1, 0, 2], [3, 0, 0], [4, 5, 6]], None),  # a 0 between ids is an id
        ([[1, 0], [3, 0, 0], [4]], None),  # nothing is filled up
    ],
)
def test_padding_stands_at_one_end_of_lists_of_one_length(rows: list[list[int]], padding: str | None) -> None:
    assert Column("x", pa.array(rows * 20)).padding == padding


def test_ids_with_weights_are_read_as_such_or_told(tmp_path: Path) -> None:
    """Pairs are told by their ids, which come again where no pair does."""
    rng = np.random.default_rng(8)
    sizes = rng.integers(1, 6, N)
    ids = [rng.choice(80, size, replace=False).tolist() for size in sizes]
    weights = [rng.normal(size=size).round(6).tolist() for size in sizes]
    pairs = [[f"t{i}:{w}" for i, w in zip(a, b, strict=True)] for a, b in zip(ids, weights, strict=True)]
    columns = {
        "topics": ["|".join(row) for row in pairs],
        "plain": [
            "|".join(f"{i}:{max(w, 0):.1e}" for i, w in zip(a, b, strict=True))
            for a, b in zip(ids, weights, strict=True)
        ],
        "tags": ids,
        "shares": weights,
        "others": [[*row, 0.5] for row in weights],
        "times": [
            f"{h}:{m:02d}|{h}:30" for h, m in zip(rng.integers(0, 24, N), rng.integers(0, 60, N), strict=True)
        ],
    }
    found = proposed(tmp_path, columns)
    told = {"kind": "weighted_multi_hot", "separator": "|", "weight_separator": ":", "ids": "vocabulary"}
    assert entry(found, "topics") == {"name": "topics", "type": "text", **told}
    assert entry(found, "plain") == {"name": "plain", "type": "integer", **told}
    assert entry(found, "tags")["kind"] == "multi_hot", "what a list beside it means, is not known"
    (line,) = [line for line in found.suspicions if "as many numbers" in line]
    assert line.startswith("tags: shares has as many numbers as it has ids: if they are weights, say kind: ")
    assert any(
        line.startswith("topics, plain, times: has a number after the ':'") for line in found.suspicions
    )
    features = found.content() | {"labels": ["click"]}
    file = str(tmp_path / "file.parquet")
    (batch,) = open_dataset(
        {
            "name": "files",
            "path": file,
            "features": features,
            "eval_fraction": 0.0,
            "cache_dir": str(tmp_path),
        },
        0,
    ).batches("train", N)
    own = batch.sparse["topics"]
    assert own.weights().tolist() == np.float32([w for row in weights for w in row]).tolist()
    topics = next(choice.column for choice in found.choices if choice.column.name == "topics")
    assert topics.counted.distinct == len({i for row in ids for i in row})


def test_distinct_values_beyond_the_sample_are_estimated() -> None:
    """Sampled without replacement from 20,000 rows of 300 frequent ids and of ids that come once."""
    frequent = RNG.integers(0, 300, 10_000)
    everything = RNG.permutation(np.concatenate([frequent, 1000 + np.arange(10_000)]))
    counts = np.unique(everything[:5000], return_counts=True)[1]
    estimate = Counts(np.sort(counts)[::-1]).estimated(4.0)
    assert len(counts) < estimate < 20_000
    assert 0.4 < estimate / 10_300 < 2
    assert Counts(counts).estimated(1.0) == len(counts)


def test_the_share_of_the_most_frequent_ids_is_that_of_a_count() -> None:
    values = [7] * 60 + list(range(100, 140))
    counted = Column("x", pa.array(values)).counted
    assert (counted.distinct, counted.top) == (41, 0.6)


# -- leaks ------------------------------------------------------------------------------------


def test_an_auc_is_the_share_of_pairs_in_order() -> None:
    scores, positive = RNG.integers(0, 9, 120).astype(float), RNG.random(120) < 0.4
    pairs = itertools.product(scores[positive], scores[~positive])
    wanted = np.mean([(high > low) + 0.5 * (high == low) for high, low in pairs])
    assert auc(scores, positive) == pytest.approx(wanted)
    assert auc(scores, np.arange(120) < FEWEST - 1) is None


def leaking() -> dict[str, tuple[object, str]]:
    """Columns that give the label away, with words of the reason."""
    ids = np.arange(N) // 8
    return {
        "same": (CLICK, "equals click in every row"),
        "opposite": (1 - CLICK, "is click in other numbers"),
        "score": (CLICK + RNG.random(N) * 0.9, "tells click by itself"),
        "paid_at": (
            pa.array([n if c else None for n, c in enumerate(CLICK)]),
            "has a value exactly where click is 1",
        ),
        "state": ([f"{'on' if c else 'off'}{n % 3}" for n, c in enumerate(CLICK)], "tells click by itself"),
        "sale": (CLICK * (RNG.random(N) < 0.3), "click is 1 in all"),
        "visit": (RNG.permutation(300)[np.where(CLICK, ids, 299 - ids % 40)], "tells click by itself"),
    }


@pytest.mark.parametrize("name", list(leaking()))
def test_what_gives_the_label_away_is_left_out_and_told(tmp_path: Path, name: str) -> None:
    values, reason = leaking()[name]
    found = proposed(tmp_path, {"user": USER, name: values})
    assert entry(found, name)["role"] == "unread"
    assert reason in entry(found, name)["why"]
    assert any(line.startswith(f"{name}: suspected leak") for line in found.suspicions)


def test_what_only_helps_to_tell_the_label_stays(tmp_path: Path) -> None:
    """A good feature, ids of two samples each (all of one label by chance), a rare value without clicks."""
    good = CLICK + RNG.normal(0, 0.5, N)
    found = proposed(
        tmp_path,
        {
            "user": USER,
            "good": good,
            "pair_id": RNG.permutation(np.arange(N) // 2),
            "page": np.where((CLICK == 0) & (RNG.random(N) < 0.1), 3, RNG.integers(1, 3, N)),
        },
    )
    assert {f["name"] for f in found.content()["features"]} == {"user", "good", "pair_id", "page"}
    assert 0.8 < next(c.alone for c in found.choices if c.column.name == "good") < 0.99
    assert not any("leak" in line for line in found.suspicions)


def test_a_label_that_is_missing_now_and_then_is_leaked_as_well(tmp_path: Path) -> None:
    """And of several labels the reason names the one that is."""
    buy = RNG.random(N) < 0.4
    rated = pa.array([None if n % 3 == 0 else int(b) for n, b in enumerate(buy)])
    score = buy + RNG.random(N) * 0.9
    file = tmp_path / "file.parquet"
    pq.write_table(pa.table({"click": CLICK, "rated": rated, "user": USER, "score": score}), file)
    found = propose(FilesConfig(path=str(file), features="auto", label=["click", "rated"]))
    assert "tells rated by itself" in entry(found, "score")["why"]
    assert entry(found, "user")["kind"] == "id"


# -- labels, yaml, errors ----------------------------------------------------------------------


def test_a_label_is_found_by_its_name_only_where_none_is_stated(tmp_path: Path) -> None:
    columns = {"user": USER, "buy": (RNG.random(N) < 0.1).astype(int)}
    found = proposed(tmp_path, columns, label="")
    assert found.content()["labels"] == [{"name": "click"}]
    assert "found by its name, and buy could be one" in found.found
    assert "by its name a label itself" in entry(found, "buy")["why"]
    assert proposed(tmp_path, columns, label="buy").content()["labels"] == [{"name": "buy"}]
    assert proposed(tmp_path, columns, label="buy").found == ""


def test_labels_of_other_values_are_told(tmp_path: Path) -> None:
    found = proposed(tmp_path, {"user": USER, "rating": RNG.integers(1, 6, N)}, label="rating")
    assert found.content()["labels"] == [{"name": "rating", "kind": "values"}]
    assert any(line.startswith("rating: has other values than 0 and 1") for line in found.suspicions)


def test_a_column_of_weights_is_no_feature(tmp_path: Path) -> None:
    found = proposed(tmp_path, {"user": USER, "trust": RNG.random(N)}, weight="trust")
    assert found.content()["weight"] == "trust"
    assert [each["name"] for each in found.content()["features"]] == ["user"]
    found.write(tmp_path / "features.yaml")
    assert read_features(tmp_path / "features.yaml") == found.features()
    assert found.features().weight == "trust"
    with pytest.raises(UserError, match=r"weight=trusts: no such column; did you mean trust\?"):
        proposed(tmp_path, {"user": USER, "trust": RNG.random(N)}, weight="trusts")


def test_the_yaml_says_what_is_proposed(tmp_path: Path) -> None:
    """Also with names, separators and values that yaml has other ideas of."""
    found = proposed(
        tmp_path,
        {
            "user id": USER,
            "yes": ITEM,
            "a: b # c": RNG.random(N),
            "tags": [["x\x01y", "y", "z\x01x"][n % 3] for n in range(N)],
            "null": ["same"] * N,
            "über": RNG.random(N),
        },
    )
    file = tmp_path / "features.yaml"
    found.write(file, ["a line", "of two\nlines"])
    assert read_features(file) == found.features() == parse_features(found.content())
    assert read_features(file).unread == ("null",)
    lines = file.read_text(encoding="utf-8").splitlines()
    assert all("#" in line or line.endswith(":") for line in lines)


def test_a_proposal_reads_its_own_files(tmp_path: Path) -> None:
    found = proposed(tmp_path, {"user": USER, "item": ITEM, "price": RNG.random(N), "history": HISTORY})
    config = FilesConfig(
        path=str(tmp_path / "file.parquet"), features=found.content(), cache_dir=str(tmp_path / "cache")
    )
    dataset = open_dataset(config, 0)
    assert dataset.size("train") + dataset.size("eval") == N
    assert [table.name for table in dataset.schema.sparse] == ["user", "item", "history"]


@pytest.mark.parametrize(
    ("columns", "label", "error", "words"),
    [
        ({"user": USER}, "clicks", UserError, r"label=clicks: no such column; did you mean click\?"),
        (
            {"kind": ["a"] * N},
            "kind",
            DataError,
            "label=kind: holds .*'a' for example; a label is numbers or bool",
        ),
        ({"price": RNG.random(N)}, "click", DataError, "no column is a feature with ids"),
    ],
)
def test_what_cannot_be_proposed_is_one_line(
    tmp_path: Path, columns: dict[str, object], label: str, error: type[UserError], words: str
) -> None:
    with pytest.raises(error, match=words) as told:
        proposed(tmp_path, columns, label).features()
    assert "\n" not in str(told.value)


def test_without_a_label_there_is_nothing_to_train(tmp_path: Path) -> None:
    file = tmp_path / "file.parquet"
    pq.write_table(pa.table({"session": USER, "item": ITEM}), file)
    found = propose(FilesConfig(path=str(file), features="auto"))
    assert [choice.role for choice in found.choices] == ["feature", "feature"]
    with pytest.raises(UserError, match=r"no column has a name of a label \(session, item\): say which"):
        found.features()


# -- odd and damaged files -----------------------------------------------------------------------


def odd() -> dict[str, object]:
    """Columns of types that are rarely features, with what they become."""
    return {
        "wide": (pa.array([2**64 - 1 - n % 40 for n in range(N)], pa.uint64()), "id"),
        "large": ([decimal.Decimal("12345678901234567890.5") + n for n in range(N)], "dense"),
        "endless": (np.where(RNG.random(N) < 0.1, np.inf, RNG.random(N)), "dense"),
        "half": (RNG.random(N).astype(np.float16), "dense"),
        "fixed": (pa.array(RNG.integers(0, 40, (N, 3)).tolist(), pa.list_(pa.int64(), 3)), "sequence"),
        "within": ([[None, n % 40], [None]][n % 2] for n in range(N)),
        "runs": (pa.array([f"a{n % 9}" for n in range(N)]).dictionary_encode(), "id"),
        "duration": ([dt.timedelta(seconds=n) for n in range(N)], None),
        "clock": ([dt.time(1, n % 60) for n in range(N)], None),
        "nested": ([[[1], [2]]] * N, None),
        "pairs": (pa.array([[("a", 1)]] * N, pa.map_(pa.string(), pa.int64())), None),
        "bytes": ([b"\xff\xfe" if n % 3 else b"x" for n in range(N)], None),
        "empty": (pa.array([[]] * N, pa.list_(pa.int64())), None),
        "json": ([f'{{"a": {n % 7}}}' for n in range(N)], None),
        "": (RNG.random(N), "dense"),
    }


@pytest.mark.parametrize("name", [*odd()])
def test_odd_types_are_features_or_left_out_with_a_reason(tmp_path: Path, name: str) -> None:
    """And the yaml has them, whatever their names are."""
    given = odd()[name]
    values, kind = given if isinstance(given, tuple) else (list(given), "multi_hot")
    found = proposed(tmp_path, {"user": USER, name: values})
    choice = found.choices[-1]
    assert choice.entry.get("kind") == kind
    assert (choice.role == "unread") == (kind is None)
    found.write(tmp_path / "features.yaml")
    assert read_features(tmp_path / "features.yaml") == found.features()


def damaged(rng: random.Random, whole: bytes) -> bytes:
    """Bytes changed, cut out and put in."""
    made = bytearray(whole)
    for _ in range(rng.choice([1, 1, 3, 20])):
        at = rng.randrange(max(1, len(made)))
        put = rng.choice([bytes([rng.randrange(256)]), b'"', b"\n", b",", b"\x00", b"\xff", b"{}"])
        made[at : at + rng.choice([0, 1, len(put), rng.randrange(50)])] = put
    return bytes(made)


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(n, marks=pytest.mark.soak) for n in range(4, 40))]
)
def test_damaged_files_are_proposals_or_one_line(tmp_path: Path, seed: int) -> None:
    """Ten a seed."""
    rng, told = random.Random(seed), list[str]()
    rows = [(n % 2, n % 9, f"a|{n % 4}", n / 2) for n in range(80)]
    table = pa.table(dict(zip(("click", "user", "tags", "x"), zip(*rows, strict=True), strict=True)))
    pq.write_table(table, tmp_path / "f.parquet")
    with pa.ipc.new_file(tmp_path / "f.arrow", table.schema) as out:
        out.write_table(table)
    lines = ["click,user,tags,x", *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "f.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    for _ in range(10):
        source = rng.choice(sorted(tmp_path.glob("f.*")))
        file = tmp_path / f"damaged{source.suffix}"
        file.write_bytes(damaged(rng, source.read_bytes()))
        try:
            propose(FilesConfig(path=str(file), features="auto", label=["click"])).to_yaml()
        except UserError as error:
            told.append(str(error))
    assert told
    assert not any("\n" in line for line in told)


def test_a_label_may_be_an_expression_whose_columns_are_no_features(tmp_path: Path) -> None:
    rating = [None if n % 50 == 0 else n % 5 + 1 for n in range(N)]
    columns = {"rating": rating, "user": USER, "kind": ["view" if n % 3 else "buy" for n in range(N)]}
    found = proposed(tmp_path, columns, {"liked": "rating >= 4", "bought": 'kind == "buy"'})
    labels = [dict(choice.entry) for choice in found.choices if choice.role == "label"]
    assert labels == [
        {"name": "liked", "expression": "rating >= 4"},
        {"name": "bought", "expression": 'kind == "buy"'},
    ]
    assert entry(found, "rating") == {"role": "unread", "why": "label liked is made of it"}
    assert entry(found, "kind")["why"] == "label bought is made of it"
    assert [f.name for f in parse_features(yaml.safe_load(found.to_yaml())).sparse] == ["user"]
    assert "0 and 1; 41% are 1; missing in 2%" in found.to_yaml()
    for label, fault in (
        ({"user": "rating >= 4"}, "label=user: a column has this name"),
        ({"liked": "raiting >= 4"}, "label=raiting: no such column.*rating"),
        ({"liked": "kind >= 4"}, "label=liked: kind >= 4 has no value in any row"),
        ({"liked": "rating == '4'"}, "column rating: holds int64, and a label's expression compares"),
        ({"liked": "rating"}, None),
    ):
        if fault is None:
            assert "numbers from 1 to 5" in proposed(tmp_path, columns, label).to_yaml()
            continue
        with pytest.raises(UserError, match=fault):
            proposed(tmp_path, columns, label)


def test_text_that_is_not_utf8_in_a_row_of_too_many_columns_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And nothing else is printed."""
    file = tmp_path / "f.csv"
    file.write_bytes(b"click,user\n1,2\n\xad,3,4\n5,6\n")
    with pytest.raises(DataError, match="row 2: .*is not UTF-8"):
        propose(FilesConfig(path=str(file), features="auto", label=["click"]))
    assert capfd.readouterr().err == ""
