"""Groups and slices of evaluations: from a batch's own columns into reports, loggers and monitors."""

from __future__ import annotations

import csv
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.make import open_dataset
from recpipe.data.schema import Schema
from recpipe.errors import DataError, UserError
from recpipe.model.call import Judgement, Scored
from recpipe.model.config import MetricsConfig
from recpipe.model.metrics import judge, judged
from recpipe.model.scores import Scores
from recpipe.model.sides import Sides
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import SparseFeature
from recpipe.report import html, run_page, sweep
from recpipe.tasks.sweeps import optimized
from recpipe.training.evaluation import Evaluation, Stop
from tests.model.objectives import TwoTower, report_of, written

SIZE, USERS = 600, 25
FEATURES = (
    "data.features={labels: [click], features: [{name: user, ids: rows, rows: 40}, "
    "{name: item, ids: rows, rows: 40}, {name: price, kind: dense}]}"
)
QUIET = (
    *("data.batch_size=64", "data.eval_fraction=0.5", "trainer.eval_every=1.0", "model.embedding_dim=8"),
    *("model.bottom=[8]", "model.top=[16,1]", "trainer.backend=plain", "trainer.progress=false", "seed=2"),
)
ASKED = ("metrics.group=user", "metrics.k=[1,5]", "metrics.slices=[item,price]", "metrics.slice_values=3")
GAUC = "{_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val/gauc, mode: max}"
NDCG = "{_target_: lightning.pytorch.callbacks.ModelCheckpoint, monitor: val/ndcg@5, mode: max}"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(7)
    user = rng.integers(0, USERS, SIZE)
    table = {
        "click": rng.integers(0, 2, SIZE).astype(np.int8),
        "user": user,
        "item": np.minimum(rng.geometric(0.2, SIZE), 39),
        "price": rng.normal(size=SIZE).astype(np.float32),
    }
    file = tmp_path_factory.mktemp("groups") / "rows.parquet"
    pq.write_table(pa.table(table), file)
    return file


