"""The dense part of a DLRM on a CPU, forward and backward, with no copy or gather that it does not need.

The arithmetic is that of TorchRec's modules; sums come in another order. A step through autograd's own
operators spends more time between the matrix products than this does: biases are copied before they are
added to, the interaction's triangle is taken out and put back by index lists, features are joined twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from recpipe.phases import phase

LEAK = 1e-30
"""Slope of the ReLU below 0 in bfloat16."""


def mlp(x: torch.Tensor, layers: Sequence[nn.Linear], ends_in_relu: bool, dtype: torch.dtype) -> torch.Tensor:
    """``layers`` one after the other with ReLU between them, and at the end if ``ends_in_relu``.

    x [B, layers[0].in_features] -> ``dtype`` [B, layers[-1].out_features]. Matrices are multiplied in
    ``dtype``; weights and their gradients are float32.
    """
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    out: torch.Tensor = _Mlp.apply(x, ends_in_relu, dtype, *parameters)  # type: ignore[no-untyped-call]
    return out


def interact(bottom: torch.Tensor, pooled: torch.Tensor, room: bool) -> torch.Tensor:
    """Dot products of all pairs of features (Naumov et al., 2019), ordered as TorchRec does.

    ``bottom`` is the dense vector [B, D]; ``pooled`` float32 [B, F * D] or, with ``room`` for the dense
    vector in front, [B, (1 + F) * D]: it is then written there. Returns [B, D + F (F + 1) / 2] of bottom's
    type: the dense vector, then the products.
    """
    out: torch.Tensor = _Interaction.apply(bottom, pooled, room)  # type: ignore[no-untyped-call]
    return out


def _affine(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, relu: bool) -> torch.Tensor:
    """x W^T + b, then ReLU if asked for. oneDNN adds the bias as it writes; ``addmm`` would first copy it."""
    low = x.dtype == torch.bfloat16
    out: torch.Tensor
    if low and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        out = torch.addmm(bias, x, weight.t())
        return out.relu_() if relu else out
    # The operator that TorchInductor emits. Its ReLU makes zeros of NaN, which must be seen; its leaky one
    # does not. In bfloat16, where a pass over the output is slow, that is worth a leak of nothing.
    leaky = ("leaky_relu", [LEAK], "") if low and relu else ("none", [], "")
    out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, *leaky)
    return out.relu_() if relu and not low else out


def _weight_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """gradient^T x, float32 [out, in]."""
    if x.shape[1] <= gradient.shape[1] or x.dtype == torch.bfloat16 or torch.get_num_threads() == 1:
        return (gradient.t() @ x).float()
    # Shared out to threads, the product whose rows are more takes oneDNN up to a fifth less.
    out = torch.empty((gradient.shape[1], x.shape[1]))
    return out.copy_((x.t() @ gradient).t())


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ends_in_relu: bool, dtype: torch.dtype, *parameters: torch.Tensor
    ) -> torch.Tensor:
        with phase("MLP forward"):
            cast = [p.to(dtype) for p in parameters]
            weights, biases = cast[0::2], cast[1::2]
            outputs = [x.to(dtype)]
            ctx.relus = [True] * (len(weights) - 1) + [ends_in_relu]
            for weight, bias, relu in zip(weights, biases, ctx.relus, strict=True):
                outputs.append(_affine(outputs[-1], weight, bias, relu))
            ctx.save_for_backward(*weights, *outputs)
            return outputs[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with phase("MLP backward"):
            count = len(ctx.relus)
            weights, outputs = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
            found: list[torch.Tensor | None] = []
            for layer in reversed(range(count)):
                if ctx.relus[layer]:
                    # Into a hidden layer's own output, which is not wanted any more and still in the cache.
                    into = outputs[layer + 1] if layer + 1 < count else torch.empty_like(gradient)
                    torch.ops.aten.threshold_backward(gradient, outputs[layer + 1], 0, grad_input=into)
                    gradient = into
                found[:0] = [_weight_gradient(gradient, outputs[layer]), gradient.sum(0).float()]
                if layer or ctx.needs_input_grad[0]:
                    gradient = gradient @ weights[layer]
            return gradient if ctx.needs_input_grad[0] else None, None, None, *found


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bottom: torch.Tensor, pooled: torch.Tensor, room: bool) -> torch.Tensor:
        with phase("interaction forward"):
            features = _joined(bottom, pooled.detach(), room)
            ctx.save_for_backward(features)
            ctx.room = room
            low = features.to(bottom.dtype)
            products = torch.bmm(low, low.transpose(1, 2))
            # The upper triangle by rows: row r leaves r + 1 products out, and has the others.
            count = features.shape[1]
            sizes = [size for row in range(count) for size in (row + 1, count - 1 - row)]
            rows = products.view(len(bottom), -1).split_with_sizes(sizes, dim=1)[1:-1:2]
            return torch.cat([bottom, *rows], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        with phase("interaction backward"):
            (features,) = ctx.saved_tensors
            batch, count, dim = features.shape
            # In float32 under bfloat16 too: columns are taken faster, and the tables want float32.
            columns = _symmetric(count, dim).expand(batch, -1)
            both = gradient.float().gather(1, columns).view(batch, count, count)
            both.diagonal(dim1=1, dim2=2).zero_()
            found = torch.bmm(both, features)
            bottom = gradient[:, :dim] + found[:, 0].to(gradient.dtype)
            return bottom, (found if ctx.room else found[:, 1:]).reshape(batch, -1), None


def _joined(bottom: torch.Tensor, pooled: torch.Tensor, room: bool) -> torch.Tensor:
    """The dense vector and the pooled rows, float32 [B, 1 + F, D]; in ``pooled``'s memory if it has room."""
    batch, dim = bottom.shape
    if not room:
        return torch.cat((bottom.float(), pooled), dim=1).view(batch, -1, dim)
    features = pooled.view(batch, -1, dim)
    features[:, 0] = bottom
    return features


@cache
def _symmetric(count: int, dim: int) -> torch.Tensor:
    """Column of the interaction's output for each of ``count`` x ``count`` products, int64 [count ** 2].

    A product and its mirror image are one column; the diagonal, which is not there, is any.
    """
    row, column = torch.triu_indices(count, count, offset=1)
    where = torch.full((count, count), dim)
    where[row, column] = where[column, row] = torch.arange(dim, dim + len(row))
    return where.view(-1)
