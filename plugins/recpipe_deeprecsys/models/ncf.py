"""NCF, neural collaborative filtering: He et al., WWW 2017, https://arxiv.org/abs/1708.05031."""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import MinLen
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.errors import UserError, shown
from recpipe.model.config import Sizes
from recpipe.models.parts import features_of


class NCF(nn.Module):
    """The product of a user's and an item's vector beside an MLP over two others of them, and one weight for
    each value of both."""

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        hidden: Sizes,
        multiplied: Annotated[list[str], MinLen(1)],
    ) -> None:
        """``multiplied``: the features of which the rows are multiplied; the others go into the MLP."""
        super().__init__()
        names = features_of(embedding_bag_collection)
        if unknown := next((name for name in multiplied if name not in names), None):
            raise UserError(
                f"model.multiplied: no feature '{shown(unknown)}'; name those whose vectors are multiplied, "
                f"a user's and an item's, of {', '.join(map(shown, names))}"
            )
        if len({*multiplied}) == len(names):
            raise UserError("model.multiplied names all features, and the MLP has none: leave one out")
        self.embedding_bag_collection = embedding_bag_collection
        dims = {
            feature: config.embedding_dim
            for config in embedding_bag_collection.embedding_bag_configs()
            for feature in config.feature_names
        }
        if len({dims[name] for name in multiplied}) > 1:
            raise UserError("model.multiplied: their tables have different dimensions; state the same")
        self.multiplied, self.others = list(multiplied), [name for name in names if name not in multiplied]
        self.mlp = MLP(sum(dims[name] for name in self.others), list(hidden))
        self.last = nn.Linear(dims[multiplied[0]] + hidden[-1], 1)

    def forward(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits float32 [B, 1]."""
        rows = self.embedding_bag_collection(sparse_features).to_dict()
        product = torch.stack([rows[name] for name in self.multiplied], dim=1).prod(dim=1)
        deep = self.mlp(torch.cat([rows[name] for name in self.others], dim=1))
        logits: torch.Tensor = self.last(torch.cat([product, deep], dim=1))
        return logits
