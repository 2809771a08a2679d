"""Files with ids that grow: trained, resumed to the bit, evaluated, predicted, written as one file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from recpipe_neo.stats import FeatureStats, feature_stats
from safetensors.numpy import load_file

from recpipe.answers.evaluate import EvaluateOptions, evaluate
from recpipe.answers.plain import unshard
from recpipe.answers.predict import PredictOptions, predict
from recpipe.answers.trained import open_trained
from recpipe.checkpoint.table_io import newest
from recpipe.common.files import RunDir
from recpipe.config.compose import compose
from recpipe.data.config import FilesConfig
from recpipe.data.sources.transforms import string_keys
from recpipe.errors import DataError, UserError
from recpipe.run import run
from recpipe.tables.dynamic.saved import map_file
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from tests.resuming import RECIPE as QUIET

FEATURES = [
    {"name": "user", "rows": "dynamic", "capacity": 60},
    {"name": "item", "rows": "dynamic", "capacity": 50, "evict": "lfu", "admit_after": 2},
    {"name": "shop", "rows": 20},
    {"name": "price", "kind": "dense"},
]


def rows(size: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    users = [None if n % 50 == 0 else int(user) for n, user in enumerate(rng.zipf(1.3, size) % 300 - 100)]
    items = [f"i{item}" for item in rng.zipf(1.2, size) % 200]
    return pa.table(
        {
            "click": rng.integers(0, 2, size),
            "user": pa.array(users, pa.int64()),
            "item": items,
            "shop": rng.integers(0, 9, size),
            "price": rng.random(size),
        }
    )


def words(folder: Path, *more: str) -> list[str]:
    mine = [word for word in QUIET if not word.startswith("data.")]
    own = [
        f"data.path={folder}/a.parquet",
        f"data.features={folder}/f.yaml",
        f"data.cache_dir={folder}/cache",
    ]
    return ["data=files", *own, "data.batch_size=64", "task.page=false", "trainer.device=cpu", *mine, *more]


def trained(folder: Path, name: str, steps: int, *more: str) -> Path:
    limits = f"trainer.max_steps={steps}", "trainer.checkpoint_every=5", "trainer.max_epochs=2"
    run(compose(words(folder, *limits, *more)), folder / name)
    return newest(folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("growing")
    pq.write_table(rows(800), folder / "a.parquet")
    (folder / "f.yaml").write_text(yaml.safe_dump({"labels": ["click"], "features": FEATURES}))
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    return trained(folder, "whole", 15)


def test_a_resumed_run_has_the_same_rows_and_maps(folder: Path, whole: Path) -> None:
    """Its first part stopped within an epoch; the loader was ahead."""
    part = trained(folder, "part", 10)
    resumed = trained(folder, "resumed", 15, f"resume={part}", "tiers.policy=lru", "tiers.resident_bytes=50%")
    files = sorted((whole / "tables").iterdir())
    assert [file.name for file in files if file.suffix == ".ids"] == ["item.ids", "user.ids"]
    for file in files:
        assert file.read_bytes() == (resumed / "tables" / file.name).read_bytes(), file.name


EXACT = {
    "lru": ("tiers.policy=lru",),
    "hotline": ("+plugin=hotline", "plugins.hotline.min_micro_batch=1", "plugins.hotline.learn_batches=2"),
    "bagpipe": ("+plugin=bagpipe", "plugins.bagpipe.lookahead=8", "tiers.store=ssd"),
}


@pytest.mark.parametrize("way", EXACT)
def test_exact_techniques_stay_exact(folder: Path, whole: Path, way: str) -> None:
    """The same ids have the same rows, and these the same weights but for the order of float sums."""
    found = trained(folder, f"exact-{way}", 15, *EXACT[way], "tiers.resident_bytes=50%")
    assert unlike(found, whole) == []


def test_a_planner_sees_rows_and_its_shards_stay_exact(
    folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a planner that saw keys, which are beyond all rows, tables that grow would have no lookups."""
    found: list[dict[str, FeatureStats]] = []

    def noted(sampled: Iterable[object]) -> dict[str, FeatureStats]:
        found.append(feature_stats(sampled))
        return found[-1]

    monkeypatch.setattr("recpipe_neo.plugin.feature_stats", noted)
    sharded = trained(folder, "neo", 15, "+plugin=neo", "plugins.neo.planner=greedy")
    for name, rows in (("user", 60), ("item", 50)):
        own = found[0][name]
        assert own.within(0, rows, 64)[0] == pytest.approx(own.counts.sum() / own.batches)
    for name, checkpoint in (("one", whole), ("many", sharded)):
        unshard(checkpoint, folder / f"{name}.safetensors")
    one, many = (load_file(folder / f"{name}.safetensors") for name in ("one", "many"))
    for name, values in one.items():
        np.testing.assert_allclose(many[name], values, 1e-5, 1e-6, err_msg=name)


