"""Hooks that a user has registered on a collection are called as often as with plain TorchRec."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

import recpipe
from recpipe.kit import open_dataset
from recpipe.plugin import Batch

DATA = {"name": "synthetic", "samples": 640, "batch_size": 64, "tables": {"a": 30, "b": 8}}
WORDS = ("data.samples=640", "data.batch_size=64", "data.tables={a: 30, b: 8}", "optim=sgd")


class Net(nn.Module):
    def __init__(self, dense: int) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=f"t_{n}", embedding_dim=4, num_embeddings=rows, feature_names=[n])
                for n, rows in (("a", 30), ("b", 8))
            ]
        )
        self.out = nn.Linear(dense + 8, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        rows = self.bags(batch.sparse).values()
        scores: torch.Tensor = self.out(torch.cat([batch.dense, rows], dim=1))
        return scores.squeeze(1)


def doubled(module: nn.Module, given: Any, found: KeyedTensor) -> KeyedTensor:
    return KeyedTensor(found.keys(), found.length_per_key(), found.values() * 2)


@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_called_in_each_step_and_its_change_counts(policy: str) -> None:
    data = open_dataset(DATA, 1)
    torch.manual_seed(1)
    ours, plain = Net(len(data.schema.dense)), Net(len(data.schema.dense))
    plain.load_state_dict(ours.state_dict())
    calls: dict[nn.Module, list[str]] = {ours: [], plain: []}
    for net, seen in calls.items():
        net.bags.register_forward_pre_hook(lambda *_, seen=seen: seen.append("before"))
        net.bags.register_forward_hook(doubled)
        net.bags.register_forward_hook(lambda *_, seen=seen, **named: seen.append("after"), with_kwargs=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in data.batches("train", 64):
        loss = nn.functional.binary_cross_entropy_with_logits(plain(batch), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert calls[plain] == ["before", "after"] * 8

    rates = ("optim.dense.name=SGD", "optim.dense.lr=0.1", "optim.tables.lr=0.1", f"tiers.policy={policy}")
    order = (
        "trainer.eval_every=1.0",
        "data.eval_fraction=0.2",
        "trainer.split=never",
        "trainer.backend=plain",
    )
    with recpipe.train(ours, None, *WORDS, *rates, *order, "trainer.progress=false", quiet=True) as run:
        state = run.model.state_dict()
        evaluated = run.report["data"]["eval_samples"] // 64
    assert calls[ours] == ["before", "after"] * (8 + evaluated)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-6, rtol=1e-5)


def test_a_handle_removes_the_hook_of_the_proxy_too() -> None:
    from recpipe import private_api

    first, second, called = nn.Identity(), nn.Identity(), []
    handle = first.register_forward_hook(lambda *_: called.append(1))
    private_api.share_hooks(first, second)
    second(torch.zeros(1))
    handle.remove()
    second(torch.zeros(1))
    assert called == [1]
