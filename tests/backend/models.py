"""Small models of others, and one step of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

DIM, DENSE, BATCH, ROWS = 8, 5, 37, 50
FEATURES = ("a", "b", "c")


def tables() -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=f"t_{n}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[n])
        for n in FEATURES
    ]
    return EmbeddingBagCollection(tables=configs)


def dlrm() -> nn.Module:
    return DLRM(tables(), DENSE, [16, DIM], [24, 16, 1])


def dcn() -> nn.Module:
    return DLRM_DCN(tables(), DENSE, [16, DIM], [24, 16, 1], dcn_num_layers=3, dcn_low_rank_dim=4)


def deep_fm() -> nn.Module:
    return SimpleDeepFMNN(DENSE, tables(), hidden_layer_size=12, deep_fm_dimension=6)


class Own(nn.Module):
    """A user's: a Sequential with other modules in it, an MLP, a lone linear layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = tables()
        self.tower = nn.Sequential(
            nn.Linear(len(FEATURES) * DIM, 20),
            nn.ReLU(),
            nn.LayerNorm(20),
            nn.Linear(20, 12),
            nn.ReLU(),
        )
        self.bottom = MLP(DENSE, [16, 12], activation="relu", activation_on_last=False)
        self.gate = nn.Linear(12, 12, bias=False)
        self.odd = MLP(12, [7, 4], activation="sigmoid")
        self.top = nn.Linear(4, 1)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        tower = self.tower(self.tables(sparse).values())
        return self.top(self.odd(tower * torch.sigmoid(self.gate(self.bottom(dense)))))


MODELS: dict[str, Callable[[], nn.Module]] = {"dlrm": dlrm, "dcn": dcn, "deep_fm": deep_fm, "own": Own}


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]()


def batch(size: int = BATCH) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    random = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, 4, (len(FEATURES) * size,), generator=random)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=random)
    return torch.randn(size, DENSE, generator=random), KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths)


def step(model: nn.Module, size: int = BATCH) -> dict[str, Any]:
    """Outputs of a batch and all gradients of a sum of them."""
    model.zero_grad()
    out = model(*batch(size))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    (out * weights).sum().backward()
    return {
        "out": out.detach(),
        **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    }


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=2e-5, atol=4e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
