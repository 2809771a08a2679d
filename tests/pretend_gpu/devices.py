"""Which tensors are said to be on the GPU, and the two modes of torch that keep the account.

All data stays in host memory. A storage is on the GPU if ``ON_GPU`` names it. ``Calls`` sees each call of
Python (``tensor.to``, ``torch.zeros(device=...)``, ``tensor.device``), ``Kernels`` each operator below it,
those of a backward too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ON_GPU: dict[int, StorageWeakRef] = {}
"""By the address of its storage, each that is on the GPU. The weak reference keeps the address from being used
again."""
PINNED: dict[int, StorageWeakRef] = {}
_LOCK = threading.Lock()
_HERE = threading.local()


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _put(table: dict[int, StorageWeakRef], tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    with _LOCK:
        if len(table) % 1024 == 1023:
            for key in [key for key, kept in table.items() if kept.expired()]:
                del table[key]
        table[storage._cdata] = StorageWeakRef(storage)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Is it said to be on the GPU?"""
    with bare():
        return tensor.layout is torch.strided and not tensor.is_meta and _key(tensor) in ON_GPU


def put_on_gpu(result: Any) -> Any:
    """Say that all tensors in ``result`` are on the GPU."""
    with bare():
        for tensor in tensors_of(result):
            if tensor.layout is torch.strided and not tensor.is_meta:
                _put(ON_GPU, tensor)
    return result


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


@contextmanager
def bare() -> Iterator[None]:
    """Without both modes."""
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        yield


def asked(device: Any) -> torch.device | None:
    """The device that an argument names, if it names one."""
    if isinstance(device, torch.device):
        return device
    if isinstance(device, int):
        return torch.device("cuda", device)
    if isinstance(device, str) and (device == "cpu" or device.startswith("cuda")):
        return torch.device(device)
    return None


MIXING = {
    # Copies between devices are what these are for; the others take indices of the host.
    "aten::copy_", "aten::index.Tensor", "aten::index_put_", "aten::index_put",
    "aten::_index_put_impl_", "aten::set_.source_Tensor", "aten::is_same_size",
}  # fmt: skip


class Kernels(TorchDispatchMode):
    """Says where an operator's results are, and refuses operators on tensors of both devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tensors_of((args, kwargs)) if t.layout is torch.strided and not t.is_meta]
        there = [_key(tensor) in ON_GPU for tensor in given]
        name = func._schema.name
        full = name + ("." + func._schema.overload_name if func._schema.overload_name else "")
        any_there = any(there)
        if any_there and not all(there) and name not in MIXING and full not in MIXING:
            # A tensor of no dimension is read by the host and passed by value.
            odd = [
                t
                for t, is_there in zip(given, there, strict=True)
                if not is_there and (t.dim() or "fbgemm" in name)
            ]
            if odd:
                raise RuntimeError(
                    f"pretend GPU: {full} on tensors of both devices: "
                    + ", ".join(
                        f"{tuple(t.shape)}@{'cuda' if w else 'cpu'}"
                        for t, w in zip(given, there, strict=True)
                    )
                )
        result = func(*args, **kwargs)
        inside = getattr(_HERE, "ambient", None)
        if inside is None:  # not in a call of Python: made by torch in a backward
            inside = torch._C._current_graph_task_id() != -1 and _HERE.backward_there
        if name == "aten::copy_":
            return result
        if (any_there and (there[0] or name not in MIXING)) or (not given and inside):
            for tensor in tensors_of(result):
                if tensor.layout is torch.strided and not tensor.is_meta:
                    _put(ON_GPU, tensor)
        return result


class Calls(TorchFunctionMode):
    """Answers for devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        special = SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        wanted = asked(kwargs.get("device"))
        if wanted is not None and wanted.type != "meta":
            kwargs = {**kwargs, "device": CPU}
            if name in TAKES_DATA:
                source = args[0] if args else kwargs.get("data")
                if isinstance(source, torch.Tensor):
                    dtype = kwargs.get("dtype")
                    return _to(source, wanted, *([dtype] if dtype else []))
        given = tuple(tensors_of((args, kwargs)))
        if wanted is None:
            ambient = any(on_gpu(tensor) for tensor in given)
        else:
            ambient = wanted.type == "cuda"
        if kwargs.pop("pin_memory", False):
            result = func(*args, **kwargs)
            _put(PINNED, result)
            return result
        before, _HERE.ambient = getattr(_HERE, "ambient", None), ambient
        try:
            result = func(*args, **kwargs)
        finally:
            _HERE.ambient = before
        if wanted is not None and wanted.type == "cuda":
            put_on_gpu(result)
        elif wanted is not None and wanted.type == "cpu":
            # An "empty_like" of a GPU's tensor for the host.
            for tensor in tensors_of(result):
                with bare():
                    ON_GPU.pop(_key(tensor), None)
        return result


TAKES_DATA = {"as_tensor", "tensor", "asarray"}


def _device(tensor: torch.Tensor) -> torch.device:
    return GPU if on_gpu(tensor) else _DEVICE(tensor)


