"""Sessions: a log of events becomes the samples that a plain loop makes of it, however it lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from recpipe.config.compose import compose
from recpipe.data import sessions
from recpipe.data.config import FilesConfig
from recpipe.data.derived import derived_files
from recpipe.data.make import open_dataset
from recpipe.errors import DataError, UserError
from recpipe.run import run

COLUMNS = ["user", "item", "item_history", "price_history", "positive", "is_last"]
Sample = dict[str, Any]


def log(users: int = 23, events: int = 300) -> list[Sample]:
    """Events in the order of time, of which several have the same, and users come in turns."""
    rng = np.random.default_rng(3)
    times = np.sort(rng.integers(0, events // 2, events)).tolist()
    return [
        {"user": f"u{rng.integers(users)}", "ts": time, "item": int(rng.integers(1, 60)), "price": n / 4}
        for n, time in enumerate(times)
    ]


def reference(
    events: list[Sample], target: str, max_length: int, min_length: int, keep: str, timed: bool
) -> list[Sample]:
    """By dicts and lists, session by session in the order of their last events."""
    numbered = list(enumerate(events))
    if timed:
        numbered.sort(key=lambda each: (each[1]["ts"], each[0]))
    of: dict[str, list[Sample]] = {}
    for _, event in numbered:
        own = of.pop(event["user"], [])
        of[event["user"]] = [*own, event]  # a dict is in the order of what was put in last
    found = []
    for own in of.values():
        for place in range(min_length - 1, len(own)):
            if target == "last" and place < len(own) - 1:
                continue
            before = own[:place]
            before = before[-max_length:] if keep == "last" else before[:max_length]
            found.append(
                {
                    "user": own[place]["user"],
                    "item": own[place]["item"],
                    "item_history": [each["item"] for each in before],
                    "price_history": [each["price"] for each in before],
                    "positive": 1,
                    "is_last": int(place == len(own) - 1),
                }
            )
    return found


def samples(folder: Path, path: str, on_bad_row: str = "error", **rule: Any) -> list[Sample]:
    config = FilesConfig(
        path=path,
        label="positive",
        sparse=["item"],
        table_rows=10,
        sessions={"by": "user", **rule},
        cache_dir=str(folder / "cache"),
        on_bad_row=on_bad_row,
    )
    ((file,),) = derived_files(config)
    found, row = [], 1
    for block in file.blocks(COLUMNS):
        assert block.first_row == row
        assert block.rows.schema.names == COLUMNS
        row += len(block.rows)
        found += block.rows.to_pylist()
    assert not list((folder / "cache").glob("sessions-*"))
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks and many parts, so that sessions go over their edges."""
    monkeypatch.setattr(sessions, "EVENTS", 40)
    monkeypatch.setattr(sessions, "VALUES", 30)
    monkeypatch.setattr("recpipe.data.columnar.BLOCK_ROWS", 17)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("target", "max_length", "min_length", "keep"),
    [("next", 5, 2, "last"), ("next", 3, 1, "first"), ("last", 100, 4, "last")],
)
def test_samples_are_those_of_a_plain_loop(
    target: str, max_length: int, min_length: int, keep: str, tmp_path: Path
) -> None:
    """From a log in the order of time, one in any order, and one whose users lie together."""
    events = log()
    rule: dict[str, Any] = {"target": target, "max_length": max_length, "min_length": min_length} | {
        "keep": keep
    }
    mixed = [events[n] for n in np.random.default_rng(5).permutation(len(events))]
    grouped = sorted(events, key=lambda each: each["user"])
    for number, each in enumerate((events, mixed, grouped)):
        file = tmp_path / f"{number}.parquet"
        pq.write_table(pa.Table.from_pylist(each), file)
        timed = samples(tmp_path, str(file), order="ts", **rule)
        assert timed == reference(each, target, max_length, min_length, keep, True)
        untimed = samples(tmp_path, str(file), **rule)
        assert untimed == reference(each, target, max_length, min_length, keep, False)
    assert timed != untimed or target == "last"


@pytest.mark.usefixtures("small")
def test_sessions_that_lie_in_order_are_read_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = log()
    last = {each["user"]: n for n, each in enumerate(events)}
    grouped = sorted(events, key=lambda each: last[each["user"]])
    pq.write_table(pa.Table.from_pylist(grouped), tmp_path / "log.parquet")
    monkeypatch.setattr(sessions.SessionFile, "_sorted", None)
    wanted = reference(grouped, "next", 5, 2, "last", True)
    assert samples(tmp_path, str(tmp_path / "log.parquet"), order="ts", max_length=5) == wanted
    assert samples(tmp_path, str(tmp_path / "log.parquet"), max_length=5) == wanted
    pq.write_table(pa.Table.from_pylist(events), tmp_path / "log.parquet")
    with pytest.raises(TypeError):  # which sorts
        samples(tmp_path, str(tmp_path / "log.parquet"), order="ts")


