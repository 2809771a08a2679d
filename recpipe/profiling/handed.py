"""Rows that are handed out to a model without tables, while one step of it is watched."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.parts import in_order, without_weights
from recpipe.tables.front import Front, same_ids
from recpipe.tables.groups import Group
from recpipe.tables.padded import padded

ROW_VALUE = 0.01
"""The value of all rows that are handed out: no tier is used, and no other rank is asked."""


class HandedRows:
    """Hands out rows of the right shape for any ids that a front is called with, as leaves of the graph.

    ``own``: the batch's ids for it, if the batch has them. ``roomy``: with room in front where the front
    gives it in a run.
    """

    def __init__(self, front: Front, own: KeyedJaggedTensor | None, roomy: bool = False) -> None:
        self.front, self.own = front, own
        self.others: list[KeyedJaggedTensor] = []
        """Ids that are not the batch's own."""
        self.leaves: list[torch.Tensor] = []
        self._asked: KeyedJaggedTensor | None = None
        self._room = roomy and front.padded

    def holds(self, sparse: KeyedJaggedTensor) -> bool:
        """Note which ids are asked for."""
        self._asked = sparse
        if self.own is None or not same_ids(sparse, self.own, self.front):
            self.others.append(sparse)
        return True

    def rows(self) -> list[torch.Tensor]:
        """The rows of each group, float32: pooled ones [B, F * dim] of F features, others [ids, dim]."""
        assert self._asked is not None, "a front asks first"
        made = [self._leaf(group, self._asked) for group in self.front.groups]
        self.leaves += [leaf for leaf in made if leaf.requires_grad]
        return made

    def _leaf(self, group: Group, asked: KeyedJaggedTensor) -> torch.Tensor:
        ids, tables = in_order(without_weights(asked), group.tables.features), group.tables
        trained = not tables.optimizer.frozen
        shape = (ids.stride(), len(tables.features) * tables.dim)
        shape = shape if tables.pooled else (ids.values().numel(), tables.dim)
        if self._room and tables.pooled:
            wide = torch.full((shape[0], tables.dim + shape[1]), ROW_VALUE, device=ids.device())
            return padded(wide, tables.dim).requires_grad_(trained)
        return torch.full(shape, ROW_VALUE, device=ids.device(), requires_grad=trained)
