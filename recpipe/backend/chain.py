"""Finds chains of linear layers and ReLU in modules, at the time of a call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from math import log
from typing import Any

import torch
from torch import nn
from torchrec.modules.mlp import MLP, Perceptron

from recpipe.backend.choices import FIRST_SHARES
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
        return f"chain {'-'.join(parts)}"


Step = Chain | nn.Module
"""A step: a chain, or a module that is called as it is."""
CHAINS = (nn.Linear, Perceptron, MLP, nn.Sequential)
"""Modules that may be chains of linear layers or contain some."""
_RELUS = (torch.relu, torch.relu_, nn.functional.relu, torch.Tensor.relu)


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


def steps(module: nn.Module) -> list[Step]:
    """What ``module`` does: a linear layer, TorchRec's ``Perceptron`` or ``MLP``, or a ``Sequential``; empty
    if no chain is in it.

    Hooks on ``module`` itself are its caller's; a member with hooks is a step of its own.
    """
    found: list[Step] = []
    _add(module, found)
    return found if any(isinstance(step, Chain) for step in found) else []


class KnownSteps:
    """``steps(module)``, kept from one call to the next, since finding them takes as long as a small batch's
    matrix products. They are found anew once a member has got hooks, other members or another forward."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._known: tuple[list[Step], list[nn.Module], list[object], list[dict[int, Any]]] | None = None
        """The steps, and what they depend on: the members, what ``_as_they_are`` says of them, their hooks.
        In one attribute, since cores that share a batch ask at the same time."""

    def __reduce__(self) -> tuple[type[KnownSteps], tuple[nn.Module]]:
        return KnownSteps, (self.module,)  # a copy finds those of its own module

    def __call__(self) -> list[Step]:
        """The steps now."""
        known = self._known
        if known is not None and not any(known[3]) and _as_they_are(known[1]) == known[2]:
            return known[0]
        found, members = steps(self.module), list(self.module.modules())
        hooks = [hooks for member in members[1:] for hooks in hooks_of(member)]
        self._known = found, members, _as_they_are(members), hooks
        return found


def _as_they_are(members: list[nn.Module]) -> list[object]:
    """What steps depend on beside hooks."""
    found: list[object] = []
    for member in members:
        own = member.__dict__
        found += own["_modules"].values()
        found += (own.get("forward"), own.get("_activation_fn"))
    return found


def _add(module: Any, found: list[Step]) -> None:
    """Append what ``module`` does, in chains as long as possible."""
    layer = None
    if is_plain(module, nn.Linear):
        layer = Layer(module, False)
    elif is_plain(module, Perceptron):
        linear, activation = module._linear, module._activation_fn
        relu, hooked = activation in _RELUS, is_hooked(linear)
        known = relu
        if isinstance(activation, nn.Module):
            relu, hooked = is_plain(activation, nn.ReLU), hooked or is_hooked(activation)
            known = relu or is_plain(activation, nn.Identity)
        if known and not hooked and is_plain(linear, nn.Linear):
            layer = Layer(linear, relu)
        else:
            found.append(module)
    else:
        members = [module._mlp] if is_plain(module, MLP) else module._modules.values()
        for member in members:
            if member is None:
                continue
            if is_hooked(member):
                found.append(member)
            elif is_plain(member, nn.ReLU) and found and isinstance(found[-1], Chain):
                found[-1][-1] = found[-1][-1]._replace(relu=True)
            elif any(is_plain(member, kind) for kind in CHAINS):
                _add(member, found)
            elif not is_plain(member, nn.Identity):
                found.append(member)
    if layer is not None:
        last = found[-1] if found else None
        if isinstance(last, Chain):
            last.append(layer)
        else:
            found.append(Chain([layer]))


class Chooser:
    """Looks up ``choices``; for what was not measured, torch's own way is taken.

    Of several measured batch sizes, the nearest by ratio counts. With ``measured_only``, a part of a model is
    converted only where that was measured to be faster; without it, at every size.
    """

    def __init__(self, choices: Mapping[str, Mapping[str, Mapping[str, str]]], measured_only: bool) -> None:
        self.choices = choices
        self.measured_only = measured_only
        self._known: dict[tuple[str, int, int], str | None] = {}
        self._onednn: dict[tuple[str, int, int], list[bool] | None] = {}

    def onednn(self, layers: Chain, samples: int) -> list[bool] | None:
        """For each of the ``layers`` whether to use oneDNN's own operator with so many samples; None: the
        whole chain is faster as torch has it."""
        key = layers.signature, torch.get_num_threads(), samples
        if key not in self._onednn:
            sizes = [f"{layer.linear.in_features}-{layer.linear.out_features}" for layer in layers]
            ways = [self._faster(f"linear {size}", samples) == "onednn" for size in sizes]
            self._onednn[key] = ways if self.pays(layers.signature, samples) else None
        return self._onednn[key]

    def pays(self, part: str, samples: int) -> bool:
        """Whether to use the back end for a part with this signature."""
        return self.way(part, samples) != "plain"

    def way(self, part: str, samples: int) -> str:
        """How to compute a part with this signature: ``plain``, ``cpu`` or ``loops``."""
        faster = self._faster(part, samples) or "plain"
        return "cpu" if faster == "plain" and not self.measured_only else faster

    def first_share(self, model: str, samples: int) -> float | None:
        """The first core's fraction of an equal share of so many samples; None if cores are not faster."""
        return FIRST_SHARES.get(self._faster(model, samples) or "")

    def is_plain(self, model: str) -> bool:
        """Whether the whole model was faster without any conversion, in the largest batch that was timed."""
        measured = self.choices.get(model, {}).get(str(torch.get_num_threads()), {})
        return bool(measured) and measured[max(measured, key=int)] == "plain"

    def _faster(self, signature: str, samples: int) -> str | None:
        key = signature, torch.get_num_threads(), samples
        if key not in self._known:
            measured = self.choices.get(signature, {}).get(str(key[1]), {})
            nearest = min(measured, key=lambda size: (abs(log(int(size) / samples)), int(size)), default=None)
            self._known[key] = None if nearest is None else measured[nearest]
        return self._known[key]
