"""Negatives: which samples are added, how often each id is drawn, and that neither ranks nor resuming change
it."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from recpipe.data.config import FilesConfig
from recpipe.data.make import open_dataset
from recpipe.data.negatives import SampledDataset, Sampler
from recpipe.data.shuffle import Shuffled
from recpipe.errors import DataError, UserError
from recpipe.plugin.batch import Batch, BatchShare
from tests.data.conftest import mix

SIZE, TRAIN = 400, 300
SPARSE = ("user", "item", "word", "tags")
FEATURES = {
    "labels": [{"name": "seen"}],
    "weight": "weight",
    "features": [
        {"name": "user", "rows": 50, "ids": "rows"},
        {"name": "item", "rows": 30, "ids": "rows"},
        {"name": "word", "rows": 1000},
        {"name": "tags", "kind": "multi_hot", "rows": 100, "ids": "rows"},
        {"name": "price", "kind": "dense"},
        {"name": "hour", "kind": "dense"},
    ],
}


def tags(item: int) -> list[int]:
    return [item + n for n in range(item % 4)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pa.Table]:
    """Samples of skewed items, whose attributes depend on the item alone; the word of item 3 is missing."""
    rng = np.random.default_rng(2)
    item = np.minimum(rng.geometric(0.2, SIZE), 25)
    table = pa.table(
        {
            "seen": np.ones(SIZE, np.int8),
            "weight": rng.integers(1, 5, SIZE).astype(float),
            "user": rng.integers(0, 50, SIZE),
            "item": item,
            "word": [None if i == 3 else f"w{i}" for i in item],
            "tags": [tags(int(i)) for i in item],
            "price": item / 2,
            "hour": rng.integers(0, 24, SIZE).astype(float),
        }
    )
    folder = tmp_path_factory.mktemp("negatives")
    pq.write_table(table, folder / "rows.parquet")
    return folder, table


def opened(folder: Path, seed: int = 0, extra: dict[str, Any] | None = None, **rule: Any) -> SampledDataset:
    drawn = {"feature": "item", "along": ["word", "tags", "price"], "ratio": 3, **rule}
    given: dict[str, Any] = {"features": FEATURES, "negatives": drawn, "eval_fraction": 0.25}
    given |= extra or {}
    config = FilesConfig(path=str(folder / "rows.parquet"), cache_dir=str(folder / "cache"), **given)
    dataset = open_dataset(config, seed)
    assert isinstance(dataset, SampledDataset)
    return dataset


def parts(batch: Batch) -> list[Any]:
    """Dense values, label, weight, log_q, and the rows of user, item, word and tags of each sample."""
    bags = [[bag.tolist() for bag in batch.sparse[name].to_dense()] for name in SPARSE]
    assert batch.weights is not None
    assert batch.log_q is not None
    flat = [part.tolist() for part in (batch.dense, batch.labels, batch.weights, batch.log_q)]
    return [list(each) for each in zip(*flat, *bags, strict=True)]


def items(batch: Batch) -> list[int]:
    found: list[int] = batch.sparse["item"].values().tolist()
    return found


def test_each_sample_is_followed_by_others_with_another_item(rows: tuple[Path, pa.Table]) -> None:
    """With that item's attributes, and all else of its own."""
    folder, table = rows
    every = parts(next(opened(folder).batches("train", 4 * TRAIN)))
    assert len(every) == 4 * TRAIN
    plain = {  # what an item has
        (own[5][0]): (own[6], own[7], own[0][0]) for own in every[::4]
    }
    for n, own in enumerate(every):
        base = table.slice(n // 4, 1).to_pylist()[0]
        (item,) = own[5]
        assert (own[0][1], own[4], own[2]) == (base["hour"], [base["user"]], base["weight"])
        assert own[1] == float(n % 4 == 0)
        assert (item == base["item"]) == (n % 4 == 0)
        assert (own[7], own[0][0]) == (tags(item), item / 2)
        assert (own[6], own[7], own[0][0]) == plain[item]
        assert (own[6] == [0]) == (item == 3)


def test_without_along_attributes_stay(rows: tuple[Path, pa.Table]) -> None:
    every = parts(next(opened(rows[0], along=[]).batches("train", 200)))
    assert all(own[6:] == every[n - n % 4][6:] for n, own in enumerate(every))


@pytest.mark.parametrize(("sampling", "power"), [("uniform", 0.0), ("popularity", 0.75)])
def test_items_are_drawn_as_often_as_said(rows: tuple[Path, pa.Table], sampling: str, power: float) -> None:
    """Of each sample: chance / (1 - its own item's chance), within five standard deviations over 200 epochs;
    ``log_q`` is the chance itself."""
    folder, table = rows
    dataset = opened(folder, sampling=sampling, ratio=8)
    counts = Counter(table["item"].to_pylist()[:TRAIN])
    total = sum(count**power for count in counts.values())
    chances = {item: count**power / total for item, count in counts.items()}
    found, expected, variance = Counter[int](), Counter[int](), Counter[int]()
    for epoch in range(200):
        drawn = items(next(dataset.of_epoch(epoch).batches("train", 9 * 50)))
        for n in range(0, len(drawn), 9):
            found.update(drawn[n + 1 : n + 9])
            if not epoch:
                for item in chances.keys() - {drawn[n]}:
                    share = chances[item] / (1 - chances[drawn[n]])
                    expected[item] += 8 * 200 * share
                    variance[item] += 8 * 200 * share * (1 - share)
    assert set(found) <= set(chances)
    for item in chances:
        assert abs(found[item] - expected[item]) <= 5 * variance[item] ** 0.5, item
    batch = next(dataset.batches("train", 450))
    assert batch.log_q is not None
    wanted = [np.log(chances[item]) for item in items(batch)]
    np.testing.assert_allclose(batch.log_q.numpy(), wanted, rtol=1e-6)


def test_draws_depend_on_seed_epoch_and_sample_alone(rows: tuple[Path, pa.Table]) -> None:
    """Batches of other sizes, from another position and of other ranks have the same bits."""
    dataset = opened(rows[0])
    assert (dataset.size("train"), dataset.size("eval")) == (4 * TRAIN, 4 * (SIZE - TRAIN))
    whole = parts(next(dataset.batches("train", 4 * TRAIN)))
    assert list(chain(*map(parts, dataset.batches("train", 27)))) == whole
    assert list(chain(*map(parts, dataset.batches("train", 82, first=4)))) == whole[328:]
    shares = [list(dataset.batches("train", 50, part=(rank, 3))) for rank in range(3)]
    for number, batch in enumerate(dataset.batches("train", 50)):
        own = [each[number] for each in shares]
        assert list(chain(*map(parts, own))) == parts(batch)
        for share in own:
            assert isinstance(share, BatchShare)
            assert share.total == batch.size == 50
            assert share.whole_weight == (float(batch.weights.sum()),)  # type: ignore[union-attr]
    held_out = parts(next(dataset.batches("eval", 400)))
    assert [own[1] for own in held_out] == [1, 0, 0, 0] * 100
    later = dataset.of_epoch(1)
    again = parts(next(later.batches("train", 4 * TRAIN)))
    assert again != whole
    assert again[::4] == whole[::4]
    assert parts(next(later.batches("eval", 400))) == held_out
    assert parts(next(dataset.batches("train", 4 * TRAIN))) == whole
    other = opened(rows[0], seed=1)
    assert parts(next(other.batches("train", 4 * TRAIN))) != whole
    assert len({dataset.fingerprint, other.fingerprint, opened(rows[0], ratio=2).fingerprint}) == 3
    assert opened(rows[0]).fingerprint == dataset.fingerprint


def test_a_two_tower_model_gets_the_logarithm_of_the_counts(rows: tuple[Path, pa.Table]) -> None:
    """In the batch no samples are added; it goes where the batch goes."""
    folder, table = rows
    batch = next(opened(folder, sampling="in_batch").batches("train", 64))
    counts = Counter(table["item"].to_pylist()[:TRAIN])
    assert batch.size == 64
    assert batch.log_q is not None
    wanted = [np.log(counts[item] / TRAIN) for item in items(batch)]
    np.testing.assert_allclose(batch.log_q.numpy(), wanted, rtol=1e-6)
    moved = batch.to(torch.device("cpu")).log_q
    assert moved is not None
    assert moved.tolist() == batch.log_q.tolist()
    held_out = next(opened(folder, sampling="in_batch").batches("eval", 100))
    unseen = [n for n, item in enumerate(items(held_out)) if item not in counts]
    assert held_out.log_q is not None
    np.testing.assert_allclose(held_out.log_q.numpy()[unseen], np.log(1 / TRAIN), rtol=1e-6)


def test_items_of_a_side_table_come_with_its_attributes(tmp_path: Path) -> None:
    """Also those that nobody has seen; text, numbers and lists as the join gives them."""
    seen = [11, 13, 11, None, 17, 13] * 20
    rows = pa.table({"seen": [1] * 120, "user": list(range(120)), "item": pa.array(seen, pa.int64())})
    pq.write_table(rows, tmp_path / "rows.parquet")
    catalog = {11: ("book", 1.0), 13: ("toy", 2.0), 17: (None, 3.0), 2**40: ("new", 4.0), 23: ("toy", None)}
    kinds, prices = zip(*catalog.values(), strict=True)
    items_table = {"item": [*catalog], "kind": kinds, "price": prices, "tags": [tags(n) for n in range(5)]}
    pq.write_table(pa.table(items_table), tmp_path / "items.parquet")
    features = [
        {"name": "user", "rows": 200, "ids": "rows"},
        {"name": "item", "rows": 10**6},
        {"name": "kind", "rows": 10**6},
        {"name": "tags", "kind": "multi_hot", "rows": 100, "ids": "rows"},
        {"name": "price", "kind": "dense", "default": -1.0},
    ]
    rule: dict[str, Any] = {"feature": "item", "along": ["kind", "tags", "price"], "source": "joined"}
    given: dict[str, Any] = {
        "path": str(tmp_path / "rows.parquet"),
        "cache_dir": str(tmp_path / "cache"),
        "joins": [{"path": str(tmp_path / "items.parquet"), "on": "item"}],
        "features": {"labels": ["seen"], "features": features},
        "eval_fraction": 0.0,
    }

    def first(**other: Any) -> Batch:
        config = FilesConfig(negatives={**rule, "ratio": 6, **other}, **given)
        return next(open_dataset(config, 0).batches("train", 840))

    row_of = {item: 1 + mix(item) % (10**6 - 1) for item in catalog}
    has = {  # by the row of the item: its kind, tags and price
        row_of[item]: (kind, tags(n), -1.0 if price is None else price)
        for n, (item, (kind, price)) in enumerate(catalog.items())
    }
    batch = first()
    names = ("item", "kind", "tags")
    bags = [[bag.tolist() for bag in batch.sparse[name].to_dense()] for name in names]
    found, kind_rows = set[int](), dict[str | None, set[int]]()
    for n, ((item,), (kind,), own_tags) in enumerate(zip(*bags, strict=True)):
        if n % 7:
            assert item != bags[0][n - n % 7][0]
            found.add(item)
        elif item == 0:
            continue
        word, *others = has[item]
        assert [own_tags, batch.dense[n].item()] == others
        kind_rows.setdefault(word, set()).add(kind)
    assert found == has.keys()
    assert kind_rows.pop(None) == {0}
    assert [len(own) for own in kind_rows.values()] == [1, 1, 1]
    wrong: dict[str, dict[str, Any]] = {
        "no side table of data.joins is joined by column 'user'": {"feature": "user"},
        "the side table has no column 'user'": {"along": ["user"]},
    }
    for match, other in wrong.items():
        with pytest.raises(UserError, match=match):
            first(**other)
    given["features"] = {"labels": ["seen"], "features": [features[1], features[4]]}
    assert set(items(first(along=["price"]))) == {0, *has}
    drawn = set(items(first(along=["price"], sampling="popularity")))
    assert drawn - {0} == {row_of[item] for item in (11, 13, 17)}
    # Text of whole numbers is the same keys.
    pyarrow.csv.write_csv(pa.table({"item": [*catalog], "price": prices}), tmp_path / "items.csv")
    given["joins"] = [{"path": str(tmp_path / "items.csv"), "on": "item"}]
    assert set(items(first(along=["price"]))) == {0, *has}


def test_what_cannot_be_drawn_is_one_line(rows: tuple[Path, pa.Table]) -> None:
    rules: dict[str, dict[str, Any]] = {
        "data.negatives.feature: no feature 'itm'": {"feature": "itm"},
        "no feature 'tags' has one id a sample": {"feature": "tags"},
        "data.negatives.along: no feature 'colour'": {"along": ["colour"]},
        "data.negatives.ratio=0": {"ratio": 0},
        "data.negatives.sampling=popular": {"sampling": "popular"},
        "no 'data.negatives.rate'": {"rate": 2},
    }
    for match, rule in rules.items():
        with pytest.raises(UserError, match=match):
            opened(rows[0], **rule)


def test_one_item_has_no_negatives(rows: tuple[Path, pa.Table], tmp_path: Path) -> None:
    table = rows[1].set_column(3, "item", pa.array([5] * SIZE))
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="there are 1 different ids of item to draw"):
        opened(tmp_path)


