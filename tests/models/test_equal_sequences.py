"""SASRec and HSTU beside RecBole's and Meta's: what is compared, and the comparison itself where a checkout
and RecBole are at hand:

RECPIPE_META=DIR [RECPIPE_META_PYTHON=PATH] pytest tests/models/test_equal_sequences.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.model.losses.ranking import InBatchSoftmax
from tests.processes import ROOT

META = os.environ.get("RECPIPE_META")
PYTHON = os.environ.get("RECPIPE_META_PYTHON", sys.executable)
CASES = "sasrec: attention", "sasrec: layers after it", "hstu"


@pytest.fixture(scope="module")
def peers() -> Iterator[Any]:
    """The benchmark's modules, which import each other by bare names as scripts of one folder do."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
        names = "sequences", "sequences_peers", "equal_sequences"
        yield SimpleNamespace(**{name: __import__(name) for name in names})
    folder = {file.stem for file in (ROOT / "benchmarks" / "peers").glob("*.py")}
    for name in (set(sys.modules) - before) & folder:
        sys.modules.pop(name)


@pytest.mark.parametrize("name", CASES)
def test_all_that_counts_goes_into_theirs(peers: Any, name: str) -> None:
    equal = peers.equal_sequences
    assert [*equal.CASES] == [*CASES]
    case = equal.CASES[name]
    model = equal.model_of(case)
    weights = {key: weight.detach().clone().requires_grad_() for key, weight in model.named_parameters()}
    theirs = case.weights(weights)
    torch.cat([weight.flatten() for weight in theirs.values()]).sum().backward()
    fresh = (".norms.", ".norm.", "found_norm.", "enter.weight", "candidate.", "top.0.")  # as at first
    for key, weight in weights.items():
        idle = any(part in key for part in (*case.idle, *fresh))
        assert weight.grad is not None or idle, key
    before = equal.vectors_of(model, equal.SCHEMA, np.ones(256, np.int64), equal.histories())[0]
    for key, parameter in model.named_parameters():
        if any(part in key for part in case.idle):
            parameter.data.add_(torch.randn_like(parameter))
    after = equal.vectors_of(model, equal.SCHEMA, np.ones(256, np.int64), equal.histories())[0]
    assert np.abs(before - after).max() > 1e-2  # what is idle would count


@pytest.mark.skipif(META is None, reason="RECPIPE_META names no checkout of generative-recommenders")
@pytest.mark.parametrize("name", CASES)
def test_equal_weights_give_equal_vectors(peers: Any, name: str) -> None:
    assert META is not None
    found = peers.equal_sequences.compared(peers.equal_sequences.CASES[name], PYTHON, Path(META))
    assert found.difference < 1e-5 < 0.1 < found.spread


def test_ranks_are_among_all_items_that_training_has(peers: Any) -> None:
    items = np.eye(4, dtype=np.float32)
    queries = np.array([[9, 9, 1, 2], [9, 9, 2, 1], [0, 1, 0, 0]], np.float32)
    found = peers.sequences.figures_of(queries, items, np.array([2, 2, 1]))
    assert found == pytest.approx({"ndcg": (1 / np.log2(3) + 1) / 2, "hr": 1.0})
    many = np.arange(20, dtype=np.float32)[:, None]
    assert peers.sequences.figures_of(np.ones((1, 1), np.float32), many, np.array([9])) == {
        "ndcg": 0,
        "hr": 0,
    }


class Summing:
    """A stand-in for a peer: the query after an event is the sum of the vectors up to it."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.table = torch.randn(9, 3)

    def vectors(self, items: torch.Tensor) -> torch.Tensor:
        return self.table[items]

    def at_every_position(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.table[ids].cumsum(1)

    def __call__(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.at_every_position(ids, lengths)[torch.arange(len(ids)), lengths - 1]


def test_both_sides_have_one_loss(peers: Any) -> None:
    histories = np.array([[-1, -1, 3], [4, 5, 3], [-1, 6, 7]])
    ids, lengths = peers.sequences_peers.from_the_left(histories)
    assert ids.tolist() == [[3, 0, 0], [4, 5, 3], [6, 7, 0]]
    assert lengths.tolist() == [1, 3, 2]
    model, items, log_q = Summing(), torch.tensor([5, 8, 5]), torch.tensor([-1.0, -2.0, -3.0])
    found = peers.sequences_peers.loss_of(model, ids, lengths, items, log_q)
    given = KeyedJaggedTensor(["item"], items, lengths=torch.ones(3).long())
    batch = SimpleNamespace(sparse=given, log_q=log_q)
    loss, taken = InBatchSoftmax(candidate_ids="item"), torch.ones(3)
    output = {"query": model(ids, lengths), "candidate": model.vectors(items)}
    torch.testing.assert_close(found, loss(output, taken, None, batch))
    assert abs(found - InBatchSoftmax()(output, taken, None, batch)) > 1e-3

    sample = torch.tensor([0, 1, 1, 1, 2, 2])
    queries = model.at_every_position(ids, lengths)[sample, torch.tensor([0, 0, 1, 2, 0, 1])]
    following = torch.tensor([5, 5, 3, 8, 7, 5])
    every = {"query": queries, "candidate": model.vectors(following), "sample": sample}
    found = peers.sequences_peers.loss_of(model, ids, lengths, items, None)
    wanted = loss({**every, "ids": {"item": following}}, taken, None, batch)
    torch.testing.assert_close(found, wanted)