@pytest.fixture(scope="module")
def run(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("run")
    words = (f"task.export_predictions={out}/predictions", f"trainer.callbacks=[{GAUC},{NDCG}]")
    with recpipe.train(None, rows, *QUIET, FEATURES, *ASKED, *words, output=out / "run", quiet=True) as done:
        return out, dict(done.report)


def held_out(rows: Path) -> Any:
    return pq.read_table(rows).slice(SIZE // 2)


def test_figures_of_groups_are_those_of_the_files_column(rows: Path, run: tuple[Path, dict]) -> None:
    out, report = run
    scores, labels = torch.from_numpy(np.load(out / "predictions" / "0.npy"))
    assert len(scores.unique()) > SIZE / 4, "its scores tell samples apart"
    users = torch.from_numpy(held_out(rows)["user"].to_numpy())
    wanted = judge(Scores("clicks", labels, scores, groups=users), MetricsConfig(group="user", k=[1, 5]))
    own = {name: value for name, value in report["quality"].items() if name != "loss"}
    assert own == pytest.approx(wanted.quality, rel=1e-9)
    assert {"gauc", "recall@1", "ndcg@5", "hr@5", "mrr@5"} <= own.keys()
    told = report["evaluated"]["score"]
    assert told["groups"] == wanted.groups
    assert told["groups"]["groups"] == USERS
    for name, found in wanted.figures.items():
        if name != "ece":
            assert told["figures"][name]["low"] == pytest.approx(found.low, rel=1e-9), name
    plain = judge(Scores("clicks", labels, scores)).figures
    assert told["figures"]["logloss"]["low"] != pytest.approx(plain["logloss"].low, rel=1e-6), "by user"


def test_slices_are_those_of_the_files_columns(rows: Path, run: tuple[Path, dict]) -> None:
    out, report = run
    scores, labels = np.load(out / "predictions" / "0.npy")
    by_item, by_price = report["evaluated"]["score"]["slices"]
    assert [by_item["column"], by_price["column"]] == ["item", "price"]
    items = held_out(rows)["item"].to_numpy()
    assert len(by_item["slices"]) == 4
    for part in by_item["slices"][:3]:
        own = items == int(part["value"])
        assert part["samples"] == own.sum()
        wanted = judged("clicks", torch.from_numpy(labels[own]), torch.from_numpy(scores[own]))
        for name in ("auc", "ne", "calibration"):
            assert part["figures"][name]["value"] == pytest.approx(wanted[name]), name
    assert by_item["slices"][3]["value"].endswith("other values")
    assert [part["samples"] for part in by_price["slices"]] == [SIZE // 6] * 3
    assert sum(part["samples"] for part in by_item["slices"]) == SIZE // 2


def test_slices_of_a_vocabulary_have_its_ids(tmp_path: Path) -> None:
    table = {
        "click": [0, 1] * 6,
        "shop": [907, 907, 907, 5, 5, 12, 907, 907, 907, 5, 8, None],
        "place": [3] * 6 + [907, 907, 907, 5, 8, 3],
        "town": ["Ulm", "Ulm", "Ulm", "Jena", "Jena", "Jena"] * 2,
    }
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    features = (
        "{labels: [click], features: [{name: shop, ids: vocabulary}, {name: town, ids: vocabulary}, "
        "{name: place, ids: rows, rows: 1000}]}"
    )
    words = ["data=files", f"data.path={tmp_path}/rows.parquet", f"data.features={features}"]
    words += [
        f"data.cache_dir={tmp_path}/cache",
        "data.eval_fraction=0.5",
        "metrics.slices=[shop,town,place]",
    ]
    recipe = Recipe.of(compose(words))
    dataset = open_dataset(recipe.data, 0)
    (batch,) = dataset.batches("eval", 12)
    sides = Sides.of_metrics(recipe.metrics, dataset)
    values = sides.of(batch)
    names = [{part.name: len(part.rows) for part in sides.slices(values, column, 9)} for column in range(3)]
    assert names[0] == {"907": 3, "5": 1, "missing": 2}  # 8 is not among those of the training part
    assert names[1] == {"Ulm": 3, "Jena": 3}
    assert names[2] == {"907": 3, "5": 1, "8": 1, "3": 1}


def test_slices_of_hashed_text_have_the_files_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, towns in {"train": ["Ulm", "Ulm", "Jena", None], "eval": ["Jena", "Ulm", "Bonn", None]}.items():
        table = {"click": [0, 1, 0, 1], "town": towns, "road": towns}
        pq.write_table(pa.table(table), tmp_path / f"{name}.parquet")
    features = "{labels: [click], features: [{name: town, rows: 1000}, {name: road, rows: 2}]}"
    words = ["data=files", f"data.path={tmp_path}/train.parquet", f"data.eval_path={tmp_path}/eval.parquet"]
    words += [f"data.features={features}", f"data.cache_dir={tmp_path}/cache", "metrics.slices=[town,road]"]
    recipe = Recipe.of(compose(words))

    def names() -> list[set[str]]:
        dataset = open_dataset(recipe.data, 0)
        sides = Sides.of_metrics(recipe.metrics, dataset)
        values = sides.of(next(iter(dataset.batches("eval", 12))))
        return [{part.name for part in sides.slices(values, column, 9)} for column in range(2)]

    assert names() == [{"Jena", "Ulm", "Bonn", "missing"}, {"Ulm, ...", "missing"}]
    monkeypatch.setattr("recpipe.data.row_words.LOOKED_AT", 4)
    town, _ = names()
    assert {"Jena", "Ulm", "missing"} < town
    (row,) = town - {"Jena", "Ulm", "missing"}
    assert 0 < int(row) < 1000, "Bonn is beyond the rows that are looked at"


def test_what_names_figures_has_them(run: tuple[Path, dict]) -> None:
    out, report = run
    quality = report["quality"]
    with (out / "run" / "logs" / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["val/gauc"]]
    assert float(logged[-1]["val/ndcg@5"]) == pytest.approx(quality["ndcg@5"])
    assert report["history"][-1]["gauc"] == quality["gauc"]
    assert optimized(["quality.gauc", "quality.ndcg@5"], report) == [quality["gauc"], quality["ndcg@5"]]
    page = html.render(run_page.page(report))
    assert "NDCG@5" in page
    assert f"{USERS} groups" in page
    assert "other values" in page
    saved = json.loads((out / "run" / "report.json").read_text())
    assert saved["quality"]["gauc"] == quality["gauc"]
    (job,) = sweep.read(out)
    assert job.quality["hr@1"] == quality["hr@1"]


def test_evaluate_has_the_groups_of_training(rows: Path, run: tuple[Path, dict]) -> None:
    out, report = run
    content = recpipe.evaluate(out / "run", None, "split=eval", "by=item", "by_top=2", quiet=True)
    own = content["tasks"]["score"]
    for name, value in report["quality"].items():
        if name != "loss":
            assert own["figures"][name]["value"] == pytest.approx(value, rel=1e-5), name
    assert own["groups"] == report["evaluated"]["score"]["groups"]
    assert [part["column"] for part in own["slices"]] == ["item", "price"]
    assert own["slices"][0]["slices"][0]["samples"] == content["by"]["slices"][0]["tasks"]["score"]["samples"]
    other = recpipe.evaluate(
        *(out / "run", None, "split=eval", "metrics.group=null", "metrics.slices=[]"),
        *("metrics.intervals=0.5",),
        quiet=True,
    )
    alone = other["tasks"]["score"]
    assert "gauc" not in alone["figures"]
    assert alone["slices"] == []
    widths = [each["figures"]["auc"]["high"] - each["figures"]["auc"]["low"] for each in (own, alone)]
    assert widths[0] > 2 * widths[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["metrics.group=usr"], "metrics.group=usr: no such column; did you mean user"),
        (["metrics.slices=[price,itm]"], "metrics.slices=itm: no such column; did you mean item"),
        (["metrics.k=[0]"], "metrics.k"),
        (["metrics.intervals=95"], "metrics.intervals"),
        (["metrics.recalibrate=plat"], "metrics.recalibrate=plat is unknown; did you mean platt"),
        (["metrics.groups=user"], "no 'metrics.groups' in the recipe"),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_what_cannot_be_is_one_line(rows: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as told:
        recpipe.train(None, rows, *QUIET, FEATURES, *words, quiet=True)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("rule", ["hash", "vocabulary"])
def test_samples_without_an_id_of_their_own_are_in_no_group(rows: Path, tmp_path: Path, rule: str) -> None:
    """Missing users, and of a vocabulary those whom the training part lacks."""
    table = pq.read_table(rows)
    users = [
        None if n % 7 == 0 else 99 if n > SIZE - 20 else own
        for n, own in enumerate(table["user"].to_pylist())
    ]
    pq.write_table(table.set_column(1, "user", pa.array(users, pa.int64())), tmp_path / "rows.parquet")
    words = FEATURES.replace("ids: rows, rows: 40", f"ids: {rule}{', rows: 5000' * (rule == 'hash')}", 1)
    with recpipe.train(
        *(None, tmp_path / "rows.parquet", *QUIET, words, "metrics.group=user"), quiet=True
    ) as done:
        groups = done.report["evaluated"]["score"]["groups"]
    later = users[SIZE // 2 :]
    alone = [own for own in later if own is None or (own == 99 and rule == "vocabulary")]
    assert groups["samples_without_group"] == len(alone)
    assert groups["groups"] == len({*later} - {*alone})


def test_a_loss_that_ranks_is_judged_within_groups_alone(tmp_path: Path) -> None:
    file, words = written(tmp_path), "data.negatives={feature: item, sampling: in_batch}"
    found = report_of(file, TwoTower(), "model.loss=in_batch_softmax", words, "metrics.group=user")
    assert {*found["quality"]} == {"gauc", "recall@10", "ndcg@10", "hr@10", "mrr@10", "loss"}
    plain = report_of(file, TwoTower(), "model.loss=in_batch_softmax", words)
    assert [*plain["quality"]] == ["loss"], "the control"


# -- batches ---------------------------------------------------------------------------------------


def batch_of(users: list[list[int]], price: list[float]) -> Batch:
    ids = KeyedJaggedTensor(
        ["user"],
        torch.tensor([id for own in users for id in own], dtype=torch.int64),
        lengths=torch.tensor([len(own) for own in users]),
    )
    return Batch(torch.tensor(price)[:, None], ids, torch.zeros(len(users)))


DATA: Any = SimpleNamespace(
    schema=Schema(("price",), (SparseFeature("user", 9),)), preparation=None, words=None
)
HASHED: Any = SimpleNamespace(
    schema=DATA.schema, preparation=SimpleNamespace(features=None, ids="hashed"), words=None
)


def test_values_of_a_batch() -> None:
    sides = Sides([("metrics.group", "user"), ("metrics.slices", "price")], DATA)
    found = sides.of(batch_of([[3], [], [0]], [-0.0, float("nan"), -1.5]))
    assert found[:, 0].tolist() == [3, -1, 0]
    hashed = Sides([("metrics.group", "user")], HASHED)
    assert hashed.of(batch_of([[3], [], [0]], [0.0] * 3))[:, 0].tolist() == [3, -1, -1], "row 0 is missing"
    assert found[0, 1] == 0
    assert found[1, 1] == -1
    assert found[2, 1] >= 0
    parts = {part.name: part.rows.tolist() for part in sides.slices(found, 1, 5)}
    assert parts["missing"] == [1]
    assert sorted(rows for name, rows in parts.items() if name != "missing") == [[0], [2]]
    with pytest.raises(DataError, match="metrics.group=user: the column holds lists"):
        sides.of(batch_of([[3, 4]], [0.0]))
    with pytest.raises(DataError, match="metrics.group=user: the batches are of a type of the caller's own"):
        sides.of(object())
    unknown = Sides([("by", "item")], None)
    with pytest.raises(DataError, match="by=item: no such column"):
        unknown.of(batch_of([[3]], [0.0]))


class Pair:
    """A channel of two threads."""

    size = 2

    def __init__(self) -> None:
        self.parts: list[Any] = [None, None]
        self.barrier = threading.Barrier(2)

    def of(self, rank: int) -> Any:
        def gather(part: np.ndarray) -> list[np.ndarray]:
            self.parts[rank] = part.copy()
            self.barrier.wait(30)
            found = list(self.parts)
            self.barrier.wait(30)
            return found

        return SimpleNamespace(size=2, gather=gather)


def evaluation(trainers: Any) -> Evaluation:
    """Of a model that predicts its dense column."""

    def judged_of(batch: Batch) -> Judgement:
        scored = Scored(batch.dense[:, 0], batch.labels, batch.weights)
        return Judgement(torch.ones((1, 2), dtype=torch.float64), {"score": scored})

    called = SimpleNamespace(
        judged={"score": SimpleNamespace(kind="clicks")}, judge=judged_of, weighs=lambda batch: True
    )
    model: Any = SimpleNamespace(called=called, look_up=lambda batch: {}, parts=SimpleNamespace(sums=False))
    asked = MetricsConfig(group="user", k=[2], slices=["price", "user"])
    return Evaluation(model, trainers, Stop(), asked, DATA)


def test_two_trainers_tell_what_one_does() -> None:
    """Their shares of a batch are not alike, and one has none of the last batch."""
    rng = np.random.default_rng(1)
    batches = []
    for size in (40, 25, 3):
        users = [[int(user)] if user < 8 else [] for user in rng.integers(0, 9, size)]
        batch = batch_of(users, rng.normal(size=size).astype(np.float32).tolist())
        batch.labels = torch.from_numpy(rng.integers(0, 2, size).astype(np.float32))
        batch.weights = torch.from_numpy(rng.integers(0, 3, size).astype(np.float32))
        batches.append((batch, users))
    one = evaluation(SimpleNamespace(size=1, gather=lambda part: [part]))
    shares: list[list[Batch]] = [[], []]
    for number, (batch, users) in enumerate(batches):
        one.add(batch, last=number == 2)
        cut = 0 if number == 2 else len(users) // 3
        for rank, part in enumerate((slice(cut, None), slice(0, cut))):
            own = batch_of(users[part], batch.dense[part, 0].tolist())
            own.labels, own.weights = batch.labels[part], batch.weights[part]
            shares[rank].append(own)
    pair = Pair()
    both = [evaluation(pair.of(rank)) for rank in (0, 1)]
    for number in range(3):
        threads = [
            threading.Thread(target=each.add, args=(shares[rank][number], number == 2))
            for rank, each in enumerate(both)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert one.figures is not None
    assert {"gauc", "ndcg@2"} <= one.figures["score"].keys()
    for each in both:
        assert each.figures is not None
        for name, value in one.figures["score"].items():
            if name != "loss":
                assert each.figures["score"][name] == pytest.approx(value, rel=1e-9), name
        mine, theirs = (e.judged()["score"]["slices"] for e in (one, each))
        assert [part["column"] for part in mine] == ["price", "user"]
        for own, other in zip(mine, theirs, strict=True):
            assert {part["value"]: part["samples"] for part in own["slices"]} == {
                part["value"]: part["samples"] for part in other["slices"]
            }
