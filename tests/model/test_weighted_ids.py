"""Ids with weights, and tables of several dimensions, by the schema: against loops and plain PyTorch."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F

import recpipe
from recpipe.answers.encoded import read_encoding
from recpipe.answers.parts import _weighs
from recpipe.answers.predict import PredictOptions, predict
from recpipe.answers.score import Scorer
from recpipe.answers.trained import Trained, open_trained
from recpipe.common.files import lock_run_dir
from recpipe.data.feature_yaml import parse_features
from recpipe.data.make import open_dataset
from recpipe.data.sources.transforms import hash_rows, string_keys
from recpipe.errors import UserError

SIZE, BATCH, RATE = 320, 32, 0.05
FEATURES: list[dict[str, Any]] = [
    {"name": "user", "rows": 30, "dim": 8},
    {"name": "words", "kind": "weighted_multi_hot", "weight_separator": ":", "separator": "|", "rows": 40},
    {
        "name": "seen",
        "kind": "weighted_multi_hot",
        "weights": "watched",
        "padding": ["0"],
        "table": "items",
        "rows": 50,
        "dim": 12,
        "pooling": "mean",
    },
    {"name": "item", "table": "items", "rows": 50, "dim": 12},
    {"name": "tags", "kind": "multi_hot", "rows": 20, "pooling": "mean"},
    {"name": "price", "kind": "dense"},
]


@pytest.fixture(scope="module")
def table() -> pa.Table:
    rng = np.random.default_rng(7)
    sizes = rng.integers(0, 5, SIZE)
    words = [[f"w:{rng.integers(60)}:{rng.normal():.3f}" for _ in range(k)] for k in sizes]
    seen = [[*rng.integers(1, 90, k).tolist(), 0, 0] for k in sizes]
    return pa.table(
        {
            "click": rng.integers(0, 2, SIZE),
            "user": rng.integers(0, 9, SIZE),
            "item": rng.integers(1, 90, SIZE),
            "words": [None if n % 7 == 3 else "|".join(each) for n, each in enumerate(words)],
            "seen": seen,
            "watched": [[*rng.integers(0, 5, len(ids) - 2).astype(float), 9.0, 9.0] for ids in seen],
            "tags": [rng.integers(1, 60, k).tolist() for k in sizes[::-1]],
            "price": rng.normal(size=SIZE),
        }
    )


@pytest.fixture(scope="module")
def file(table: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("weighted") / "rows.parquet"
    pq.write_table(table, made)
    return made


def words(file: Path, features: list[dict[str, Any]] = FEATURES) -> list[str]:
    described = str({"labels": ["click"], "features": features}).replace("'", '"')
    (file.parent / f"{abs(hash(described))}.yaml").write_text(described)
    said = ["data=files", f"data.path={file}", f"data.cache_dir={file.parent}/cache"]
    return [*said, f"data.features={file.parent}/{abs(hash(described))}.yaml"]


TIERS: dict[str, list[str]] = {
    "resident": [],
    "lru": ["tiers.policy=lru", "tiers.store=host", "tiers.resident_bytes=50%"],
    "sharded": ["tiers.sharded=true"],
}


@pytest.fixture(scope="module", params=TIERS)
def trained(request: pytest.FixtureRequest, file: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("run")
    said = [*words(file), f"data.batch_size={BATCH}", "model.embedding_dim=4", "model.bottom=[8]"]
    said += ["model.top=[8]", "seed=3", "trainer.logger=null", "trainer.progress=false"]
    said += ["optim=sgd", f"optim.tables.lr={RATE}", f"optim.dense.lr={RATE}", *TIERS[request.param]]
    said += ["trainer.checkpoint_every=4", "trainer.keep_checkpoints=2", "trainer.max_steps=8"]
    recpipe.train(None, None, *said, output=folder, quiet=True).close()
    return open_trained(folder / "checkpoints")


def test_weights_are_those_of_the_file(file, table) -> None:
    features = parse_features({"labels": ["click"], "features": FEATURES})
    assert features.inputs[-1] == "watched", "a column that is read"
    dataset = open_dataset(
        {
            "name": "files",
            "path": str(file),
            "features": {"labels": ["click"], "features": FEATURES},
            "eval_fraction": 0.0,
            "cache_dir": str(file.parent / "cache"),
        },
        0,
    )
    (batch,) = dataset.batches("train", SIZE)
    found: dict[str, list[list[tuple[int, float]]]] = {}
    for name in ("words", "seen", "tags", "user"):
        own = batch.sparse[name]
        pairs = list(zip(own.values().tolist(), own.weights().tolist(), strict=True))
        ends = [0, *own.lengths().cumsum(0).tolist()]
        found[name] = [pairs[low:high] for low, high in pairwise(ends)]
    for n, row in enumerate(table.to_pylist()):
        parts = [each.rpartition(":")[::2] for each in (row["words"] or "").split("|") if each]
        keys, _ = string_keys(pa.array([word for word, _ in parts], pa.string()))
        assert found["words"][n] == list(
            zip(hash_rows(keys, 40).tolist(), [float(np.float32(w)) for _, w in parts], strict=True)
        )
        ids = np.array(row["seen"][:-2], np.uint64)
        total = sum(row["watched"][:-2]) or 1.0
        assert [id_ for id_, _ in found["seen"][n]] == hash_rows(ids, 50).tolist()
        np.testing.assert_allclose(
            [w for _, w in found["seen"][n]], [w / total for w in row["watched"][:-2]], rtol=1e-6
        )
        np.testing.assert_allclose([w for _, w in found["tags"][n]], 1 / max(1, len(row["tags"])), rtol=1e-6)
        assert [w for _, w in found["user"][n]] == [1.0]


def test_rows_are_summed_by_their_weights_and_projected(trained) -> None:
    model = recpipe.load(trained.directory)
    arch: Any = model.get_submodule("sparse_arch")
    rows = {
        unquote(name.split(".")[-2]): own
        for name, own in model.named_parameters()
        if "embedding_bags" in name
    }
    assert {name: own.shape[1] for name, own in rows.items()} == {
        "user": 8,
        "words": 4,
        "items": 12,
        "tags": 4,
    }
    batch = next(trained.dataset.batches("eval", BATCH))
    found = arch(batch.sparse)
    assert found.shape == (BATCH, 5, 4)
    tables = {"user": "user", "words": "words", "seen": "items", "item": "items", "tags": "tags"}
    for place, name in enumerate(["user", "words", "seen", "item", "tags"]):
        own = batch.sparse[name]
        sizes = own.lengths().tolist()
        for sample, (ids, weights) in enumerate(
            zip(own.values().split(sizes), own.weights().split(sizes), strict=True)
        ):
            wanted = (rows[tables[name]][ids] * weights[:, None]).sum(0)
            if len(wanted) != 4:
                (matrix,) = (
                    own
                    for key, own in arch.projections.named_parameters()
                    if unquote(key.split(".")[0]) == tables[name]
                )
                wanted = matrix @ wanted
            torch.testing.assert_close(found[sample, place], wanted)


def test_training_is_that_of_plain_pytorch(trained) -> None:
    older = sorted(trained.directory.parent.glob("step-*.ckpt"))[0]
    assert older != trained.directory
    model, newer = recpipe.load(older).train(), recpipe.load(trained.directory)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dataset = trained.dataset
    for _, batch in zip(range(4), dataset.batches("train", BATCH, 4), strict=False):
        optimizer.zero_grad()
        logits = model(batch.dense, batch.sparse).reshape(-1)
        F.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        optimizer.step()
    for name, value in newer.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5, atol=1e-6)
        assert not torch.equal(value, before[name]), f"{name} is trained"


def test_predictions_are_the_models(trained, table, tmp_path) -> None:
    with lock_run_dir(tmp_path) as folder:
        told = predict(trained, PredictOptions(scores="raw"), folder)
    model = recpipe.load(trained.directory)
    batches = [*trained.dataset.batches("train", SIZE), *trained.dataset.batches("eval", SIZE)]
    wanted = torch.cat([model(batch.dense, batch.sparse).detach().reshape(-1) for batch in batches])
    np.testing.assert_allclose(np.asarray(told).reshape(-1), wanted, rtol=1e-4, atol=1e-5)


def test_a_request_has_the_weights_of_training(trained, table, tmp_path) -> None:
    pytest.importorskip("recpipe_serve")
    from recpipe_serve.batching.forms import together
    from recpipe_serve.errors import Refused
    from recpipe_serve.http.features import Features, Heads

    sparse = [{"name": f.name, "rows": f.rows, **_weighs(trained.schema, f)} for f in trained.schema.sparse]
    manifest = {"dense": {"names": ["price"]}, "sparse": sparse, "lookups": [{"weighted": True}]}
    heads = Heads(Features(manifest, 4096), trained.trained_on.preparation)
    rows = table.drop(["click"]).to_pylist()[:BATCH]
    (batch,) = islice(trained.dataset.batches("train", BATCH), 1)
    _, asked = heads.read(json.dumps({"rows": rows}).encode(), None)
    for place, name in enumerate(batch.sparse.keys()):
        own, bags = batch.sparse[name], asked.bags(place, of_each=True)
        assert bags.ids.tolist() == own.values().tolist()
        assert bags.weights is not None
        assert bags.weights.tolist() == own.weights().tolist(), name
    sides = together([asked, asked])[1]
    assert all(side.weights is not None and len(side.weights) == len(side.ids) for side in sides)

    def tensor(name: str, kind: str, *values: float) -> dict[str, Any]:
        return {"name": name, "datatype": kind, "shape": [len(values)], "data": list(values)}

    inputs = [{"name": "dense", "datatype": "FP32", "shape": [1, 1], "data": [0.5]}]
    inputs += [tensor(name, "INT64", 3) for name in ("user", "words", "seen", "item")]
    inputs.append({"name": "tags", "datatype": "INT64", "shape": [1, 2], "data": [3, 4]})
    given = [tensor(f"{name}.weights", "FP32", 0.25) for name in ("words", "seen")]
    _, found = heads.read(json.dumps({"inputs": inputs + given}).encode(), None)
    assert found.weights is not None
    assert found.weights.tolist() == [1.0, 0.25, 0.25, 1.0, 0.5, 0.5], "two tags are averaged"
    for wrong in (given[1:], [*given[1:], tensor("words.weights", "FP32", 1.0, 2.0)]):
        with pytest.raises(Refused, match="'words.weights' is not FP32, a weight for each of the 1 ids"):
            heads.read(json.dumps({"inputs": inputs + wrong}).encode(), None)


@pytest.mark.soak
def test_a_package_and_a_server_score_as_the_model_does(trained, table, tmp_path) -> None:
    pytest.importorskip("recpipe_serve")
    from recpipe_serve.batching.forms import together
    from recpipe_serve.batching.scorer import RequestScorer
    from recpipe_serve.http.features import Features, Heads

    package = recpipe.package(trained.directory, tmp_path / "m.recpipe", quiet=True)
    with lock_run_dir(tmp_path) as folder:
        told = np.asarray(predict(trained, PredictOptions(scores="raw", package=str(package)), folder))
        model = np.asarray(predict(trained, PredictOptions(scores="raw"), folder))
    np.testing.assert_allclose(told, model, rtol=1e-4, atol=1e-5)
    scorer = Scorer(package)
    assert "reference" in scorer.manifest
    heads = Heads(Features(scorer.manifest, 4096), read_encoding(package, scorer.manifest))
    rows = table.drop(["click"]).to_pylist()
    asked = [heads.read(json.dumps({"rows": part}).encode(), None)[1] for part in (rows[:100], rows[100:])]
    served = RequestScorer(scorer)(*together(asked)).numpy()
    np.testing.assert_allclose(served.reshape(-1), told.reshape(-1), rtol=1e-5, atol=1e-6)
    shared = {name: rows[0][name] for name in ("user", "words", "seen", "watched")}
    own = [{name: value for name, value in row.items() if name not in shared} for row in rows[:9]]
    one = [heads.read(json.dumps({"shared": shared, "rows": own}).encode(), None)[1]]
    each = [heads.read(json.dumps({"rows": [row | shared]}).encode(), None)[1] for row in own]
    candidates, alone = (RequestScorer(scorer)(*together(some)).numpy() for some in (one, each))
    np.testing.assert_allclose(candidates, alone, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="the model's ids have weights"):
        scorer(torch.zeros(1, 1), torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.int64))
    again = recpipe.package(package, tmp_path / "again.recpipe", quiet=True)
    assert Scorer(again).difference <= 1e-5


BAD = [
    ({"words": ["a:1|b", "c:1"]}, {}, "row 1, column words: a:1|b has not a weight for each of its ids"),
    ({"words": ["a:1", "c:x"]}, {}, "row 2, column words: c:x has not a weight"),
    ({"words": ["a:-1", "c:1"]}, {"pooling": "mean"}, "row 1, column words: a:-1 has not a weight"),
    ({"words": [["a"], ["b"]], "w": [[1.0], [1.0, 2.0]]}, {"weights": "w"}, "row 2, column words: "),
    ({"words": [["a"], ["b"]], "w": [[1.0], [None]]}, {"weights": "w"}, "row 2, column words: "),
    (
        {"words": [["a"], ["b"]], "w": [1.0, 2.0]},
        {"weights": "w"},
        "column w: holds double; weights are lists",
    ),
    ({"words": [[1], [2]]}, {}, "column words: holds list.*weight_separator is of text"),
    ({"words": [["a"], ["b"]]}, {"weights": "v"}, "no column 'v'"),
    ({"words": ["a", "b"]}, {"weight_separator": None}, "weights .* says what an id weighs: state one"),
]


@pytest.mark.parametrize(("columns", "keys", "fault"), BAD)
def test_what_is_no_weight_is_one_line(tmp_path, columns, keys, fault) -> None:
    pq.write_table(pa.table({"click": [0, 1], **columns}), tmp_path / "a.parquet")
    feature = FEATURES[1] | keys
    if "weights" in keys:
        feature = {key: value for key, value in feature.items() if key != "weight_separator"}
    recipe = {
        "name": "files",
        "path": str(tmp_path / "a.parquet"),
        "features": {"labels": ["click"], "features": [feature]},
        "cache_dir": str(tmp_path),
    }
    with pytest.raises(UserError, match=fault) as refused:
        open_dataset(recipe, 0)
    assert "\n" not in str(refused.value)


def test_features_of_a_table_state_the_same_dimension() -> None:
    other = [FEATURES[2], FEATURES[3] | {"dim": 8}]
    with pytest.raises(UserError, match="share table 'items' and state different rows, dim"):
        parse_features({"labels": ["click"], "features": other})
    with pytest.raises(UserError, match="dim=6: must be a multiple of 4"):
        parse_features({"labels": ["click"], "features": [FEATURES[0] | {"dim": 6}]})
    with pytest.raises(UserError, match="price: dim is of a table of ids, not of numbers"):
        parse_features({"labels": ["click"], "features": [FEATURES[0], FEATURES[5] | {"dim": 8}]})
