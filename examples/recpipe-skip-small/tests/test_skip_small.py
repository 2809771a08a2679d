from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from recpipe_skip_small.plugin import SkipSmallGradients
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe import UserError
from recpipe.plugin import Batch
from recpipe.testing import PluginSuite, Trained

ROWS, DIM, SIZE, LR, LEAST = {"user": 300, "item": 60}, 8, 64, 0.1, 1e-2
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LR),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=LR, eps=1e-8),
    "rowwise_adagrad": lambda parameters: RowWiseAdagrad(parameters, lr=LR, eps=1e-8),
}


class TestSkipSmall(PluginSuite):
    plugin = "skip_small"

    def test_updates_are_left_out(self, trained: Trained) -> None:
        shown = trained.report["plugins"]["skip_small"]
        assert 0 < shown["skipped_share"] < 1
        assert trained.report["altered"] == ["EXACT_GRADIENT"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
            for name, rows in ROWS.items()
        ]
        self.rows = EmbeddingBagCollection(tables)
        self.over = nn.Linear(len(ROWS) * DIM + 1, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([self.rows(batch.sparse).values(), batch.dense], dim=1)
        logits = self.over(both).squeeze(1)
        return binary_cross_entropy_with_logits(logits, batch.labels), logits


def batches() -> list[Batch]:
    """Bags of 0 to 3 skewed ids."""
    rng, made = np.random.default_rng(1), []
    for _ in range(12):
        lengths = torch.from_numpy(rng.integers(0, 4, len(ROWS) * SIZE))
        counts = lengths.view(len(ROWS), SIZE).sum(1).tolist()
        ids = [(rng.random(n) ** 3 * r).astype(np.int64) for n, r in zip(counts, ROWS.values(), strict=True)]
        sparse = KeyedJaggedTensor(list(ROWS), torch.from_numpy(np.concatenate(ids)), lengths=lengths)
        dense = torch.from_numpy(rng.standard_normal((SIZE, 1), np.float32))
        made.append(Batch(dense, sparse, torch.from_numpy((rng.random(SIZE) < 0.4).astype(np.float32))))
    return made


def by_hand(optimizer: str, least: float) -> dict[str, torch.Tensor]:
    """A dense optimizer whose gradient is zero for rows that are not to be updated."""
    model = Model()
    tables = [bag.weight for bag in model.rows.embedding_bags.values()]
    each = [OPTIMIZERS[optimizer](tables), torch.optim.SGD(model.over.parameters(), lr=LR)]
    for batch in batches():
        for one in each:
            one.zero_grad()
        model(batch)[0].backward()
        for weight in tables:
            norms = weight.grad.norm(dim=1)
            assert not ((norms - LEAST).abs() < 1e-7).any(), "rounding must not decide"
            weight.grad[norms < least] = 0.0
        for one in each:
            one.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("where", [("tiers.policy=resident",), ("tiers.policy=lru", "tiers.store=host")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_a_dense_optimizer_over_the_other_rows(optimizer: str, where: tuple[str, ...]) -> None:
    """Multi-hot bags; under lru rows come and go."""
    model = Model()
    words = (
        f"optim={optimizer}",
        f"optim.tables.lr={LR}",
        "++optim.tables.eps=1e-8",
        "tiers.resident_bytes=20%",
    )
    with recpipe.place(
        model, batches(), *words, *where, "+plugin=skip_small", f"plugins.skip_small.least={LEAST}"
    ) as placed:
        dense = torch.optim.SGD(model.parameters(), lr=LR)
        for batch in placed.loader:
            dense.zero_grad()
            model(batch)[0].backward()
            dense.step()
        found = {name: value.clone() for name, value in model.state_dict().items()}
    expected, everything = by_hand(optimizer, LEAST), by_hand(optimizer, 0.0)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
    assert max(float((found[name] - everything[name]).abs().max()) for name in found) > 1e-3


def test_refuses_a_norm_that_is_none() -> None:
    with pytest.raises(UserError, match="plugins.skip_small.least=-1: must be at least 0"):
        SkipSmallGradients(least=-1)
