"""Makes a finished model faster. Its parameters, names, hooks and results stay the same.

    convert(model, choices)   # on a CPU, in place; revert(model) takes it back
    convert_on_gpu(model)     # on a GPU, likewise

Module objects get an attribute ``forward``, which precedes that of their class. It uses the back end if the
module runs on float32 [B, N] of that device (or under autocast to bfloat16). In all other cases it calls the
class's: for other shapes, types, devices and empty batches, while a program is traced, and if a hook watches
the inputs or outputs of a member. What watches torch's operators sees them in place of compiled loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torchrec.models.deepfm import FMInteractionArch
from torchrec.models.dlrm import DLRM, InteractionArch, SparseArch
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.deepfm import DeepFM, FactorizationMachine

from recpipe import private_api
from recpipe.backend.chain import (
    CHAINS,
    Chain,
    Chooser,
    Converted,
    KnownSteps,
    is_converted,
    is_hooked,
    is_plain,
)
from recpipe.backend.crosses import cross
from recpipe.backend.dense import chain, factorize, interact
from recpipe.backend.pairs import pair_products
from recpipe.tables.group_rows import is_padded, is_spent, marked

_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_COLLECTION = "sparse_arch.embedding_bag_collection"
"""A function for DLRM's modules."""


def convert(
    model: nn.Module,
    choices: Mapping[str, Mapping[str, Mapping[str, str]]] | None = None,
    measured_only: bool = False,
) -> None:
    """Convert ``model`` in place by the ``choices`` that ``recpipe.backend.calibrate.calibrated`` has
    measured.

    With ``measured_only`` (``trainer.backend=auto``) a part is converted only at sizes and threads for which
    that was measured to be faster; without it (``cpu``), always. The same ``choices`` give the same bits.
    """
    chooser = Chooser(choices or {}, measured_only)
    for module in model.modules():
        for kind, forward in _FORWARDS.items():
            if is_plain(module, kind):
                known = (KnownSteps(module),) if forward is _chains else ()
                module.forward = Converted(forward, module, chooser, *known)


def convert_on_gpu(model: nn.Module) -> None:
    """Convert what a GPU computes faster: a DLRM's interaction and what is in front of it.

    The gradient of TorchRec's is put back by pairs of index lists, for which torch sorts them; of a step of
    8,192 samples with 26 features of dimension 64 that took an NVIDIA H100 0.64 of 3.4 ms.
    """
    for module in model.modules():
        for kind, forward in _FORWARDS_ON_GPU.items():
            if is_plain(module, kind):
                module.forward = Converted(forward, module, None)


def revert(model: nn.Module) -> None:
    """Undo ``convert`` and ``convert_on_gpu``."""
    for module in model.modules():
        if is_converted(module):
            del module.forward


def padded_paths(model: nn.Module) -> set[str]:
    """Paths of the collections whose rows need padding in front, for the interaction of a DLRM in
    ``model`` that takes them as they are."""
    found = (
        path
        for path, module in model.named_modules()
        if type(module) is DLRM and type(module.sparse_arch) is SparseArch
    )
    return {f"{path}.{_COLLECTION}" if path else _COLLECTION for path in found}


def _computes(device: str = "cpu") -> torch.dtype | None:
    """The type of matrix products here: float32, or bfloat16 under autocast. None: any other, or modules are
    not called normally, but traced or watched."""
    if (
        torch_module._has_any_global_hook()  # type: ignore[no-untyped-call]
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or private_api.functorch_is_active()
    ):
        return None
    if not torch.is_autocast_enabled(device):
        return torch.float32
    return torch.bfloat16 if torch.get_autocast_dtype(device) == torch.bfloat16 else None


def _fits(x: Any, ndim: int = 2, *types: torch.dtype, device: str = "cpu") -> bool:
    """Whether ``x`` is a tensor of samples that the kernels take."""
    return (
        type(x) in _PLAIN_TENSORS
        and x.ndim == ndim
        and x.dtype in (types or (torch.float32,))
        and x.device.type == device
        and x.numel() > 0
    )


def _chains(module: nn.Module, chooser: Chooser, steps: KnownSteps, input: Any) -> Any:
    """The ``forward`` of a linear layer, a ``Perceptron``, an ``MLP`` or a ``Sequential``."""
    dtype = _computes()
    found = [] if dtype is None else steps()
    if dtype is None or not found:
        return type(module).forward(module, input)
    x = input
    for step in found:
        if not isinstance(step, Chain):
            x = step(x)
            continue
        onednn = chooser.onednn(step, len(x)) if _fits_chain(step, x, dtype) else None
        if onednn is not None:
            x = chain(x, step, onednn, dtype)
            continue
        # This does what the members' own forwards do; none of them has a hook.
        for linear, relu in step:
            x = nn.functional.linear(x, linear.weight, linear.bias)
            x = torch.relu_(x) if relu else x
    return x


