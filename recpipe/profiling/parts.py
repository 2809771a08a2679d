"""Assigns modules to the parts of a training step, named as phases and floors are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torchrec.models.deepfm import FMInteractionArch
from torchrec.models.dlrm import InteractionArch, InteractionDCNArch, InteractionProjectionArch
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet
from torchrec.modules.deepfm import FactorizationMachine
from torchrec.modules.mlp import MLP, Perceptron

from recpipe.backend.chain import Converted, steps
from recpipe.common.timing import phase
from recpipe.tables.front import Front

LAYERS = (nn.Linear, Perceptron, MLP)
INTERACTIONS = (
    InteractionArch,
    InteractionDCNArch,
    InteractionProjectionArch,
    CrossNet,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    VectorCrossNet,
    FactorizationMachine,
    FMInteractionArch,
)
"""TorchRec's modules that combine features."""


def part_name(module: nn.Module) -> str | None:
    """``embedding``, ``interaction`` or ``MLP``; None for any other module, whose own work counts as
    ``dense``."""
    if isinstance(module, Front):
        return "embedding"
    if isinstance(module, INTERACTIONS):
        return "interaction"
    return "MLP" if isinstance(module, LAYERS) or _is_mlp(module) else None


def _is_mlp(module: nn.Module) -> bool:
    """Whether ``module`` is a ``Sequential`` of linear layers and modules without parameters."""
    if not isinstance(module, nn.Sequential):
        return False
    found = steps(module)
    others = [step for step in found if isinstance(step, nn.Module)]
    return len(others) < len(found) and not any(True for other in others for _ in other.parameters())


class _Told(Converted):
    """Replaces a module's ``forward`` while phases are recorded; a module converted by the back end stays
    so."""


def tell_parts(model: nn.Module) -> Callable[[], None]:
    """Record the forward pass of each part of ``model`` as a phase from now on; returns a function that ends
    it.

    No module may be running when it is called.
    """
    before: dict[nn.Module, Any] = {}
    for module in model.modules():
        part = part_name(module)
        if part is not None:
            before[module] = module.__dict__.get("forward")
            module.forward = _Told(_in_phase, f"{part} forward", module.forward)

    def end() -> None:
        for module, forward in before.items():
            del module.forward
            if forward is not None:
                module.forward = forward

    return end


def _in_phase(name: str, forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with phase(name):
        return forward(*arguments, **named)
