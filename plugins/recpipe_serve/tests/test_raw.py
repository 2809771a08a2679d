"""Raw values in a request: they become the ids and numbers of training, and get its scores."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from recpipe_serve.batching.forms import together
from recpipe_serve.batching.scorer import RequestScorer
from recpipe_serve.config import ServeConfig
from recpipe_serve.errors import Refused
from recpipe_serve.http.features import Features, Heads
from recpipe_serve.http.protocol import rows_of, texts

import recpipe
from recpipe.answers import score
from recpipe.answers.encoded import FILE, KEY, read_encoding, write_encoding
from recpipe.answers.predict import PredictOptions, predict
from recpipe.answers.trained import Trained, open_trained
from recpipe.common.files import lock_run_dir
from recpipe.data.config import FileConfig
from recpipe.data.dataset import Dataset
from recpipe.data.make import StreamedDataset, open_dataset, open_source
from recpipe.data.preparation import Preparation
from recpipe.data.sources.criteo_columns import DENSE, SPARSE
from recpipe.plugin.batch import Batch

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

from recpipe_serve.http.app import Server
from recpipe_serve.store.filled import FeatureStore
from recpipe_serve.store.sources import ParquetSource
from recpipe_serve.tests.listening import listening
from recpipe_serve.tests.test_serving import ask
from recpipe_serve.tests.test_store import Held

CITIES = ["Zürich", "Köln", "", "New York, NY", "007"]
FEATURES: list[dict[str, Any]] = [
    {"name": "city", "rows": 40},
    {"name": "user", "rows": 50},
    {"name": "tags", "kind": "multi_hot", "separator": "|", "rows": 20},
    {"name": "seen", "kind": "sequence", "padding": ["0"], "max_length": 3, "rows": 30},
    {"name": "price", "kind": "dense", "scale": "log1p", "default": -1.0, "missing": ["-1"]},
    {"name": "age", "kind": "dense", "scale": "standard", "default": 0.5},
    {"name": "known", "column": "city", "ids": "vocabulary", "min_count": 2},
    {"name": "recent", "kind": "sequence", "column": "seen", "ids": "vocabulary", "table": "items"},
    {"name": "years", "kind": "dense", "column": "age", "buckets": 4},
    {"name": "both", "kind": "cross", "of": ["city", "user", "at_hour"], "rows": 99},
    {"name": "shape", "kind": "vector", "default": 2.0},
    {"name": "at", "kind": "timestamp", "zone": "Europe/Berlin"},
    {"name": "day", "kind": "timestamp", "as": ["weekday"]},
    {"name": "usual", "column": "city", "default": "Köln", "rows": 9},
    {"name": "cost", "kind": "dense", "column": "price", "edges": [0.5, 10], "missing": ["-1"]},
]


def rows(size: int) -> pa.Table:
    """``size`` rows with missing values in every column but the label."""
    rng = np.random.default_rng(1)

    def some(values: list[Any], every: int) -> list[Any]:
        return [None if n % every == 3 else value for n, value in enumerate(values)]

    times = [datetime(2024, 3, 30, tzinfo=UTC) + timedelta(minutes=37 * n) for n in range(size)]
    lists = [rng.integers(0, 9, 5).tolist() for _ in range(size)]
    return pa.table(
        {
            "click": rng.integers(0, 2, size),
            "city": [CITIES[n] for n in rng.integers(0, 5, size)],
            "user": some(rng.integers(1, 90, size).tolist(), 11),
            "tags": ["|".join(f"t{n}" for n in rng.integers(0, 9, rng.integers(0, 4))) for _ in range(size)],
            "seen": pa.array(some(lists, 9), pa.list_(pa.int64(), 5)),
            "price": some(rng.choice([-1.0, 0.5, 7.25, 1e6], size).tolist(), 7),
            "shape": pa.array(some(rng.normal(size=(size, 2)).tolist(), 8), pa.list_(pa.float64(), 2)),
            "at": pa.array(some(times, 6), pa.timestamp("ms", "UTC")),
            "day": pa.array(some([time.date() for time in times], 5)),
            "age": pa.array(some(rng.integers(0, 99, size).tolist(), 5), pa.int32()),
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on raw files."""
    folder = tmp_path_factory.mktemp("raw")
    pq.write_table(rows(300), folder / "rows.parquet")
    (folder / "features.yaml").write_text(json.dumps({"labels": ["click"], "features": FEATURES}))
    words = ["data=files", f"data.path={folder}/rows.parquet", f"data.features={folder}/features.yaml"]
    words += [f"data.cache_dir={folder}/cache", "data.batch_size=64", "data.eval_fraction=0.1"]
    words += ["model.embedding_dim=4", "model.bottom=[8]", "model.top=[8]", "trainer.logger=null"]
    recpipe.train(None, None, *words, "trainer.checkpoint_every=4", output=folder / "run", quiet=True).close()
    return folder


