"""A two-tower: users and items each have tables of their own dimension and end in a vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP

from recpipe import UserError
from recpipe.kit import Schema
from recpipe.plugin import Batch


class TwoTower(nn.Module):
    """Two towers, of dense features and users' ids and of items' ids; a click's logit is their product.

    ``in_batch``: all samples are clicks, and each item's negatives are the items of the others in its batch.
    """

    def __init__(
        self,
        schema: Schema,
        user_dim: int,
        item_dim: int,
        hidden: list[int],
        user: list[str] | None = None,
        item: list[str] | None = None,
        in_batch: bool = False,
    ) -> None:
        super().__init__()
        self.in_batch = in_batch
        names = [feature.name for feature in schema.sparse]
        half = (len(names) + 1) // 2
        users, items = user or names[:half], item or names[half:]
        # On the meta device: recpipe makes the rows, and puts them where its tiers are.
        self.user_tables = _tables(schema, users, user_dim, PoolingType.MEAN)
        self.item_tables = _tables(schema, items, item_dim, PoolingType.SUM)
        self.user_tower = MLP(len(schema.dense) + len(users) * user_dim, hidden)
        self.item_tower = MLP(len(items) * item_dim, hidden)

    def forward(self, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Logits float32 [B], over which the recipe's loss is, model.loss; ``in_batch``: (loss, logits)."""
        user = torch.cat([batch.dense, self.user_tables(batch.sparse).values()], dim=1)
        users, items = self.user_tower(user), self.item_tower(self.item_tables(batch.sparse).values())
        logits: torch.Tensor = (users * items).sum(dim=1)
        if not self.in_batch or (batch.log_q is None and not self.training):  # where it is served
            return logits
        return _softmax(users @ items.T, batch.log_q), logits


def _softmax(logits: torch.Tensor, log_q: torch.Tensor | None) -> torch.Tensor:
    """The mean loss of each user's own item among those of the batch (logits [B, B]), corrected by how likely
    these come (Yi et al., RecSys 2019)."""
    if log_q is None:
        raise UserError("in_batch: needs data.negatives={feature: ITEM, sampling: in_batch}")
    own = torch.arange(len(logits), device=logits.device)
    return nn.functional.cross_entropy(logits - log_q, own)


def _tables(schema: Schema, names: Sequence[str], dim: int, pooling: PoolingType) -> EmbeddingBagCollection:
    rows = {feature.name: feature.rows for feature in schema.sparse}
    absent = [name for name in names if name not in rows]
    if absent or not names:
        raise ValueError(f"no sparse feature {absent or 'is left'} in the data, which has {', '.join(rows)}")
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                name=f"t_{name}",
                embedding_dim=dim,
                num_embeddings=rows[name],
                feature_names=[name],
                pooling=pooling,
            )
            for name in names
        ],
        device=torch.device("meta"),
    )
