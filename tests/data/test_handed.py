"""Records from Python train as the same rows in a file do, and what are no records is one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

import recpipe
from recpipe.data.handed import write_records
from recpipe.errors import UserError

FEATURES = {
    "labels": ["click"],
    "features": [
        {"name": "user", "ids": "vocabulary"},
        {"name": "city", "rows": 40},
        {"name": "price", "kind": "dense", "scale": "standard"},
    ],
}
SMALL = (
    *("model.bottom=[8]", "model.top=[8]", "model.embedding_dim=8", "data.batch_size=64"),
    *("trainer.progress=false", "trainer.backend=plain"),
)


def rows(size: int = 500) -> pa.Table:
    rng = np.random.default_rng(5)
    return pa.table(
        {
            "click": rng.integers(0, 2, size),
            "user": rng.integers(0, 60, size),
            "city": [["Zürich", "Kraków", ""][n] for n in rng.integers(0, 3, size)],
            "price": rng.lognormal(size=size),
        }
    )


def read(file: Path) -> pa.Table:
    with pa.memory_map(str(file)) as source:
        return pa.ipc.open_stream(source).read_all()


def as_dicts(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(100):
        text = {"city": batch["city"].to_pylist()}
        numbers = {name: torch.from_numpy(np.array(batch[name])) for name in ("user", "price")}
        yield {"click": np.array(batch["click"]), **numbers, **text}


FORMS: dict[str, Callable[[pa.Table], Any]] = {
    "table": lambda table: table,
    "reader": lambda table: table.to_reader(100),
    "batches": lambda table: table.to_batches(100),
    "tables": lambda table: (table.slice(low, 90) for low in range(0, len(table), 90)),
    "dicts": as_dicts,
    "loader": lambda table: DataLoader(list(as_dicts(table)), batch_size=None),
}


@pytest.mark.parametrize("form", FORMS)
def test_records_of_every_form_are_the_rows(form: str, tmp_path: Path) -> None:
    wanted = rows()
    write_records(FORMS[form](wanted), tmp_path / "records.arrow")
    found = read(tmp_path / "records.arrow")
    assert found.select(wanted.column_names).equals(wanted)


def test_records_train_as_the_same_rows_in_a_file_do(tmp_path: Path) -> None:
    pq.write_table(rows(), tmp_path / "rows.parquet")
    with (
        recpipe.train(None, str(tmp_path / "rows.parquet"), *SMALL, features=FEATURES, quiet=True) as wanted,
        recpipe.train(None, as_dicts(rows()), *SMALL, features=FEATURES, quiet=True) as found,
    ):
        assert found.report["quality"] == wanted.report["quality"]
        assert found.report["data"]["train_samples"] == 400
        for one, other in zip(found.model.parameters(), wanted.model.parameters(), strict=True):
            assert torch.equal(one, other)


def test_rows_of_an_array_are_lists(tmp_path: Path) -> None:
    wide = np.arange(12, dtype=np.float32).reshape(4, 3)
    write_records([{"vector": wide}, {"vector": torch.from_numpy(wide)}], tmp_path / "records.arrow")
    found = read(tmp_path / "records.arrow")["vector"]
    assert found.type == pa.list_(pa.float32(), 3)
    assert found.to_pylist() == [*wide.tolist(), *wide.tolist()]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], "the data has no record batch"),
        ([{"a": [1]}, {"b": [1]}], "record batch 2: has not the columns and types of the first one"),
        ([{"a": [1]}, {"a": ["x"]}], "record batch 2: has not the columns and types of the first one"),
        ([{"a": [1], "b": [1, 2]}], "record batch 1: is no table of columns"),
        ([3], "record batch 1 is a int"),
        (3, "the data is a int: with features"),
        ({"a": [1]}, "the data is a dict: with features"),
    ],
)
def test_what_are_no_records_is_one_line(records: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said) as caught:
        write_records(records, tmp_path / "records.arrow")
    assert "\n" not in str(caught.value)


def test_features_are_not_of_batches() -> None:
    with pytest.raises(UserError, match="features go with a path, or with records"):
        recpipe.train(None, [], features=FEATURES, held_out=[], quiet=True)
