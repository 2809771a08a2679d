"""Ids that grew, in packages and a server: each raw value has the row that it got in training."""

from __future__ import annotations

import asyncio
import json
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
from recpipe_serve.monitor.monitor import Monitor
from safetensors.numpy import load_file, save_file

import recpipe
from recpipe.answers import score
from recpipe.answers.evaluate import EvaluateOptions, evaluate
from recpipe.answers.grown import GrownIds, grown_in
from recpipe.answers.parts import MAPS
from recpipe.answers.predict import PredictOptions, predict
from recpipe.answers.reference import read_lookups
from recpipe.answers.score import RowMap
from recpipe.answers.trained import Trained, open_trained
from recpipe.common.files import RunDir, lock_run_dir
from recpipe.data.id_mapper import MISSING_KEY
from recpipe.errors import UserError
from recpipe.plugin.tables import Growth, SparseFeature
from recpipe.private_api.compiled import compiler
from recpipe.tables.dynamic.saved import map_file
from tests.data.test_growing_files import rows as made_rows
from tests.data.test_growing_files import trained as trained_in

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

from recpipe_serve.http.app import Server
from recpipe_serve.http.metrics import Metrics

FEATURES: list[dict[str, Any]] = [
    {"name": "user", "rows": "dynamic", "capacity": 60},
    {"name": "item", "rows": "dynamic", "capacity": 50, "evict": "lfu", "admit_after": 2},
    {
        "name": "seen",
        "kind": "sequence",
        "separator": "|",
        "rows": "dynamic",
        "capacity": 50,
        "table": "item",
        "evict": "lfu",
        "admit_after": 2,
    },
    {"name": "shop", "rows": 20},
    {"name": "price", "kind": "dense"},
]


def rows(size: int) -> pa.Table:
    made, rng = made_rows(size), np.random.default_rng(3)
    lists = ["|".join(f"i{n}" for n in rng.zipf(1.2, rng.integers(0, 4)) % 300) for _ in range(size)]
    return made.append_column("seen", pa.array(lists))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on raw files."""
    folder = tmp_path_factory.mktemp("grown")
    pq.write_table(rows(600), folder / "a.parquet")
    (folder / "f.yaml").write_text(json.dumps({"labels": ["click"], "features": FEATURES}))
    trained_in(folder, "run", 6)
    return folder


@pytest.fixture(scope="module")
def trained(run: Path) -> Trained:
    return open_trained(run / "run")


@pytest.fixture(scope="module")
def grown(trained: Trained) -> dict[str, GrownIds]:
    return grown_in(trained.directory / "tables", trained.schema.sparse)


def manifest_of(trained: Trained) -> dict[str, Any]:
    sparse = [
        {"name": f.name, "rows": f.rows} | ({"map": f.growth.table} if f.growth else {})
        for f in trained.schema.sparse
    ]
    return {
        "dense": {"names": list(trained.schema.dense)},
        "sparse": sparse,
        "outputs": [{"name": "score", "kind": "clicks"}],
    }


def maps_of(trained: Trained, grown: dict[str, GrownIds]) -> dict[int, RowMap]:
    features = enumerate(trained.schema.sparse)
    return {place: grown[f.growth.table].map for place, f in features if f.growth is not None}


def heads_of(trained: Trained, maps: dict[int, RowMap]) -> Heads:
    return Heads(Features(manifest_of(trained), 4096, maps), trained.trained_on.preparation)


def body(table: pa.Table) -> bytes:
    return json.dumps({"rows": table.drop(["click"]).to_pylist()}).encode()


def wanted_rows(trained: Trained, table: str, keys: list[int]) -> list[int]:
    """By the checkpoint's own file, with a dictionary."""
    saved = load_file(map_file(trained.directory / "tables", table))["records"][:, 0].tolist()
    known = {key: row for row, key in enumerate(saved, 2)} | {MISSING_KEY: 0}
    return [known.get(key, 1) for key in keys]


