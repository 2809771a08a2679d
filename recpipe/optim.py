"""Optimizers from one yaml: fused ones for the tables, any of ``torch.optim`` for the dense part."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn

from recpipe.errors import UserError


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
        near = difflib.get_close_matches(name, kinds, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(sorted(kinds))}"
        raise UserError(f"optim.dense.name={name}: torch.optim has no such optimizer; {hint}")
    takes = signature(kinds[name]).parameters
    if "fused" in takes and not knobs.keys() & {"fused", "foreach", "differentiable"}:
        knobs["fused"] = True
    try:
        return kinds[name](parameters, **knobs)
    except (TypeError, ValueError) as fault:
        raise UserError(f"optim.dense: torch.optim.{name} does not take {knobs}: {fault}") from fault