@pytest.fixture(scope="module")
def trained(run: Path) -> Trained:
    return open_trained(run / "run" / "checkpoints")


def written(request: dict[str, Any]) -> bytes:
    """As JSON; times as ISO 8601 has them."""
    return json.dumps(request, default=lambda time: time.isoformat()).encode()


def body(table: pa.Table, **more: Any) -> bytes:
    return written({"rows": table.drop(["click"]).to_pylist(), **more})


def manifest_of(trained: Trained) -> dict[str, Any]:
    sparse = [{"name": f.name, "rows": f.rows} for f in trained.schema.sparse]
    return {"dense": {"names": list(trained.schema.dense)}, "sparse": sparse}


@pytest.fixture(scope="module")
def heads(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    """What reads requests for a package of the run, by the file that the package has."""
    folder, preparation = tmp_path_factory.mktemp("package"), trained.trained_on.preparation
    manifest = manifest_of(trained) | write_encoding(folder, preparation) | {"files": {FILE: ""}}
    return Heads(Features(manifest, 4096), read_encoding(folder, manifest))


def same(heads: Heads, batch: Batch, asked: bytes) -> None:
    """The request's inputs are those of the batch, bit by bit."""
    _, found = heads.read(asked, None)
    np.testing.assert_array_equal(found.dense.view(np.int32), batch.dense.numpy().view(np.int32))
    for place, name in enumerate(batch.sparse.keys()):
        bags, own = found.bags(place, of_each=True), batch.sparse[name]
        assert bags.ids.tolist() == own.values().tolist(), name
        lengths = np.broadcast_to(bags.lengths, bags.samples).tolist()
        assert lengths == own.lengths().tolist(), name


def test_raw_values_become_the_ids_and_numbers_of_training(trained: Trained, heads: Heads) -> None:
    table, at = rows(300), 0
    for split in ("train", "eval"):
        for batch in trained.dataset.batches(split, 100):
            same(heads, batch, body(table.slice(at, len(batch.labels))))
            at += len(batch.labels)
    assert at == 300
    config = trained.cfg.data
    assert isinstance(config, FileConfig)
    source = open_source(config, labelled=False, trained_by=trained.trained_on.preparation)
    for number, batch in enumerate(StreamedDataset(source).batches("train", 100)):
        same(heads, batch, body(table.slice(100 * number, 100)))


def heads_of(dataset: Dataset, folder: Path) -> Heads:
    """What reads requests for a model of these data, by the file that its package has."""
    schema, preparation = dataset.known_schema(), dataset.preparation
    manifest: dict[str, Any] = {
        "dense": {"names": list(schema.dense)},
        "sparse": [{"name": f.name, "rows": f.rows} for f in schema.sparse],
        "files": {FILE: ""},
    }
    manifest |= write_encoding(folder, preparation)
    return Heads(Features(manifest, 4096), read_encoding(folder, manifest))


def test_rows_of_criteos_text_become_what_they_were_in_training(tmp_path: Path) -> None:
    rng, lines, asked = np.random.default_rng(5), [], []
    for _ in range(60):
        numbers = ["" if rng.random() < 0.2 else str(rng.integers(-3, 10**6)) for _ in DENSE]
        words = [
            f"{rng.integers(2**64, dtype=np.uint64) >> np.uint64(rng.choice([0, 32, 58])):x}" for _ in SPARSE
        ]
        words = ["" if rng.random() < 0.2 else rng.choice([w, w.upper(), w.zfill(16)]).item() for w in words]
        lines.append("\t".join(["1", *numbers, *words]))
        sent = [None if not n else int(n) if rng.random() < 0.5 else float(n) for n in numbers]
        asked.append(dict(zip((*DENSE, *SPARSE), (*sent, *words), strict=True)))
    (tmp_path / "day.tsv").write_text("\n".join(lines) + "\n")
    tables = {name: 40 + n for n, name in enumerate(SPARSE)}
    recipe = {"name": "criteo", "path": str(tmp_path / "day.tsv"), "tables": tables, "eval_fraction": 0.0}
    dataset = open_dataset(recipe | {"cache_dir": str(tmp_path / "cache")}, 0)
    (batch,) = dataset.batches("train", 60)
    heads = heads_of(dataset, tmp_path)
    same(heads, batch, written({"rows": asked}))
    shared = {"C1": asked[0]["C1"]}
    own = [{name: value for name, value in row.items() if name != "C1"} for row in asked]
    _, found = heads.read(written({"shared": shared, "rows": own}), None)
    _, wanted = heads.read(written({"rows": [row | shared for row in own]}), None)
    assert found.ids.tolist() == wanted.ids.tolist()
    for change, fault in (
        ({"C1": "68fd1e6g"}, "row 1, column C1: 68fd1e6g is not a hexadecimal id of up to 16 digits"),
        ({"C2": "0" * 17}, "row 1, column C2: 0{17} is not a hexadecimal id"),
        (
            {"C2": 12},
            "column C2: holds int64; hexadecimal ids are text|column C2: holds int64, and held text",
        ),
        ({"I1": "x"}, "row 1, column I1: x is not a number"),
    ):
        with pytest.raises(Refused, match=fault):
            heads.read(written({"rows": [asked[0] | change]}), None)


@pytest.mark.parametrize("hash_ids", [True, False])
def test_rows_of_npy_triples_become_what_they_were_in_training(tmp_path: Path, hash_ids: bool) -> None:
    rng = np.random.default_rng(6)
    dense = rng.normal(size=(40, 13)).astype(np.float32)
    sparse = rng.integers(0, 10**6 if hash_ids else 40, (40, 26)).astype(np.int32)
    sparse[0] *= -1 if hash_ids else 1
    for name, values in (("dense", dense), ("sparse", sparse), ("labels", np.ones((40, 1), np.int32))):
        np.save(tmp_path / f"day_{name}.npy", values)
    recipe = {"name": "npy", "path": str(tmp_path), "tables": dict.fromkeys(SPARSE, 40), "hash_ids": hash_ids}
    dataset = open_dataset(recipe | {"eval_fraction": 0.0, "cache_dir": str(tmp_path / "cache")}, 0)
    (batch,) = dataset.batches("train", 40)
    asked = [
        dict(zip((*DENSE, *SPARSE), (*numbers.tolist(), *ids.tolist()), strict=True))
        for numbers, ids in zip(dense, sparse, strict=True)
    ]
    heads = heads_of(dataset, tmp_path)
    same(heads, batch, written({"rows": asked}))
    if not hash_ids:
        with pytest.raises(Refused, match=r"column C3: 40 is not in \[0, 40\)"):
            heads.read(written({"rows": [asked[0] | {"C3": 40}]}), None)


def test_a_value_that_is_shared_stands_in_every_row(trained: Trained, heads: Heads) -> None:
    table = rows(300).slice(20, 4)
    named = [row | {"city": "Köln"} for row in table.drop(["click"]).to_pylist()]
    own = [{name: value for name, value in row.items() if name != "city"} for row in named]
    _, each = heads.read(written({"rows": named}), None)
    _, shared = heads.read(written({"rows": own, "shared": {"city": "Köln"}}), None)
    assert shared.ids.tolist() == each.ids.tolist()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"city": 7}, "column city: holds int64, and held text in training"),
    ({"user": "7"}, "column user: holds string, and held numbers in training"),
    ({"price": "cheap"}, "the request, row 1, column price: cheap is not a number"),
    ({"price": -3}, "row 1, column price: -3.* has no log1p"),
    ({"user": 1.5}, "column user: 1.5 is not a whole number"),
    ({"seen": 4}, "column seen: holds int64; a sequence column has lists"),
    ({"seen": [1, "a"]}, "column seen: its values are not all text"),
    ({"user": {"id": 4}}, "column user: holds struct"),
    ({"at": "30.03.2024"}, "row 1, column at: 30.03.2024 is not a time"),
    ({"at": 17}, "column at: holds int64; state of which unit the numbers are"),
    ({"shape": [1.0]}, r"column shape: \[1.0\] is not a list of 2 numbers"),
    ({"usr": 4}, "no feature has a column 'usr'; did you mean user"),
]


