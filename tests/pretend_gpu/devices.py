"""Which tensors are said to be on the GPU, and the two modes of torch that keep the account.

All data stays in host memory. A storage is on the GPU if ``ON_GPU`` names it. ``Calls`` sees the calls of
Python (``tensor.to``, ``torch.zeros(device=...)``, ``tensor.device``), ``Kernels`` each operator below them,
those of a backward too. Modes belong to a thread: ``watch_all`` sets them in each that starts.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensorBase
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ON_GPU: dict[int, StorageWeakRef] = {}
"""By the address of its storage, each that is on the GPU. The weak reference keeps the address from being
used again."""
PINNED: dict[int, StorageWeakRef] = {}
MIXING = ("aten::copy_", "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
"""Operators on tensors of both devices: copies, and indices in host memory. The result is where the first
is."""
READING = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::_unique2", "aten::is_nonzero")
"""Operators for whose results the host waits."""
WAITS: deque[tuple[str, str]] = deque(maxlen=10_000)
"""The last times that a GPU would have been waited for: the thread's name, and why. Not all are seen:
``tolist`` is not."""
_OURS = re.compile(r"/(recpipe\w*|tests)/(?!pretend_gpu)[^@]*$")
_LOCK = threading.Lock()


class _Here(threading.local):
    watched = False
    from_python: bool | None = None
    """Whether the call of Python that runs now makes its new tensors on the GPU; None outside calls."""
    backward_there = False
    """Whether the backward that runs now began on the GPU."""


_HERE = _Here()


# -- the account ---------------------------------------------------------------------------------


def on_gpu(tensor: torch.Tensor) -> bool:
    """Is it said to be on the GPU?"""
    with bare():
        return _has_memory(tensor) and _key(tensor) in ON_GPU


def put_on_gpu(result: Any) -> Any:
    """Say that all tensors in ``result`` are on the GPU."""
    with bare():
        for tensor in _tensors(result):
            _note(ON_GPU, tensor)
    return result


@contextmanager
def bare() -> Iterator[None]:
    """In the block, tensors are where they are, in host memory."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and _has_memory(leaf)]


def _has_memory(tensor: torch.Tensor) -> bool:
    # A ShardedTensor has none of its own: its shards are tensors.
    return not isinstance(tensor, ShardedTensorBase) and tensor.layout is torch.strided and not tensor.is_meta


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _note(table: dict[int, StorageWeakRef], tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    with _LOCK:
        if len(table) % 1024 == 1023:
            for key in [key for key, kept in table.items() if kept.expired()]:
                del table[key]
        table[storage._cdata] = StorageWeakRef(storage)


# -- the modes -----------------------------------------------------------------------------------


class Kernels(TorchDispatchMode):
    """Notes where an operator's results are, and refuses operators on tensors of both devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        there = [_key(tensor) in ON_GPU for tensor in given]
        name = func._schema.name
        # A tensor without dimensions is passed by value.
        by_value = 0 if name.startswith("fbgemm") else 1
        here = [t for t, is_there in zip(given, there, strict=True) if not is_there and t.dim() >= by_value]
        if any(there) and here and name not in MIXING:
            shapes = [(tuple(t.shape), "gpu" if x else "cpu") for t, x in zip(given, there, strict=True)]
            raise RuntimeError(f"pretended GPU: {name} on tensors of both devices: {shapes}")
        if any(there) and (name in READING or (here and name in MIXING[1:])):
            _waited(name)
        result = func(*args, **kwargs)
        if name == "aten::copy_":
            return result
        if (any(there) and (there[0] or name not in MIXING)) or (not given and self._makes_there()):
            for tensor in _tensors(result):
                _note(ON_GPU, tensor)
        return result

    @staticmethod
    def _makes_there() -> bool:
        if _HERE.from_python is not None:
            return _HERE.from_python
        return _HERE.backward_there and torch._C._current_graph_task_id() != -1


class Calls(TorchFunctionMode):
    """Answers for devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ANSWERS:
            return _ANSWERS[func](*args, **kwargs)
        wanted = _device_of(kwargs.get("device"))
        if wanted is not None and wanted.type != "meta":
            kwargs = {**kwargs, "device": CPU}
            data = args[0] if args else kwargs.get("data")
            if func in (torch.as_tensor, torch.asarray, torch.tensor) and isinstance(data, torch.Tensor):
                dtype = kwargs.get("dtype")
                return _to(data, wanted, *([dtype] if dtype else []))
        pinned = kwargs.pop("pin_memory", False)
        there = any(map(on_gpu, _tensors((args, kwargs)))) if wanted is None else wanted.type == "cuda"
        before, _HERE.from_python = _HERE.from_python, there
        try:
            result = func(*args, **kwargs)
        finally:
            _HERE.from_python = before
        if pinned:
            _note(PINNED, result)
        if wanted is not None and there:
            put_on_gpu(result)
        elif wanted == CPU:  # zeros_like(something on the GPU, device="cpu")
            for tensor in _tensors(result):
                ON_GPU.pop(_key(tensor), None)
        return result


def _device_of(word: Any) -> torch.device | None:
    """The device that an argument names, if it names one."""
    if isinstance(word, bool):
        return None
    if isinstance(word, torch.device):
        return word
    if isinstance(word, int) or (isinstance(word, str) and word.split(":")[0] in ("cpu", "cuda", "meta")):
        return torch.device(word) if isinstance(word, str) else torch.device("cuda", word)
    return None


# -- what tensors answer -------------------------------------------------------------------------


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, to_gpu: bool) -> torch.Tensor:
        ctx.was_there = on_gpu(tensor)
        return _copied(tensor, to_gpu)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _copied(gradient, ctx.was_there), None


