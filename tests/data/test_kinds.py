"""Kinds of features against plain Python: vectors, times, crosses, defaults of ids."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpipe.data.config import FilesConfig
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset
from recpipe.data.sources.transforms import hash_rows, mix64, string_keys
from recpipe.errors import DataError, UserError

SIZE, TRAIN = 60, 45
BERLIN = ZoneInfo("Europe/Berlin")


def opened(folder: Path, table: pa.Table, *features: dict[str, Any], **settings: Any) -> Dataset:
    click = pa.array(np.arange(len(table)) % 2)
    pq.write_table(table.append_column("click", click), folder / "rows.parquet")
    known = [*features, {"name": "some", "column": "click", "rows": 3}]
    described = {"labels": ["click"], "features": known}
    made = {"eval_fraction": 0.25, "cache_dir": str(folder / "cache"), **settings}
    return open_dataset(FilesConfig(path=str(folder / "rows.parquet"), features=described, **made), 0)


def dense(dataset: Dataset) -> np.ndarray:
    return np.concatenate([b.dense.numpy() for s in ("train", "eval") for b in dataset.batches(s, 16)])


def ids(dataset: Dataset, name: str) -> list[int]:
    batches = [b for split in ("train", "eval") for b in dataset.batches(split, 16)]
    return [row for batch in batches for row in batch.sparse[name].values().tolist()]


def test_a_vector_is_as_many_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    vectors: list[Any] = rng.normal(5, 3, (SIZE, 3)).tolist()
    vectors[4], vectors[7] = None, [1.0, None, 2.0]
    fixed = pa.table({"v": pa.array(vectors, pa.list_(pa.float64(), 3))})
    listed = pa.table({"v": pa.array(vectors, pa.list_(pa.float64()))})
    text = pa.table({"v": [None if v is None else " ".join(str(x or "") for x in v) for v in vectors]})
    dataset = opened(tmp_path, fixed, {"name": "v", "kind": "vector", "default": -1.0})
    assert dataset.schema is not None
    assert dataset.schema.dense == ("v_0", "v_1", "v_2")
    wanted = np.array([[-1.0 if x is None else x for x in (v or [None] * 3)] for v in vectors], np.float32)
    np.testing.assert_array_equal(dense(dataset), wanted)
    assert dataset.missing["v"] == 1
    named = {"name": "v", "kind": "vector", "size": 3, "default": -1.0}
    np.testing.assert_array_equal(dense(opened(tmp_path, listed, named)), wanted)
    np.testing.assert_array_equal(dense(opened(tmp_path, text, named | {"separator": " "})), wanted)
    scaled = dense(opened(tmp_path, listed, named | {"scale": "standard", "default": None}))
    own = np.array([[np.nan if x is None else x for x in (v or [None] * 3)] for v in vectors])
    wanted = (own - np.nanmean(own[:TRAIN], 0)) / np.nanstd(own[:TRAIN], 0)
    np.testing.assert_allclose(scaled, np.nan_to_num(wanted), rtol=1e-5, atol=1e-6)


def test_vectors_of_another_length_are_one_line(tmp_path: Path) -> None:
    table = pa.table({"v": [[1.0, 2.0], [1.0]] * 20})
    with pytest.raises(DataError, match=r"state how many numbers a vector has"):
        opened(tmp_path, table, {"name": "v", "kind": "vector"})
    with pytest.raises(DataError, match=r"row 2, column v: \[1.0\] is not a list of 2 numbers"):
        opened(tmp_path, table, {"name": "v", "kind": "vector", "size": 2})
    with pytest.raises(DataError, match=r"rows.parquet, column v: holds .* kind: vector"):
        opened(tmp_path, table, {"name": "v", "kind": "dense"})


def test_ages_are_seconds_until_the_samples_own_time(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    now = rng.integers(10**9, 2 * 10**9, SIZE)
    lists: list[Any] = [sorted(int(t - d) for d in rng.integers(0, 10**6, n % 6)) for n, t in enumerate(now)]
    lists[6] = None
    table = pa.table({"seen": pa.array(lists, pa.list_(pa.int64())), "at": now})
    feature = {"name": "ago", "kind": "ages", "column": "seen", "until": "at", "size": 3, "unit": "s"}
    dataset = opened(tmp_path, table, feature)
    assert dataset.schema is not None
    assert dataset.schema.dense == ("ago_0", "ago_1", "ago_2")
    wanted = [
        ([-1.0] * 3 + [float(t - each) for each in (own or [])])[-3:]
        for t, own in zip(now, lists, strict=True)
    ]
    np.testing.assert_array_equal(dense(dataset), np.array(wanted, np.float32))
    assert dataset.missing["ago"] == sum(not own for own in lists)
    stamps = pa.array(now * 1000, pa.timestamp("ms"))
    text = [",".join(datetime.fromtimestamp(t, UTC).isoformat() for t in own or []) for own in lists]
    written = feature | {"separator": ",", "format": "iso", "unit": None}
    again = opened(tmp_path, pa.table({"seen": text, "at": stamps}), written)
    np.testing.assert_array_equal(dense(again), dense(dataset))


def test_ages_that_cannot_be_are_one_line(tmp_path: Path) -> None:
    own = {"at": [10] * 40, "none": [10, None] * 20, "id": [1] * 40, "ids": [[3, 4], [3]] * 20}
    table = pa.table({"seen": [[5, 9], [7, 12]] * 20, "fine": [[5, 9]] * 40, **own})
    feature = {"name": "ago", "kind": "ages", "column": "seen", "until": "at", "size": 2, "unit": "s"}
    with pytest.raises(DataError, match=r"row 2, column seen: \[7, 12\] has a time that is none, or is l"):
        opened(tmp_path, table, feature)
    with pytest.raises(DataError, match=r"row 2, column none: None is not a time"):
        opened(tmp_path, table, feature | {"until": "none"})
    for key, fault in (
        ("size", "how many of the latest times are taken"),
        ("until", "the sample's own time"),
    ):
        with pytest.raises(UserError, match=f"data.features, ago: {key} of ages is .*{fault}"):
            opened(tmp_path, table, {k: v for k, v in feature.items() if k != key})
    with pytest.raises(DataError, match=r"column id: holds int64.*ages are of a list of times"):
        opened(tmp_path, table, feature | {"column": "id"})
    sequence = {"name": "ids", "kind": "sequence", "rows": 20}
    with pytest.raises(DataError, match=r"row 2, column ids: \[3\] has another number of ids than ago has"):
        opened(tmp_path, table, feature | {"column": "fine"}, sequence | {"ages": "ago"})
    with pytest.raises(UserError, match=r"ids: ages names 'agos', no feature of kind ages; did you mean ago"):
        opened(tmp_path, table, feature, sequence | {"ages": "agos"})
    with pytest.raises(UserError, match=r"ids: keep is the last ids, where their ages are known"):
        opened(tmp_path, table, feature, sequence | {"ages": "ago", "keep": "first"})


def times() -> list[datetime | None]:
    """Whole seconds over two changes of the clock, some missing."""
    first = datetime(2024, 3, 20, 3, 4, 5, tzinfo=UTC)
    return [None if n % 9 == 2 else first + timedelta(days=5 * n, minutes=47 * n) for n in range(SIZE)]


def written(kind: str) -> tuple[pa.Array, dict[str, Any]]:
    """The times as files have them, and what reads them."""
    found = times()
    local = [time and time.astimezone(BERLIN) for time in found]
    if kind in ("s", "ms", "us", "ns"):
        factor = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind]
        return pa.array([time and int(time.timestamp()) * factor for time in found]), {"unit": kind}
    if kind == "seconds":
        return pa.array([time and time.timestamp() for time in found]), {"unit": "s"}
    if kind == "digits":  # as CSV has them, some with a fraction, and as a request may
        texts = [
            time and str(time.timestamp() if n % 2 else int(time.timestamp())) for n, time in enumerate(found)
        ]
        texts[7] = found[7] and found[7].isoformat()
        return pa.array(texts), {"unit": "s"}
    if kind == "zone":
        return pa.array(found, pa.timestamp("ms", "Asia/Tokyo")), {}
    if kind == "naive":
        return pa.array([time and time.replace(tzinfo=None) for time in local], pa.timestamp("ns")), {}
    form = {"text": "%d.%m.%Y %H:%M:%S", "offset": "%Y-%m-%dT%H:%M:%S%z"}.get(kind)
    if form is None:
        return pa.array([time and time.isoformat() for time in local]), {"format": "iso"}
    return pa.array([time.strftime(form) if time else "" for time in local]), {"format": form}


KINDS = ["s", "ms", "us", "ns", "seconds", "digits", "zone", "naive", "text", "offset", "iso"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_time_is_an_age_an_hour_and_a_weekday_in_its_zone(tmp_path: Path, kind: str) -> None:
    array, keys = written(kind)
    feature = {"name": "at", "kind": "timestamp", "zone": "Europe/Berlin", "default": -2.0, **keys}
    dataset = opened(
        tmp_path,
        pa.table({"at": array}),
        feature,
        {"name": "hour_too", "kind": "cross", "of": ["at_hour", "at_weekday"], "rows": 100},
    )
    found = times()
    local = [time and time.astimezone(BERLIN) for time in found]
    assert ids(dataset, "at_hour") == [0 if t is None else 1 + t.hour for t in local]
    assert ids(dataset, "at_weekday") == [0 if t is None else 1 + t.weekday() for t in local]
    now = max(time for time in found[:TRAIN] if time is not None)
    days = [None if t is None else (now - t) / timedelta(days=1) for t in found]
    wanted = [-2.0 if d is None else math.copysign(math.log1p(abs(d)), d) for d in days]
    np.testing.assert_allclose(dense(dataset)[:, 0], wanted, rtol=1e-6, atol=1e-6)
    assert min(wanted) < -2 < 0 < max(wanted)  # some lie after the training part
    assert dataset.missing["at_hour"] == sum(time is None for time in found)


def test_dates_and_a_stated_now(tmp_path: Path) -> None:
    days = [date(2024, 2, 28) + timedelta(days=n) for n in range(20)]
    feature = {
        "name": "at",
        "kind": "timestamp",
        "as": ["weekday", "age"],
        "now": "2024-03-01T00:00:00+01:00",
    }
    dataset = opened(tmp_path, pa.table({"at": days}), feature | {"zone": "Europe/Berlin"})
    assert ids(dataset, "at_weekday") == [1 + day.weekday() for day in days]
    apart = [(date(2024, 3, 1) - day).days for day in days]
    np.testing.assert_allclose(
        dense(dataset)[:, 0], [math.copysign(math.log1p(abs(d)), d) for d in apart], rtol=1e-6
    )


WRONG_TIMES: list[tuple[list[Any], dict[str, Any], str]] = [
    (
        ["30.02.2024"],
        {"format": "%d.%m.%Y"},
        "row 1, column at: 30.02.2024 is not a time as format: '%d.%m.%Y'",
    ),
    (["2024-13-01"], {"format": "iso"}, "2024-13-01 is not a time"),
    (["2024-01-01 "], {"format": "%Y-%m-%d"}, "is not a time"),
    (["2024-01-01"], {}, "holds string; state how times are written"),
    (["1e999"], {"unit": "s"}, "1e999 is not a time"),
    (["17x"], {"unit": "s"}, "17x is not a time"),
    ([17], {}, "state of which unit the numbers are"),
    ([2**60], {"unit": "s"}, "is not a time, in the years 1 to 9999"),
    ([True], {"unit": "s"}, "a timestamp is a date, a timestamp, a number or text"),
]


@pytest.mark.parametrize(("values", "keys", "fault"), WRONG_TIMES)
def test_what_is_no_time_is_one_line(
    tmp_path: Path, values: list[Any], keys: dict[str, Any], fault: str
) -> None:
    with pytest.raises(DataError) as refused:
        opened(tmp_path, pa.table({"at": values * 20}), {"name": "at", "kind": "timestamp", **keys})
    assert fault in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_cross_has_the_ids_of_its_features_together_in_their_order(tmp_path: Path) -> None:
    country = [["DE", "FR", "", "Türkiye"][n % 4] for n in range(SIZE)]
    category = [None if n % 7 == 3 else n % 5 for n in range(SIZE)]
    table = pa.table({"country": country, "category": category})
    plain = [{"name": "country", "rows": 9}, {"name": "category", "rows": 9}]
    crosses = [
        {"name": "both", "kind": "cross", "of": ["country", "category"], "rows": 10_000},
        {"name": "turned", "kind": "cross", "of": ["category", "country"], "rows": 10_000},
        {"name": "known", "kind": "cross", "of": ["country", "category"], "ids": "vocabulary"},
    ]
    dataset = opened(tmp_path, table, *plain, *crosses)
    one = string_keys(pa.array(country))[0]

    def key(a: int, b: int) -> int:
        mixed = int(mix64(np.array([(a + 0x9E3779B97F4A7C15) % 2**64], np.uint64))[0])
        return int(mix64(np.array([mixed ^ b], np.uint64))[0])

    for name, turned in (("both", False), ("turned", True)):
        wanted = []
        for text, number, own in zip(country, category, one.tolist(), strict=True):
            pair = (number or 0, own) if turned else (own, number or 0)
            row = hash_rows(np.array([key(*pair)], np.uint64), 10_000)[0]
            wanted.append(0 if text == "" or number is None else int(row))
        assert ids(dataset, name) == wanted
    assert ids(dataset, "both") != ids(dataset, "turned")
    pairs = list(zip(country, category, ids(dataset, "known"), strict=True))
    assert all((row == 0) == (text == "" or number is None) for text, number, row in pairs)
    assert len({row for *_, row in pairs if row > 1}) == len({p[:2] for p in pairs[:TRAIN] if p[2]})
    assert dataset.missing["both"] == sum(row == 0 for *_, row in pairs)


def test_a_whole_number_is_a_default_of_numbers_and_of_ids(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([None, 2.0] * 9), "item": pa.array([None, 7] * 9)})
    found = opened(
        tmp_path,
        table,
        {"name": "x", "kind": "dense", "default": -1},
        {"name": "item", "rows": 99, "default": 7},
    )
    assert dense(found)[:2, 0].tolist() == [-1.0, 2.0]
    assert len(set(ids(found, "item"))) == 1


def test_a_missing_id_may_stand_for_another_one(tmp_path: Path) -> None:
    table = pa.table({"city": ["Köln", "", "Ulm", None] * 10, "zip": [7, None, 9, 7] * 10})
    features = [
        {"name": "city", "rows": 50, "default": "Ulm"},
        {"name": "zip", "rows": 50, "default": 7},
    ]
    dataset = opened(tmp_path, table, *features)
    city, code = ids(dataset, "city"), ids(dataset, "zip")
    assert city[1] == city[2] == city[3] != city[0]
    assert code[1] == code[0] == code[3] != code[2]
    assert 0 not in city + code
    assert (dataset.missing["city"], dataset.missing["zip"]) == (20, 10)
    with pytest.raises(DataError, match="zip: default x is no id as its column has them"):
        opened(tmp_path, table, features[1] | {"default": "x"})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"kind": "cross", "of": ["some"], "rows": 9}, "of names less than two features"),
    ({"kind": "cross", "of": ["some", "sum"], "rows": 9}, "of names 'sum', .* choose one of some"),
    (
        {"kind": "cross", "of": ["some", "some"], "rows": 9, "ids": "rows"},
        "ids of a cross are hash or vocabulary",
    ),
    ({"kind": "timestamp", "zone": "Mars/Base"}, "zone is Mars/Base, which is no zone"),
    ({"kind": "timestamp", "now": "yesterday"}, "now is yesterday, not a time"),
    ({"kind": "timestamp", "as": ["minute"]}, "is unknown; choose one of age, hour, weekday"),
    ({"kind": "dense", "default": "x"}, "default is text, and numbers have none"),
    ({"kind": "id", "of": ["a", "b"]}, "a feature of kind id has no 'of'"),
]


@pytest.mark.parametrize(("keys", "fault"), WRONG)
def test_keys_that_cannot_be_are_one_line(tmp_path: Path, keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        opened(tmp_path, pa.table({"x": [1, 2] * 10}), {"name": "x", **keys})


@pytest.mark.parametrize(("values", "counts"), [([60, 120], "unit"), (["1970", "1971"], "format")])
def test_of_unit_and_format_one_counts_and_is_named(
    values: list[Any], counts: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table({"t": values * 4})
    one: dict[str, Any] = {"name": "t", "kind": "timestamp", "as": ["age", "hour"], "now": "1970-01-03"}
    both = opened(tmp_path, table, one | {"unit": "s", "format": "%Y"})
    said = [record.message for record in caplog.records if "unit and format" in record.message]
    assert len(said) == 1
    assert f"column t: unit and format are stated, of which {counts} counts" in said[0]
    caplog.clear()
    alone = opened(tmp_path, table, one | ({"unit": "s"} if counts == "unit" else {"format": "%Y"}))
    np.testing.assert_array_equal(dense(both), dense(alone))
    assert "unit and format" not in caplog.text


def test_an_id_of_a_column_of_lists_is_a_set_of_ids(tmp_path: Path) -> None:
    table = pa.table({"seen": [[1, 2], [], None, [3]] * 3})
    found = [opened(tmp_path, table, {"name": "seen", "kind": k, "rows": 9}) for k in ("id", "multi_hot")]
    one, other = (next(data.batches("train", 9)).sparse["seen"] for data in found)
    assert one.lengths().tolist() == [2, 0, 0, 1] * 2 + [2]
    assert one.values().tolist() == other.values().tolist()
