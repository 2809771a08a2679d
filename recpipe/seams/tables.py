"""Names of tables as TorchRec's modules have them, and views into FBGEMM's fused tables."""

from __future__ import annotations

from urllib.parse import quote

import numpy as np
import torch
import torch.distributed
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from numpy.typing import NDArray
from torch import nn

from recpipe.common.versions import private

_TAKEN = frozenset(dir(nn.ModuleDict()))
Views = tuple[torch.Tensor, torch.Tensor]
"""A table's weights [rows, D], of the type that stores them, and optimizer state float32 [rows, S] (S may be
0), sharing the TBE's memory."""


def module_name(table: str) -> str:
    """``table`` as the name of a module, by which TorchRec's planner and sharded collection know a table.

    The name itself, but for what no module may be called: a dot, nothing, an attribute of ``ModuleDict``.
    Percent-encoded, so that different tables have different names.
    """
    safe = quote(table, safe="").replace(".", "%2E")
    if safe in _TAKEN:
        return f"%{ord(safe[0]):02X}{safe[1:]}"
    return safe or "%"


def tbe_views(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> list[Views]:
    """Per physical table of a TBE, views of weights and optimizer state; writing them changes the TBE."""
    weights = tbe.split_embedding_weights()
    states = tbe.split_optimizer_states() or [()] * len(weights)
    views = []
    for weight, state in zip(weights, states, strict=True):
        rows = weight.shape[0]
        # The row-wise state is a vector, Adagrad's a matrix; SGD has none.
        flat = state[0].view(rows, -1) if len(state) else weight.new_empty((rows, 0), dtype=torch.float32)
        views.append((weight.detach(), flat.detach()))
    return views


def update_by_table(
    tbe: SplitTableBatchedEmbeddingBagsCodegen, rows: int, table_of: NDArray[np.int64]
) -> None:
    """Let a CPU TBE of one physical table with ``rows`` update it by the tables whose rows lie there.

    ``table_of``: each feature's table, int64 [F]. For a table that several features share, FBGEMM has a loop
    that is slower and rounds otherwise than its kernel for a table of one feature. No row here is looked up
    by features of two tables, so the latter is as right, and makes the bits that a physical table for each
    would. FBGEMM takes features for tables of their own where their first rows, in this sum, differ.
    """
    sums = private(tbe, "hash_size_cumsum")
    if sums.device.type == "cpu":
        ends = np.append(table_of, table_of[-1] + 1)
        sums.copy_(rows * torch.from_numpy(ends))
