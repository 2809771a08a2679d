"""Which samples train, validate and test, beside loops over the rows."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from recpipe.data import columnar, last_rows
from recpipe.data.config import FilesConfig, SyntheticConfig, parse_config
from recpipe.data.dataset import NumberedDataset
from recpipe.data.make import StreamedDataset, open_dataset, open_source
from recpipe.data.proposal.propose import propose
from recpipe.data.sources.transforms import mix64
from recpipe.errors import DataError, UserError

SIZE = 600
FIRST = np.datetime64("2026-02-25T00:00:00", "us")
VALID, TEST = "2026-03-01", "2026-03-05T12:00:00"
SPLITS = ("train", "eval", "test")
LEARNED = [
    {"name": "word", "ids": "vocabulary"},
    {"name": "seen", "kind": "sequence", "ids": "vocabulary"},
    {"name": "scaled", "kind": "dense", "column": "number", "scale": "standard"},
    {"name": "user", "rows": 50},
]
PLAIN = [
    {"name": "user", "rows": 50},
    {"name": "seen", "kind": "sequence", "rows": 70},
    {"name": "word", "rows": 9},
]


def features(own: list[dict[str, Any]]) -> dict[str, Any]:
    return {"labels": ["click"], "features": [*own, {"name": "number", "kind": "dense"}]}


@pytest.fixture(scope="module")
def table() -> pa.Table:
    rng = np.random.default_rng(8)
    times = FIRST + rng.integers(0, 13 * 86_400, SIZE).astype("timedelta64[s]").astype("timedelta64[us]")
    return pa.table(
        {
            "click": rng.integers(0, 2, SIZE),
            "ts": pa.array(times, pa.timestamp("us")),
            "user": [None if n % 11 == 0 else int(v) for n, v in enumerate(rng.integers(-5, 60, SIZE))],
            "word": [f"word {v}" for v in rng.zipf(1.5, SIZE) % 90],
            "seen": [rng.integers(0, 40, n % 4).tolist() for n in range(SIZE)],
            "part": [("train", "train", "valid", "test")[v] for v in rng.integers(0, 4, SIZE)],
            "fold": rng.integers(0, 5, SIZE),
            "held": np.arange(SIZE) % 7 == 3,
            "number": np.arange(SIZE, dtype=np.float64),
        }
    )


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "BLOCK_ROWS", 128)


def opened(folder: Path, table: pa.Table, own: list[dict[str, Any]] = PLAIN, **keys: Any) -> NumberedDataset:
    file = folder / "rows.parquet"
    if not file.exists():
        pq.write_table(table, file)
    keys.setdefault("path", str(file))
    dataset = open_dataset(FilesConfig(features=features(own), cache_dir=str(folder / "cache"), **keys), 0)
    assert isinstance(dataset, NumberedDataset)
    return dataset


def parts(dataset: NumberedDataset) -> dict[str, list[int]]:
    """The numbers of the rows in each part."""
    found = {}
    for split in SPLITS:
        batches = list(dataset.batches(split, 64))
        found[split] = [int(batch.dense[n, -1]) for batch in batches for n in range(batch.size)]
        assert len(found[split]) == dataset.size(split)
    return found


def by_rows(table: pa.Table, part_of: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {split: [] for split in SPLITS}
    for number, row in enumerate(table.to_pylist()):
        found[part_of(row)].append(number)
    assert all(found[split] for split in ("train", "test")), "a test of parts"
    return found


def by_time(row: dict[str, Any]) -> str:
    time = row["ts"].isoformat()
    return "test" if time >= TEST else "eval" if time >= VALID else "train"


def by_user(row: dict[str, Any]) -> str:
    if row["user"] is None:
        return "train"
    key = int.from_bytes(hashlib.blake2b(str(row["user"]).encode(), digest_size=8).digest(), "little")
    mixed = int(mix64(np.array([(key + 0x5D1CE5A1B3C0FFEE) % 2**64], np.uint64))[0])
    place = (mixed >> 11) / 2**53
    return "eval" if place < 0.25 else "test" if place >= 1 - 0.2 else "train"


def by_number(row: dict[str, Any]) -> str:
    seed = int(mix64(np.array([7 + 0x2545F4914F6CDD1D], np.uint64))[0])
    place = int(mix64(np.array([(int(row["number"]) + seed) % 2**64], np.uint64))[0]) >> 11
    return "eval" if place / 2**53 < 0.25 else "test" if place / 2**53 >= 1 - 0.2 else "train"


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "time": ({"by": "time", "column": "ts", "valid": VALID, "test": TEST}, by_time),
    "user": ({"by": "user", "column": "user", "valid": 0.25, "test": 0.2}, by_user),
    "random": ({"by": "random", "valid": 0.25, "test": 0.2, "seed": 7}, by_number),
    "words": (
        {"by": "column", "column": "part"},
        lambda row: "eval" if row["part"] == "valid" else row["part"],
    ),
    "values": (
        {"by": "column", "column": "fold", "valid": 3, "test": [0, 4]},
        lambda row: {3: "eval", 0: "test", 4: "test"}.get(row["fold"], "train"),
    ),
    "truth": (
        {"by": "column", "column": "held", "test": True},
        lambda row: "test" if row["held"] else "train",
    ),
    "numbers": (
        {"by": "time", "column": "fold", "valid": 2, "test": 4},
        lambda row: "test" if row["fold"] >= 4 else "eval" if row["fold"] >= 2 else "train",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_of_the_part_that_their_column_says(tmp_path: Path, table: pa.Table, case: str) -> None:
    """Parts lie one after the other, each in the order of the files; all values are those of the rows."""
    split, part_of = CASES[case]
    dataset, wanted = opened(tmp_path, table, split=split), by_rows(table, part_of)
    assert parts(dataset) == wanted
    assert parts(opened(tmp_path, table, split=split)) == wanted, "from the cache"
    whole = samples(opened(tmp_path, table, eval_fraction=0.0), "train")
    for name in SPLITS:
        assert samples(dataset, name) == [whole[row] for row in wanted[name]]


def test_parts_at_random_are_by_the_seed_and_stay_where_rows_are_added(
    tmp_path: Path, table: pa.Table
) -> None:
    split = {"by": "random", "valid": 0.3, "test": 0.1}
    whole = parts(opened(tmp_path, table, split=split))
    assert abs(len(whole["eval"]) - 0.3 * SIZE) < 4 * (0.21 * SIZE) ** 0.5
    other = parts(opened(tmp_path, table, split={**split, "seed": 1}))
    assert other != whole
    files = []
    for number, (low, high) in enumerate([(0, 150), (150, 400)]):
        files.append(str(tmp_path / f"{number}.parquet"))
        pq.write_table(table.slice(low, high - low), files[-1])
    some = parts(opened(tmp_path, table, split=split, path=files))
    assert some == {name: [row for row in rows if row < 400] for name, rows in whole.items()}


def samples(dataset: NumberedDataset, split: Any) -> list[tuple[Any, ...]]:
    found = []
    for batch in dataset.batches(split, 50):
        bags = []
        for feature in batch.sparse.to_dict().values():
            bags.append([part.tolist() for part in feature.values().split(feature.lengths().tolist())])
        found += zip(batch.dense.tolist(), batch.labels.tolist(), *bags, strict=True)
    return [(tuple(dense), label, *map(tuple, ids)) for dense, label, *ids in found]


@pytest.mark.parametrize("time", [None, "ts"])
def test_the_last_rows_of_each_user_are_held_out_but_for_the_only_one(
    tmp_path: Path, table: pa.Table, time: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_rows, "STEP", 50)
    own: dict[int, list[int]] = {}
    for number, row in enumerate(table.to_pylist()):
        own.setdefault(row["user"], []).append(number)
    own.pop(None)
    times = table["ts"].to_pylist()
    part = ["train"] * SIZE
    for rows in own.values():
        later = (sorted(rows, key=times.__getitem__) if time else rows)[1:]
        for row in later[-5:]:
            part[row] = "eval"
        for row in later[-1:]:
            part[row] = "test"
    wanted = by_rows(table, lambda row: part[int(row["number"])])
    split = {"by": "last", "column": "user", "valid": 4, "test": 1, "time": time}
    assert parts(opened(tmp_path, table, split=split)) == wanted
    assert min(map(len, own.values())) < 6, "some have too few rows"


def test_what_is_learned_is_of_the_training_part_wherever_it_lies(tmp_path: Path, table: pa.Table) -> None:
    split, part_of = CASES["words"]
    dataset, wanted = opened(tmp_path, table, LEARNED, split=split), by_rows(table, part_of)
    assert parts(dataset) == wanted
    rows = table.to_pylist()
    counts = Counter(rows[n]["word"] for n in wanted["train"])
    known = {word: n + 2 for n, (word, _) in enumerate(counts.most_common())}
    mean, deviation = np.mean(wanted["train"]), np.std(wanted["train"])
    seen = {value for n in wanted["train"] for value in rows[n]["seen"]}
    assert {rows[n]["word"] for n in wanted["eval"] + wanted["test"]} - counts.keys(), "some are unseen"
    for name in SPLITS:
        batch = next(dataset.batches(name, SIZE))
        assert batch.sparse["word"].values().tolist() == [known.get(rows[n]["word"], 1) for n in wanted[name]]
        lists = batch.sparse["seen"].values().tolist()
        assert [row > 1 for row in lists] == [v in seen for n in wanted[name] for v in rows[n]["seen"]]
        scaled = (np.array(wanted[name]) - mean) / deviation
        np.testing.assert_allclose(batch.dense[:, 0].numpy(), scaled, rtol=1e-6, atol=1e-6)


def test_users_are_split_alike_in_csv_and_wherever_their_rows_lie(tmp_path: Path, table: pa.Table) -> None:
    split = CASES["user"][0]
    text = table.select(["click", "user", "word", "number"])
    own = [{"name": "user", "rows": 50}, {"name": "word", "rows": 9}]
    pa.csv.write_csv(text, tmp_path / "rows.csv")
    pq.write_table(text.slice(300), tmp_path / "b.parquet")
    pq.write_table(text.slice(0, 300), tmp_path / "a.parquet")
    wanted = {name: set(rows) for name, rows in by_rows(table, by_user).items()}
    turned = [str(tmp_path / "b.parquet"), str(tmp_path / "a.parquet")]
    for path in (str(tmp_path / "rows.csv"), turned):
        found = parts(opened(tmp_path, table, own, path=path, split=split))
        assert {name: set(rows) for name, rows in found.items()} == wanted


def test_times_in_text_and_in_numbers_with_a_zone(tmp_path: Path, table: pa.Table) -> None:
    """Midnight in Berlin is 23:00 in UTC."""
    seconds = pa.array((table["ts"].to_numpy().astype("datetime64[s]")).astype(np.int64))
    written = [time.strftime("%d.%m.%Y %H:%M:%S") for time in table["ts"].to_pylist()]
    other = table.append_column("seconds", seconds).append_column("written", pa.array(written))
    bounds = {"by": "time", "valid": VALID, "test": "2026-03-05T13:00:00"}
    wanted = parts(opened(tmp_path, other, split={**bounds, "column": "ts", "zone": "UTC"}))
    assert parts(opened(tmp_path, other, split={**bounds, "column": "seconds", "unit": "s"})) == wanted
    form = {"column": "written", "format": "%d.%m.%Y %H:%M:%S"}
    assert parts(opened(tmp_path, other, split={**bounds, **form})) == wanted
    berlin = parts(
        opened(tmp_path, other, split={**bounds, "column": "seconds", "unit": "s", "zone": "Europe/Berlin"})
    )

    def part_of(row: dict[str, Any]) -> str:
        time = row["ts"].isoformat()
        return "test" if time >= TEST else "eval" if time >= "2026-02-28T23:00:00" else "train"

    assert berlin == by_rows(table, part_of) != wanted


def test_files_of_their_own(tmp_path: Path, table: pa.Table) -> None:
    bounds = {"a": (0, 300), "b": (300, 450), "c": (450, 600)}
    paths = {}
    for name, (low, high) in bounds.items():
        paths[name] = str(tmp_path / f"{name}.parquet")
        pq.write_table(table.slice(low, high - low), paths[name])
    own = opened(tmp_path, table, path=paths["a"], eval_path=paths["c"], test_path=[paths["b"]])
    wanted = {"train": range(300), "eval": range(450, 600), "test": range(300, 450)}
    assert parts(own) == {name: list(rows) for name, rows in wanted.items()}
    both = opened(tmp_path, table, path=[paths["a"], paths["b"]], test_path=paths["c"], eval_fraction=0.1)
    assert {name: len(rows) for name, rows in parts(both).items()} == {"train": 405, "eval": 45, "test": 150}
    assert [*chain.from_iterable(parts(both).values())] == list(range(600))
    learned = opened(tmp_path, table, LEARNED, path=paths["a"], eval_path=paths["c"])
    unseen = set(table["word"].to_pylist()[450:]) - set(table["word"].to_pylist()[:300])
    ones = (next(learned.batches("eval", 200)).sparse["word"].values() == 1).tolist()
    assert ones == [word in unseen for word in table["word"].to_pylist()[450:]]
    assert any(ones)
    with pytest.raises(DataError, match=r"/d\.parquet: no such file or directory \(data\.test_path, seen"):
        opened(tmp_path, table, path=paths["a"], test_path=str(tmp_path / "d.parquet"))
    config = FilesConfig(path=paths["a"], eval_path=paths["c"], features=features(PLAIN))
    rows = StreamedDataset(open_source(config, labelled=False)).batches("train", SIZE)
    assert next(rows).size == 300, "what is scored is data.path"


def test_fractions_of_any_source(tmp_path: Path, table: pa.Table) -> None:
    settings = {"samples": 1000, "tables": {"a": 9}, "eval_fraction": 0.2}
    plain = open_dataset(SyntheticConfig(**settings), 1)
    three = open_dataset(SyntheticConfig(**settings, test_fraction=0.1), 1)
    assert [three.size(split) for split in SPLITS] == [700, 200, 100]
    assert plain.size("test") == 0
    assert plain.fingerprint != three.fingerprint
    last = next(plain.batches("eval", 200))
    assert next(three.batches("test", 100)).dense.equal(last.dense[100:])
    assert next(three.batches("eval", 200)).dense[100:].equal(last.dense[:100])
    with pytest.raises(DataError, match=r"data\.test_fraction=0\.0001 is less than one of 1000 samples"):
        open_dataset(SyntheticConfig(**settings, test_fraction=0.0001), 1)
    learned = opened(tmp_path, table, LEARNED, eval_fraction=0.25, test_fraction=0.25)
    assert parts(learned)["test"] == list(range(450, 600))
    scaled = next(learned.batches("train", 1)).dense[0, 0]
    np.testing.assert_allclose(scaled, -np.mean(range(300)) / np.std(range(300)), rtol=1e-6)


def test_skipped_rows_are_of_no_part(tmp_path: Path, table: pa.Table) -> None:
    split = CASES["words"][0]
    words = table["part"].to_pylist()
    words[5] = words[77] = None
    words[300] = "dev"
    other = table.set_column(table.column_names.index("part"), "part", pa.array(words))
    dataset = opened(tmp_path, other, split=split, on_bad_row="skip")
    assert dataset.rejected_rows == 3
    kept = sorted(chain.from_iterable(parts(dataset).values()))
    assert kept == [n for n in range(SIZE) if n not in (5, 77, 300)]
    with pytest.raises(
        DataError, match=r"rows\.parquet, row 6, column part: None is missing, and data\.split"
    ):
        opened(tmp_path, other, split=split)
    pq.write_table(other.slice(78), tmp_path / "later.parquet")
    with pytest.raises(DataError, match="row 223, column part: .*dev.* is not train, valid or test"):
        opened(tmp_path, other, split=split, path=str(tmp_path / "later.parquet"))


def test_a_column_that_says_the_part_is_no_proposed_feature(tmp_path: Path, table: pa.Table) -> None:
    pq.write_table(table, tmp_path / "rows.parquet")
    settings = {"path": str(tmp_path / "rows.parquet"), "label": "click", "features": "auto"}
    for name, split in (("part", CASES["words"][0]), ("ts", CASES["time"][0]), ("none", None)):
        proposal = propose(FilesConfig(**settings, split=split))
        names = {choice.column.name for choice in proposal.choices}
        assert ("part" in names) == (name != "part")
        assert "ts" in names


@pytest.mark.parametrize(
    ("split", "fault"),
    [
        (
            {"by": "time", "column": "ts", "valid": "2027-01-01"},
            r"no sample is for valid \(train 600, valid 0, test 0\); column ts has 2026-02-2.* to 2026-03-0",
        ),
        ({"by": "time", "column": "ts", "valid": "2020-01-01"}, "no sample is for train"),
        (
            {"by": "column", "column": "fold", "valid": 7},
            "no sample is for valid .*column fold has .*: state",
        ),
        ({"by": "time", "column": "tz", "valid": VALID}, "no column 'tz'"),
        (
            {"by": "time", "column": "fold", "valid": VALID},
            r"^data\.split: .*column fold: holds int64; state of which unit",
        ),
        ({"by": "user", "column": "seen", "valid": 0.1}, "column seen: holds list"),
        ({"by": "last", "column": "number", "test": 1}, "no sample is for test .*number has too few rows"),
        ({"by": "last", "column": "user", "test": 1, "time": "fold"}, "fold: holds int64; state of which"),
        ({"by": "time", "column": "word", "valid": 3}, "row 1, column word: .* is no number"),
    ],
)
def test_parts_that_cannot_be_are_one_line(
    tmp_path: Path, table: pa.Table, split: dict[str, Any], fault: str
) -> None:
    with pytest.raises(DataError, match=fault) as raised:
        opened(tmp_path, table, split=split)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ({"split": {"by": "weeks", "column": "a"}}, r"data\.split\.by=weeks is unknown"),
        ({"split": {"by": "user", "valid": 0.1}}, r"data\.split\.column has no value"),
        ({"split": {"by": "user", "column": "a"}}, "by: user says no part; state valid: 0.1"),
        ({"split": {"by": "time", "column": "a"}}, "by: time says no part"),
        ({"split": {"by": "random"}}, "by: random says no part; state valid: 0.1"),
        ({"split": {"by": "random", "column": "a", "valid": 0.1}}, "by: random is by no column"),
        ({"split": {"by": "random", "valid": 0.5, "test": 0.5}}, "are 1 of the rows: none trains"),
        ({"split": {"by": "user", "column": "a", "valid": 0.1, "seed": 1}}, "seed is of by: random"),
        ({"split": {"by": "user", "column": "a", "valid": 2}}, r"data\.split\.valid=2\.0: must be a share"),
        ({"split": {"by": "user", "column": "a", "valid": 0.6, "test": 0.4}}, "none trains"),
        ({"split": {"by": "time", "column": "a", "valid": "March"}}, r"data\.split\.valid=March: is no time"),
        ({"split": {"by": "time", "column": "a", "valid": 3, "test": "2026-01-01"}}, "both be numbers"),
        ({"split": {"by": "user", "column": "a", "valid": 0.1, "unit": "s"}}, "are of by: time"),
        ({"split": {"by": "last", "column": "a", "valid": 0.5}}, "must be how many of the last rows"),
        ({"split": {"by": "last", "column": "a"}}, "by: last says no part; state valid: 1"),
        ({"split": {"by": "user", "column": "a", "test": 0.5, "time": "b"}}, "time is of by: last"),
        ({"split": {"by": "time", "column": "a", "valid": VALID, "zone": "Bonn"}}, "is no zone"),
        ({"split": {"by": "column", "colum": "a"}}, "Did you mean 'data.split.column'"),
        ({"split": {"by": "column", "column": "a"}, "test_path": "x"}, "data.split and data.test_path both"),
        ({"test_fraction": 0.1, "eval_path": "x"}, "data.test_fraction and data.eval_path both say"),
    ],
)
def test_keys_that_do_not_go_together_are_one_line(keys: dict[str, Any], fault: str) -> None:
    with pytest.raises(UserError, match=fault) as raised:
        parse_config({"name": "files", "path": "x", "features": features(PLAIN), **keys})
    assert "\n" not in str(raised.value)
