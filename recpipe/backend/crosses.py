"""TorchRec's factorization machine and low-rank cross net on a CPU, with fewer passes over their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from recpipe.backend.dense import Gradients, differentiable
from recpipe.common.timing import phase


def factorize(x: torch.Tensor) -> torch.Tensor:
    """Half of (sum of x)^2 - sum of x^2 over each sample: float32 [B, N] -> [B, 1]."""
    out: torch.Tensor = _FactorizationMachine.apply(x)  # type: ignore[no-untyped-call]
    return out


def cross(x: torch.Tensor, net: Any) -> torch.Tensor:
    """A ``LowRankCrossNet`` over x float32 [B, N] -> [B, N]: x_l+1 = x_0 * (W (V x_l) + b) + x_l."""
    layers = zip(net.W_kernels, net.V_kernels, net.bias, strict=True)
    out: torch.Tensor = _Cross.apply(x, *(p for layer in layers for p in layer))  # type: ignore[no-untyped-call]
    return out


class _FactorizationMachine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with phase("interaction forward"):
            total = x.sum(1, keepdim=True)
            ctx.save_for_backward(x, total)
            squares: torch.Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True)
            half: torch.Tensor = (total * total - squares * squares) * 0.5
            return half

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            total = x.sum(1, keepdim=True)
        with phase("interaction backward"):
            found: torch.Tensor = (total - x) * gradient
            return found


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_0: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        with phase("interaction forward"):
            x, saved = x_0, []
            for w, v, bias in zip(*(parameters[k::3] for k in range(3)), strict=True):
                low = x @ v.t()
                factor = torch.addmm(bias, low, w.t())
                saved += [x, low, factor]
                x = torch.addcmul(x, x_0, factor)
            ctx.save_for_backward(x_0, *parameters, *saved)
            return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        count = (len(ctx.saved_tensors) - 1) // 2
        x_0, parameters = ctx.saved_tensors[0], ctx.saved_tensors[1 : 1 + count]
        if torch.is_grad_enabled():
            return differentiable(_plain_cross, (x_0, *parameters), gradient)
        with phase("interaction backward"):
            saved = ctx.saved_tensors[1 + count :]
            to_x_0 = torch.zeros_like(x_0)
            found: list[torch.Tensor | None] = []
            for layer in reversed(range(0, count, 3)):
                (w, v, _), (x, low, factor) = parameters[layer : layer + 3], saved[layer : layer + 3]
                to_factor = gradient * x_0
                to_x_0.addcmul_(gradient, factor)
                to_low = to_factor @ w
                found[:0] = [to_factor.t() @ low, to_low.t() @ x, to_factor.sum(0)]
                gradient = torch.addmm(gradient, to_low, v)
            return to_x_0.add_(gradient), *found


def _plain_cross(x_0: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """``cross`` by torch's own operators."""
    x = x_0
    for w, v, bias in zip(*(parameters[k::3] for k in range(3)), strict=True):
        x = x_0 * nn.functional.linear(nn.functional.linear(x, v), w, bias) + x
    return x
