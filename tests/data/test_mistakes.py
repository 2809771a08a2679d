"""Mistakes in files of features and on the command line: each is one line that says where."""

from __future__ import annotations

import bz2
import gzip
import logging
import re
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recpipe.data.config import FilesConfig, parse_config
from recpipe.data.feature_yaml import read_features
from recpipe.data.make import open_dataset
from recpipe.data.sources.transforms import hash_rows, string_keys
from recpipe.errors import DataError, UserError

ROWS = "click;user\tname\n" + "1;7\tx\n0;8\ty\n" * 20
CONTENTS = [
    ("", r": must have two lists, labels: \[click\] and"),
    ("- click\n", ": must have two lists"),
    ("features: [{name: user}]\n", r": labels must be a list, as in labels: \[click\]"),
    ("labels: click\nfeatures: [{name: user}]\n", ": labels must be a list"),
    ("labels:\nfeatures: [{name: user}]\n", ": labels must be a list"),
    ("labels: [click]\n", r": features must be a list, as in features: \[{name: user}\]"),
    ("labels: [click]\nfeatures:\n", ": features must be a list"),
    ("labels: [click]\nfeatures: {user: id}\n", ": features must be a list"),
    ("labels: [click]\nfeatures: [{name: user}]\nunread: time\n", ": unread must be a list"),
    ("labels: []\nfeatures: [{name: user}]\n", "name at least one label"),
    (
        "labels: [click]\nfeatures: [{name: user, missing: -1}]\n",
        r"\[0\].missing=-1: must be a list, not int",
    ),
    (
        "labels: [click]\nfeatures: [{name: user, rows: many}]\n",
        "rows=many is neither a whole number, .* nor",
    ),
    ("labels: [click]\nfeatures: [{name: user, rows: 5, rows: 9}]\n", "'rows' is stated twice.*line 2"),
    ("labels: [a]\nfeatures: [{name: at, kind: timestamp, as: [day]}]\n", r"as\[0\]=day is unknown"),
    ("labels: [click]\nfeatures: [{name: user, rows: 1e6}]\n", "rows=1e6 is neither a whole number"),
    ("labels: [click\nfeatures: []\n", r"is not yaml \(expected ',' or ']', .*, line 2\)"),
    (
        "labels: [click]\nfeatures: [{name: x, kind: dense, default: 1.0e+39}]\n",
        "x: default is beyond float32",
    ),
]


@pytest.mark.parametrize(("content", "fault"), CONTENTS)
def test_a_file_of_features_that_is_none(tmp_path: Path, content: str, fault: str) -> None:
    file = tmp_path / "features.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=fault) as raised:
        read_features(file)
    assert "\n" not in str(raised.value)


def config(folder: Path, **settings: Any) -> FilesConfig:
    file = folder / "rows.csv"
    if not file.exists():
        file.write_text(ROWS)
    made = {"name": "files", "path": str(file), "cache_dir": str(folder / "cache"), **settings}
    found = parse_config(made)
    assert isinstance(found, FilesConfig)
    return found


def test_features_without_ids(tmp_path: Path) -> None:
    features = {"labels": ["click"], "features": [{"name": "user", "kind": "dense"}]}
    with pytest.raises(UserError, match="none has ids, and a model needs one"):
        config(tmp_path, features=features).described()
    features["features"] = [{"name": "user", "kind": "dense", "edges": [1]}]
    assert config(tmp_path, features=features).described().sparse


def test_separators_and_quotes_are_one_character(tmp_path: Path) -> None:
    for key, value in (("separator", "||"), ("separator", "§"), ("separator", "\n"), ("quote", "''")):
        with pytest.raises(UserError, match=rf"data.{key}=.*must be one character"):
            config(tmp_path, **{key: value}, label="click", sparse=["user"])
    # A shell hands '\t' on as two characters.
    tabs = config(tmp_path, separator="\\t", columns=["a", "b"], label="b", sparse=["a"], table_rows=9)
    assert tabs.rules().separator == "\t"
    with pytest.raises(DataError, match="row 1, column b: name is no number"):
        open_dataset(tabs, 0)


