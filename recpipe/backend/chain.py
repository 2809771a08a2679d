"""Finds chains of linear layers and ReLU in modules, at the time of a call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torchrec.modules.mlp import MLP, Perceptron

from recpipe.backend.choices import chain_signature
from recpipe.backend.dense import Layer


class Chain(list[Layer]):
    """Linear layers, each with ReLU behind it or not."""

    @cached_property
    def signature(self) -> str:
        """Its sizes, such as "13-512r-16": r stands for ReLU, and x for a layer without bias."""
        parts = [str(self[0].linear.in_features)]
        for linear, relu in self:
            parts.append(
                f"{linear.out_features}{'' if linear.bias is not None else 'x'}{'r' if relu else ''}"
            )
        return chain_signature("-".join(parts))


Step = Chain | nn.Module
"""A step: a chain, or a module that is called as it is."""
CHAINS = (nn.Linear, Perceptron, MLP, nn.Sequential)
"""Modules that may be chains of linear layers or contain some."""
_RELUS = (torch.relu, torch.relu_, nn.functional.relu, torch.Tensor.relu)


class _Known(threading.local):
    steps: dict[nn.Module, list[Step]] | None = None


_known = _Known()
"""The steps of modules in this thread, inside ``KnownSteps.used``."""


class KnownSteps:
    """The steps of the modules in ``model``, kept from one call to the next, since finding them takes as long
    as a small batch's matrix products. A module that gets hooks, other members or another forward between two
    calls has its steps found anew."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._steps: dict[nn.Module, list[Step]] = {}
        self._members: list[nn.Module] = []
        self._hooks: list[dict[int, Any]] = []
        self._as_found: list[object] | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """In the block, nobody changes the modules: their steps are found once."""
        if self._as_they_are() != self._as_found:
            self._steps, self._members = {}, list(self.model.modules())
            self._hooks = [hooks for module in self._members for hooks in hooks_of(module)]
            self._as_found = self._as_they_are()
        before, _known.steps = _known.steps, None if any(self._hooks) else self._steps
        try:
            yield
        finally:
            _known.steps = before

    def _as_they_are(self) -> list[object]:
        """What the steps depend on beside hooks."""
        found: list[object] = []
        for module in self._members:
            own = module.__dict__
            found += own["_modules"].values()
            found += (own.get("forward"), own.get("_activation_fn"))
        return found


class Converted(partial[Any]):
    """The ``forward`` of a converted module: a function of the back end and the module."""


def is_converted(module: nn.Module) -> bool:
    """Whether ``module.forward`` is one of the back end's."""
    return isinstance(module.__dict__.get("forward"), Converted)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether ``module`` computes what ``kind`` does: its forward is neither overridden nor replaced."""
    if not isinstance(module, kind) or type(module).forward is not kind.forward:
        return False
    own = module.__dict__.get("forward")
    return own is None or isinstance(own, Converted)


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """The hooks that want to see what goes into or out of ``module``, by kind."""
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook wants to see what goes into or out of ``module``."""
    return any(hooks_of(module))


def any_global_hook() -> bool:
    """Whether a hook of all modules is registered."""
    return bool(torch_module._has_any_global_hook())  # type: ignore[no-untyped-call]


def steps(module: nn.Module) -> list[Step]:
    """What ``module`` does: a linear layer, TorchRec's ``Perceptron`` or ``MLP``, or a ``Sequential``.

    Hooks on ``module`` itself are its caller's; a member with hooks is a step of its own.
    """
    if _known.steps is not None and module in _known.steps:
        return _known.steps[module]
    found: list[Step] = []
    _add(module, found)
    if _known.steps is not None:
        _known.steps[module] = found
    return found


def _add(module: nn.Module, found: list[Step]) -> None:
    if is_plain(module, nn.Linear):
        _extend(found, Layer(module, False))  # type: ignore[arg-type]
    elif is_plain(module, Perceptron):
        _add_perceptron(module, found)
    elif is_plain(module, MLP):
        _add_member(module._mlp, found)  # type: ignore[arg-type]
    else:
        for child in module._modules.values():
            if child is not None:
                _add_member(child, found)


def _add_member(module: nn.Module, found: list[Step]) -> None:
    if is_hooked(module):
        found.append(module)
    elif is_plain(module, nn.ReLU) and found and isinstance(found[-1], Chain):
        found[-1][-1] = found[-1][-1]._replace(relu=True)
    elif isinstance(module, CHAINS) and any(is_plain(module, kind) for kind in CHAINS):
        _add(module, found)
    elif not is_plain(module, nn.Identity):
        found.append(module)


def _add_perceptron(module: Any, found: list[Step]) -> None:
    linear, activation = module._linear, module._activation_fn
    alone = is_hooked(linear) or not is_plain(linear, nn.Linear)
    if isinstance(activation, nn.Module):
        alone = alone or is_hooked(activation)
        relu = is_plain(activation, nn.ReLU)
        alone = alone or not (relu or is_plain(activation, nn.Identity))
    else:
        relu = activation in _RELUS
        alone = alone or not relu
    if alone:
        found.append(module)
    else:
        _extend(found, Layer(linear, relu))


def _extend(found: list[Step], layer: Layer) -> None:
    if found and isinstance(found[-1], Chain):
        found[-1].append(layer)
    else:
        found.append(Chain([layer]))