def test_raw_values_and_keys_have_the_rows_of_the_checkpoint(
    trained: Trained, grown: dict[str, GrownIds]
) -> None:
    heads, table, at = heads_of(trained, maps_of(trained, grown)), rows(600), 0
    unknown = 0
    for split in ("train", "eval"):
        for batch in trained.dataset.batches(split, 150):
            _, found = heads.read(body(table.slice(at, len(batch.labels))), None)
            at += len(batch.labels)
            for place, feature in enumerate(trained.schema.sparse):
                keys = batch.sparse[feature.name].values()
                ids = found.bags(place, of_each=True).ids.tolist()
                if feature.growth is None:
                    assert ids == keys.tolist()
                    continue
                assert ids == wanted_rows(trained, feature.growth.table, keys.tolist()), feature.name
                unknown += ids.count(1)
            inputs = {"dense": batch.dense.numpy()}
            for feature in trained.schema.sparse:
                own = batch.sparse[feature.name]
                inputs[feature.name] = own.values().numpy()
                inputs[f"{feature.name}.lengths"] = own.lengths().numpy()
            assert heads.features.asked(inputs).ids.tolist() == found.ids.tolist()
    assert at == 600
    assert unknown > 50


def test_a_loader_looks_up_rows_and_counts_unknown_ids(
    trained: Trained, grown: dict[str, GrownIds], tmp_path: Path
) -> None:
    """What a package's loader does before the lookups, without the compiled part."""
    scorer = score.Scorer.__new__(score.Scorer)
    scorer.manifest, scorer.directory = manifest_of(trained), tmp_path
    scorer.rows = torch.tensor([feature["rows"] for feature in scorer.manifest["sparse"]])
    scorer.manifest[MAPS] = {}
    for name, own in grown.items():
        own.write(tmp_path / f"{name}.safetensors")
        scorer.manifest[MAPS][name] = {"file": f"{name}.safetensors", "ids": len(own.keys) - 2}
    scorer.maps = scorer.make_maps()
    batch = next(trained.dataset.batches("train", 100))
    ids, lengths = batch.sparse.values().long(), batch.sparse.lengths().long()
    found = scorer.checked(batch.dense, ids, lengths, 100)
    unknown, parts = 0, found.split(batch.sparse.length_per_key())
    for own, feature in zip(parts, trained.schema.sparse, strict=True):
        keys = batch.sparse[feature.name].values().tolist()
        table = feature.growth and feature.growth.table
        assert own.tolist() == (wanted_rows(trained, table, keys) if table else keys)
        unknown += own.tolist().count(1) if table else 0
    assert scorer.unknown_of(found, lengths) == unknown > 0


def test_the_key_of_each_row_is_found_again() -> None:
    keys = np.array([MISSING_KEY, 1, 7, -3, 2**62, 0, -(2**63) + 1, -1], np.int64)
    own = GrownIds(keys)
    assert own.map(torch.from_numpy(keys)).tolist() == list(range(8))
    assert own.map(torch.tensor([5, 2**63 - 1, -2])).tolist() == [1, 1, 1]


def test_an_id_that_none_is_stands_for_unknown_ones(tmp_path: Path) -> None:
    growth = {"admit_after": 1, "admit_by": "exact", "admit_probability": 1.0, "evict": "lru", "max_age": 0}
    told = {"growth": growth | {"table": "t"}, "capacity": 9, "used": 5, "now": 1}
    figures = {"admitted": 3, "evicted": 0, "defaulted": 0}
    records = np.array([[1, 1], [0, 1], [-4, 1]], np.int64)
    save_file({"records": records}, tmp_path / "t.ids", {"recpipe": json.dumps(told | {"figures": figures})})
    own = GrownIds.of(tmp_path, SparseFeature("f", 9, Growth("t")))
    assert own.keys.tolist() == [MISSING_KEY, 2, 1, 0, -4]
    with pytest.raises(UserError, match="has no rows of ids for table 'u'"):
        GrownIds.of(tmp_path, SparseFeature("f", 9, Growth("u")))


