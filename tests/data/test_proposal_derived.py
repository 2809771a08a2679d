"""A proposal sees what joins and sessions make of the records of files."""

from __future__ import annotations

import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from recpipe.config.compose import compose
from recpipe.data.config import FilesConfig
from recpipe.data.derived import derived_files
from recpipe.data.make import open_dataset
from recpipe.data.proposal import derived
from recpipe.data.proposal.derived import derived_sample
from recpipe.data.proposal.propose import Proposal, propose
from recpipe.errors import DataError
from recpipe.tasks.schema import schema

EVENTS = 3000
ITEMS = {number: (f"c{number % 7}", float(number**2)) for number in range(1, 60)}
RULE = {"by": "user", "order": "time", "max_length": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log in the order of time, in which users come in turns, and a table of its items."""
    rng, found = np.random.default_rng(2), tmp_path_factory.mktemp("log")
    table = {
        "user": [f"u{number}" for number in rng.integers(0, 400, EVENTS)],
        "item": rng.integers(1, 60, EVENTS),
        "time": np.arange(EVENTS) * 600 + 1_700_000_000,
        "paid": rng.random(EVENTS) * 100,
        "buys": (rng.random(EVENTS) < 0.2).astype(int),
    }
    pyarrow.csv.write_csv(pa.table(table), found / "log.csv")
    category, price = zip(*ITEMS.values(), strict=True)
    items = pa.table({"item": list(ITEMS), "category": category, "price": price, "shop": ["s"] * len(ITEMS)})
    pq.write_table(items, found / "items.parquet")
    return found


def config(folder: Path, **given: Any) -> FilesConfig:
    usual = {"path": str(folder / "log.csv"), "cache_dir": str(folder / "cache"), "features": "auto"}
    return FilesConfig(**(usual | given))


def joins(folder: Path) -> list[dict[str, Any]]:
    return [{"path": str(folder / "items.parquet"), "on": "item", "prefix": "item_"}]


def entries(proposal: Proposal) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in proposal.content()["features"]}


@pytest.mark.parametrize("rows", [10_000, 200])
def test_columns_of_side_tables_are_looked_at_beside_sampled_rows(folder: Path, rows: int) -> None:
    given = config(folder, joins=joins(folder), label="buys")
    (files,) = derived_files(given)
    sample = derived_sample(files, rows)
    assert sample.whole == (rows > EVENTS)
    assert sample.rows.num_rows <= min(rows, EVENTS)
    for row in sample.rows.to_pylist():
        assert (row["item_category"], row["item_price"]) == ITEMS[int(row["item"])]
    found = propose(given, rows)
    assert entries(found)["item_category"] == {
        **{"name": "item_category", "kind": "id", "type": "text", "ids": "vocabulary"}
    }
    assert entries(found)["item_price"] == {"name": "item_price", "kind": "dense", "scale": "standard"}
    assert "item_shop" in found.content()["unread"]


def test_a_sample_of_sessions_has_all_events_of_some_of_them(folder: Path) -> None:
    """Of all sessions those that the whole log has; of some, what a plain loop makes of theirs."""
    given = config(folder, sessions=RULE)
    ((file,),) = derived_files(given)
    events = pyarrow.csv.read_csv(folder / "log.csv").to_pylist()
    of_user = defaultdict[str, list[Any]](list)
    for event in events:
        of_user[event["user"]].append(event)
    for rows in (10_000, 150):
        sample = derived_sample([file], rows)
        made = sample.rows.to_pylist()
        users = {row["user"] for row in made}
        wanted = [
            (user, str(own[n]["item"]), [str(before["item"]) for before in own[max(0, n - 4) : n]])
            for user, own in of_user.items()
            if user in users
            for n in range(1, len(own))
        ]
        got = [(row["user"], row["item"], row["item_history"]) for row in made]
        assert sorted(got) == sorted(wanted)
        in_all = sum(len(own) - 1 for own in of_user.values())
        if rows > EVENTS:
            assert sample.whole
            assert len(made) == sample.total == in_all
        else:
            assert len(users) < 60
            assert rows / 2 < len(made) <= 2 * rows
            assert in_all / 2 < sample.total < 2 * in_all
            assert "(one in 16 of its sessions, by hash; read: the whole log)" in sample.says


def test_histories_share_the_tables_of_ids_and_others_are_left_out(folder: Path) -> None:
    found = propose(config(folder, sessions=RULE, joins=joins(folder), label="buys"))
    made = entries(found)
    assert made["item_history"] == {
        **{"name": "item_history", "kind": "sequence", "max_length": 4, "ids": "vocabulary"},
        **{"type": "integer", "table": "item"},
    }
    assert made["item_category_history"]["table"] == "item_category"
    assert made["buys_history"]["kind"] == "sequence"
    assert "table" not in made["buys_history"]
    unread = {choice.column.name: choice.reason for choice in found.choices if choice.role == "unread"}
    assert unread["user_history"] == "user is the same in all events of a session"
    assert "known only afterwards" in unread["is_last"]
    assert {"time_history", "paid_history", "item_price_history", "positive"} <= unread.keys()
    assert any("buys_history: is of events before" in line for line in found.suspicions)
    dataset = open_dataset(config(folder, sessions=RULE, joins=joins(folder), features=found.content()), 0)
    of = {own.name: own for own in dataset.schema.sparse}
    assert of["item_history"].rows == of["item"].rows == len(ITEMS) + 2


def test_a_column_that_says_the_part_is_no_history_either(folder: Path) -> None:
    rows = pyarrow.csv.read_csv(folder / "log.csv")
    parts = pa.array(["train", "train", "valid"] * (EVENTS // 3))
    pq.write_table(rows.append_column("part", parts), folder / "parts.parquet")
    split = {"by": "column", "column": "part"}
    found = propose(
        config(folder, path=str(folder / "parts.parquet"), sessions=RULE, label="buys", split=split)
    )
    assert not {"part", "part_history"} & entries(found).keys()


def test_a_log_without_a_label_has_events_that_took_place(folder: Path) -> None:
    items = pyarrow.csv.read_csv(folder / "log.csv").select(["user", "item"])
    pq.write_table(items, folder / "plain.parquet")
    given: dict[str, Any] = {"path": str(folder / "plain.parquet"), "features": "auto"}
    given |= {"sessions": {"by": "user"}}
    found = propose(FilesConfig(**given))
    assert found.content()["labels"] == [{"name": "positive"}]
    assert any("'data.negatives={feature: item}'" in line for line in found.suspicions)
    found = propose(FilesConfig(**given, negatives={"feature": "item"}))
    assert not any("positive" in line for line in found.suspicions)


def test_a_sample_of_sessions_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the events that are read, in its bytes, and where a few sessions have most events."""
    monkeypatch.setattr("recpipe.data.columnar.BLOCK_ROWS", 100)
    monkeypatch.setattr("recpipe.data.sessions.BLOCK_ROWS", 100)
    table = pyarrow.csv.read_csv(folder / "log.csv")
    pq.write_table(table, folder / "log.parquet")
    given = {"sessions": RULE, "path": str(folder / "log.parquet")}
    ((file,),) = derived_files(FilesConfig(features="auto", **given))
    monkeypatch.setattr(derived, "MOST_EVENTS", 900)
    sample = derived_sample([file], 10_000)
    assert "the first 30% of the log" in sample.says
    assert not sample.whole
    assert sample.rows.num_rows < 900
    monkeypatch.setattr(derived, "MOST_EVENTS", 1 << 24)
    monkeypatch.setattr(derived, "MOST_BYTES", 1000)
    sample = derived_sample([file], 10_000)
    assert not sample.whole
    assert 0 < sample.rows.num_rows < sample.total
    monkeypatch.setattr(derived, "FEWEST", 1000)  # sessions, more than there are
    sample = derived_sample([file], 100)
    assert "all its sessions" in sample.says
    assert "of the log)" in sample.says


def test_what_sessions_leave_out_is_told(folder: Path) -> None:
    table = pyarrow.csv.read_csv(folder / "log.csv")
    without = pa.array([None if n % 100 == 0 else v for n, v in enumerate(table["user"].to_pylist())])
    pq.write_table(table.set_column(0, "user", without), folder / "some.parquet")
    given = config(folder, path=str(folder / "some.parquet"), sessions=RULE, label="buys")
    assert any(line.startswith("30 events have no session") for line in propose(given).suspicions)
    pq.write_table(table.append_column("word", pa.array(["w"] * EVENTS)), folder / "words.parquet")
    timeless = config(folder, path=str(folder / "words.parquet"), sessions=RULE | {"order": "word"})
    with pytest.raises(DataError, match="row 1, column word: w is no time"):
        propose(timeless)
    few = config(folder, sessions=RULE | {"min_length": 1000}, label="buys")
    with pytest.raises(DataError, match="none of 400 sessions has 1000 events"):
        propose(few)


def test_the_command_says_what_is_derived(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rule = "sessions={by: user, order: time, max_length: 4}"
    side = f"joins=[{{path: {folder}/items.parquet, on: item, prefix: item_}}]"
    output = tmp_path / "features.yaml"
    assert schema([str(folder / "log.csv"), "label=buys", rule, side, f"output={output}"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    words = shlex.split(command)[3:]
    assert f"data.{rule}" in words
    assert f"data.{side}" in words
    dataset = open_dataset(compose([*words, f"data.cache_dir={tmp_path}"]).data, 0)
    assert "item_category_history" in [own.name for own in dataset.schema.sparse]