def _fits_chain(layers: Chain, x: Any, dtype: torch.dtype) -> bool:
    if not _fits(x, 2, torch.float32, dtype) or x.shape[1] != layers[0].linear.in_features:
        return False
    for linear, _ in layers:
        for w in (linear.weight, linear.bias):
            if w is not None and (
                type(w) not in _PLAIN_TENSORS or w.dtype != torch.float32 or w.device.type != "cpu"
            ):
                return False
    return True


def _interaction(module: Any, chooser: Chooser | None, dense_features: Any, sparse_features: Any) -> Any:
    """The ``forward`` of ``InteractionArch``; without a ``chooser`` on a GPU."""
    dense, sparse, device = dense_features, sparse_features, "cuda" if chooser is None else "cpu"
    dtype, way = _computes(device), "plain"
    if (
        dtype is not None
        and _fits(dense, 2, dtype, device=device)
        and _fits(sparse, 3, device=device)
        and sparse.shape == (len(dense), module.F, dense.shape[1])
    ):
        part = f"dot {sparse.shape[1]}x{sparse.shape[2]}"
        way = "cpu" if chooser is None else chooser.way(part, len(dense))
    if way == "loops" and not private_api.operators_are_watched():
        # Under bfloat16, too: rows and their gradients are float32 anyway, and nothing is rounded on the way.
        return pair_products(dense.float(), sparse, is_spent(sparse)).to(dense.dtype)
    if way != "plain":
        return interact(dense, sparse, is_padded(sparse))
    return type(module).forward(module, dense, sparse)


def _cross_net(module: Any, chooser: Chooser, input: Any) -> Any:
    """The ``forward`` of ``LowRankCrossNet``."""
    parameters = [*module.W_kernels, *module.V_kernels, *module.bias]
    if _computes() is torch.float32 and _fits(input) and all(_fits(p, p.ndim) for p in parameters):
        part = f"cross {input.shape[1]}-{module._low_rank} x{module._num_layers}"
        way = chooser.way(part, len(input))
        if way != "plain":
            return cross(input, module, way == "loops" and not private_api.operators_are_watched())
    return type(module).forward(module, input)


def _factorization_machine(module: Any, chooser: Chooser, embeddings: Any) -> Any:
    """The ``forward`` of ``FactorizationMachine``, which joins a list of tensors; often there is only one."""
    if _computes() is torch.float32 and all(type(x) in _PLAIN_TENSORS for x in embeddings):
        parts = [x.flatten(1) for x in embeddings]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if _fits(flat):
            return factorize(flat)
        embeddings = [flat]
    return type(module).forward(module, embeddings)


def _deep_fm(module: Any, chooser: Chooser, embeddings: Any) -> Any:
    """The ``forward`` of ``DeepFM``; a single tensor is not joined, which would copy it."""
    if _computes() is not None and len(embeddings) == 1 and _fits(embeddings[0]):
        return module.dense_module(embeddings[0])
    return type(module).forward(module, embeddings)


def _fm_interaction(module: Any, chooser: Chooser, dense_features: Any, sparse_features: Any) -> Any:
    """The ``forward`` of ``FMInteractionArch``: features are joined once for both parts, without being split
    before."""
    members = module.deep_fm, module.fm
    if (
        _computes() is not None
        and _fits(dense_features)
        and module.sparse_feature_names
        and sparse_features.keys() == module.sparse_feature_names
        and _fits(sparse_features.values())
        and not any(map(is_hooked, members))
    ):
        joined = [torch.cat((dense_features, sparse_features.values()), dim=1)]
        return torch.cat([dense_features, *(member(joined) for member in members)], dim=1)
    return type(module).forward(module, dense_features, sparse_features)


def _sparse(module: Any, chooser: Chooser | None, features: Any) -> Any:
    """The ``forward`` of DLRM's ``SparseArch``. Pooled rows that are already in its order are not split and
    joined again.

    If they have padding in front, it is passed on to the interaction.
    """
    if _computes("cpu" if chooser is not None else "cuda") is None:
        return type(module).forward(module, features)
    pooled = module.embedding_bag_collection(features)
    if list(pooled.keys()) != module.sparse_feature_names:
        by_name = pooled.to_dict()
        return torch.cat([by_name[n] for n in module.sparse_feature_names], dim=1).reshape(
            -1, module.F, module.D
        )
    values = pooled.values()
    rows = values.view(len(values), module.F, module.D)
    return marked(rows, is_spent(values)) if is_padded(values) else rows


_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    **dict.fromkeys(CHAINS, _chains),
    InteractionArch: _interaction,
    SparseArch: _sparse,
    LowRankCrossNet: _cross_net,
    FactorizationMachine: _factorization_machine,
    DeepFM: _deep_fm,
    FMInteractionArch: _fm_interaction,
}
_FORWARDS_ON_GPU: dict[type[nn.Module], Callable[..., Any]] = {
    InteractionArch: _interaction,
    SparseArch: _sparse,
}