def test_a_technique_that_does_not_begin_rows_anew_is_found_out(
    folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TieredEmbeddingBagCollection, "renew", lambda *_: None)
    found = trained(folder, "kept-on", 15, *EXACT["lru"], "tiers.resident_bytes=50%")
    assert {"user", "item"} <= set(unlike(found, whole))


def test_plans_far_ahead_are_not_saved(folder: Path, whole: Path) -> None:
    """A plugin has planned batches that are not trained when a checkpoint is written and the run ends."""
    more = (*EXACT["bagpipe"], "tiers.resident_bytes=50%")
    part = trained(folder, "ahead", 5, *more)
    assert unlike(trained(folder, "ahead-resumed", 15, f"resume={part}", *more), whole) == []


def unlike(one: Path, other: Path) -> list[str]:
    """The tables in which two checkpoints differ in ids, or in the rows of ids."""
    differ = []
    for table in ("user", "item", "shop"):
        ids = [map_file(each / "tables", table) for each in (one, other)]
        if table != "shop":
            assert ids[0].read_bytes() == ids[1].read_bytes(), table
        used = slice(None) if table == "shop" else slice(2 + len(load_file(ids[0])["records"]))
        mine, theirs = (load_file(each / "tables" / f"{table}.safetensors") for each in (one, other))
        close = (np.allclose(values[used], theirs[name][used], 1e-5, 1e-6) for name, values in mine.items())
        if not all(close):
            differ.append(table)
    return differ


def test_a_plugin_that_asks_for_rows_before_training_is_one_line(folder: Path) -> None:
    with pytest.raises(UserError, match="the ids of user, item get their rows then") as caught:
        trained(folder, "fae", 5, "+plugin=fae", "tiers.resident_bytes=50%")
    assert "\n" not in str(caught.value)


def test_the_report_counts(folder: Path, whole: Path) -> None:
    data = json.loads((folder / "whole" / "report.json").read_text())
    user, item = data["data"]["growing"]["user"], data["data"]["growing"]["item"]
    assert user["occupied"] == user["capacity"] == 58 == user["admitted"] - user["evicted"]
    assert user["defaulted"] == 0 < item["defaulted"]
    assert data["data"]["unknown_ids"] > 0
    assert data["altered"] == ["ID_SPACE", "TABLE_LAYOUT"]


def test_predictions_look_up_the_rows_of_ids(folder: Path, whole: Path, tmp_path: Path) -> None:
    """An id that is known has the score of its row; all others have that of one row."""
    keys = load_file(map_file(whole / "tables", "user"))["records"][:, 0]
    before = map_file(whole / "tables", "user").read_bytes()
    known, unknown = int(keys[3]), [10**12 + n for n in range(3)]
    table = rows(5).set_column(1, "user", pa.array([known, *unknown, None], pa.int64()))
    for name in ("item", "shop", "price", "click"):
        table = table.set_column(table.column_names.index(name), name, [[table[name][0].as_py()] * 5])
    pq.write_table(table, tmp_path / "new.parquet")
    opened = open_trained(whole, [f"data.path={tmp_path}/new.parquet"])
    scores = predict(opened, PredictOptions(), None)
    assert isinstance(scores, np.ndarray)
    assert scores[1] == scores[2] == scores[3]
    assert len(set(scores.tolist())) == 3
    assert map_file(whole / "tables", "user").read_bytes() == before


