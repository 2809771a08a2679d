"""Optimizers from one yaml: fused ones for the tables, any of ``torch.optim`` for the dense part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn

from recpipe.embedding.tables import TableOptimizer
from recpipe.errors import UserError, nearest_or_all, shown

Argument = bool | int | float | str | list[float] | None
"""What yaml can give an optimizer of ``torch.optim``."""


@dataclass(frozen=True)
class OptimConfig:
    """``conf/optim``: the optimizer fused into the tables, and name and arguments of the dense part's."""

    tables: TableOptimizer
    dense: dict[str, Argument]


def dense_optimizer(config: Mapping[str, Any], parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """``torch.optim.<config['name']>`` over ``parameters``; the other keys are its keyword arguments.

    The fused implementation, one pass over all parameters, where the optimizer has one and the recipe does
    not choose another (``fused``, ``foreach``, ``differentiable``).
    """
    knobs = {str(k): v for k, v in config.items() if k != "name"}
    name = str(config.get("name"))
    kinds = {
        n: c
        for n, c in vars(torch.optim).items()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
    }
    if name not in kinds or name == "Optimizer":
        hint = nearest_or_all(name, sorted(kinds))
        raise UserError(f"optim.dense.name={shown(name)}: torch.optim has no such optimizer; {hint}")
    takes = signature(kinds[name]).parameters
    if "fused" in takes and not knobs.keys() & {"fused", "foreach", "differentiable"}:
        knobs["fused"] = True
    try:
        return kinds[name](parameters, **knobs)
    except (TypeError, ValueError) as fault:
        raise UserError(
            f"optim.dense: torch.optim.{name} does not take {shown(knobs, 80)}: {shown(fault, 200)}"
        ) from fault


def try_out(config: Mapping[str, Any], device: torch.device) -> None:
    """One step of ``dense_optimizer`` over a matrix and a vector, as the dense part has them.

    torch checks some arguments only then, and not every optimizer can train such parameters in this way.
    """
    parameters = [nn.Parameter(torch.zeros(shape, device=device)) for shape in ((2, 2), (2,))]
    optimizer = dense_optimizer(config, parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except Exception as fault:  # whatever torch makes of values that it has not checked
        raise UserError(
            f"optim.dense: torch.optim.{config['name']} cannot train the dense part ({shown(fault, 200)}); "
            "choose another optimizer or other arguments, as in conf/optim"
        ) from fault
