"""Joins: the columns of side tables are beside each record as a plain dict gives them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from recpipe.data import joins
from recpipe.data.cache import cache_key
from recpipe.data.config import FilesConfig, StreamConfig
from recpipe.data.derived import derived_files
from recpipe.data.file_columns import read_columns
from recpipe.data.make import open_dataset, open_source
from recpipe.data.select import select
from recpipe.data.stream.stream import Stream
from recpipe.errors import DataError, UserError

ITEMS = {7: ("book", 2.5, 1), 3: ("toy", None, 2), 12: ("book", 9.0, None), 40: (None, 1.0, 1)}
SHOPS = {1: "north", 2: "south"}
CLICKS = [(1, 7), (0, 3), (1, None), (0, 99), (1, 12), (0, 7), (1, 40)]
FEATURES: dict[str, Any] = {
    "labels": ["click"],
    "features": [
        {"name": "item", "rows": 100},
        {"name": "item_category", "rows": 50},
        {"name": "shop_place", "rows": 20},
        {"name": "item_price", "kind": "dense", "default": -1.0},
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    clicks = {"click": [c for c, _ in CLICKS], "item": pa.array([i for _, i in CLICKS], pa.int32())}
    pq.write_table(pa.table(clicks), tmp_path / "clicks.parquet")
    category, price, shop = zip(*ITEMS.values(), strict=True)
    items = pa.table({"id": list(ITEMS), "category": category, "price": price, "shop": pa.array(shop)})
    pq.write_table(items, tmp_path / "items.parquet")
    pyarrow.csv.write_csv(items, tmp_path / "items.csv")
    pyarrow.csv.write_csv(pa.table({"id": [*SHOPS], "place": [*SHOPS.values()]}), tmp_path / "shops.csv")
    return tmp_path


def config(folder: Path, items: str = "items.parquet", **settings: Any) -> FilesConfig:
    sides = [
        {"path": str(folder / items), "on": {"left": "item", "right": "id"}, "prefix": "item_"},
        {"path": str(folder / "shops.csv"), "on": {"left": "item_shop", "right": "id"}, "prefix": "shop_"},
    ]
    given: dict[str, Any] = {"path": str(folder / "clicks.parquet"), "joins": sides, "features": FEATURES}
    return FilesConfig(eval_fraction=0.0, cache_dir=str(folder / "cache"), **given | settings)


@pytest.mark.parametrize("items", ["items.parquet", "items.csv"])
def test_records_have_what_a_dict_has_for_their_key(folder: Path, items: str) -> None:
    """In two steps: the second key is a column that the first join adds."""
    ((file,),) = derived_files(config(folder, items))
    wanted = ["item_price", "shop_place", "item", "item_category"]
    (block,) = file.blocks(wanted)
    assert block.rows.schema.names == wanted
    for row, (_, item) in zip(block.rows.to_pylist(), CLICKS, strict=True):
        category, price, shop = ITEMS.get(item, (None, None, None)) if item else (None, None, None)
        assert row["item"] == item
        assert (row["item_category"] or None) == category  # CSV has no null, but empty text
        assert (float(row["item_price"]) if row["item_price"] else None) == price
        assert row["shop_place"] == (SHOPS[shop] if shop else None)


def test_samples_of_joined_files_are_those_of_a_file_with_the_columns(folder: Path) -> None:
    """Bit by bit, and missing values are counted; the output of predictions can have the columns too."""
    joined = open_dataset(config(folder), 0)
    rows = [ITEMS.get(item or 0, (None, None, None)) for _, item in CLICKS]
    whole = pq.read_table(folder / "clicks.parquet")
    whole = whole.append_column("item_category", pa.array([r[0] for r in rows]))
    whole = whole.append_column("item_price", pa.array([r[1] for r in rows]))
    whole = whole.append_column("shop_place", pa.array([SHOPS.get(r[2] or 0) for r in rows]))
    pq.write_table(whole, folder / "whole.parquet")
    plain = open_dataset(config(folder, joins=[], path=str(folder / "whole.parquet")), 0)
    ours, theirs = (next(data.batches("train", 100)) for data in (joined, plain))
    assert ours.sparse.values().tolist() == theirs.sparse.values().tolist()
    assert ours.dense.tolist() == theirs.dense.tolist()
    assert ours.dense.tolist()[1] == [-1.0]
    assert (
        joined.missing == plain.missing == {"item": 1, "item_category": 3, "item_price": 3, "shop_place": 3}
    )
    (table,) = read_columns(config(folder), ["shop_place"])
    assert table["shop_place"].to_pylist() == whole["shop_place"].to_pylist()


def test_the_content_of_a_side_table_is_part_of_what_is_prepared(folder: Path) -> None:
    before = cache_key(open_source(config(folder)))
    assert cache_key(open_source(config(folder))) == before
    items = pq.read_table(folder / "items.parquet")
    changed = items.set_column(2, "price", pa.array([2.5, None, 9.0, 1.5]))
    pq.write_table(changed, folder / "items.parquet")
    assert cache_key(open_source(config(folder))) != before
    assert "joins" not in open_source(config(folder, joins=[], features=only_item())).recipe


def only_item() -> dict[str, Any]:
    return {"labels": ["click"], "features": [{"name": "item", "rows": 100}]}


def test_text_keys_are_as_they_are_written(folder: Path) -> None:
    """`007` and `7` are two keys where both sides are text, and one where a side has numbers."""
    (folder / "clicks.csv").write_text("click,item\n1,7\n0,007\n1,NA\n")
    (folder / "side.csv").write_text("item,word\n007,long\n7,short\n")
    side: list[dict[str, Any]] = [{"path": str(folder / "side.csv"), "on": "item"}]
    ((file,),) = derived_files(config(folder, joins=side, path=str(folder / "clicks.csv")))
    (block,) = file.blocks(["word"])
    assert block.rows["word"].to_pylist() == ["short", "long", None]
    side = [{"path": str(folder / "items.parquet"), "on": {"left": "item", "right": "id"}}]
    ((file,),) = derived_files(config(folder, joins=side, path=str(folder / "clicks.csv")))
    (block,) = file.blocks(["category"])
    assert block.rows["category"].to_pylist() == ["book", None, None]


def test_what_cannot_be_joined_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, **join: Any) -> None:
        given = {"path": str(folder / "items.parquet"), "on": {"left": "item", "right": "id"}, **join}
        with pytest.raises((DataError, UserError), match=match) as fault:
            open_dataset(config(folder, joins=[given], features=only_item()), 0)
        assert len(str(fault.value).splitlines()) == 1

    pq.write_table(pa.table({"id": [7, 3, 7], "word": ["a", "b", "c"]}), folder / "twice.parquet")
    refused("column id: 7 is in two rows", path=str(folder / "twice.parquet"))
    refused("no column 'itme'", on={"left": "itme", "right": "id"})
    refused("no column 'idd'", on={"left": "item", "right": "idd"})
    refused("no column 'colour'", columns=["colour"])
    refused("on is the column of the key, or {left", on={"left": "item"})
    refused(r"no 'data.joins\[0\].prefx'", prefx="x")
    refused("no such file", path=str(folder / "absent.parquet"))
    monkeypatch.setattr(joins, "MOST_BYTES", 50)
    refused("takes more than 50 bytes in memory")


def test_a_column_of_the_same_name_needs_a_prefix(folder: Path) -> None:
    pq.write_table(pa.table({"id": [7], "click": [5]}), folder / "side.parquet")
    side = [{"path": str(folder / "side.parquet"), "on": {"left": "item", "right": "id"}}]
    with pytest.raises(DataError, match="add a second column 'click'; give it a prefix"):
        open_dataset(config(folder, joins=side, features=only_item()), 0)


def test_records_of_a_stream_are_joined_as_those_of_files_are(folder: Path) -> None:
    """Also where the first ones have no key, and where a resumed run finds another side table."""
    clicks = pq.read_table(folder / "clicks.parquet").to_pylist()
    incoming = folder / "incoming"
    incoming.mkdir()
    for number, part in enumerate((clicks[2:3], clicks[:2], clicks[3:])):
        (incoming / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    features = {
        **FEATURES,
        "features": [{"type": "integer", **FEATURES["features"][0]}, *FEATURES["features"][1:]],
    }
    given: dict[str, Any] = {"features": features, "joins": config(folder).joins}
    settings = StreamConfig(path=str(incoming), settle=0.0, end="stop", idle=0.15, **given)
    stream = Stream(settings)
    ours = next(stream.batches("train", 100))
    theirs = next(open_dataset(config(folder), 0).batches("train", 100))
    order = [2, 0, 1, 3, 4, 5, 6]
    wanted = select(theirs, np.array(order))
    assert ours.sparse.values().tolist() == wanted.sparse.values().tolist()
    assert ours.dense.tolist() == wanted.dense.tolist()
    assert dict(stream.missing) == {"item": 1, "item_category": 3, "item_price": 3, "shop_place": 3}
    changed = pq.read_table(folder / "items.parquet").slice(1)
    pq.write_table(changed, folder / "items.parquet")
    again = Stream(settings)
    assert again.fingerprint == stream.fingerprint
    assert len(list(again.batches("train", 100))) == 1
    assert again.missing["item_category"] == 5, "7 is not there any more"
    assert (
        Stream(replace(settings, joins=given["joins"][:1], features=only_item())).fingerprint
        != again.fingerprint
    )