def test_an_evaluation_counts_unknown_ids(whole: Path, tmp_path: Path) -> None:
    found = evaluate(open_trained(whole), EvaluateOptions(split="eval"), RunDir(tmp_path))
    told = json.loads((whole.parent.parent / "report.json").read_text())
    assert found["data"]["unknown_ids"] > 0
    (task,) = found["tasks"].values()
    assert task["figures"]["auc"]["value"] == pytest.approx(told["quality"]["auc"], abs=1e-9)


def test_one_file_has_the_keys_of_rows(whole: Path, tmp_path: Path) -> None:
    unshard(whole, tmp_path / "all.safetensors")
    found = load_file(tmp_path / "all.safetensors")
    assert found["user"].shape == (60, found["user"].shape[1])
    assert found["user.keys"].shape == (58,)
    texts, _ = string_keys(pa.array([f"i{n}" for n in range(200)]))
    assert set(found["item.keys"].tolist()) <= set(texts.view(np.int64).tolist())


def test_other_growth_is_refused(folder: Path, whole: Path) -> None:
    (folder / "other.yaml").write_text(
        yaml.safe_dump({"labels": ["click"], "features": [{**FEATURES[0], "evict": "lfu"}, *FEATURES[1:]]})
    )
    with pytest.raises(UserError, match="table 'user' has grown with evict=lru, and the recipe has lfu"):
        trained(folder, "other", 16, f"resume={whole}", f"data.features={folder}/other.yaml")
    with pytest.raises(DataError, match="column user: its table grows in the checkpoint and grows"):
        _ = open_trained(whole, [f"data.features={folder}/other.yaml"]).dataset


POLICIES = """
def seen_last(keys, times, seen, now):
    return seen

def seen_first(keys, times, seen, now):
    return -seen
"""


def test_a_policy_of_a_package_decides(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that decides as ``lru`` does leaves the same rows, bit by bit, and its opposite others."""
    (tmp_path / "acme_policies.py").write_text(POLICIES)
    info = tmp_path / "acme_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[recpipe.evictions]\noldest = acme_policies:seen_last\n")
    monkeypatch.syspath_prepend(tmp_path)
    left = {}
    for name in ("oldest", "acme_policies:seen_first"):
        told = {"labels": ["click"], "features": [{**FEATURES[0], "evict": name}, *FEATURES[1:]]}
        (tmp_path / "f.yaml").write_text(yaml.safe_dump(told))
        left[name] = trained(folder, name.partition(":")[2] or name, 15, f"data.features={tmp_path}/f.yaml")
    wanted = load_file(map_file(whole / "tables", "user"))["records"]
    found = {name: load_file(map_file(own / "tables", "user"))["records"] for name, own in left.items()}
    assert np.array_equal(found["oldest"], wanted)
    assert not np.array_equal(found["acme_policies:seen_first"], wanted)
    for file in (whole / "tables").glob("*.safetensors"):
        assert file.read_bytes() == (left["oldest"] / "tables" / file.name).read_bytes(), file.name
    (tmp_path / "f.yaml").write_text(yaml.safe_dump(told).replace("acme_policies:seen_first", "newest"))
    with pytest.raises(UserError, match="evict: newest is unknown; .*oldest"):
        trained(folder, "newest", 5, f"data.features={tmp_path}/f.yaml")


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"rows": "dynamic"}, "needs the most rows that the table may have: capacity: 1000000"),
        ({"rows": 50, "evict": "lfu"}, "'evict' is of tables whose ids get rows as they come"),
        ({"rows": "dynamic", "capacity": 9, "ids": "modulo"}, "leave ids out"),
        ({"rows": "dynamic", "capacity": 9, "evict": "lifo"}, "evict: lifo is unknown; .*lfu"),
        ({"rows": "dynamic", "capacity": 9, "evict": "age"}, "max_age .batches. belong together"),
        ({"rows": "dynamic", "capacity": 9, "admit_by": "sketch"}, "from 2 to 255"),
        ({"rows": "growing"}, "rows=growing"),
    ],
)
def test_what_cannot_grow_is_one_line(tmp_path: Path, said: dict[str, object], fault: str) -> None:
    told = {"labels": ["click"], "features": [{"name": "user", **said}]}
    with pytest.raises(UserError, match=fault) as caught:
        FilesConfig(path="a.parquet", features=told).described()
    assert "\n" not in str(caught.value)