def test_a_label_without_a_value_is_shown_as_none(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("click,user\n1,2\n,3\n")
    with pytest.raises(DataError, match="row 2, column click: '' is no label"):
        open_dataset(config(tmp_path, label="click", sparse=["user"], table_rows=9), 0)


def test_what_is_no_text_says_what_it_is(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "sheet.csv", "w") as made:
        made.writestr("xl/workbook.xml", "<workbook/>")
    (tmp_path / "packed.csv").write_bytes(gzip.compress(ROWS.encode()))
    (tmp_path / "smaller.csv").write_bytes(bz2.compress(ROWS.encode()))
    (tmp_path / "columns.csv").write_bytes(b"PAR1\x15\x04")
    told = {
        "sheet": "is a zip archive, as .xlsx files are",
        "packed": "is packed by gzip: name it .gz",
        "smaller": "is packed by bzip2",
        "columns": "is Parquet: pass data.format=parquet",
    }
    for name, fault in told.items():
        with pytest.raises(DataError, match=f"{name}.csv: {fault}"):
            open_dataset(
                config(tmp_path, path=str(tmp_path / f"{name}.csv"), label="click", sparse=["user"]), 0
            )


def test_a_feature_of_the_labels_own_column_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    features = {"labels": ["click"], "features": [{"name": "was", "column": "click", "rows": 3}]}
    (tmp_path / "rows.csv").write_text("click,user\n" + "1,2\n0,3\n" * 20)
    with caplog.at_level(logging.WARNING):
        open_dataset(config(tmp_path, features=features), 0)
    assert "label click is made of column click, which feature was gives to the model" in caplog.text


SUSPECTED = [
    (["Comedy|Drama", "Drama", "War|Comedy"], {}, "seems to hold lists with '|' between their ids"),
    (
        ["Comedy|Drama", "Drama", "War|Comedy"],
        {"kind": "multi_hot", "separator": ";"},
        "has no text with the separator ';' of feature x, and '|' seems to be one",
    ),
    ([[3, 0, 0], [4, 5, 0], [3, 4, 5]], {"kind": "sequence"}, "filled up with 0, which feature x takes for"),
    (["Comedy|Drama", "Drama", "War|Comedy"], {"kind": "multi_hot", "separator": "|"}, ""),
    ([[3, 0, 0], [4, 5, 0], [3, 4, 5]], {"kind": "sequence", "padding": ["0"]}, ""),
    (["Comedy: a play", "Drama", "War and peace, vol. 2"], {}, ""),
]


@pytest.mark.parametrize(("values", "keys", "told"), SUSPECTED)
def test_lists_that_are_taken_for_something_else_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, values: list[Any], keys: dict[str, Any], told: str
) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"click": [0, 1, 1] * 20, "x": values * 20}), file)
    features = {"labels": ["click"], "features": [{"name": "x", "rows": 9, **keys}]}
    with caplog.at_level(logging.WARNING):
        open_dataset(config(tmp_path, path=str(file), features=features), 0)
    assert told in caplog.text
    assert bool(told) == ("column x" in caplog.text)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (pa.time64("us"), "cast it to int64, or to text"),
        (pa.duration("s"), "cast it to int64, or to text"),
        (pa.struct([("a", pa.int64())]), "write its parts as columns of their own"),
        (pa.map_(pa.string(), pa.int64()), "write its ids as a list"),
        (pa.list_(pa.list_(pa.int64())), "write its ids as a list"),
    ],
)
def test_types_that_no_id_has_are_refused_with_a_remedy(
    tmp_path: Path, kind: pa.DataType, remedy: str
) -> None:
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"click": [0, 1], "x": pa.nulls(2, kind)}), file)
    features = {"labels": ["click"], "features": [{"name": "x", "rows": 9}]}
    with pytest.raises(DataError, match=f"column x: holds .*; {remedy}"):
        open_dataset(config(tmp_path, path=str(file), features=features), 0)


