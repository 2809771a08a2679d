import pytest
import torch

from recpipe import UserError
from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset
from recpipe.model.call import Called
from recpipe.model.config import UserModel
from recpipe.model.make import make_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data() -> Dataset:
    return open_dataset({"name": "synthetic", "samples": 500, "table_scale": 0.01, "pooling": 3}, seed=1)


def config(*overrides: str) -> UserModel:
    found = Recipe.of(compose(["model=two_tower", *overrides])).model
    assert isinstance(found, UserModel)
    return found


def test_is_made_of_its_recipe_and_called(data: Dataset) -> None:
    asked = config("model.user_dim=32", "model.user=[C1,C2]")
    model = make_model(asked, data.schema, CPU)
    assert [table.embedding_dim for table in model.user_tables.embedding_bag_configs()] == [32, 32]
    assert len(model.item_tables.embedding_bag_configs()) == 13
    for tables in (model.user_tables, model.item_tables):
        for weight in tables.to_empty(device=CPU).parameters():
            torch.nn.init.uniform_(weight, -0.1, 0.1)
    batch = next(data.batches("train", 64))
    loss, logits = Called.of(model, asked)(batch)
    assert torch.isclose(loss, torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_refuses_features_that_are_not_there(data: Dataset) -> None:
    with pytest.raises(
        UserError, match="model=two_tower: its constructor raised ValueError: no sparse feature"
    ):
        make_model(config("model.item=[C99]"), data.schema, CPU)
