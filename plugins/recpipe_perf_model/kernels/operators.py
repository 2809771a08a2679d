"""Operators of torch as kernel models know them: a kind and sizes, from the arguments of a call.

Micro-benchmarks describe what they run by the same function as the capture of a model, so that both mean the
same by a kind and its sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2, prod
from typing import Any

import torch

from recpipe.common.loops import TOLD
from recpipe.private_api import TorchDispatchMode

GEMMS = ("addmm", "linear", "mm nn", "mm nt", "mm tn", "bmm nn", "bmm nt", "bmm tn")
"""Products of matrices; ``n`` and ``t`` say how each of the two lies in memory, by rows or by columns.
``linear`` is oneDNN's own operator."""
UNTOUCHED = float(2**28)
"""Bytes since memory was touched that was not touched before."""
REST = 2.0**25
"""Bytes that the rest of a step touches, at least."""
STATE = {"SGD": 0, "Adagrad": 1, "RMSprop": 1}
"""Values of an optimizer's state for each parameter's value; two for others."""
FREE = ("view", "empty")
"""What touches no values: its time is that of a call."""
_MATH = (
    *("sigmoid", "tanh", "exp", "log", "log1p", "sqrt", "rsqrt", "pow", "erf", "gelu", "silu", "softplus"),
    *("_softmax", "_log_softmax", "log_sigmoid_forward", "gelu_backward", "silu_backward", "mish"),
)
_BCE = ("binary_cross_entropy_with_logits", "binary_cross_entropy", "mse_loss", "_softmax_backward_data")
_FILLS = ("zeros", "new_zeros", "zeros_like", "full", "full_like", "ones", "ones_like", "zero_", "fill_")
_SPREADS = ("slice_backward", "select_backward", "embedding_dense_backward")
_ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_SUMS = ("sum", "mean", "amax", "amin", "max", "norm", "var", "var_mean", "native_layer_norm", "any", "all")
_TAKES = ("index_select", "gather", "index", "embedding")
_ELEMENTWISE = (
    *("add", "sub", "mul", "div", "neg", "relu", "threshold_backward", "leaky_relu", "leaky_relu_backward"),
    *("clone", "copy_", "where", "clamp", "abs", "sigmoid_backward", "tanh_backward", "rsub", "addcmul"),
    *("minimum", "maximum", "eq", "gt", "lt", "ge", "le", "masked_fill", "sign", "reciprocal", "lerp"),
    *("native_dropout_backward", "hardtanh", "hardtanh_backward", "elu", "elu_backward"),
)
_NOTHING = ("_is_mkldnn_bf16_supported",)


@dataclass(frozen=True)
class Operator:
    """A call of an operator."""

    kind: str
    at: Mapping[str, float | str]
    """Of products ``b`` (how many), ``m``, ``n`` and ``k``; of others ``bytes`` (read and written),
    ``elements``, ``runs`` (pieces of memory, if values do not lie one after the other), ``results`` (values
    that come out) and ``row`` (the length of the widest tensor's last dimension). Of both ``footprint``
    (bytes of distinct memory), ``dtype``, and ``reuse``: how many bytes are touched until the operator's
    memory is touched again, as a geometric mean over its bytes."""
    name: str
    """torch's name for it."""
    known: bool = True
    """Whether there is a model for it, and not only one for passes over so many bytes."""


def described(func: Any, args: Sequence[Any], out: Any) -> Operator | None:
    """The call ``func(*args)``, below autograd, with the result ``out``; None if it is no work."""
    name = func._schema.name.partition("::")[2]
    plain = name.rstrip("_") if name != "copy_" and name not in _FILLS else name
    if plain in _NOTHING:
        return None
    if plain in _ALLOCATES:
        return Operator("empty", {}, name)
    tensors = [*_tensors(args), *_tensors([out])]
    if func.is_view or plain in ("detach", "alias", "_unsafe_view", "lift_fresh") or not tensors:
        return Operator("view", {}, name)
    if plain in ("mm", "addmm", "bmm", "baddbmm", "_linear_pointwise"):
        return _product(plain, args)
    return _pass(plain, args, _tensors([out]), tensors, name)


def _product(name: str, args: Sequence[Any]) -> Operator:
    if name == "_linear_pointwise":
        left, weight = args[:2]
        kind, b, m, n, k = "linear", 1, len(left), len(weight), left.shape[1]
    else:
        left, right = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
        b, (m, k), n = left.shape[0] if left.ndim == 3 else 1, left.shape[-2:], right.shape[-1]
        layout = "".join(
            "t" if min(each.shape[-2:]) > 1 and each.stride(-1) != 1 and each.stride(-2) == 1 else "n"
            for each in (left, right)
        )
        layout = "tn" if layout == "tt" else layout
        kind = name if name == "addmm" else f"{name.removeprefix('badd')} {layout}"
    sizes = {"b": float(b), "m": float(m), "n": float(n), "k": float(k)}
    return Operator(kind, {**sizes, "dtype": _dtype(left)}, name)


