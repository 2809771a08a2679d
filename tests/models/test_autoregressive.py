"""Training at every position: each event of a history predicts the next one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.errors import UserError
from recpipe.model.losses.ranking import Bpr, InBatchSoftmax, SampledSoftmax
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import SparseFeature
from tests.any_model.runs import train
from tests.any_model.zoo import by_hand, furthest
from tests.models.published import HISTORY, batches, made, schema_of

WORDS = "model.retrieval=true", "model.autoregressive=true"
MODELS = pytest.mark.parametrize("name", ["sasrec", "hstu"])


def prefixes(batch: Batch) -> tuple[Batch, torch.Tensor]:
    """A sample of each position of each history, with the events up to it, and which samples they are of."""
    ids = {name: batch.sparse[name] for name in batch.sparse.keys()}  # noqa: SIM118
    found: dict[str, list[list[int]]] = {name: [] for name in ids}
    samples = []
    for n in range(batch.size):
        own = {name: jagged.to_dense()[n].tolist() for name, jagged in ids.items()}
        for end in range(1, len(own["items"]) + 1):
            samples.append(n)
            for name, values in own.items():
                found[name].append(values)
            for name, target in (("items", "item"), ("kinds", "kind")):
                found[name][-1] = own[name][:end]
                found[target][-1] = [*own[name], *own[target]][end : end + 1]
    lengths = [len(one) for each in found.values() for one in each]
    values = [value for each in found.values() for one in each for value in one]
    sparse = KeyedJaggedTensor([*found], torch.tensor(values), lengths=torch.tensor(lengths))
    rows = torch.tensor(samples)
    return Batch(batch.dense[rows], sparse, batch.labels[rows]), rows


@MODELS
def test_each_position_is_what_a_sample_of_its_own_would_be(name: str) -> None:
    (batch,) = batches(schema_of(name), 1)
    model = made(name, *WORDS)
    each, rows = prefixes(batch)
    found = model(batch.dense_features, batch.sparse_features)
    wanted = model.eval()(each.dense_features, each.sparse_features)
    for part in ("query", "candidate"):
        torch.testing.assert_close(found[part], wanted[part], rtol=1e-5, atol=1e-5)
    assert torch.equal(found["sample"], rows)
    for target in ("item", "kind"):
        assert torch.equal(found["ids"][target], each.sparse[target].values())
    assert model(batch.dense_features, batch.sparse_features)["query"].shape[0] == batch.size


def softmax(model: nn.Module, batch: Batch) -> torch.Tensor:
    """In-batch softmax over a sample of each position."""
    each, _ = prefixes(batch)
    found = model(each.dense_features, each.sparse_features)
    ids = each.sparse["item"].values()
    same = (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)
    scores = (found["query"] @ found["candidate"].T).masked_fill(same, -torch.inf)
    return F.cross_entropy(scores, torch.arange(len(ids)))


@MODELS
def test_training_is_that_of_a_sample_for_each_position(name: str) -> None:
    rows = [replace(batch, labels=torch.ones(batch.size)) for batch in batches(schema_of(name), 3)]
    loss = "model.loss={name: in_batch_softmax, candidate_ids: item}"
    with patch("tests.any_model.zoo.loss_of", softmax):
        theirs = by_hand(made(name, *WORDS).eval(), rows, "rowwise_adagrad")
    assert furthest(train(made(name, *WORDS), rows, "rowwise_adagrad", loss), theirs) < 1e-5
    assert furthest(train(made(name, WORDS[0]), rows, "rowwise_adagrad", loss), theirs) > 1e-3


def output(queries: int) -> dict[str, Any]:
    """Of the samples 0, 0, 1, 2, 2, ..."""
    torch.manual_seed(1)
    sample = torch.tensor([0, 0, 1, 2, 2, 2, 3])[:queries]
    ids = {"item": torch.tensor([4, 4, 5, 6, 4, 7, 8])[:queries]}
    return {
        "query": torch.randn(queries, 3),
        "candidate": torch.randn(queries, 3),
        "sample": sample,
        "ids": ids,
    }


def test_of_samples_that_did_not_take_place_the_target_alone_is_a_candidate() -> None:
    found = output(7)
    scores = found["query"] @ found["candidate"].T
    labels, weights = torch.tensor([1.0, 1, 0, 1]), torch.tensor([1.0, 3, 1, 1])
    # Sample 2 has label 0: its first two positions have no part, its last one is a negative.
    taken = torch.tensor([0, 1, 2, 5, 6])
    each = F.cross_entropy(scores[taken][:, taken], torch.arange(5), reduction="none")
    judged = torch.tensor([True, True, True, False, True])
    torch.testing.assert_close(InBatchSoftmax()(found, labels), each[judged].mean())
    own = weights[found["sample"]][taken]
    wanted = (each * own)[judged].sum() / own[judged].sum() * own.mean()
    torch.testing.assert_close(InBatchSoftmax()(found, labels, weights), wanted)
    negatives = scores[taken][:, [5]]
    own_and_drawn = torch.cat([scores.diagonal()[taken, None], negatives], dim=1)
    each = -own_and_drawn.log_softmax(1)[:, 0]
    torch.testing.assert_close(SampledSoftmax()(found, labels), each[judged].mean())
    apart = scores.diagonal()[taken, None] - negatives
    torch.testing.assert_close(Bpr()(found, labels), F.softplus(-apart)[judged].mean())


def test_frequent_candidates_are_corrected_by_their_share_of_the_batch() -> None:
    found, labels = output(7), torch.ones(4)
    batch = SimpleNamespace(log_q=torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    shares = torch.tensor([3, 3, 1, 1, 3, 1, 1]) / 7
    scores = found["query"] @ found["candidate"].T - shares.log()
    wanted = F.cross_entropy(scores, torch.arange(7))
    torch.testing.assert_close(InBatchSoftmax()(found, labels, None, batch), wanted)
    uniform = SimpleNamespace(log_q=torch.full((4,), -2.0))
    bare = SampledSoftmax(log_q=False)(found, labels, None, batch)
    assert torch.equal(SampledSoftmax()(found, labels, None, uniform), bare)
    with pytest.raises(UserError, match="set data.negatives' sampling to uniform, or log_q to false"):
        SampledSoftmax()(found, labels, None, batch)
    with pytest.raises(UserError, match="candidate_ids=kind: is none of a history's events; choose one"):
        InBatchSoftmax(candidate_ids="kind")(found, labels)


@MODELS
def test_what_cannot_be_trained_at_every_position_is_said(name: str) -> None:
    with pytest.raises(UserError, match="set model.retrieval=true"):
        made(name, WORDS[1])
    schema = schema_of(name)
    twice = (*schema.sparse, SparseFeature("bought", 50, table="goods", sequence=HISTORY))
    with pytest.raises(UserError, match="takes one history, and the data have those of items and bought"):
        made(name, *WORDS, schema=replace(schema, sparse=twice))
