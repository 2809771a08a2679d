"""Models of which a CUDA graph, which repeats no Python, leaves nothing out.

All Python that a step runs is torch's, TorchRec's and recpipe's own: beside starting kernels it reads
settings, such as a dropout's rate, and calls hooks.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import BuiltinFunctionType
from typing import Any

from torch import nn

from recpipe import seams
from recpipe.backend.chain import Converted, any_global_hook, is_hooked
from recpipe.pipeline.placed import PlacedModel

_LIBRARIES = {"torch", "torchrec", "recpipe"}
_SETTINGS = (bool, int, float, str, type(None))


def is_repeatable(module: nn.Module) -> bool:
    """Whether all Python that ``module`` runs is the libraries', as far as it shows. torch.compile may have
    graphs of its own, so a module that it has compiled is not."""
    return not any(map(_has_own_code, module.modules()))


class Settings:
    """What the Python of a repeatable ``model`` reads beside tensors."""

    def __init__(self, model: PlacedModel) -> None:
        self._modules = list(model.module.modules())
        self._parameters = model.dense
        self._places = [
            (vars(module), name)
            for module in self._modules
            for name, value in vars(module).items()
            if isinstance(value, _SETTINGS)
        ]

    def __call__(self) -> Hashable:
        """Their values now; None while hooks, which must be called, are registered."""
        hooked = any_global_hook() or any(map(is_hooked, self._modules))
        if hooked or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._parameters):
            return None
        return tuple(attributes.get(name) for attributes, name in self._places)


def _has_own_code(module: nn.Module) -> bool:
    if not _is_theirs(type(module)) or seams.is_compiled(module):
        return True
    called = (value for value in vars(module).values() if callable(value))
    return not all(isinstance(value, Converted) or _is_theirs(value) for value in called)


def _is_theirs(code: Any) -> bool:
    """Whether a class or a function is one of the libraries'."""
    module = str(getattr(code, "__module__", None))
    return isinstance(code, BuiltinFunctionType) or module.partition(".")[0] in _LIBRARIES
