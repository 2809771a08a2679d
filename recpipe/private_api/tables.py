"""Names of tables in TorchRec's modules, and views into FBGEMM's fused tables."""

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

_look_up_on_cpu = private(torch.ops.fbgemm, "split_embedding_codegen_forward_cpu").default
_TAKEN = frozenset(dir(nn.ModuleDict()))
Views = tuple[torch.Tensor, torch.Tensor]
"""A table's weights [rows, D], in their storage type, and optimizer state float32 [rows, S] (S may be 0),
both sharing the TBE's memory."""


def module_name(table: str) -> str:
    """The name of a table's module, by which TorchRec's planner and sharded collections know the table.

    It is the table's name itself, unless no module may be called so (it has a dot, is empty, or is an
    attribute of ``ModuleDict``). Then it is percent-encoded, so that different tables have different names.
    """
    safe = quote(table, safe="").replace(".", "%2E")
    if safe in _TAKEN:
        return f"%{ord(safe[0]):02X}{safe[1:]}"
    return safe or "%"


HOOKS = (
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
)


def has_hooks(owner: torch.Tensor | nn.Module) -> bool:
    """Whether a user has registered hooks on a tensor, or on a module's own passes."""
    return any(getattr(owner, name, None) for name in HOOKS)


CALL_HOOKS = (
    *HOOKS,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
    "_non_full_backward_hooks",
)


def share_hooks(module: nn.Module, successor: nn.Module) -> None:
    """Have ``successor`` call the hooks on the passes of ``module``. Both share them, so that the handle that
    a user has kept removes a hook of both."""
    for name in CALL_HOOKS:
        if name in vars(module):
            setattr(successor, name, getattr(module, name))


def look_up_only(
    tbe: SplitTableBatchedEmbeddingBagsCodegen,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Look up pooled sums, float32 [B, F * D], in a TBE on a CPU by the kernel that it calls itself.

    It prepares no backward pass, which takes longer than to look a few samples up. ``ids`` and ``offsets``
    are int64, ``weights`` float32.
    """
    found: torch.Tensor = _look_up_on_cpu(
        tbe.weights_host,
        tbe.weights_offsets,
        tbe.D_offsets,
        tbe.total_D,
        tbe.hash_size_cumsum,
        ids,
        offsets,
        int(tbe.pooling_mode),
        weights,
        tbe.output_dtype,
    )
    return found


def tbe_views(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> list[Views]:
    """Views of weights and optimizer state of each physical table of a TBE; writing to them changes the
    TBE."""
    weights = tbe.split_embedding_weights()
    states = tbe.split_optimizer_states() or [()] * len(weights)
    views = []
    for weight, state in zip(weights, states, strict=True):
        rows = weight.shape[0]
        # The state of a row-wise optimizer is a vector, that of Adagrad a matrix; SGD has none.
        flat = state[0].view(rows, -1) if len(state) else weight.new_empty((rows, 0), dtype=torch.float32)
        views.append((weight.detach(), flat.detach()))
    return views


def whole_weights(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> torch.Tensor:
    """The rows of all physical tables of a TBE, which have one dimension, one table after the other: [rows,
    D], in their storage type; writing to them changes the TBE."""
    parts = tbe.split_embedding_weights()
    whole: torch.Tensor = private(tbe, "weights_host" if parts[0].device.type == "cpu" else "weights_dev")
    made = whole.detach().view(-1, parts[0].shape[1])
    assert len(made) == sum(map(len, parts)), "tables lie one after the other"
    return made


def whole_state(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> torch.Tensor:
    """The optimizer state of all physical tables of a TBE on a CPU, one table after the other, float32 of one
    axis; empty if there is none. Writing to it changes the TBE."""
    if not tbe.split_optimizer_states():
        return torch.empty(0)
    whole: torch.Tensor = private(tbe, "momentum1_host")
    return whole.detach().view(-1)


def update_by_table(
    tbe: SplitTableBatchedEmbeddingBagsCodegen, rows: int, table_of: NDArray[np.int64]
) -> None:
    """Make a CPU TBE treat the tables in its one physical table of ``rows`` rows as separate tables in
    updates.

    ``table_of``: each feature's table, int64 [F]. If several features share a table, FBGEMM uses a loop that
    is slower and rounds differently from its kernel for a table of one feature. Here no row is looked up by
    features of two tables, so that kernel is right too, and gives the same bits as one physical table for
    each. FBGEMM takes features for separate tables if their entries in ``hash_size_cumsum`` differ.
    """
    sums = private(tbe, "hash_size_cumsum")
    if sums.device.type == "cpu":
        ends = np.append(table_of, table_of[-1] + 1)
        sums.copy_(rows * torch.from_numpy(ends))
