"""Models of a user's own, named by ``_target_`` in the tests beside this file."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

HERE = __name__


class Tower(nn.Module):
    def __init__(self, schema: Any, hidden: int, activation: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(len(schema.dense), hidden)
        self.activation = activation

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layer(batch.dense).sum(dim=1)


class Asks(nn.Module):
    def __init__(
        self,
        schema: Any,
        hidden: int,
        embedding_dim: int,
        embedding_bag_collection: nn.Module,
        embedding_collection: nn.Module,
        num_dense_features: int,
        dense_in_features: int,
        *,
        dense_device: torch.device | None = None,
        device: torch.device,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self.bags, self.rows = given.pop("embedding_bag_collection"), given.pop("embedding_collection")
        self.given = given


class Defaults(nn.Module):
    def __init__(
        self, num_dense_features: int = 3, embedding_dim: int = 32, embedding_bag_collection: Any = None
    ) -> None:
        super().__init__()
        self.given = {"num_dense_features": num_dense_features, "embedding_dim": embedding_dim}


class Raises(nn.Module):
    def __init__(self) -> None:
        raise ValueError("two\nlines")


def make_tower(schema: Any, activations: list[nn.Module]) -> nn.Module:
    return Tower(schema, 4, activations[0])


def not_a_module(hidden: int = 3) -> int:
    return hidden


a_module = nn.Linear(1, 1)
