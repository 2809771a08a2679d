"""Batches of a user's types on a GPU: what has no method ``to`` is moved part by part; a model's own ids."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import recpipe
from recpipe.data.parts import leaves, on_device, tensors_in
from tests.any_model.runs import left_by
from tests.any_model.zoo import furthest
from tests.gpu.conftest import WHERE, WORDS


@dataclass(frozen=True)
class Clicks:
    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    name: str = "clicks"


Pair = namedtuple("Pair", ["sparse", "labels"])


class Mover(SimpleNamespace):
    """Moves itself, without ``non_blocking``."""

    def to(self, device: torch.device) -> Mover:
        return Mover(sparse=self.sparse.to(device), labels=self.labels.to(device), moved=True)


KINDS: dict[str, Any] = {
    "dict": lambda sparse, labels: {"sparse": sparse, "labels": labels},
    "dataclass": Clicks,
    "named tuple": Pair,
    "object": lambda sparse, labels: SimpleNamespace(sparse=sparse, labels=labels),
    "its own to": lambda sparse, labels: Mover(sparse=sparse, labels=labels),
}


def ids_and_labels(seed: int, size: int = 32) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (size,), generator=generator)
    return KeyedJaggedTensor(["item"], ids, lengths=torch.ones(size, dtype=torch.long)), (ids % 2).float()


class Scores(nn.Module):
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=40, feature_names=["item"])
        self.rows, self.over = EmbeddingBagCollection([table]), nn.Linear(4, 1)

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        values: torch.Tensor = self.over(self.rows(sparse).values())
        return values.squeeze(1)


@pytest.mark.parametrize("policy", ["resident", "lru"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_trains_and_is_scored(device: torch.device, kind: str, policy: str) -> None:
    batches = [KINDS[kind](*ids_and_labels(seed)) for seed in range(4)]
    words = ("trainer.progress=false", "trainer.logger=null", f"tiers.policy={policy}", *WORDS)
    with recpipe.train(Scores(), batches, *words, held_out=batches[:1], quiet=True) as run:
        scores = run.predict(batches[0])
    assert scores.device == device
    assert scores.shape == (32,)


@pytest.mark.skipif(WHERE == "cpu", reason="a CPU's batch is not moved")
def test_all_parts_are_moved_and_the_batch_stays_where_it_is(device: torch.device) -> None:
    sparse, labels = ids_and_labels(1)
    jagged = JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]))
    batch = [{"sparse": sparse, "name": "x"}, (labels, Clicks(sparse, labels)), jagged, 3]
    there = on_device(batch, device)
    tensors = [tensor for leaf in leaves(there) for tensor in tensors_in(leaf)]
    assert len(tensors) == 8
    assert all(tensor.device == device for tensor in tensors)
    assert (there[0]["name"], there[1][1].name, there[3]) == ("x", "clicks", 3)
    assert type(there[1]) is tuple
    assert not any(tensor.is_cuda for leaf in leaves(batch) for tensor in tensors_in(leaf))
    assert on_device(there, device) is there


class Twice(Scores):
    """Also looks up ids that it makes of the batch's, of which some rows are in both."""

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        others = KeyedJaggedTensor(sparse.keys(), sparse.values() // 2, lengths=sparse.lengths())
        values: torch.Tensor = self.over(self.rows(sparse).values() + self.rows(others).values())
        return values.squeeze(1)


def twice() -> Twice:
    torch.manual_seed(7)
    return Twice()


@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_ids_that_the_model_makes_are_trained(policy: str) -> None:
    batches, rate = [KINDS["dict"](*ids_and_labels(seed)) for seed in range(4)], 0.5
    plain = twice()
    by_hand = torch.optim.SGD(plain.parameters(), lr=rate)
    for batch in batches:
        by_hand.zero_grad()
        binary_cross_entropy_with_logits(plain(batch["sparse"]), batch["labels"]).backward()
        by_hand.step()
    model = twice()
    words = (*WORDS, "optim=sgd", f"optim.tables.lr={rate}", f"tiers.policy={policy}", "tiers.store=host")
    with recpipe.place(model, batches, *words, "tiers.resident_bytes=30%") as placed:
        dense = torch.optim.SGD(model.parameters(), lr=rate)
        for batch in placed.loader:
            dense.zero_grad()
            binary_cross_entropy_with_logits(model(batch["sparse"]), batch["labels"]).backward()
            dense.step()
        trained = left_by(model)
    assert furthest(trained, left_by(plain)) < 1e-5
    assert furthest(trained, left_by(twice())) > 1e-2
