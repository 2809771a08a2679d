"""A user's raw values become two models' inputs at once, each as it would be made alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from recpipe_serve.http.raw import RawValues
from recpipe_serve.sides import Beside, Users

from recpipe.data.feature import Feature
from recpipe.data.features import Features, Label
from recpipe.data.learned import Learned
from recpipe.data.preparation import Preparation

USER, AGE = Feature("user", rows=100), Feature("age", "dense", scale="standard")
SEEN = Feature("seen", "multi_hot", separator="|", type="text", rows=50)
CITY = Feature("city", ids="vocabulary", type="text")
ITEM, PRICE = Feature("item", rows=40), Feature("price", "dense")
BOTH = Feature("both", "cross", of=("user", "item"), rows=64)
SCALES = {"age": (30.0, 5.0)}
ITEMS = pa.table({"item": [3, 4, 5], "price": [1.0, 2.0, 4.0]})
WHO = {"user": 17, "age": 31.5, "seen": "s1|s4", "city": "Ulm"}


def encoded(*features: Feature, **learned: Any) -> Preparation:
    dense = tuple(feature for feature in features if feature.kind == "dense")
    sparse = tuple(feature for feature in features if feature.kind != "dense")
    return Preparation.of(Features((Label("click"),), dense, sparse), Learned(**learned))


QUERY = encoded(replace(USER, side="user", dim=8), SEEN, ITEM)
RANKER = encoded(USER, AGE, SEEN, PRICE, ITEM, BOTH, scales=SCALES)


def inputs(preparation: Preparation, made: dict[str, np.ndarray]) -> dict[str, Any]:
    found = Beside(preparation, ITEMS).inputs(WHO, made, np.array([2, 0]))
    return {name: values.tolist() for name, values in found.items()}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The columns of each of the batches that are encoded."""
    found: list[set[str]] = []
    real = RawValues.of_batch

    def of_batch(self: RawValues, batch: Any) -> Any:
        found.append({*batch.schema.names})
        return real(self, batch)

    monkeypatch.setattr(RawValues, "of_batch", of_batch)
    return found


def test_what_both_read_alike_is_encoded_once(calls: list[set[str]]) -> None:
    models = Beside(QUERY, ITEMS), Beside(RANKER, ITEMS)
    calls.clear()
    query, ranker = Users(*models)(WHO)
    assert calls == [{"user", "age", "seen"}]
    for own, model, preparation in ((query, models[0], QUERY), (ranker, models[1], RANKER)):
        assert model.user is not None
        alone = model.user.inputs([WHO])
        assert own.keys() == alone.keys()
        assert inputs(preparation, own) == inputs(preparation, alone)
    assert inputs(RANKER, ranker)["dense"] == [[pytest.approx(0.3), 4.0], [pytest.approx(0.3), 1.0]]
    assert query["user"] == ranker["user"]
    assert "dense.age" not in query


@pytest.mark.parametrize(
    "ranker",
    [
        encoded(replace(USER, rows=90), SEEN),
        encoded(USER, replace(SEEN, separator=",")),
        encoded(Feature("seen", "dense", column="age")),
        encoded(replace(SEEN, kind="weighted_multi_hot", weight_separator=":")),
    ],
    ids=["other rows", "another separator", "another kind", "weights"],
)
def test_what_they_read_otherwise_is_made_for_each(calls: list[set[str]], ranker: Preparation) -> None:
    models = Beside(encoded(USER, SEEN), ITEMS), Beside(ranker, ITEMS)
    calls.clear()
    assert len(Users(*models)(WHO | {"seen": "s1:2"})) == len(calls) == 2


def test_vocabularies_are_joined_where_they_are_one() -> None:
    one, other = encoded(CITY, vocabularies={"city": "AAAAAAAAAAA="}), encoded(USER)
    joined = one.joined(other)
    assert joined is not None
    assert joined.learned == one.learned
    assert one.joined(encoded(CITY, vocabularies={"city": "AQAAAAAAAAA="})) is None