@pytest.mark.parametrize(("change", "fault"), WRONG)
def test_what_is_wrong_with_raw_values_is_one_line(heads: Heads, change: dict[str, Any], fault: str) -> None:
    (row,) = rows(300).slice(0, 1).drop(["click"]).to_pylist()
    with pytest.raises(Refused, match=fault) as refused:
        heads.read(written({"rows": [row | change]}), None)
    assert refused.value.status == 400
    assert "\n" not in str(refused.value)


def test_raw_and_encoded_values_are_told_apart(heads: Heads, trained: Trained) -> None:
    whole = rows(300).slice(0, 2)
    lacking = body(whole.drop(["city"]))
    both = body(whole, inputs=[{"name": "city", "datatype": "INT64", "shape": [1], "data": [3]}])
    for asked, fault in (
        (lacking, "the request: no column 'city'"),
        (both, "inputs, which are encoded, or rows, which are raw, and not both"),
        (json.dumps({"rows": []}).encode(), "rows is no list of samples"),
        (json.dumps({"rows": [4]}).encode(), "a row is no JSON object"),
        (body(whole, shared={"city": "a"}), "'city' is shared, and in a row as well"),
    ):
        with pytest.raises(Refused, match=fault):
            heads.read(asked, None)
    without = Heads(Features(manifest_of(trained), 4096))
    with pytest.raises(Refused, match="does not say how raw values are encoded"):
        without.read(body(whole), None)


