"""DCNv2's crosses (TorchRec's ``LowRankCrossNet``): x_l+1 = x_0 * (W (V x_l) + b) + x_l, and their gradient.

What is not a product of matrices reads and writes each value of a layer, and takes as long as memory does. By
torch's operators it goes over them eight times in a backward pass; a loop of recpipe's own goes over them
once, adds the bias on the way and sums up its gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recpipe.backend.dense import Gradients, differentiable
from recpipe.common.loops import compiled, cut, tell
from recpipe.common.teams import share_out
from recpipe.common.timing import phase
from recpipe.common.vectors import LANES, add, fma, load, mul, splat, store

LEAST = 1 << 17
"""Values that a thread goes over at least; fewer take no longer than waking it."""
BLOCK = 64
"""Samples whose gradients of a bias are summed before they are added to the others': so that sums of many are
as exact as torch's."""


def cross(x: torch.Tensor, net: Any, loops: bool = False) -> torch.Tensor:
    """A ``LowRankCrossNet`` over x float32 [B, N] -> [B, N]; ``loops``: by recpipe's own."""
    layers = zip(net.W_kernels, net.V_kernels, net.bias, strict=True)
    parameters = (p for layer in layers for p in layer)
    out: torch.Tensor = _Cross.apply(x, loops, *parameters)  # type: ignore[no-untyped-call]
    return out


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_0: torch.Tensor, loops: bool, *parameters: torch.Tensor) -> torch.Tensor:
        with phase("interaction forward"):
            x_0 = x_0.contiguous() if loops else x_0
            x, saved = x_0, []
            for w, v, bias in zip(*(parameters[k::3] for k in range(3)), strict=True):
                low = x @ v.t()
                factor = low @ w.t() if loops else torch.addmm(bias, low, w.t())
                saved += [x, low, factor]
                x = crossed(x_0, x, factor, bias) if loops else torch.addcmul(x, x_0, factor)
            ctx.loops = loops
            ctx.save_for_backward(x_0, *parameters, *saved)
            return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        count = (len(ctx.saved_tensors) - 1) // 2
        x_0, parameters = ctx.saved_tensors[0], ctx.saved_tensors[1 : 1 + count]
        if torch.is_grad_enabled():
            found = differentiable(plain_cross, (x_0, *parameters), gradient)
            return found[0], None, *found[1:]
        with phase("interaction backward"):
            saved, gradient = ctx.saved_tensors[1 + count :], gradient.contiguous()
            to_x_0 = torch.empty_like(x_0) if ctx.loops else torch.zeros_like(x_0)
            found_so_far: list[torch.Tensor | None] = []
            for layer in reversed(range(0, count, 3)):
                (w, v, bias), (x, low, factor) = parameters[layer : layer + 3], saved[layer : layer + 3]
                if ctx.loops:
                    last = layer == count - 3
                    to_factor, to_bias = uncrossed(gradient, x_0, factor, bias, to_x_0, last)
                else:
                    to_factor = gradient * x_0
                    to_bias = to_factor.sum(0)
                    to_x_0.addcmul_(gradient, factor)
                to_low = to_factor @ w
                found_so_far[:0] = [to_factor.t() @ low, to_low.t() @ x, to_bias]
                # The last layer's is the caller's.
                own = layer < count - 3
                gradient = gradient.addmm_(to_low, v) if own else torch.addmm(gradient, to_low, v)
            return to_x_0.add_(gradient), None, *found_so_far