_DEVICE = torch.Tensor.device.__get__


def _moved(tensor: torch.Tensor, device: torch.device, copy: bool = False) -> torch.Tensor:
    """``tensor`` on ``device``; a copy, which autograd knows, if it is elsewhere."""
    if device.type == "meta":
        return tensor.to("meta")
    if (device.type == "cuda") == on_gpu(tensor) and not copy:
        return tensor
    result = (
        _Move.apply(tensor, device.type == "cuda")
        if tensor.requires_grad and torch.is_grad_enabled()
        else None
    )
    if result is None:
        result = _copied(tensor, device.type == "cuda")
    return result


def _copied(tensor: torch.Tensor, to_gpu: bool) -> torch.Tensor:
    with bare(), torch.no_grad():
        result = tensor.detach().clone()
    return put_on_gpu(result) if to_gpu else result


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, to_gpu: bool) -> torch.Tensor:
        ctx.was = on_gpu(tensor)
        return _copied(tensor, to_gpu)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _copied(grad, ctx.was), None


def _to(tensor: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    named.pop("non_blocking", None)
    device = asked(named.pop("device", None))
    rest = []
    for value in args:
        if isinstance(value, torch.Tensor):
            device, value = _device(value), value.dtype
        if not isinstance(value, bool) and asked(value) is not None:
            device = asked(value)
        else:
            rest.append(value)
    rest = [value for value in rest if not isinstance(value, bool) and value is not None]
    if "other" in named:
        other = named.pop("other")
        device, rest = _device(other), [*rest, other.dtype]
    if named.get("dtype") is None:
        named.pop("dtype", None)
    copy = bool(named.get("copy"))
    result = tensor
    if device is not None:
        result = _moved(tensor, device, copy)
        named.pop("copy", None)
    return result.to(*rest, **named) if rest or named else result


def _numpy(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
    if on_gpu(tensor) and not named.get("force"):
        raise TypeError("pretend GPU: can't convert cuda:0 device type tensor to numpy")
    with bare():
        return tensor.numpy(*args, **named)


def _array(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
    _refuse(tensor)
    with bare():
        return tensor.__array__(*args, **named)


def _refuse(tensor: torch.Tensor) -> None:
    if on_gpu(tensor):
        raise TypeError("pretend GPU: can't convert cuda:0 device type tensor to numpy")


def _pinned(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    if on_gpu(tensor):
        raise RuntimeError(
            "pretend GPU: cannot pin 'torch.cuda.FloatTensor': only dense CPU tensors can be pinned"
        )
    with bare():
        result = tensor.clone()
        _put(PINNED, result)
    return result


def _is_pinned(tensor: torch.Tensor, *args: Any) -> bool:
    with bare():
        return _key(tensor) in PINNED


def _data_ptr(tensor: torch.Tensor) -> int:
    with bare():
        return tensor.data_ptr()


SPECIAL: dict[Any, Any] = {
    torch.Tensor.device.__get__: _device,
    torch.Tensor.is_cuda.__get__: on_gpu,
    torch.Tensor.is_cpu.__get__: lambda tensor: not on_gpu(tensor) and not tensor.is_meta,
    torch.Tensor.get_device: lambda tensor: 0 if on_gpu(tensor) else -1,
    torch.get_device: lambda tensor: 0 if on_gpu(tensor) else -1,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: lambda tensor, device=None, non_blocking=False, **named: _moved(tensor, GPU),
    torch.Tensor.cpu: lambda tensor, **named: _moved(tensor, CPU),
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _array,
    torch.Tensor.pin_memory: _pinned,
    torch.Tensor.is_pinned: _is_pinned,
    torch.Tensor.data_ptr: _data_ptr,
}


def backward(run: Any) -> Any:
    """``run``, torch's engine, with an account of the calls in the backward of a user's function."""

    def watched(roots: Any, *arguments: Any, **named: Any) -> Any:
        before = getattr(_HERE, "ambient", None), getattr(_HERE, "backward_there", False)
        _HERE.ambient, _HERE.backward_there = None, any(on_gpu(tensor) for tensor in tensors_of(roots))
        try:
            with nullcontext() if torch._C._len_torch_function_stack() else Calls():
                return run(roots, *arguments, **named)
        finally:
            _HERE.ambient, _HERE.backward_there = before

    return watched


def watch() -> None:
    """Keep the account in this thread from now on."""
    if not getattr(_HERE, "watched", False):
        _HERE.watched = True
        _HERE.modes = (Kernels(), Calls())
        for mode in _HERE.modes:
            mode.__enter__()


def watch_all(threads: Iterable[type] = (threading.Thread,)) -> None:
    """The same in this thread and in each that starts from now on."""
    torch.autograd._engine_run_backward = backward(torch.autograd._engine_run_backward)
    watch()
    for kind in threads:
        run = kind.run

        def watched(self: Any, run: Any = run) -> None:
            watch()
            run(self)

        kind.run = watched