def test_an_encoding_that_is_not_as_it_was_written_is_refused(trained: Trained, tmp_path: Path) -> None:
    manifest = manifest_of(trained) | {"files": {FILE: ""}}
    manifest |= write_encoding(tmp_path, trained.trained_on.preparation)
    assert manifest[KEY] == FILE
    whole = json.loads((tmp_path / FILE).read_text())
    whole["features"]["sparse"][0]["rows"] = 41
    for text in ("", "[]", '{"features": {"labels": 3}}', json.dumps(whole)):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(score.PackageError, match="package the checkpoint anew"):
            read_encoding(tmp_path, manifest)
    assert write_encoding(tmp_path, Preparation("hashed", "signed_log")) == {}


def test_what_waits_is_encoded_anew_for_another_package(trained: Trained) -> None:
    first = trained.trained_on.preparation
    assert first is not None
    assert first.learned is not None
    other = replace(first, learned=replace(first.learned, scales={"age": (0.0, 2.0)}))
    manifest = manifest_of(trained) | {"outputs": [{"name": "score", "kind": "clicks"}]}
    found: list[Any] = []

    def score(dense: torch.Tensor, sides: object, between: object = None) -> torch.Tensor:
        return dense[:, 1]

    async def change() -> None:
        server = Server(score, manifest, "m", ServeConfig(), preparation=first)
        server.batcher.start()
        (row,) = rows(300).slice(0, 1).drop(["click"]).to_pylist()
        for age in (50, 60):
            _, asked = server.heads.read(written({"rows": [row | {"age": age}]}), None)
            server.batcher.put(asked, lambda scores: found.append(scores.tolist()))
        server.use(score, manifest, "another", other)
        await server.batcher.close()
        server.monitor.close()

    asyncio.run(change())
    mean, deviation = first.learned.scales["age"]
    assert found == [[pytest.approx((50 - mean) / deviation)], [30.0]]