def test_a_log_may_be_in_several_files_and_formats_of_time(tmp_path: Path) -> None:
    events = log()
    wanted = reference(events, "next", 5, 2, "last", True)
    table = pa.Table.from_pylist(events)
    narrow = table.set_column(2, "item", table["item"].cast(pa.int16()))
    pq.write_table(narrow.slice(0, 100), tmp_path / "part_1.parquet")
    pq.write_table(table.slice(100), tmp_path / "part_2.parquet")
    assert samples(tmp_path, str(tmp_path / "part_*.parquet"), order="ts", max_length=5) == wanted
    stamps = table["ts"].cast(pa.int64())
    for name, times in {
        "float": stamps.cast(pa.float64()),
        "negative": pa.array([-1e9 + n for n in stamps.to_pylist()]),
        "timestamp": stamps.cast(pa.timestamp("s")),
        "text": pa.array([str(n) for n in stamps.to_pylist()]),
        "iso": pa.array([str(time) for time in stamps.cast(pa.timestamp("s")).to_pylist()]),
    }.items():
        pq.write_table(table.set_column(1, "ts", times), tmp_path / f"{name}.parquet")
        assert samples(tmp_path, str(tmp_path / f"{name}.parquet"), order="ts", max_length=5) == wanted, name


def config(folder: Path, path: Path, **settings: Any) -> FilesConfig:
    features = {
        "labels": [{"name": "clicked", "column": "positive"}],
        "features": [
            {"name": "item", "rows": 100},
            {"name": "before", "kind": "sequence", "column": "item_history", "table": "item", "rows": 100},
        ],
    }
    given: dict[str, Any] = {"features": features, "sessions": {"by": "user", "order": "ts"}}
    return FilesConfig(path=str(path), cache_dir=str(folder / "cache"), **given | settings)


def test_csv_of_a_log_gives_the_same_rows_of_tables(tmp_path: Path) -> None:
    """Whole numbers in text are numbers, of events and of those before alike."""
    table = pa.Table.from_pylist(log())
    pq.write_table(table, tmp_path / "log.parquet")
    pyarrow.csv.write_csv(table, tmp_path / "log.csv")
    ours, theirs = (
        next(open_dataset(config(tmp_path, tmp_path / name), 0).batches("train", 500)).sparse
        for name in ("log.parquet", "log.csv")
    )
    assert ours.lengths().tolist() == theirs.lengths().tolist()
    assert ours.values().tolist() == theirs.values().tolist()
    single = set(ours["item"].values().tolist())
    assert set(ours["before"].values().tolist()) & single  # one table, one row for an item


def test_events_without_a_session_or_a_time_are_bad_rows(tmp_path: Path) -> None:
    events = log()
    events[7]["user"] = None
    events[9]["ts"] = None
    pq.write_table(pa.Table.from_pylist(events), tmp_path / "log.parquet")
    file = str(tmp_path / "log.parquet")
    with pytest.raises(DataError, match="log.parquet, row 8, column user: None is no session"):
        samples(tmp_path, file, order="ts")
    good = [each for n, each in enumerate(events) if n not in (7, 9)]
    wanted = reference(good, "next", 50, 2, "last", True)
    assert samples(tmp_path, file, "skip", order="ts") == wanted
    dataset = open_dataset(config(tmp_path, Path(file), on_bad_row="skip"), 0)
    assert dataset.rejected_rows == 2
    assert dataset.size("train") + dataset.size("eval") == len(wanted)


def test_what_cannot_be_a_session_is_one_line(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(log())
    file = tmp_path / "log.parquet"
    pq.write_table(table.append_column("word", pa.array(["x"] * len(table))), file)
    for match, rule in {
        "no column 'usr'": {"by": "usr"},
        "no column 'tss'": {"by": "user", "order": "tss"},
        "row 1, column word: x is no time": {"by": "user", "order": "word"},
        "data.sessions.by has no value": {"order": "ts"},
        "no 'data.sessions.lenght'": {"by": "user", "lenght": 3},
        "data.sessions.target=first": {"by": "user", "target": "first"},
        "none of 23 sessions has 1000 events, as many as data.sessions.min": {
            "by": "user",
            "min_length": 1000,
        },
    }.items():
        with pytest.raises((DataError, UserError), match=match) as fault:
            open_dataset(config(tmp_path, file, sessions=rule), 0)
        assert len(str(fault.value).splitlines()) == 1
    other = tmp_path / "other.parquet"
    pq.write_table(table.set_column(2, "item", pa.array(["x"] * len(table))), other)
    with pytest.raises(DataError, match="column item: holds"):
        open_dataset(replace(config(tmp_path, file), path=[str(file), str(other)]), 0)


@pytest.mark.parametrize(
    ("experiment", "name"), [("tmall_sessions", "tmall_sessions"), ("taobao", "taobao_110k")]
)
def test_the_recipe_of_a_real_log_trains_from_it_as_it_lies(
    experiment: str, name: str, data_dir: Path, tmp_path: Path
) -> None:
    source = data_dir / f"{name}.parquet"
    if not source.is_file():
        pytest.skip(f"no {source}")
    rows = next(pq.ParquetFile(source).iter_batches(6000))
    pq.write_table(pa.Table.from_batches([rows]), tmp_path / "part.parquet")
    by = "session" if experiment == "tmall_sessions" else "user"
    counts = np.unique(rows[by].to_numpy(zero_copy_only=False), return_counts=True)[1]
    cfg = compose(
        [
            f"experiment={experiment}",
            f"data.path={tmp_path / 'part.parquet'}",
            f"data.cache_dir={tmp_path / 'cache'}",
            "model.embedding_dim=4",
            "trainer.backend=plain",
            "trainer.progress=false",
            "trainer.logger=null",
            "task.page=false",
        ]
    )
    report = run(cfg, tmp_path / "run")
    assert report["data"]["train_samples"] + report["data"]["eval_samples"] == 5 * int((counts - 1).sum())
    assert 0 < report["quality"]["logloss"] < 1
