"""AOTInductor: compiles an exported program into a file that torch alone can load.

Imported by what needs it and not with the room, since torch's compiler takes a second to import.
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from recpipe.common.own_cache import COMPILERS, own_compilers_caches, private_files
from recpipe.common.versions import private, private_names

with private_names():
    import torch._inductor
    from torch._inductor import config as inductor
    from torch._inductor import cpp_builder
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch.fx.experimental import _config as export

    from recpipe.private_api.engine import linear_pointwise

_UNCHANGED = ("leaky_relu", [1.0], "")
"""The operation that oneDNN applies to a linear layer's result: none, not even to NaN. "none" would say the
same, but the compiler puts the ReLU that follows in its place, and oneDNN's turns NaN into 0."""


def any_batch_size() -> Any:
    """A context in which ``torch.export`` does not treat dynamic sizes 0 and 1 as special, so that what it
    exports takes them too."""
    return export.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


def compiler() -> str | None:
    """The C++ compiler that AOTInductor would use; None if there is none."""
    try:
        return str(get_cpp_compiler())
    except RuntimeError:
        return None


def compile_program(
    program: ExportedProgram, march: str | None, width: int, frozen: bool = False
) -> tuple[memoryview, list[str]]:
    """Compile ``program`` without its constants, all of which can be replaced in what is compiled;
    ``frozen``: with them, packed for oneDNN, so that layers in int8 are multiplied so.

    ``march``: the compiler's target; None: this machine. ``width``: bits of a vector register.

    Returns the content of a .pt2 file, and the compiler's flags that the kernels need beside ``march``.
    """
    options: dict[str, Any] = {"aot_inductor.package_constants_in_so": False}
    # Without it, vectors of up to eight values are numbers in the code.
    options["always_keep_tensor_constants"] = True
    if frozen:
        options = {"freezing": True}
    if march is not None:
        options["cpp.simdlen"] = width
    if hasattr(inductor.aot_inductor, "precompile_headers"):
        # They take longer than all the rest, are used by one or two files, and stay behind: 300 MB in /tmp.
        options["aot_inductor.precompile_headers"] = False
    content = io.BytesIO()
    with torch.no_grad(), compiled_for(march), trusted_caches():
        # Into memory: torch ends the process where it cannot write to a file.
        torch._inductor.aoti_compile_and_package(program, package_path=content, inductor_configs=options)
    with inductor.patch({"cpp.simdlen": width if march is not None else None}), trusted_caches():
        return content.getbuffer(), str(pick_vec_isa().build_arch_flags()).split()


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The linear layer of x [..., I], weight [O, I] and bias [O] by oneDNN, as ``use_onednn`` has it."""
    return linear_pointwise(x, weight, bias, *_UNCHANGED)


def linear_layers(graph: fx.Graph) -> list[fx.Node]:
    """The linear layers of an exported program's graph that are computed in float32 from its parameters."""
    return [
        node
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
        if node.meta["val"].dtype == torch.float32 and node.args[1].op in ("placeholder", "get_attr")
    ]


def use_onednn(program: ExportedProgram, layers: Collection[int]) -> None:
    """Let oneDNN compute these of the ``linear_layers`` of ``program``, by their places among them."""
    by_onednn = private(torch.ops.mkldnn, "_linear_pointwise").default
    for place, node in enumerate(linear_layers(program.graph)):
        if place in layers:
            x, weight, *bias = node.args
            node.target, node.args = by_onednn, (x, weight, bias[0] if bias else None, *_UNCHANGED)
    program.graph_module.recompile()


@contextmanager
def trusted_caches() -> Iterator[None]:
    """In the block, torch's compilers load and keep code where nobody else can write."""
    before = {variable: os.environ.get(variable) for variable in COMPILERS}
    try:
        own_compilers_caches()
        with private_files():
            yield
    finally:
        for variable, value in before.items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value


@contextmanager
def compiled_for(march: str | None) -> Iterator[None]:
    """In the block, AOTInductor's compiler makes code for ``march``; None: for this machine."""
    if march is None:
        yield
        return
    if hasattr(inductor.cpp, "march"):
        with inductor.patch({"cpp.march": march}):
            yield
        return
    # torch 2.11 has no setting for it, and says march=native.
    name = "_get_optimization_cflags"
    made = private(cpp_builder, name)

    def flags(*arguments: Any, **named: Any) -> tuple[list[str], list[str]]:
        for_compiler, for_linker = made(*arguments, **named)
        chosen = [f"march={march}" if flag == "march=native" else flag for flag in for_compiler]
        return chosen, for_linker

    setattr(cpp_builder, name, flags)
    try:
        yield
    finally:
        setattr(cpp_builder, name, made)