def test_tensors_by_column_are_rows_over_both_protocols(trained: Trained, heads: Heads) -> None:
    triton = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
    rpc = pytest.importorskip("tritonclient.grpc", reason="recpipe[grpc] is not installed")
    from recpipe_serve.grpc.messages import read_request

    columns: dict[str, Any] = {
        "city": np.array(["Köln"], object),
        "user": np.array([5, 7, 8]),
        "tags": np.array(["t1|t2", "", "t8"], object),
        "seen": np.array([[1, 2], [3, 4], [5, 6]]),
        "price": np.array([0.5, np.nan, 7.25]),
        "age": np.array([30], np.int32),
        "shape": np.array([[1.0, 2.0]] * 3),
        "at": np.array(["2024-03-30T01:00:00+00:00"], object),
        "day": np.array(["2024-03-30"], object),
    }
    rows = [
        {name: own[n % len(own)] for name, own in ((key, v.tolist()) for key, v in columns.items())}
        for n in range(3)
    ]
    rows[1]["price"] = None
    _, wanted = heads.read(written({"rows": rows}), None)

    def inputs(kind: Any) -> list[Any]:
        words = {"O": "BYTES", "i8": "INT64", "i4": "INT32", "f8": "FP64"}
        made = [kind.InferInput(n, v.shape, words[v.dtype.str.lstrip("<|")]) for n, v in columns.items()]
        for own, values in zip(made, columns.values(), strict=True):
            own.set_data_from_numpy(values)
        return made

    make = triton.InferenceServerClient.generate_request_body
    whole, length = make(inputs(triton), parameters={"raw": True})
    plain = json.dumps({"parameters": {"raw": True}, "inputs": rows_as_tensors(columns)}).encode()
    message = rpc._utils._get_inference_request(
        "m", inputs(rpc), "", "", None, 0, False, False, 0, None, {"raw": True}
    )
    for found in (
        heads.read(whole, str(length))[1],
        heads.read(plain, None)[1],
        heads.encoded(read_request(message).rows),
    ):
        assert found.ids.tolist() == wanted.ids.tolist()
        assert found.dense.tolist() == wanted.dense.tolist()
    for change, fault in (
        ({"city": np.array([["a"], ["b"]], object)}, "'city' has 2 samples, and another one has 3"),
        ({"user": np.zeros((3, 1, 1), np.int64)}, r"'user' is \[3, 1, 1\], not \[N\] or \[N, K\]"),
    ):
        with pytest.raises(Refused, match=fault):
            rows_of(columns | change)
    for data, fault in (
        (b"\x02\x00\x00\x00a", "its bytes end within a text"),
        (b"\x01\x00\x00", "has no texts of type BYTES"),
        (b"\x01\x00\x00\x00\xff", "has no texts of type BYTES"),
        (b"\x01\x00\x00\x00ab", "has 6 bytes, and its 1 texts 5"),
    ):
        with pytest.raises(Refused, match=fault):
            texts(data, 1, "input 'x'")