def _waited(why: str) -> None:
    """Note it with the line of recpipe's, of a plugin's or of a test's that asked for it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _OURS.search(frame.f_code.co_filename):
        frame = frame.f_back
    where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    WAITS.append((threading.current_thread().name, f"{why} at {where}"))


def _copied(tensor: torch.Tensor, to_gpu: bool) -> torch.Tensor:
    with bare(), torch.no_grad():
        result = tensor.detach().clone()
    return put_on_gpu(result) if to_gpu else result


def _moved(
    tensor: torch.Tensor, device: torch.device, copy: bool = False, non_blocking: bool = False
) -> torch.Tensor:
    """``tensor`` on ``device``; a copy, which autograd knows, if it is elsewhere."""
    if device.type == "meta" or tensor.is_meta:
        with bare():
            return tensor.to(device if device.type == "meta" else CPU)
    to_gpu = device.type == "cuda"
    if to_gpu == on_gpu(tensor) and not copy:
        return tensor
    if not (to_gpu and non_blocking) and tensor.dim() + tensor.numel() > 1:
        _waited(f"a copy to the {'GPU' if to_gpu else 'host'}")
    if tensor.requires_grad and torch.is_grad_enabled():
        moved: torch.Tensor = _Move.apply(tensor, to_gpu)
        return moved
    return _copied(tensor, to_gpu)


def _to(tensor: torch.Tensor, *words: Any, **named: Any) -> torch.Tensor:
    """``Tensor.to`` in all its forms."""
    waits_not = named.pop("non_blocking", False) or any(w is True for w in words)
    words = tuple(w for w in words if not isinstance(w, bool))
    like = [w for w in (*words, named.pop("other", None)) if isinstance(w, torch.Tensor)]
    devices = [_device(w) for w in like]
    devices += [d for d in map(_device_of, (*words, named.pop("device", None))) if d is not None]
    types = [w.dtype for w in like] + [
        w for w in (*words, named.pop("dtype", None)) if isinstance(w, torch.dtype)
    ]
    copy = named.pop("copy", False)
    result = _moved(tensor, devices[0], copy, waits_not) if devices else tensor
    return result.to(*types, **named, copy=copy and not devices) if types or named or not devices else result


def _device(tensor: torch.Tensor) -> torch.device:
    with bare():
        return GPU if on_gpu(tensor) else tensor.device


def _numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
    if on_gpu(tensor) and not force:
        raise TypeError("pretended GPU: can't convert cuda:0 device type tensor to numpy")
    with bare():
        return tensor.numpy(force=force)


def _array(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    return _numpy(tensor).__array__(*arguments, **named)


def _pinned(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    if on_gpu(tensor):
        raise RuntimeError("pretended GPU: only dense CPU tensors can be pinned")
    with bare():
        result = tensor.clone()
    _note(PINNED, result)
    return result


def _is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
    with bare():
        return _key(tensor) in PINNED


_ANSWERS: dict[Any, Any] = {
    torch.Tensor.device.__get__: _device,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: on_gpu,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda tensor: _device(tensor) == CPU,  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda tensor: 0 if on_gpu(tensor) else -1,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: lambda tensor, device=None, non_blocking=False: _moved(tensor, GPU),
    torch.Tensor.cpu: lambda tensor: _moved(tensor, CPU),
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _array,
    torch.Tensor.pin_memory: _pinned,
    torch.Tensor.is_pinned: _is_pinned,
}


# -- threads -------------------------------------------------------------------------------------


def _watch() -> None:
    """Keep the account in this thread from now on."""
    if not _HERE.watched:
        _HERE.watched = True
        Kernels().__enter__()
        Calls().__enter__()


def watch_all() -> None:
    """Keep the account in this thread, in each that starts from now on, and in the Python that a backward
    runs."""
    run, engine = threading.Thread.run, torch.autograd._engine_run_backward

    def watched(thread: threading.Thread) -> None:
        _watch()
        run(thread)

    def backward(roots: Any, *arguments: Any, **named: Any) -> Any:
        before = _HERE.from_python, _HERE.backward_there
        _HERE.from_python, _HERE.backward_there = None, any(map(on_gpu, _tensors(roots)))
        try:
            # A call of ``Calls``, such as ``Tensor.backward``, has taken the mode away.
            with nullcontext() if torch._C._len_torch_function_stack() else Calls():
                return engine(roots, *arguments, **named)
        finally:
            _HERE.from_python, _HERE.backward_there = before

    _watch()
    threading.Thread.run = watched  # type: ignore[method-assign]
    torch.autograd._engine_run_backward = backward
