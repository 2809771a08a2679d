"""torch's and FBGEMM's operators for CUDA, computed on the emulated GPU's memory by those for the CPU.

``install()`` gives each operator that has kernels for both devices one for CUDA that calls the CPU's on the
same memory. Before, it waits for the current stream, as a kernel would: what other streams have not done by
then, and nobody waited for, is not there. Host code stays: allocation, views, copies between devices,
synchronisation.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import torch

HOST_CODE = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::resize_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::set_.source_Tensor_storage_offset",
    "aten::is_pinned",
    "aten::_pin_memory",
    "aten::record_stream",
    "aten::_local_scalar_dense",
    "aten::_efficientzerotensor",
    "aten::copy_",
    "aten::_copy_from",
    "fbgemm::all_to_one_device",
    "fbgemm::merge_pooled_embeddings",
    "fbgemm::sum_reduce_to_one",
    "fbgemm::is_uvm_tensor",
    "fbgemm::uvm_storage",
    "fbgemm::uvm_to_cpu",
    "fbgemm::uvm_to_cpu_clone",
    "fbgemm::new_unified_tensor",
    "fbgemm::copy_to_shared",
}
"""Operators that launch no kernel on a GPU, or move memory by the runtime's functions."""
LOOKUPS = ("_function", "_function_pt2", "_pt2_wrapper")
"""Ends of the names of FBGEMM's lookups: see fbgemm.py."""
TAKE_BOTH = (
    "aten::index",
    "aten::_index_put_impl_",
    "aten::_foreach_",
    "aten::_fused_",
    "aten::repeat_inter",
)
"""Beginnings of names of operators that take tensors in host memory beside those of a GPU."""

_runtime = ctypes.CDLL(None)
_kept: list[torch.library.Library] = []


def install() -> None:
    """Register the kernels, for the life of the process."""
    libraries = {space: torch.library.Library(space, "IMPL", "CUDA") for space in ("aten", "fbgemm")}
    _kept.extend(libraries.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each registration says that it overrides one
        for name in torch._C._dispatch_get_all_op_names():
            library = libraries.get(name.split("::")[0])
            if library is None or name in HOST_CODE or name.endswith(LOOKUPS) or not _for_both(name):
                continue
            operator = _overload(name)
            if operator is not None and not _is_view(operator):
                library.impl(operator, _Kernel(operator), "CUDA")
        copy = torch.library.get_kernel("aten::copy_", "CUDA")
        libraries["aten"].impl(torch.ops.aten.copy_.default, _copy(copy), "CUDA", with_keyset=True)


def finish() -> None:
    """Do what is issued on the current stream."""
    _runtime.emulated_gpu_finish(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))


def in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU of the same memory."""
    shape, strides = tensor.shape, tensor.stride()
    with torch.inference_mode(tensor.is_inference()):
        if not tensor.numel():
            return torch.empty_strided(shape, strides, dtype=tensor.dtype)
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        memory = (ctypes.c_char * (reach * tensor.element_size())).from_address(tensor.data_ptr())
        return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(shape, strides)


def on_the_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor of the CPU on the GPU."""
    made = torch.empty_like(tensor, device="cuda")
    if made.numel():
        in_host_memory(made).copy_(tensor)
    return made


def _for_both(name: str) -> bool:
    has, finds = (
        torch._C._dispatch_has_kernel_for_dispatch_key,
        torch._C._dispatch_has_computed_kernel_for_dispatch_key,
    )
    return bool(has(name, "CUDA") and finds(name, "CPU"))


def _overload(name: str) -> Any:
    """``torch.ops``' name for an operator; None for one without."""
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
    except (AttributeError, RuntimeError):
        return None


def _is_view(operator: Any) -> bool:
    """Whether what it returns is memory of its arguments, which it does not write."""
    return any(kind.alias_info and not kind.alias_info.is_write for kind in operator._schema.returns)


class _Kernel:
    """An operator for CUDA."""

    def __init__(self, operator: Any) -> None:
        self.operator, self.schema = operator, operator._schema
        self.arguments = self.schema.arguments
        written = [argument.alias_info for argument in self.arguments]
        self.written = [info.before_set if info and info.is_write else None for info in written]
        self.takes_both = self.schema.name.startswith(TAKE_BOTH)

    def __call__(self, *args: Any, **named: Any) -> Any:
        rest = self.arguments[len(args) :]
        given = [*args, *(named.get(argument.name, argument.default_value) for argument in rest)]
        finish()
        here = _Here()
        local = [self._local(i, value, here) for i, value in enumerate(given)]
        if here.strays and not self.takes_both:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! ({self.schema.name})"
            )
        plain = [
            value for argument, value in zip(self.arguments, local, strict=True) if not argument.kwarg_only
        ]
        keyed = {a.name: v for a, v in zip(self.arguments, local, strict=True) if a.kwarg_only}
        found = self.operator(*plain, **keyed)
        here.take_new_shapes()
        kinds = self.schema.returns
        if len(kinds) > 1:
            return tuple(self._given_back(f, kind, given) for f, kind in zip(found, kinds, strict=True))
        return self._given_back(found, kinds[0], given) if kinds else None

    def _local(self, i: int, value: Any, here: _Here) -> Any:
        kind = str(self.arguments[i].type)
        if "Generator" in kind:
            return _generator(value)
        if kind == "Tensor" and isinstance(value, (bool, int, float)):  # a number in an expression
            return torch.tensor(value)
        return here.moved(value, bool(self.written[i]))

    def _given_back(self, result: Any, kind: Any, given: list[Any]) -> Any:
        if kind.alias_info:
            names = kind.alias_info.before_set
            return next(value for value, own in zip(given, self.written, strict=True) if own and own & names)
        if isinstance(result, (list, tuple)):
            return [self._given_back(one, kind, given) for one in result]
        on_cpu = isinstance(result, torch.Tensor) and result.device.type == "cpu"
        return on_the_gpu(result) if on_cpu else result


class _Here:
    """The arguments of one call, in host memory."""

    def __init__(self) -> None:
        self.strays: list[torch.Tensor] = []
        """Tensors of the CPU among them, other than single values."""
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []

    def moved(self, value: Any, write: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return [self.moved(one, write) for one in value]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_cuda:
            self.strays += [value] if value.dim() else []
            return value
        made = in_host_memory(value)
        if write:
            self._written.append((value, made))
        return made

    def take_new_shapes(self) -> None:
        """Of results that the operator has given another shape."""
        for value, made in self._written:
            if value.shape != made.shape:
                value.resize_(made.shape)
                in_host_memory(value).copy_(made)


def _generator(given: torch.Generator | None) -> torch.Generator:
    """Random numbers of the CPU that go by the state of a GPU's, which goes on."""
    on_gpu = given is not None and given.device.type == "cuda"
    source = given if on_gpu else torch.cuda.default_generators[0]
    made = torch.Generator().manual_seed((source.initial_seed() * 1_000_003 + source.get_offset()) % 2**63)
    source.set_offset(source.get_offset() + 4)
    return made


def _copy(real: Any) -> Callable[..., torch.Tensor]:
    """Between devices the runtime copies; on the GPU a kernel would, if not all is dense."""

    def copy_(keys: Any, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not (to.is_cuda and source.is_cuda):
            real.call_boxed(keys, to, source, non_blocking)
            return to
        finish()
        in_host_memory(to).copy_(in_host_memory(source))
        return to

    return copy_
