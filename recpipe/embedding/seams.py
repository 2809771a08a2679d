"""The only file that touches private names of TorchRec and FBGEMM; all else uses their public API.

Checked against the version triples that ``recpipe doctor`` knows. When a release renames one of
these, this file is the place to mend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

Views = tuple[torch.Tensor, torch.Tensor]
"""A table's weights [rows, D] and optimizer state [rows, S] (S may be 0), sharing the TBE's memory."""


def table_views(collection: FusedEmbeddingBagCollection) -> list[Views]:
    """Per table of a fused collection, in its order, views into the TBE (all tables share one data type)."""
    (lookups,) = collection._emb_modules
    return tbe_views(lookups._emb_module)


def tbe_views(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> list[Views]:
    """Per physical table of a TBE, views of weights and optimizer state; writing them changes the TBE."""
    weights = tbe.split_embedding_weights()
    states = tbe.split_optimizer_states() or [()] * len(weights)
    views = []
    for weight, state in zip(weights, states, strict=True):
        rows = weight.shape[0]
        # The row-wise state is a vector, Adagrad's a matrix; SGD has none.
        flat = state[0].view(rows, -1) if len(state) else weight.new_empty(rows, 0)
        views.append((weight.detach(), flat.detach()))
    return views


@dataclass(frozen=True)
class LocalShard:
    """A table's rows from ``row`` and columns from ``column`` on that lie on this process."""

    row: int
    column: int
    weights: torch.Tensor
    """float32 [rows, columns], sharing the TBE's memory."""
    state: torch.Tensor
    """Optimizer state float32 [rows, S], likewise."""


def local_shards(parallel: DistributedModelParallel, table: str) -> list[LocalShard]:
    """The shards of ``table`` in a ``DistributedModelParallel`` whose module holds them as ``tables``."""
    key = f"embedding_bags.{table}.weight"
    weights = parallel.module.tables.state_dict()[key].local_shards()
    states = parallel.fused_optimizer.state_dict()["state"].get(f"tables.{key}", {})
    momentum = next((v.local_shards() for name, v in states.items() if "momentum" in name), None)
    shards = []
    for index, shard in enumerate(weights):
        tensor = shard.tensor.detach()
        state = tensor.new_empty(len(tensor), 0)
        if momentum is not None:
            state = momentum[index].tensor.detach().view(len(tensor), -1)
        row, column = shard.metadata.shard_offsets
        shards.append(LocalShard(row, column, tensor, state))
    return shards