def test_a_column_of_numbers_that_becomes_times_is_refused_with_both_files(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, kind in (("a", pa.int64()), ("b", pa.timestamp("s"))):
        table = pa.table({"click": [0, 1], "x": pa.array([1, 2], pa.int64()).cast(kind)})
        pq.write_table(table, folder / f"{name}.parquet")
    features = {"labels": ["click"], "features": [{"name": "x", "rows": 9}]}
    with pytest.raises(
        DataError, match=r"b.parquet, column x: holds timestamp\[.*\] here and int64 in .*a.p"
    ):
        open_dataset(config(tmp_path, path=str(folder), features=features), 0)


HEADERS: list[tuple[str, dict[str, Any], str]] = [
    ('click,"us\ner",user\n1,2,3\n', {}, "a name in its first row goes over two lines"),
    ("click,user,2024\n1,2,3\n", {}, "its first row has numbers, .* pass data.header=true"),
    ('click,"user\n', {}, "no column 'user'|cannot be read"),
    (
        "click,user\nyes,2\n",
        {},
        r"""click: yes is no number; .*: 'data.label={liked: "click == \\"yes\\""}'""",
    ),
    (
        'click,user\n1,"a\n0,b\n',
        {},
        r"row 1: the quote before 'a\\n0,b\\n\\n' is not closed; .*data.quote=''",
    ),
    ('click,user\n0,c\n1,"a\n0,b\n', {}, r"row 2: the quote before 'a\\n0,b"),
]


@pytest.mark.parametrize(("text", "settings", "fault"), HEADERS)
def test_first_rows_that_cannot_be_read(
    tmp_path: Path, text: str, settings: dict[str, Any], fault: str
) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(DataError, match=fault) as raised:
        open_dataset(config(tmp_path, label="click", sparse=["user"], table_rows=9, **settings), 0)
    assert "\n" not in str(raised.value)


def test_a_first_row_without_names_may_go_over_two_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('1,"a\nb",7\n' * 10)
    names = config(tmp_path, columns=["click", "x", "user"], label="click", sparse=["x"], table_rows=9)
    assert open_dataset(names, 0).size("train") == 8


def test_a_quote_within_text_is_a_character_and_no_row_is_lost(tmp_path: Path) -> None:
    """Also where the rows up to it are a block of their own, of which the first has the header alone."""
    (tmp_path / "rows.csv").write_text('click,user\n1,5" pipe\n0,b\n1,"a"\n0,c\n')
    ids = {"label": "click", "sparse": ["user"], "table_rows": 10**6, "eval_fraction": 0.0}
    (batch,) = open_dataset(config(tmp_path, **ids), 0).batches("train", 9)
    assert batch.labels.tolist() == [1, 0, 1, 0]
    keys, _ = string_keys(pa.array(['5" pipe', "b", "a", "c"]))
    assert batch.sparse.values().tolist() == hash_rows(keys, 10**6).tolist()


ODD: list[tuple[dict[str, Any], str]] = [
    (
        {"name": "at", "kind": "timestamp", "unit": "ms"},
        "column at has times until 1970-01-.* by unit: ms",
    ),
    ({"name": "at", "kind": "timestamp", "unit": "s"}, ""),
    (
        {"name": "word", "table": "user", "rows": 9},
        "table user: user has numbers and word text",
    ),
    ({"name": "word", "table": "user", "rows": 9, "type": "integer"}, ""),
]


@pytest.mark.parametrize(("feature", "told"), ODD)
def test_units_and_tables_that_do_not_fit_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, feature: dict[str, Any], told: str
) -> None:
    file = tmp_path / "rows.parquet"
    rows = {"click": [0, 1] * 9, "user": range(18), "word": [str(n) for n in range(18)]}
    pq.write_table(pa.table({**rows, "at": range(1_700_000_000, 1_700_000_018)}), file)
    features = {"labels": ["click"], "features": [{"name": "user", "rows": 9}, feature]}
    with caplog.at_level(logging.WARNING):
        open_dataset(config(tmp_path, path=str(file), features=features), 0)
    assert re.search(told, caplog.text)
    assert bool(told) == bool(caplog.text)


def test_text_of_json_is_text_also_where_it_is_written_like_a_time(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"click": 1, "day": "2026-03-01"}\n{"click": 0, "day": "someday"}\n' * 5)
    features: dict[str, Any] = {"labels": ["click"], "features": [{"name": "day", "rows": 99}]}
    dated = tmp_path / "dated.jsonl"
    dated.write_text('{"click": 1, "day": "2026-03-01"}\n' * 10)
    found = {}
    for path in (file, dated):
        dataset = open_dataset(config(tmp_path, path=str(path), features=features), 0)
        found[path] = next(iter(dataset.batches("train", 1))).sparse.values().tolist()
    assert found[file] == found[dated]
    features["features"].append({"name": "at", "column": "day", "kind": "timestamp", "format": "iso"})
    assert open_dataset(config(tmp_path, path=str(dated), features=features), 0).size("train") == 8


def test_a_file_of_two_parts_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rows.csv").write_text("click,user\n1,2\n0,3\n")
    keys = {"label": "click", "sparse": ["user"], "table_rows": 9}
    with caplog.at_level(logging.WARNING):
        open_dataset(config(tmp_path, eval_path=str(tmp_path / "rows.csv"), **keys), 0)
    assert "rows.csv is in data.path and in data.eval_path: its rows are in both parts" in caplog.text


def test_a_side_table_that_no_record_has_a_key_of_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rows.csv").write_text("click,user\n" + "1,u2\n0,u3\n" * 5)
    keys: dict[str, Any] = {"label": "click", "sparse": ["user", "city"], "table_rows": 9}
    for written, told in (("2", True), ("u2", False)):
        (tmp_path / "side.csv").write_text(f"user,city\n{written},x\n")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            joins = [{"path": str(tmp_path / "side.csv"), "on": "user", "columns": ["city"]}]
            open_dataset(config(tmp_path, joins=joins, **keys), 0)
        assert ("none of the first 10 records has a key of the side table" in caplog.text) == told