def _pass(
    name: str, args: Sequence[Any], outs: list[torch.Tensor], tensors: list[torch.Tensor], full: str
) -> Operator:
    widest = max(tensors, key=lambda tensor: tensor.numel())
    results = sum(tensor.numel() for tensor in outs)
    moved = sum(map(_bytes, tensors))
    runs = sum(map(_runs, tensors))
    kind, known, elements = "elementwise", True, widest.numel()
    if name in ("cat", "stack"):
        kind, elements = "cat", results
        # The pieces of memory that are copied, one after the other.
        parts, dim = _tensors(args[:1]), args[1] if len(args) > 1 and isinstance(args[1], int) else 0
        dim %= parts[0].ndim + (name == "stack") if parts else 1
        runs = float(sum(part.numel() / max(1, prod(part.shape[dim:])) for part in parts))
    elif name in _FILLS or name in _SPREADS:
        kind, elements = "fill", results
        moved = sum(map(_bytes, outs))
    elif name in _TAKES:
        kind, elements = f"take {name}", results
        moved = 2 * sum(map(_bytes, outs))
    elif name == "index_put":
        kind, elements = "put", args[2].numel()
    elif name in _SUMS:
        kind = _sum_kind(args, widest)
    elif name in _BCE:
        kind = "loss"
    elif name in _MATH:
        kind = "math"
    elif name == "_to_copy" and outs and outs[0].dtype != args[0].dtype:
        kind = f"cast to {_dtype(outs[0])}"
    elif name in ("copy_", "clone", "_to_copy") and _turned(args, outs):
        kind = "transpose"
    elif name not in _ELEMENTWISE and name != "_to_copy":
        known = False
    at: dict[str, float | str] = {
        "bytes": float(moved),
        "elements": float(elements),
        "runs": float(runs),
        "results": float(results),
        "row": float(widest.shape[-1] if widest.ndim else 1),
        "dtype": _dtype(outs[0] if outs else widest),
    }
    return Operator(kind, at, full, known)


def _sum_kind(args: Sequence[Any], widest: torch.Tensor) -> str:
    """``sum 0`` over the first dimension, as for a bias; ``sum 1`` over the last; ``sum`` over all."""
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple | int) else []
    dims = [dims] if isinstance(dims, int) else list(dims)
    if widest.ndim < 2 or not dims or len(dims) == widest.ndim:
        return "sum"
    return "sum 0" if 0 in dims or -widest.ndim in dims else "sum 1"


def _turned(args: Sequence[Any], outs: Sequence[torch.Tensor]) -> bool:
    """Whether a copy changes the order of the values: its tensors differ in their innermost dimension."""
    copied = [tensor for tensor in _tensors(args) if tensor.numel() > 1] + list(outs)
    inner = {
        min(range(tensor.ndim), key=lambda dim: (tensor.stride(dim) or 1 << 60, -dim))
        for tensor in copied
        if min(tensor.shape, default=1) > 1
    }
    return len(inner) > 1


def _runs(tensor: torch.Tensor) -> float:
    """Pieces of memory of a tensor whose values do not lie one after the other; 0 for one whose do."""
    size = inner = 1
    for length, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if length == 1 or stride == 0:
            continue
        if stride != size:
            break
        size, inner = size * length, inner * length
    values = prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return 0.0 if inner >= values else values / inner


def _bytes(tensor: torch.Tensor) -> int:
    """The bytes of its values, without those that an expanded tensor repeats."""
    values = prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or n == 1)
    return values * tensor.element_size()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In a with block, collects the operators that run below autograd in this thread, and recpipe's own loops
    in their place.

    Memory is known by its address, which an allocator gives out again, so that the new memory of a result may
    have been touched a moment ago.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Operator] = []
        self._touched = 0.0
        self._last: dict[int, float] = {}
        """How many bytes had been touched when each address was touched last."""

    def __enter__(self) -> Watch:
        TOLD.append(self.told)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        TOLD.remove(self.told)
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def told(self, kind: str, work: float, tensors: Sequence[torch.Tensor]) -> None:
        """Note a loop."""
        made = tensors[-1]
        at = {"bytes": float(sum(map(_bytes, tensors))), "elements": float(work), "runs": 0.0}
        at |= {"results": float(made.numel()), "row": float(made.shape[-1])}
        self.note(Operator(kind, {**at, "dtype": _dtype(made), **self.touch(tensors)}, kind))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = self.run(func, args, kwargs or {})
        operator = described(func, args, out)
        if operator is not None:
            if operator.kind not in FREE:
                reuse = self.touch([*_tensors(args), *_tensors([out])])
                operator = replace(operator, at={**operator.at, **reuse})
            self.note(operator)
        return out

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an operator; a derived class may time it."""
        return func(*args, **kwargs)

    def touch(self, tensors: Sequence[torch.Tensor], others: float = 0.0) -> dict[str, float]:
        """Note that ``tensors`` are touched, and so many bytes of other memory before: the ``footprint``, and
        ``reuse``, the bytes touched since they were touched last."""
        self._touched += others
        sizes: dict[int, int] = {}
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            sizes[address] = max(sizes.get(address, 0), _bytes(tensor))
        whole, apart = sum(sizes.values()), 0.0
        for address, size in sizes.items():
            since = self._touched - self._last.get(address, -UNTOUCHED)
            apart += size * log2(max(since, 1.0))
        self._last.update(dict.fromkeys(sizes, self._touched))
        self._touched += whole
        return {"footprint": float(whole), "reuse": 2 ** (apart / whole) if whole else 1.0}

    def note(self, operator: Operator) -> None:
        """Keep one more operator."""
        self.found.append(operator)


def watched(run: Callable[[], object]) -> list[Operator]:
    """The operators of one call of ``run``."""
    watch = Watch()
    with watch:
        run()
    return watch.found


def optimizer_sizes(name: str, parameters: int, values: int) -> dict[str, float | str]:
    """The sizes of an optimizer's step over so many parameters with ``values`` in all, float32."""
    state = STATE.get(name, 2)
    touched = 4.0 * values * (2 + state)
    moved = 4.0 * values * (3 + 2 * state)
    sizes = {"bytes": moved, "footprint": touched, "elements": float(values), "runs": float(parameters)}
    return {**sizes, "reuse": touched + REST, "dtype": "float32"}