def test_what_waits_is_looked_up_anew_for_another_package(
    trained: Trained, grown: dict[str, GrownIds]
) -> None:
    manifest, found = manifest_of(trained), list[Any]()
    user = grown["user"]
    moved = GrownIds(np.concatenate((user.keys[:2], user.keys[:1:-1])))
    first, second = (maps_of(trained, grown | {"user": own}) for own in (user, moved))

    def score(dense: torch.Tensor, sides: Any, between: object = None) -> torch.Tensor:
        return sides[0].ids[: len(dense)].float()  # of the first feature

    key = int(user.keys[2])
    row = rows(1).drop(["click"]).to_pylist()[0] | {"user": key, "seen": ""}
    inputs = {"dense": np.zeros((1, 1), np.float32), "user": np.array([key])}
    inputs |= {name: np.zeros(1, np.int64) for name in ("item", "shop")}
    inputs |= {"seen": np.zeros(0, np.int64), "seen.lengths": np.zeros(1, np.int64)}

    async def change(*packages: dict[int, RowMap]) -> None:
        preparation = trained.trained_on.preparation
        server = Server(score, manifest, "m", ServeConfig(), preparation=preparation, maps=first)
        server.batcher.start()
        for _, asked in (
            server.heads.read(json.dumps({"rows": [row]}).encode(), None),
            server.heads.read(json.dumps({"rows": [row]}).encode(), None),
            (None, server.features.asked(inputs)),
        ):
            server.batcher.put(asked, lambda scores: found.append(scores.tolist()))
        for maps in packages:
            server.use(score, manifest, "another", preparation, maps)
        await server.batcher.close()
        server.monitor.close()

    asyncio.run(change(second))
    there = float(len(user.keys) - 1)
    assert found == [[2.0], [there], [there]], "one was scored at once, and two waited"


def test_the_monitor_counts_unknown_ids(trained: Trained, grown: dict[str, GrownIds]) -> None:
    manifest = manifest_of(trained)
    features = {f["name"]: {"ids_per_sample": 1.0, "row_0": 0.0} for f in manifest["sparse"]}
    features["user"]["unknown"], features["seen"]["ids_per_sample"] = 0.05, 1.5
    figures = {"edges": [], "counts": [1.0], "lowest": -9.0, "highest": 9.0, "saturated": 0.0, "figures": {}}
    tasks = {"score": figures | {"kind": "clicks", "mean": {"prediction": 0.5, "label": 0.5}}}
    manifest["reference"] = {"samples": 1000, "tasks": tasks, "features": features}
    monitor = Monitor(manifest, ServeConfig())
    heads, table = heads_of(trained, maps_of(trained, grown)), rows(600)
    strange = table.set_column(1, "user", pa.array(np.arange(600) + 10**9))
    wrong = {f["name"]: 0 for f in manifest["sparse"]}
    for part in (table, strange):
        _, asked = heads.read(body(part), None)
        _, sides = together([asked])
        monitor.saw(sides, np.zeros(600, np.float32))
        for place, name in enumerate(wrong):
            wrong[name] += asked.bags(place, of_each=True).ids.tolist().count(1)
    compared = monitor.compared()
    own = compared.figures["ids"]
    assert own["user"]["unknown_since_start"] == wrong["user"] > 600
    assert own["user"]["unknown"]["window"] == pytest.approx(wrong["user"] / 1200)
    assert own["item"]["unknown_since_start"] == wrong["item"]
    assert own["seen"]["unknown_since_start"] == wrong["seen"]
    assert "unknown" not in own["shop"]
    (said,) = [line for line in compared.off if "have no row" in line]
    share = wrong["user"] / 1200
    assert said.startswith(
        f"{share:.1%} of the ids of 'user' have no row of their own; in the reference 5.0%"
    )
    text = Metrics("m", monitor.compared).text().decode()
    assert f'recpipe_monitor_ids_unknown_total{{feature="user"}} {float(wrong["user"])}' in text
    assert 'recpipe_monitor_unknown{feature="user",of="reference"} 0.05' in text


def test_an_id_that_stands_for_missing_ones_is_one_line(trained: Trained, grown: dict[str, GrownIds]) -> None:
    heads = heads_of(trained, maps_of(trained, grown))
    with pytest.raises(Refused, match="column user: -9223372036854775808 is no id of a table that grows"):
        heads.read(body(rows(1).set_column(1, "user", pa.array([MISSING_KEY]))), None)


