"""Parts of a model's dense part, forward and backward, without unnecessary copies and gathers: chains of
layers on a CPU, the interaction also on a GPU.

The arithmetic is that of torch's and TorchRec's modules, but the order of sums differs. With autograd's own
operators, a step spends more time between the matrix products: gradients of ReLU get new memory, the
interaction's triangle is extracted and put back by pairs of index lists, and features are joined twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from recpipe import private_api
from recpipe.common.timing import phase
from recpipe.tables.group_rows import widened

LEAK = 1e-30
"""The slope below 0 of the leaky ReLU that is used in bfloat16."""
SERIAL = 2
"""Up to so many threads, torch's single-threaded ``index_select`` is as fast as its ``gather``."""
Gradients = tuple[torch.Tensor | None, ...]


class Layer(NamedTuple):
    """A linear layer, and whether ReLU follows it."""

    linear: nn.Linear
    relu: bool


def mlp(x: torch.Tensor, layers: Sequence[nn.Linear], ends_in_relu: bool, dtype: torch.dtype) -> torch.Tensor:
    """``chain`` of ``layers`` with ReLU between them (and at the end if ``ends_in_relu``), all by oneDNN."""
    last = len(layers) - 1
    made = [Layer(layer, number < last or ends_in_relu) for number, layer in enumerate(layers)]
    return chain(x, made, [True] * len(made), dtype)


def chain(
    x: torch.Tensor, layers: Sequence[Layer], onednn: Sequence[bool], dtype: torch.dtype
) -> torch.Tensor:
    """``layers`` one after the other, each by oneDNN's own operator or by ``addmm`` as ``onednn`` says.

    x [B, in_features of the first] -> ``dtype`` [B, out_features of the last]. Matrices are multiplied in
    ``dtype``; weights and their gradients are float32.
    """
    parameters: list[torch.Tensor | None] = []
    relus: list[bool] = []
    for linear, relu in layers:
        parameters += (linear.weight, linear.bias)
        relus.append(relu)
    if not torch.is_grad_enabled():
        with phase("MLP forward"):
            return _outputs(x, relus, onednn, dtype, parameters)[0][-1]
    out: torch.Tensor = _Chain.apply(x, relus, onednn, dtype, *parameters)  # type: ignore[no-untyped-call]
    return out


def interact(bottom: torch.Tensor, pooled: torch.Tensor, padding: bool) -> torch.Tensor:
    """Dot products of all pairs of features (Naumov et al., 2019), ordered as TorchRec does.

    ``bottom`` is the dense vector [B, D]; ``pooled`` float32 [B, F * D] or [B, F, D]. With ``padding``, the
    dense vector is written in front of the rows: ``pooled`` is then [B, (1 + F) * D], or a [B, F, D] for
    which ``is_padded``. Returns [B, D + F (F + 1) / 2] of bottom's type: the dense vector, followed by
    the products.
    """
    if not torch.is_grad_enabled():
        with phase("interaction forward"):
            return _interacted(bottom, pooled, padding)[0]
    out: torch.Tensor = _Interaction.apply(bottom, pooled, padding)  # type: ignore[no-untyped-call]
    return out


