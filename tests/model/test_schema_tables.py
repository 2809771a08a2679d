"""Features that share a table by the data's schema, and means of lists, against plain sums."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import recpipe
from recpipe.answers.trained import Trained, open_trained
from recpipe.data.feature_yaml import parse_features
from recpipe.data.schema import Schema
from recpipe.errors import DataError, UserError
from recpipe.plugin.tables import SparseFeature

FEATURES: list[dict[str, Any]] = [
    {"name": "item", "table": "items", "rows": 40},
    {"name": "user", "rows": 30},
    {"name": "seen", "kind": "sequence", "table": "items", "rows": 40, "pooling": "mean"},
    {"name": "tags", "kind": "multi_hot", "rows": 20},
    {"name": "price", "kind": "dense"},
]


@pytest.fixture(scope="module", params=["resident", "lru"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run with all rows in memory, and one with a cache over a cold store."""
    folder, rng = tmp_path_factory.mktemp("shared"), np.random.default_rng(1)
    lists = [rng.integers(1, 60, rng.integers(0, 5)).tolist() for _ in range(320)]
    table = {
        "click": rng.integers(0, 2, 320),
        "item": rng.integers(1, 60, 320),
        "user": rng.integers(0, 9, 320),
    }
    table |= {"seen": lists, "tags": lists[::-1], "price": rng.normal(size=320)}
    pq.write_table(pa.table(table), folder / "rows.parquet")
    words = ["data=files", f"data.path={folder}/rows.parquet", f"data.cache_dir={folder}/cache"]
    words += ["data.batch_size=32", "model.embedding_dim=4", "model.bottom=[8]", "model.top=[8]"]
    words += ["trainer.logger=null", "trainer.checkpoint_every=4", "seed=3"]
    if request.param == "lru":
        words += ["tiers.policy=lru", "tiers.resident_bytes=50%"]
    described = {"labels": ["click"], "features": FEATURES}
    (folder / "features.yaml").write_text(str(described))
    words.append(f"data.features={folder}/features.yaml")
    recpipe.train(None, None, *words, output=folder / "run", quiet=True).close()
    return open_trained(folder / "run" / "checkpoints")


def test_features_of_a_table_look_up_the_same_rows_and_lists_are_averaged(trained: Trained) -> None:
    model = trained.model
    weights = [(name, own) for name, own in model.named_parameters() if "embedding_bags" in name]
    # "items" is a name that a module cannot have.
    rows = {unquote(name.split(".")[-2]): own for name, own in weights}
    assert sorted(rows) == ["items", "tags", "user"]
    batch = next(trained.dataset.batches("eval", 32))
    collection = next(m for m in model.modules() if hasattr(m, "embedding_bag_configs"))
    found = collection(batch.sparse).to_dict()
    for feature, table, mean in (
        ("item", "items", True),
        ("user", "user", False),
        ("seen", "items", True),
        ("tags", "tags", False),
    ):
        own = batch.sparse[feature]
        for ids, row in zip(own.values().split(own.lengths().tolist()), found[feature], strict=True):
            wanted = rows[table][ids.long()].sum(0) / (max(len(ids), 1) if mean else 1)
            torch.testing.assert_close(row, wanted)
    made = recpipe.load(trained.directory)  # by the sizes that the checkpoint has
    with trained.scoring() as scoring:
        (scored,) = scoring.scores([batch], labelled=False)
    torch.testing.assert_close(scored.scores, made(batch.dense, batch.sparse).detach().reshape(-1))


def test_a_table_has_one_number_of_rows_and_one_pooling() -> None:
    bags = [FEATURES[2], FEATURES[3] | {"table": "items", "rows": 40}]
    with pytest.raises(UserError, match="tags: another feature of table 'items' is pooled by mean"):
        parse_features({"labels": ["click"], "features": bags}).schema({})
    with pytest.raises(DataError, match="a and b share table 't' and have other rows, dim or pooling"):
        Schema((), (SparseFeature("a", 9, table="t"), SparseFeature("b", 8, table="t")))
