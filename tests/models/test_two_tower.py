"""Two towers: each looks at its own features alone, and a batch's candidates are compared with each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from recpipe.checkpoint.trained_on import Columns
from recpipe.data.cache import cache_key
from recpipe.data.config import FilesConfig
from recpipe.data.feature_yaml import parse_features
from recpipe.data.make import open_source
from recpipe.data.schema import Schema
from recpipe.errors import UserError
from recpipe.model.losses.ranking import InBatchSoftmax
from recpipe.models.parts import candidates_of
from recpipe.models.two_tower import TwoTower
from tests.models.published import batches, made, schema_of

CANDIDATE = "model.candidate=[item,liked,age]"


def of_batch(model: torch.nn.Module, dense: torch.Tensor, sparse: object) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = model(dense, sparse)
    return found


@pytest.mark.parametrize("normalize", ["true", "false"])
def test_its_vectors_are_those_of_a_plain_loop(normalize: str) -> None:
    schema = schema_of("two_tower")
    (batch,) = batches(schema, 1)
    model = made("two_tower", CANDIDATE, f"model.normalize={normalize}")
    assert isinstance(model, TwoTower)
    found = of_batch(model, batch.dense_features, batch.sparse_features)
    pooled = model.embedding_bag_collection(batch.sparse_features).to_dict()
    parts = {
        "query": [pooled["user"], pooled["category"], pooled["tags"], batch.dense[:, :1]],
        "candidate": [pooled["item"], pooled["liked"], batch.dense[:, 1:]],
    }
    for name, own in parts.items():
        weights = [w.detach() for w in getattr(model, name).parameters()]
        hidden = F.relu(torch.cat(own, dim=1) @ weights[0].T + weights[1])
        wanted = hidden @ weights[2].T + weights[3]
        wanted = wanted / wanted.norm(dim=1, keepdim=True) if normalize == "true" else wanted
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-6)
    logits = made("two_tower", CANDIDATE, f"model.normalize={normalize}", "model.retrieval=false")(
        batch.dense_features, batch.sparse_features
    )
    torch.testing.assert_close(logits[:, 0], (found["query"] * found["candidate"]).sum(1))


def test_a_tower_does_not_see_the_others_features() -> None:
    (batch,) = batches(schema_of("two_tower"), 1)
    model = made("two_tower", CANDIDATE)
    before = of_batch(model, batch.dense_features, batch.sparse_features)
    dense = batch.dense_features.clone()
    dense[:, 0] += 1.0  # price, of the query
    after = of_batch(model, dense, batch.sparse_features)
    assert torch.equal(before["candidate"], after["candidate"])
    assert not torch.equal(before["query"], after["query"])


def test_its_loss_is_that_of_the_batch() -> None:
    (batch,) = batches(schema_of("two_tower"), 1)
    found = of_batch(made("two_tower", CANDIDATE), batch.dense_features, batch.sparse_features)
    labels = torch.ones(batch.size)
    loss = InBatchSoftmax(temperature=0.1)(found, labels)
    wanted = F.cross_entropy(found["query"] @ found["candidate"].T / 0.1, torch.arange(batch.size))
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)


def test_wrong_keys_are_told_in_a_line() -> None:
    with pytest.raises(UserError, match="model.candidate: no feature 'itm'; did you mean item"):
        made("two_tower", "model.candidate=[itm]")
    with pytest.raises(UserError, match="which features are the candidate's. Say side: item of them"):
        made("two_tower")
    with pytest.raises(UserError, match="the query is left without a feature"):
        made("two_tower", "model.candidate=[item,liked,age,user,category,tags,price]")
    with pytest.raises(UserError, match="ends in 8 and model.candidate_layers in 32"):
        made("two_tower", CANDIDATE, "model.query_layers=[8]")


def sided(**sides: str) -> Schema:
    described = [
        {"name": name, "rows": 9} | ({"side": sides[name]} if name in sides else {})
        for name in ("user", "item", "shop")
    ]
    price = {"name": "price", "kind": "dense", "side": sides.get("price")}
    return parse_features({"labels": ["click"], "features": [*described, price]}).schema({})


def test_towers_are_found_by_the_sides_that_features_are_said_to_have() -> None:
    schema = sided(item="item", price="item", user="user")
    known = ["user", "item", "shop", "price"]
    assert (schema.users, schema.items) == (("user",), ("price", "item"))
    assert {*candidates_of(schema, [], known)} == {"item", "price"}
    assert candidates_of(schema, ["price", "item"], known) == ["price", "item"]
    assert candidates_of(sided(), ["shop"], known) == ["shop"]  # as before there were sides
    again = Columns.of(schema).schema  # as a checkpoint keeps it
    assert (again.users, again.items) == (schema.users, schema.items)


@pytest.mark.parametrize(
    ("sides", "named", "told"),
    [
        ({}, [], "which features are the candidate's"),
        ({"user": "user"}, [], "which features are the candidate's"),
        ({"user": "user"}, ["user"], "names 'user', of which data.features say side: user"),
        ({"item": "item"}, ["item", "shop"], "names 'shop', of which data.features say no side: item"),
        ({"item": "item", "price": "item"}, ["item"], "lacks 'price', of which data.features say side: item"),
    ],
)
def test_sides_that_are_missing_or_contradict_the_recipe_are_told(
    sides: dict[str, str], named: list[str], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        candidates_of(sided(**sides), named, ["user", "item", "shop", "price"])


def test_another_side_is_no_reason_to_prepare_anew(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("click,item,price\n1,3,0.5\n0,4,1.5\n")

    def key(side: str | None, scale: str = "none") -> str:
        price = {"name": "price", "kind": "dense", "side": side, "scale": scale}
        features = {"labels": ["click"], "features": [{"name": "item", "rows": 9, "side": side}, price]}
        return cache_key(
            open_source(FilesConfig("files", path=str(tmp_path / "rows.csv"), features=features))
        )

    assert key("item") == key(None)
    assert key("item") != key("item", "log")