def test_shuffled_samples_are_those_of_their_numbers(rows: tuple[Path, pa.Table]) -> None:
    """Of each epoch, with their weights; the held-out part stays as it is."""
    folder, _ = rows
    plain, mixed = opened(folder), opened(folder)
    mixed.shuffle(5)
    for epoch in range(2):
        whole = parts(next(plain.of_epoch(epoch).batches("train", 4 * TRAIN)))
        numbers = Shuffled(4 * TRAIN, 5, epoch).between(0, 4 * TRAIN)
        assert list(chain(*map(parts, mixed.of_epoch(epoch).batches("train", 70)))) == [
            whole[number] for number in numbers
        ]
        share = next(mixed.of_epoch(epoch).batches("train", 70, part=(1, 3)))
        assert isinstance(share, BatchShare)
        assert share.whole_weight == (sum(whole[number][2] for number in numbers[:70]),)
    assert parts(next(mixed.batches("eval", 400))) == parts(next(plain.batches("eval", 400)))


def test_the_parts_of_a_split_have_whole_samples_and_ids_of_training_alone(
    rows: tuple[Path, pa.Table], tmp_path: Path
) -> None:
    """By fractions and by users; ids that only held-out samples have are never drawn."""
    folder, table = rows
    test = opened(folder, extra={"test_fraction": 0.25})
    assert test.parts == (4 * 200, 4 * 100, 4 * 100)
    counts = Counter(table["item"].to_pylist()[:200])
    drawn = {item for batch in test.batches("train", 800) for n, item in enumerate(items(batch)) if n % 4}
    assert drawn <= counts.keys()
    assert set(table["item"].to_pylist()) - counts.keys(), "there are such ids"
    batch = next(opened(folder, sampling="in_batch", extra={"test_fraction": 0.25}).batches("train", 50))
    assert batch.log_q is not None
    wanted = [np.log(counts[item] / 200) for item in items(batch)]
    np.testing.assert_allclose(batch.log_q.numpy(), wanted, rtol=1e-6)
    split = {"by": "user", "column": "user", "valid": 0.2, "test": 0.2}
    by_user = opened(folder, extra={"split": split})
    assert sum(by_user.parts) == 4 * SIZE
    users = [set(batch.sparse["user"].values().tolist()) for batch in by_user.batches("train", 10**4)]
    assert users[0].isdisjoint(next(by_user.batches("test", 10**4)).sparse["user"].values().tolist())


def test_counts_are_kept_beside_the_prepared_data(
    rows: tuple[Path, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And made again if they are damaged."""
    before = parts(next(opened(rows[0]).batches("train", 100)))
    made: list[int] = []
    count = Sampler._counted
    monkeypatch.setattr(Sampler, "_counted", lambda self, samples: made.append(1) or count(self, samples))
    assert parts(next(opened(rows[0]).batches("train", 100))) == before
    assert not made
    for file in rows[0].glob("cache/data-*/counts-item-*"):
        file.write_bytes(file.read_bytes()[:-8])
    assert parts(next(opened(rows[0]).batches("train", 100))) == before
    assert made == [1]
