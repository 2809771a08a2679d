from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from recpipe_tower.model import TwoTower

import recpipe
from recpipe import UserError
from recpipe.kit import Dataset, open_dataset
from recpipe.testing import SMALL

TRAINED = tuple(word for word in SMALL if not word.startswith("model."))


@pytest.fixture(scope="module")
def data() -> Dataset:
    return open_dataset({"name": "synthetic", "samples": 500, "table_scale": 0.01, "pooling": 3}, seed=1)


def test_is_made_of_its_arguments_and_called(data: Dataset) -> None:
    model = TwoTower(data.schema, user_dim=32, item_dim=8, hidden=[16], user=["C1", "C2"])
    assert [table.embedding_dim for table in model.user_tables.embedding_bag_configs()] == [32, 32]
    assert len(model.item_tables.embedding_bag_configs()) == 13
    for tables in (model.user_tables, model.item_tables):
        for weight in tables.to_empty(device=torch.device("cpu")).parameters():
            torch.nn.init.uniform_(weight, -0.1, 0.1)
    logits = model(next(data.batches("train", 64)))
    assert logits.shape == (64,)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_trains_as_a_recipe_says() -> None:
    with recpipe.train(None, None, *TRAINED, "model=click_tower", "model.user_dim=32", quiet=True) as run:
        assert run.report["recipe"]["model"]["user_dim"] == 32
        assert 0 < run.report["quality"]["auc"] < 1


def test_learns_from_clicks_alone(tmp_path: Path) -> None:
    """Each user clicks one of two items: among the items of a batch, its own get likely."""
    rng = np.random.default_rng(1)
    user = rng.integers(0, 40, 1000)
    item = (3 * user + rng.integers(0, 2, 1000)) % 40
    file = tmp_path / "clicks.parquet"
    pq.write_table(pa.table({"click": np.ones(1000, np.int8), "user": user, "item": item}), file)
    words = (
        "data.label=click",
        "data.sparse=[user,item]",
        "data.table_rows=100",
        "data.hash_ids=false",
        "data.batch_size=50",
        "data.negatives={feature: item, sampling: in_batch}",
        "model=click_tower",
        "model.in_batch=true",
        "model.hidden=[16]",
        "trainer.max_epochs=8",
        "trainer.progress=false",
    )
    with recpipe.train(None, file, *words, output=tmp_path / "run", quiet=True) as run:
        losses = run.report["series"]["loss"]
        assert np.mean(losses[-8:]) < np.mean(losses[:8]) - 1
    assert len(recpipe.predict(tmp_path / "run", file, quiet=True)) == 1000


def test_refuses_clicks_alone_of_which_nothing_is_known() -> None:
    with pytest.raises(UserError, match=r"in_batch: needs data\.negatives"):
        recpipe.train(None, None, *TRAINED, "model=click_tower", "model.in_batch=true", quiet=True)


def test_refuses_features_that_are_not_there() -> None:
    wrong = "model=click_tower: its constructor raised ValueError: no sparse feature"
    with pytest.raises(UserError, match=wrong):
        recpipe.train(None, None, *TRAINED, "model=click_tower", "model.item=[C99]", quiet=True)