def test_such_a_model_is_not_quantized(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the ids of 'user' got rows as they came") as caught:
        recpipe.quantize(run / "run", None, "+plugin=low_precision", output=tmp_path / "q")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda keys, rows: (keys[::-1], rows),
        lambda keys, rows: (keys, rows + 60),
        lambda keys, rows: (keys, -rows),
        lambda keys, rows: (keys, rows.astype(np.int64)),
        lambda keys, rows: (keys[1:], rows[1:]),
        lambda keys, rows: (keys[:-1], rows[:-1]),
        lambda keys, rows: (keys, rows[:-1]),
        lambda keys, rows: (keys[:0], rows[:0]),
    ],
)
def test_a_map_that_does_not_fit_is_named(grown: dict[str, GrownIds], tmp_path: Path, change: Any) -> None:
    own = grown["user"].map
    sparse = [{"name": "user", "rows": 60, "map": "user"}]
    maps = {"user": {"file": "u.safetensors", "ids": len(own.keys) - 1}}
    manifest = {"sparse": sparse, MAPS: maps, "files": {"u.safetensors": ""}}

    def check(keys: np.ndarray, rows: np.ndarray) -> None:
        found = {"keys": np.ascontiguousarray(keys), "rows": np.ascontiguousarray(rows)}
        save_file(found, tmp_path / "u.safetensors")
        with score.readable(tmp_path):
            score.check_maps(tmp_path, manifest)

    check(own.keys.numpy(), own.rows.numpy())
    with pytest.raises(score.PackageError, match=r"u.safetensors has other ids|not as 'recpipe package'"):
        check(*change(own.keys.numpy(), own.rows.numpy()))


def looked_up(trained: Trained, table: str) -> list[torch.Tensor]:
    """The ids of the training part that look up ``table``."""
    names = [f.name for f in trained.schema.sparse if f.growth is not None and f.growth.table == table]
    batches = trained.dataset.batches("train", 100)
    return [batch.sparse[name].values() for batch in batches for name in names]


@pytest.mark.soak
@pytest.mark.skipif(compiler() is None, reason="packages are compiled: no C++ compiler here")
def test_a_package_scores_as_the_checkpoint_and_a_server_as_the_package(
    run: Path, trained: Trained, grown: dict[str, GrownIds], tmp_path: Path
) -> None:
    package = tmp_path / "m.recpipe"
    assert recpipe.package(run / "run", package, quiet=True, popularity=True) == package
    scorer = score.Scorer(package)
    assert scorer.manifest["schema"] == 3
    table = rows(600)
    heads = Heads(Features(scorer.manifest, 4096, scorer.maps), trained.trained_on.preparation)
    _, asked = heads.read(body(table), None)
    served = RequestScorer(scorer)(*together([asked])).numpy().reshape(-1)
    options = PredictOptions(scores="raw", package=str(package))
    whole = open_trained(run / "run", ["data.batch_size=600"])
    with lock_run_dir(tmp_path) as folder:
        told = predict(whole, options, folder)
        model = predict(whole, PredictOptions(scores="raw"), folder)
    assert isinstance(told, np.ndarray)
    assert isinstance(model, np.ndarray)
    np.testing.assert_allclose(told, model, rtol=1e-5, atol=1e-6)
    assert served.tolist() == told.tolist()
    reference = scorer.manifest["reference"]
    unknown = sum(
        own.get("unknown", 0.0) * own["ids_per_sample"] * reference["samples"]
        for own in reference["features"].values()
    )
    found = evaluate(trained, EvaluateOptions(split="eval"), RunDir(tmp_path / "evaluated"))
    assert unknown == pytest.approx(found["data"]["unknown_ids"])
    lookups = read_lookups(package)
    for name in ("user", "item"):
        looked, counts = lookups[name]
        assert looked.max() < len(grown[name].keys), "rows, not keys"
        assert counts.sum() == sum(own.numel() for own in looked_up(trained, name))
    again = recpipe.package(package, tmp_path / "again.recpipe", quiet=True)
    for name in ("user", "item"):
        file = f"{MAPS}/{name}.safetensors"
        assert (again / file).read_bytes() == (package / file).read_bytes()
    golden = load_file(package / "golden.safetensors")
    assert score.Scorer(again)(*(torch.from_numpy(golden[n]) for n in ("dense", "ids", "lengths"))).tolist()
