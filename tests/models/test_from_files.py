"""Published models by their names in a recipe, from files to figures, predictions and a package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import recpipe
from tests.models.published import MODELS

FEATURES: list[dict[str, Any]] = [
    {"name": "item", "rows": 40, "table": "goods"},
    {"name": "user", "rows": 30},
    {"name": "seen", "kind": "sequence", "table": "goods", "rows": 40, "max_length": 5},
    {"name": "tags", "kind": "multi_hot", "rows": 20},
    {"name": "price", "kind": "dense"},
]
AGES = {"name": "ago", "kind": "ages", "column": "seen_at", "until": "at", "size": 5, "unit": "s"}
KEYS = {"wide_deep": ["model.wide=[user,tags]"], "finalmlp": ["model.left_gate=[user]"]}
ROWS = 320


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples whose label depends on what was seen."""
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(1)
    seen = [rng.integers(1, 30, rng.integers(0, 8)).tolist() for _ in range(ROWS)]
    columns = {
        "click": [len(ids) % 2 for ids in seen],
        "item": rng.integers(1, 30, ROWS),
        "user": rng.integers(0, 9, ROWS),
        "seen": seen,
        "tags": [rng.integers(1, 9, 2).tolist() for _ in range(ROWS)],
        "price": rng.normal(size=ROWS),
        "seen_at": [sorted(rng.integers(0, 10**6, len(ids)).tolist()) for ids in seen],
        "at": [10**6] * ROWS,
    }
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    unread = {"labels": ["click"], "unread": ["seen_at", "at"]}
    (folder / "features.yaml").write_text(str({**unread, "features": FEATURES}))
    timed = [{**each, "ages": "ago"} if each["name"] == "seen" else each for each in FEATURES]
    (folder / "hstu.yaml").write_text(str({"labels": ["click"], "features": [*timed, AGES]}))
    return folder / "rows.parquet"


def features_of(file: Path, name: str) -> Path:
    """What a model is given: all but HSTU do not look at when events were."""
    return file.parent / ("hstu.yaml" if name == "hstu" else "features.yaml")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] * (name != "din")) for name in MODELS],
)
def test_a_recipe_names_it(file: Path, tmp_path: Path, name: str) -> None:
    words = ["data=files", f"data.path={file}", f"data.features={features_of(file, name)}"]
    words += [f"data.cache_dir={file.parent}/cache", "data.batch_size=32", "trainer.logger=null"]
    words += [f"model={name}", "model.embedding_dim=8", "tiers.policy=lru", "tiers.resident_bytes=50%"]
    with recpipe.train(None, None, *words, *KEYS.get(name, ()), output=tmp_path / "run", quiet=True) as run:
        told = run.report["quality"]
    assert np.isfinite(told["logloss"])
    found = recpipe.evaluate(tmp_path / "run", None, "split=eval", quiet=True)
    assert found["loss"] == pytest.approx(told["loss"], rel=1e-6)
    scores = recpipe.predict(tmp_path / "run", file, quiet=True)
    assert scores.shape == (ROWS,)
    assert np.ptp(scores) > 0


@pytest.mark.soak
@pytest.mark.parametrize("name", MODELS)
def test_a_package_scores_as_its_checkpoint(file: Path, tmp_path: Path, name: str) -> None:
    words = ["data=files", f"data.path={file}", f"data.features={features_of(file, name)}"]
    words += [f"data.cache_dir={file.parent}/cache", "data.batch_size=32", "trainer.logger=null"]
    words += [f"model={name}", "model.embedding_dim=8", *KEYS.get(name, ())]
    recpipe.train(None, None, *words, output=tmp_path / "run", quiet=True).close()
    package = recpipe.package(tmp_path / "run", tmp_path / "package", dense="float32", quiet=True)
    raw = ("scores=raw",)
    theirs = recpipe.predict(tmp_path / "run", file, *raw, quiet=True)
    mine = recpipe.predict(tmp_path / "run", file, *raw, f"package={package}", quiet=True)
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