def plain_cross(x_0: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    """``cross`` by torch's own operators."""
    x = x_0
    for w, v, bias in zip(*(parameters[k::3] for k in range(3)), strict=True):
        x = x_0 * nn.functional.linear(nn.functional.linear(x, v), w, bias) + x
    return x


def _flat(x: torch.Tensor) -> NDArray[np.float32]:
    flat: NDArray[np.float32] = x.detach().view(-1).numpy()
    return flat


def crossed(x_0: torch.Tensor, x: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x_0 * (factor + bias) + x."""
    out, (samples, width) = torch.empty_like(x), x.shape
    tell("cross forward", samples * width, x_0, x, factor, out)
    given = _flat(x_0), _flat(x), _flat(factor), _flat(bias), _flat(out), width
    share_out(cross_samples, given, cut(samples, 1 + LEAST // width, torch.get_num_threads()))
    return out


def uncrossed(
    gradient: torch.Tensor,
    x_0: torch.Tensor,
    factor: torch.Tensor,
    bias: torch.Tensor,
    to_x_0: torch.Tensor,
    first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of ``factor`` and ``bias``; that of x_0 is added to ``to_x_0``, which has nothing yet if
    this is the ``first`` layer."""
    to_factor, (samples, width) = torch.empty_like(factor), factor.shape
    tell("cross backward", 2 * samples * width, gradient, x_0, factor, to_x_0, to_factor)
    ends = cut(samples, 1 + LEAST // width, torch.get_num_threads())
    sums = torch.zeros(len(ends) - 1, width)
    given = _flat(gradient), _flat(x_0), _flat(factor), _flat(bias)
    made = _flat(to_x_0), _flat(to_factor), _flat(sums)
    share_out(differentiate_cross, (*given, *made, width, first, np.array(ends)), ends)
    return to_factor, sums[0] if len(sums) == 1 else sums.sum(0)


@compiled
def cross_samples(
    x_0: NDArray[np.float32],
    x: NDArray[np.float32],
    factor: NDArray[np.float32],
    bias: NDArray[np.float32],
    out: NDArray[np.float32],
    width: int,
    low: int,
    high: int,
) -> None:
    """Write x_0 * (factor + bias) + x of samples [low, high) into ``out``, all [B * ``width``] but the
    bias."""
    whole = width // LANES * LANES
    for b in range(low, high):
        at = b * width
        for d in range(0, whole, LANES):
            f = add(load(factor, at + d), load(bias, d))
            store(out, at + d, fma(load(x_0, at + d), f, load(x, at + d)))
        for d in range(whole, width):
            out[at + d] = x_0[at + d] * (factor[at + d] + bias[d]) + x[at + d]


@compiled
def differentiate_cross(
    gradient: NDArray[np.float32],
    x_0: NDArray[np.float32],
    factor: NDArray[np.float32],
    bias: NDArray[np.float32],
    to_x_0: NDArray[np.float32],
    to_factor: NDArray[np.float32],
    to_bias: NDArray[np.float32],
    width: int,
    first: bool,
    ends: NDArray[np.int64],
    low: int,
    high: int,
) -> None:
    """The gradients of ``cross_samples`` of samples [low, high), one of the parts with these ``ends``:
    written into ``to_factor``, added to ``to_x_0`` (written if ``first``), and added up in the part's own
    numbers of ``to_bias`` [parts * ``width``], which has zeros."""
    whole, own = width // LANES * LANES, 0
    while ends[own // width] != low:
        own += width
    sums = np.empty(width + LANES, np.float32)
    for start in range(low, high, BLOCK):
        sums[:] = 0.0
        for b in range(start, min(start + BLOCK, high)):
            at = b * width
            for d in range(0, whole, LANES):
                g, f = load(gradient, at + d), add(load(factor, at + d), load(bias, d))
                t = mul(g, load(x_0, at + d))
                store(to_factor, at + d, t)
                before = splat(0.0) if first else load(to_x_0, at + d)
                store(to_x_0, at + d, fma(g, f, before))
                store(sums, d, add(load(sums, d), t))
            for d in range(whole, width):
                one = gradient[at + d] * x_0[at + d]
                to_factor[at + d] = one
                so_far = np.float32(0) if first else to_x_0[at + d]
                to_x_0[at + d] = so_far + gradient[at + d] * (factor[at + d] + bias[d])
                sums[d] += one
        for d in range(width):
            to_bias[own + d] += sums[d]