def _weight_gradient(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """gradient^T x, float32 [out, in]."""
    by_mkl = torch.get_float32_matmul_precision() == "highest"
    if by_mkl or x.shape[1] <= gradient.shape[1] or x.dtype == torch.bfloat16 or torch.get_num_threads() == 1:
        return (gradient.t() @ x).float()
    # With several threads, oneDNN computes the product with more rows up to a fifth faster.
    out = x.new_empty((gradient.shape[1], x.shape[1]))
    return out.copy_((x.t() @ gradient).t())


def _outputs(
    x: torch.Tensor,
    relus: Sequence[bool],
    onednn: Sequence[bool],
    dtype: torch.dtype,
    parameters: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], Sequence[torch.Tensor | None]]:
    """x and each layer's output in ``dtype``, and the ``parameters`` in it, a weight and a bias a layer."""
    low = dtype == torch.bfloat16
    if dtype != torch.float32:
        x, parameters = x.to(dtype), [None if p is None else p.to(dtype) for p in parameters]
    outputs = [x]
    for relu, own, weight, bias in zip(relus, onednn, parameters[0::2], parameters[1::2], strict=True):
        assert weight is not None
        if own and (not low or private_api.onednn_takes_bfloat16()):
            # The operator that TorchInductor emits: it adds the bias as it writes, where ``addmm`` first
            # copies it. Its ReLU turns NaN into 0, which would hide it; its leaky ReLU does not. In bfloat16,
            # where a pass over the output is slow, a negligible slope is accepted for that.
            leaky = ("leaky_relu", [LEAK], "") if low and relu else ("none", [], "")
            x = private_api.linear_pointwise(x, weight, bias, *leaky)
            x = x.relu_() if relu and not low else x
        else:
            x = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
            x = x.relu_() if relu else x
        outputs.append(x)
    return outputs, parameters


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        relus: Sequence[bool],
        onednn: Sequence[bool],
        dtype: torch.dtype,
        *parameters: torch.Tensor | None,
    ) -> torch.Tensor:
        with phase("MLP forward"):
            ctx.relus, ctx.dtype, ctx.input = relus, dtype, given.dtype
            outputs, cast = _outputs(given, relus, onednn, dtype, parameters)
            ctx.save_for_backward(given, *parameters, *cast[0::2], *outputs)
            return outputs[-1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        count = len(ctx.relus)
        saved = ctx.saved_tensors
        if torch.is_grad_enabled():
            relus, dtype = ctx.relus, ctx.dtype
            found = differentiable(lambda x, *p: _plain(x, p, relus, dtype), saved[: 1 + 2 * count], gradient)
            return found[0], None, None, None, *found[1:]
        with phase("MLP backward"):
            weights, outputs = saved[1 + 2 * count : 1 + 3 * count], saved[1 + 3 * count :]
            wanted = ctx.needs_input_grad
            kept = private_api.graph_is_kept()
            grads: list[torch.Tensor | None] = []
            for layer in reversed(range(count)):
                if ctx.relus[layer]:
                    # Written into a hidden layer's own output, which is not needed any more and still in the
                    # cache.
                    own = layer + 1 < count and not kept
                    into = outputs[layer + 1] if own else torch.empty_like(gradient)
                    torch.ops.aten.threshold_backward.grad_input(
                        gradient, outputs[layer + 1], 0, grad_input=into
                    )
                    gradient = into
                weight, bias = wanted[4 + 2 * layer : 6 + 2 * layer]
                grads[:0] = [
                    _weight_gradient(gradient, outputs[layer]) if weight else None,
                    gradient.sum(0).float() if bias else None,
                ]
                if layer or wanted[0]:
                    gradient = gradient @ weights[layer]
            return gradient.to(ctx.input) if wanted[0] else None, None, None, None, *grads


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bottom: torch.Tensor, pooled: torch.Tensor, padding: bool) -> torch.Tensor:
        with phase("interaction forward"):
            out, features = _interacted(bottom, pooled.detach(), padding)
            ctx.save_for_backward(bottom, pooled, features)
            # As [B, F, D], pooled has the padding before it; as [B, (1 + F) * D], inside.
            ctx.inside = padding and pooled.ndim == 2
            return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        bottom, pooled, features = ctx.saved_tensors
        batch, count, dim = features.shape
        if torch.is_grad_enabled():
            inside = ctx.inside

            def plain(bottom: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
                return plain_interaction(bottom, pooled.view(batch, -1, dim)[:, inside:])

            return *differentiable(plain, (bottom, pooled), gradient), None
        with phase("interaction backward"), torch.autocast(gradient.device.type, enabled=False):
            # float32 also under bfloat16: columns are taken faster, and the tables need float32.
            where = _symmetric(count, dim, gradient.device)
            both = _columns(gradient.float(), where).view(batch, count, count)
            both.diagonal(dim1=1, dim2=2).zero_()
            found = torch.bmm(both, features)
            to_bottom = gradient[:, :dim] + found[:, 0].to(gradient.dtype)
            # The gradient has the strides of the padding, so that nothing is copied: see ``widened``.
            flat = found if ctx.inside else found[:, 1:]
            return to_bottom, flat if pooled.ndim == 3 else flat.reshape(batch, -1), None


def _interacted(
    bottom: torch.Tensor, pooled: torch.Tensor, padding: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``interact`` returns, and the features float32 [B, 1 + F, D] that it was made of."""
    batch, dim = bottom.shape
    if padding:  # the rows' own memory takes the dense vector
        wide = widened(pooled.view(batch, -1), dim) if pooled.ndim == 3 else pooled
        assert wide is not None, "rows that are marked lie so"
        features = wide.view(batch, -1, dim)
        features[:, 0] = bottom
    else:
        features = torch.cat((bottom.float(), pooled.reshape(batch, -1)), dim=1).view(batch, -1, dim)
    low = features.to(bottom.dtype)
    products = torch.bmm(low, low.transpose(1, 2)).flatten(1)
    triangle = _triangle(features.shape[1], features.device)
    return torch.cat((bottom, _columns(products, triangle)), dim=1), features


def _columns(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The ``columns`` (int64 [M]) of values [B, N], as [B, M]."""
    if values.is_cuda or torch.get_num_threads() <= SERIAL:
        return torch.index_select(values, 1, columns)
    return values.gather(1, columns.expand(len(values), -1))


@cache
def _triangle(count: int, device: torch.device) -> torch.Tensor:
    """Positions of the products above the diagonal among ``count`` x ``count``, row by row, int64."""
    row, column = torch.triu_indices(count, count, offset=1, device="cpu")
    found: torch.Tensor = row * count + column
    return found.to(device)


@cache
def _symmetric(count: int, dim: int, device: torch.device) -> torch.Tensor:
    """Column of the interaction's output for each of ``count`` x ``count`` products, int64 [count ** 2].

    A product and its mirror image have the same column. The diagonal is not in the output; its columns are
    arbitrary.
    """
    row, column = torch.triu_indices(count, count, offset=1, device="cpu")
    where = torch.full((count, count), dim, device="cpu")
    where[row, column] = where[column, row] = torch.arange(dim, dim + len(row), device="cpu")
    return where.view(-1).to(device)


def differentiable(
    plain: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor | None, ...], gradient: torch.Tensor
) -> Gradients:
    """Gradients that can be differentiated themselves (``create_graph=True``), by torch's own operators."""
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(plain(*inputs), wanted, gradient, create_graph=True))
    return tuple(next(found) if x is not None and x.requires_grad else None for x in inputs)


def _plain(
    x: torch.Tensor, parameters: Sequence[torch.Tensor | None], relus: Sequence[bool], dtype: torch.dtype
) -> torch.Tensor:
    """``chain`` by torch's own operators."""
    x = x.to(dtype)
    for weight, bias, relu in zip(parameters[0::2], parameters[1::2], relus, strict=True):
        assert weight is not None
        x = nn.functional.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
        x = x.relu() if relu else x
    return x


def plain_interaction(bottom: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
    """``interact`` by torch's own operators; pooled [B, F, D]."""
    features = torch.cat((bottom.unsqueeze(1), pooled.to(bottom.dtype)), dim=1)
    products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
    return torch.cat((bottom, products[:, _triangle(features.shape[1], features.device)]), dim=1)


def factorize(x: torch.Tensor) -> torch.Tensor:
    """Half of (sum of x)^2 - sum of x^2 over each sample: float32 [B, N] -> [B, 1]."""
    out: torch.Tensor = _FactorizationMachine.apply(x)  # type: ignore[no-untyped-call]
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
