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
    with recpipe.train(None, None, *TRAINED, "model=two_tower", "model.user_dim=32", quiet=True) as run:
        assert run.report["recipe"]["model"]["user_dim"] == 32
        assert 0 < run.report["quality"]["auc"] < 1


def test_refuses_features_that_are_not_there() -> None:
    wrong = "model=two_tower: its constructor raised ValueError: no sparse feature"
    with pytest.raises(UserError, match=wrong):
        recpipe.train(None, None, *TRAINED, "model=two_tower", "model.item=[C99]", quiet=True)