def rows_as_tensors(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """In JSON, as Python writes NaN."""
    words = {"O": "BYTES", "i8": "INT64", "i4": "INT32", "f8": "FP64"}
    return [
        {"name": n, "shape": v.shape, "datatype": words[v.dtype.str.lstrip("<|")], "data": v.tolist()}
        for n, v in columns.items()
    ]


def test_what_rows_leave_out_comes_from_the_store(trained: Trained, tmp_path: Path) -> None:
    preparation = trained.trained_on.preparation
    assert preparation is not None
    whole = rows(300).drop(["click"])
    users = whole.column("user").to_pylist()
    place = next(n for n, user in enumerate(users) if user is not None and users.count(user) == 1)
    of_user = ["age", "seen", "tags"]
    pq.write_table(whole.select(["user", *of_user]).slice(place, 1), tmp_path / "users.parquet")
    (row,) = whole.slice(place, 1).to_pylist()
    row["at"], row["day"] = row["at"].isoformat(), row["day"].isoformat()
    lacking = {name: value for name, value in row.items() if name not in of_user}
    manifest = manifest_of(trained) | {"outputs": [{"name": "score", "kind": "clicks"}]}

    def score(dense: torch.Tensor, sides: list[Any], between: object = None) -> torch.Tensor:
        return dense.sum(1) + sum(side.ids.sum() for side in sides)

    server = Server(score, manifest, "m", ServeConfig(), preparation=preparation)
    source = ParquetSource(tmp_path / "users.parquet", "user")
    server.fill_from(FeatureStore(source, "user", 5.0, 60.0, 10))
    with listening(server) as (port, _):
        answers = [
            ask(port, "POST", "/v2/models/m/infer", json.dumps({"rows": [own]}).encode())
            for own in (row, lacking, lacking | {"user": 12345}, lacking | dict.fromkeys(of_user))
        ]
        metrics = ask(port, "GET", "/metrics")[1].decode()
    assert [status for status, _ in answers] == [200] * 4
    told = [json.loads(said) for _, said in answers]
    scores = [own["outputs"][0]["data"] for own in told]
    assert scores[1] == scores[0]
    assert scores[3] != scores[0], "what the request says counts, also that it is missing"
    assert [own.get("parameters") for own in told] == [None, None, {"features_lacking": 1}, None]
    assert "recpipe_store_cached 2.0" in metrics
    wrong = Server(score, manifest, "m", ServeConfig(), preparation=preparation)
    wrong.fill_from(FeatureStore(Held(**{str(row["user"]): {"age": "old"}}), "user", 5.0, 60.0, 10))
    with listening(wrong) as (port, _):
        asked = [json.dumps({"rows": [own]}).encode() for own in (lacking, lacking | {"age": "old"})]
        answers = [ask(port, "POST", "/v2/models/m/infer", own) for own in asked]
        metrics = ask(port, "GET", "/metrics")[1].decode()
    filled, refused = (json.loads(said) for _, said in answers)
    assert [status for status, _ in answers] == [200, 400], "the request's own fault, and not the store's"
    assert (filled["outputs"][0]["data"], filled["parameters"]) == (scores[3], {"features_lacking": 1})
    assert "age" in refused["error"]
    assert "recpipe_store_refused 1.0" in metrics


@pytest.mark.soak
def test_a_server_scores_raw_values_as_predict_does(run: Path, trained: Trained, tmp_path: Path) -> None:
    package = recpipe.package(run / "run" / "checkpoints", tmp_path / "m.recpipe", quiet=True)
    scorer = score.Scorer(package)
    heads = Heads(Features(scorer.manifest, 4096), read_encoding(package, scorer.manifest))
    _, asked = heads.read(body(rows(300)), None)
    served = RequestScorer(scorer)(*together([asked])).numpy()
    options = PredictOptions(scores="raw", package=str(package))
    with lock_run_dir(tmp_path) as folder:
        told = predict(trained, options, folder)
        model = predict(trained, PredictOptions(scores="raw"), folder)
    assert isinstance(told, np.ndarray)
    assert isinstance(model, np.ndarray)
    np.testing.assert_allclose(told, model, rtol=1e-5, atol=1e-6)
    assert served.reshape(-1).tolist() == told.reshape(-1).tolist()
    assert recpipe.package(package, tmp_path / "again.recpipe", quiet=True)
    assert (tmp_path / "again.recpipe" / FILE).read_bytes() == (package / FILE).read_bytes()
