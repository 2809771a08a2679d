"""Models that compute the weights of their bags' ids, each of them a ``TwoTower`` with another user tower."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.any_model.zoo import OTHERS, ROWS, Events, TwoTower

LISTS = ("clicked", "carted")


def weighted_bags() -> EmbeddingBagCollection:
    """Two dimensions, and thus two groups; the tables are not in the order of the batch's features."""
    sizes = {"carted": 4, "clicked": 8}
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=f"w_{f}", embedding_dim=dim, num_embeddings=ROWS, feature_names=[f])
            for f, dim in sizes.items()
        ],
        is_weighted=True,
    )


class Weighing(TwoTower):
    def __init__(self) -> None:
        super().__init__()
        self.user = weighted_bags()
        self.left = nn.Sequential(nn.Linear(12 + 13, 16), nn.ReLU(), nn.Linear(16, 8))

    def of_user(self, batch: Events) -> torch.Tensor:
        pooled = self.pooled(batch.lists)
        return self.left(torch.cat([pooled, batch.dense_features], dim=1))

    def pooled(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.user(with_weights(ids, self.weights(ids))).values()

    def weights(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        raise NotImplementedError


def with_weights(ids: KeyedJaggedTensor, weights: torch.Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(ids.keys(), ids.values(), weights, lengths=ids.lengths())


class Positions(Weighing):
    """A weight for each position in a list; ``FeatureProcessedEmbeddingBagCollection`` puts the ids together
    anew, in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        processors = {feature: PositionWeightedModule(4) for feature in LISTS}
        self.user = FeatureProcessedEmbeddingBagCollection(self.user, processors)

    def pooled(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.user(ids).values()


class PositionsTogether(Positions):
    """The same by a collection of processors."""

    def __init__(self) -> None:
        super().__init__()
        processors = PositionWeightedModuleCollection(dict.fromkeys(LISTS, 4))
        self.user = FeatureProcessedEmbeddingBagCollection(weighted_bags(), processors)


class OfIds(Weighing):
    """A learned weight for each id."""

    def __init__(self) -> None:
        super().__init__()
        self.of_id = nn.Parameter(torch.linspace(0.5, 1.5, ROWS))

    def weights(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.of_id[ids.values()]


class Fixed(Weighing):
    """Weights without a gradient."""

    def weights(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return 1.0 + (ids.values() % 3).float()


class Scaled(Weighing):
    """The batch's weights times a learned one, which is 1 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def weights(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return ids.weights() * self.scale


class Twice(OfIds):
    """Two sums of the same rows by different weights."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.linspace(-1, 1, ROWS))

    def pooled(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        # The one that is added keeps gradients away from zero, where Adagrad makes a step of their rounding.
        other = self.user(with_weights(ids, self.other[ids.values()])).values()
        return super().pooled(ids) * (1.0 + other)


class Frozen(OfIds):
    """Learned weights of rows that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.user.requires_grad_(False)


class HandedOn(Weighing):
    """The batch's own weights: sums are made where the rows are."""

    def pooled(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.user(ids).values()


WEIGHING: dict[str, type[Weighing]] = {
    "positions": Positions,
    "positions_together": PositionsTogether,
    "of_ids": OfIds,
    "fixed": Fixed,
    "scaled": Scaled,
    "twice": Twice,
    "weighed_frozen": Frozen,
}
OTHERS |= WEIGHING


def with_own_weights(batches: list[Events]) -> list[Events]:
    """The same batches, whose lists have weights."""
    return [
        replace(b, lists=with_weights(b.lists, 0.5 + (b.lists.values() % 7).float() / 7)) for b in batches
    ]
