"""A module of the user's own says how many rows its tables have, and ids are hashed or checked by these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import recpipe
from recpipe.data.sources.criteo_columns import SPARSE
from recpipe.data.sources.transforms import hash_rows
from recpipe.errors import UserError

QUIET = ("trainer.progress=false", "trainer.backend=plain", "optim=sgd", "data.batch_size=50")
COLUMNS = ("data.label=click", "data.sparse=[user,item]", "data.dense=[price]")
SIZES = {"user": 70, "item": 30}
HERE = __name__


class Sum(nn.Module):
    """A table of its own for each feature, and dropout, which draws random numbers."""

    def __init__(self, num_dense_features: int = 1, sizes: dict[str, int] | None = None) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{name}", embedding_dim=4, num_embeddings=rows, feature_names=[name])
            for name, rows in (sizes or SIZES).items()
        ]
        self.rows = EmbeddingBagCollection(tables)
        self.over = nn.Linear(4 * len(tables) + num_dense_features, 1)
        self.drop = nn.Dropout(0.2)

    def forward(self, batch: Any) -> torch.Tensor:
        found = torch.cat([self.rows(batch.sparse).values(), batch.dense_features], dim=1)
        return self.over(self.drop(found)).squeeze(1)


class Asks(Sum):
    """Its tables could depend on the data's."""

    def __init__(self, schema: Any) -> None:
        super().__init__(len(schema.dense))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(3)
    columns = {
        "click": rng.integers(0, 2, 400),
        "price": rng.random(400),
        "user": rng.integers(0, 10**9, 400),
        "item": rng.integers(0, 30, 400),
    }
    made = tmp_path_factory.mktemp("files") / "clicks.parquet"
    pq.write_table(pa.table(columns), made)
    return made


def trained(model: nn.Module | None, *words: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with recpipe.train(model, None, *QUIET, *words, quiet=True) as run:
        return {name: value.clone() for name, value in run.model.state_dict().items()}, run.report


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_training_is_as_if_the_recipe_stated_the_modules_sizes(file) -> None:
    words = ("data=files", f"data.path={file}", *COLUMNS, f"model._target_={HERE}.Sum")
    found, report = trained(None, *words)
    stated, _ = trained(None, *words, "data.tables={user: 70, item: 30}")
    assert equal(found, stated), "random numbers are drawn alike, too"
    assert report["recipe"]["data"]["tables"] == SIZES, "what a checkpoint says for evaluate and predict"
    fewer, _ = trained(None, *words, "data.tables={user: 60, item: 30}")
    assert not equal(found, fewer), "the control: sizes that are stated are used"


def test_a_module_from_python_is_trained_with_its_own_sizes(file) -> None:
    torch.manual_seed(1)
    model = Sum()
    before = model.rows.embedding_bags["t_user"].weight.detach().clone()
    found, _ = trained(model, "data=files", f"data.path={file}", *COLUMNS)
    changed = (found["rows.embedding_bags.t_user.weight"] != before).any(1).nonzero().reshape(-1)
    users = pq.read_table(file)["user"].to_numpy()[:320]
    assert set(changed.tolist()) == set(hash_rows(users.view(np.uint64), 70).tolist())


def test_ids_that_are_rows_are_checked_by_the_modules_sizes(file) -> None:
    words = (
        "data=files",
        f"data.path={file}",
        "data.label=click",
        "data.sparse=[item]",
        "data.dense=[price]",
    )
    words = (*words, "data.hash_ids=false")
    trained(Sum(sizes={"item": 30}), *words)
    with pytest.raises(UserError, match=r"column item: 2\d is not in \[0, 20\): .* its num_embeddings"):
        trained(Sum(sizes={"item": 20}), *words)


def test_what_the_module_does_not_say_is_told(file) -> None:
    words = ("data=files", f"data.path={file}", *COLUMNS)
    with pytest.raises(UserError, match=r"no table for 'item' \(choose one of user\): .*data.tables.item=N"):
        trained(Sum(sizes={"user": 70}), *words)
    two = Sum()
    two.more = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="u", embedding_dim=4, num_embeddings=9, feature_names=["user"])]
    )
    with pytest.raises(UserError, match=r"'user' in tables of 9 and 70 rows: .* data.tables.user=9"):
        trained(two, *words)
    with pytest.raises(UserError, match="data.tables lacks column 'user'"):
        trained(None, *words, f"model._target_={HERE}.Asks")


def test_all_tables_of_criteo_are_sized_by_the_module(tmp_path) -> None:
    rng = np.random.default_rng(0)
    rows = [
        "\t".join([str(n % 2), *("1" for _ in range(13)), *(f"{rng.integers(2**32):08x}" for _ in SPARSE)])
        for n in range(100)
    ]
    (tmp_path / "day.tsv").write_text("\n".join(rows) + "\n")
    sizes = {name: 5 + n for n, name in enumerate(SPARSE)}
    words = ("data=criteo", f"data.path={tmp_path / 'day.tsv'}")
    _, report = trained(Sum(13, sizes), *words)
    assert report["recipe"]["data"]["tables"] == sizes
    with pytest.raises(UserError, match="feature C3 is not in its table of 7 rows; .*num_embeddings"):
        trained(Sum(13, sizes), *words, "data.tables.C3=900000")
