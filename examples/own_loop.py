"""A training loop of your own, in plain PyTorch: recpipe keeps the tables, the loop stays yours.

    python examples/own_loop.py                      # LRU; also: resident, bagpipe, hotline

A two-tower model with two collections of different dimensions trains on made-up clicks. Two lines are
recpipe's: ``recpipe.place`` and the loader that it gives.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe

ROWS, BATCH, STEPS = 20_000, 512, 60
HOW = {
    "resident": ("tiers.policy=resident",),
    "lru": ("tiers.policy=lru", "tiers=ssd"),
    "bagpipe": ("+plugin=bagpipe", "plugins.bagpipe.lookahead=20", "tiers.resident_bytes=50%"),
    "hotline": ("+plugin=hotline",),
}


@dataclass
class Clicks:
    """A batch: any object of tensors and ``KeyedJaggedTensor`` will do."""

    user: KeyedJaggedTensor
    item: KeyedJaggedTensor
    clicked: torch.Tensor


class TwoTower(nn.Module):
    """An ordinary model over TorchRec's collections."""

    def __init__(self) -> None:
        super().__init__()
        seen = EmbeddingBagConfig(
            name="seen",
            embedding_dim=16,
            num_embeddings=ROWS,
            feature_names=["seen"],
            pooling=PoolingType.MEAN,
        )
        item = EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=ROWS, feature_names=["item"])
        self.users = EmbeddingBagCollection([seen])
        self.items = EmbeddingBagCollection([item])
        self.left, self.right = nn.Linear(16, 16), nn.Linear(8, 16)

    def forward(self, batch: Clicks) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and logits [B]."""
        users = self.left(self.users(batch.user).values())
        logits = (users * self.right(self.items(batch.item).values())).sum(1)
        return binary_cross_entropy_with_logits(logits, batch.clicked), logits


def clicks(seed: int) -> Clicks:
    """Popular items, histories of one to five of them, and clicks on what is like the history."""
    random = torch.Generator().manual_seed(seed)

    def popular(count: int) -> torch.Tensor:
        return (torch.rand(count, generator=random) ** 6 * ROWS).long()

    lengths = torch.randint(1, 6, (BATCH,), generator=random)
    seen, item = popular(int(lengths.sum())), popular(BATCH)
    last = seen[lengths.cumsum(0) - 1]
    clicked = ((last % 7 == item % 7) | (torch.rand(BATCH, generator=random) < 0.1)).float()
    ones = torch.ones(BATCH, dtype=torch.long)
    return Clicks(
        KeyedJaggedTensor(["seen"], seen, lengths=lengths),
        KeyedJaggedTensor(["item"], item, lengths=ones),
        clicked,
    )


def main(how: str) -> float:
    """Train; returns the mean loss of the last steps."""
    torch.manual_seed(1)
    model, loader = TwoTower(), [clicks(seed) for seed in range(STEPS)]
    losses = []
    with recpipe.place(model, loader, *HOW[how], "optim.tables.lr=0.2") as placed:
        optimizer = torch.optim.Adagrad(
            model.parameters(), lr=0.02
        )  # the dense part; tables have optim.tables
        for _ in range(2):
            for batch in placed.loader:
                loss, _ = model(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        weights = model.state_dict()  # loads into TwoTower() where there is no recpipe
    last = sum(losses[-10:]) / 10
    print(f"{how}: loss {losses[0]:.4f} -> {last:.4f}; {', '.join(weights)}")
    return last


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "lru")
