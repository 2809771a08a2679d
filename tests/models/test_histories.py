"""What a model takes for a history and its target, and what it refuses, a line each."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.schema import Schema
from recpipe.errors import DataError, UserError
from recpipe.models.histories import Side, latest, sides_of
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import SparseFeature
from tests.models.published import EVENTS, SCHEMA, batches, made, schema_of


def test_sequences_side_by_side_until_a_table_comes_again() -> None:
    bought = (
        SparseFeature("bought", 50, table="goods", sequence=9),
        SparseFeature("kinds_bought", 12, table="kind", sequence=9),
        SparseFeature("searched", 70, sequence=3),
    )
    found = sides_of(Schema((), (*EVENTS, *bought)), None, "din")
    assert found == [
        Side(("items", "kinds"), ("item", "kind"), 5),
        Side(("bought", "kinds_bought"), ("item", "kind"), 9),
    ]
    assert [side.length for side in sides_of(schema_of("din"), 3, "din")] == [3]


def test_what_has_no_history_is_refused() -> None:
    with pytest.raises(
        UserError, match="model=din compares a sequence with a target, and the data have none"
    ):
        sides_of(SCHEMA, None, "din")
    endless = SparseFeature("item", 50), SparseFeature("items", 50, table="item", sequence=0)
    with pytest.raises(UserError, match="how many of the latest events of items are looked at"):
        sides_of(Schema((), endless), None, "bst")


def test_latest_rows_are_those_of_a_loop() -> None:
    torch.manual_seed(1)
    lengths = torch.tensor([0, 2, 5, 3, 0])
    rows = torch.randn(10, 4)
    found, present = latest(rows, lengths, 3)
    for sample, own in enumerate(rows.split(lengths.tolist())):
        wanted = torch.cat([torch.zeros(3, 4), own])[-3:]
        assert torch.equal(found[sample], wanted)
        assert present[sample].tolist() == [False] * (3 - min(3, len(own))) + [True] * min(3, len(own))
    nothing, present = latest(torch.zeros(0, 4), torch.zeros(2, dtype=torch.int32), 3)
    assert not nothing.any()
    assert not present.any()


def with_lengths(batch: Batch, feature: str, lengths: torch.Tensor) -> KeyedJaggedTensor:
    """The batch's ids, with as many of ``feature`` in each sample."""
    ids = {name: (batch.sparse[name].values(), batch.sparse[name].lengths()) for name in batch.sparse.keys()}  # noqa: SIM118
    ids[feature] = torch.ones(int(lengths.sum()), dtype=torch.long), lengths
    return KeyedJaggedTensor(
        list(ids), torch.cat([i for i, _ in ids.values()]), lengths=torch.cat([n for _, n in ids.values()])
    )


def test_histories_that_do_not_fit_are_refused() -> None:
    (batch,) = batches(schema_of("din"), 1)
    model, one = made("din"), torch.ones(batch.size, dtype=torch.long)
    with pytest.raises(DataError, match="items and kinds have other numbers of ids in a sample"):
        model(batch.dense, with_lengths(batch, "kinds", batch.sparse["kinds"].lengths().roll(1)))
    with pytest.raises(DataError, match="kind has several ids or none in a sample, and is the target"):
        model(batch.dense, with_lengths(batch, "kind", 2 * one))
    with pytest.raises(
        UserError, match="model.heads=3 does not divide the width of an event, 16, and of its"
    ):
        made("bst", "model.heads=3")
