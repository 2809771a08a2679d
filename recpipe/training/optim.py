"""Optimizers of a recipe: those of the tables' rows, and any of ``torch.optim`` for the dense part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from inspect import signature
from typing import Annotated, Any

import torch
import torchrec.optim
from pydantic import BeforeValidator
from torch import nn

from recpipe.common.device import explanation
from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.plugin.tables import FROZEN, KNOBS, TableOptimizer

Argument = bool | int | float | str | list[float] | None
"""The types of arguments that yaml can give an optimizer of ``torch.optim``."""


def _named(values: object) -> object:
    """``values`` of one table's optimizer; a rate of 0 freezes the table under any optimizer, so that it
    needs no name."""
    frozen = isinstance(values, Mapping) and "name" not in values and values.get("lr") in (0, "0", "0.0")
    return {"name": FROZEN.name, **values} if frozen else values  # type: ignore[dict-item]


@dataclass(frozen=True)
class OptimConfig:
    """``conf/optim``: the tables' optimizer, and the name and arguments of the dense part's."""

    tables: TableOptimizer
    dense: dict[str, Argument]
    by_table: dict[str, Annotated[TableOptimizer, BeforeValidator(_named)]] | None = None
    """Optimizers for tables whose name matches a glob, instead of ``tables``; the first match counts."""

    def of_table(self, name: str, weights: torch.Tensor) -> TableOptimizer:
        """The optimizer of a table: ``FROZEN`` if its weights require no gradient or its rate is 0. Otherwise
        the one in ``by_table``, else the one that the model has attached to its weights
        (``apply_optimizer_in_backward``), else that of all tables."""
        if not weights.requires_grad:
            return FROZEN
        named = next((own for glob, own in (self.by_table or {}).items() if fnmatchcase(name, glob)), None)
        chosen = named or _attached(name, weights) or self.tables
        return FROZEN if chosen.frozen else chosen

    def check_tables(self, names: Sequence[str]) -> None:
        """``UserError`` for a glob of ``by_table`` that matches none of the tables' ``names``."""
        for glob in self.by_table or ():
            if not any(fnmatchcase(name, glob) for name in names):
                raise UserError(f"optim.by_table.{shown(glob)}: no such table; {nearest_or_all(glob, names)}")


DECOUPLED = {"weight_decay_mode": "decouple"}
ATTACHED: dict[type, tuple[str, dict[str, Any]]] = {
    torch.optim.SGD: ("sgd", {}),
    torch.optim.Adagrad: ("adagrad", {}),
    torch.optim.Adam: ("adam", {}),
    torch.optim.AdamW: ("adam", DECOUPLED),
    torchrec.optim.SGD: ("sgd", {}),
    torchrec.optim.Adagrad: ("adagrad", {}),
    torchrec.optim.RowWiseAdagrad: ("rowwise_adagrad", {}),
    # FBGEMM's, which these stand for, have decoupled decay and a rate of 0.01 where nothing else is said.
    torchrec.optim.Adam: ("adam", DECOUPLED),
    torchrec.optim.PartialRowWiseAdam: ("partial_rowwise_adam", DECOUPLED),
    torchrec.optim.LAMB: ("lamb", DECOUPLED),
    torchrec.optim.PartialRowWiseLAMB: ("partial_rowwise_lamb", DECOUPLED),
}
"""The classes that a model may attach to a table: the name of the tables' optimizer, and what it is given."""


def _attached(name: str, weights: torch.Tensor) -> TableOptimizer | None:
    """The optimizer that ``apply_optimizer_in_backward`` has attached to a table's weights."""
    classes = getattr(weights, "_optimizer_classes", None)
    if not classes:
        return None
    (kind, *others), (knobs, *_) = classes, weights._optimizer_kwargs  # type: ignore[attr-defined]
    own, also = ATTACHED.get(kind, ("", {}))
    takes = {"lr", "eps", *KNOBS.get(own, ())}
    defaults = {n: p.default for n, p in signature(kind).parameters.items()}
    values = {"lr": 0.01} | {n: value for n, value in _apart(defaults).items() if n in takes} | _apart(knobs)
    unknown = {n for n, value in values.items() if n not in takes and value != defaults.get(n, knobs)}
    if others or not own or unknown:
        what = f"{kind.__name__} with {', '.join(sorted(unknown))}" if own and unknown else kind.__name__
        raise UserError(
            f"table '{name}': the model attaches {what}, and tables are updated by one of "
            f"{', '.join(sorted({each.__name__ for each in ATTACHED}))} with "
            f"{', '.join(sorted(takes)) if own else 'their arguments'}; set optim.by_table, or attach one of "
            "these"
        )
    given: dict[str, Any] = {
        n: float(value) for n, value in values.items() if n in takes and value is not None
    }
    return TableOptimizer(own, **given, **(also if given.get("weight_decay") else {}))


def _apart(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """``knobs`` with ``betas`` as ``beta1`` and ``beta2``."""
    others = {name: value for name, value in knobs.items() if name != "betas"}
    pair = knobs.get("betas")
    return others if pair is None else {**others, "beta1": pair[0], "beta2": pair[1]}


def dense_optimizer(config: Mapping[str, Any], parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """``torch.optim.<config['name']>`` over ``parameters``; the other keys are its keyword arguments.

    It uses the fused implementation, which makes one pass over all parameters, if the optimizer has one for
    their device and the recipe does not choose another (``fused``, ``foreach``, ``differentiable``).
    """
    parameters = list(parameters)
    knobs = {str(k): v for k, v in config.items() if k != "name"}
    name = str(config.get("name"))
    kinds = {
        n: c
        for n, c in vars(torch.optim).items()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer
    }
    if name not in kinds:
        hint = nearest_or_all(name, sorted(kinds))
        raise UserError(f"optim.dense.name={shown(name)}: torch.optim has no such optimizer; {hint}")
    takes = signature(kinds[name]).parameters
    for key in knobs:
        if key not in takes or key in ("self", "params"):
            hint = nearest_or_all(key, [knob for knob in takes if knob not in ("self", "params")])
            raise UserError(f"optim.dense.{shown(key)}: torch.optim.{name} takes no such argument; {hint}")
    if "fused" in takes and not knobs.keys() & {"fused", "foreach", "differentiable"}:
        # False instead of None would also rule out torch's pass over all parameters at once (foreach).
        knobs["fused"] = _has_fused(name, parameters[0].device.type if parameters else "cpu") or None
    try:
        return kinds[name](parameters, **knobs)
    except (TypeError, ValueError) as fault:
        raise UserError(
            f"optim.dense: torch.optim.{name} does not take {shown(knobs, 80)}: {shown(fault, 200)}"
        ) from fault


@cache
def _has_fused(name: str, device: str) -> bool:
    """Whether ``name`` has a fused implementation for ``device``; torch 2.11 lacks Adagrad's for a GPU."""
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.ones_like(parameter)
    try:
        getattr(torch.optim, name)([parameter], fused=True).step()
    except RuntimeError:
        return False
    return True


def try_out(config: Mapping[str, Any], device: torch.device) -> None:
    """Try one step of ``dense_optimizer`` over a matrix and a vector, like the dense part's parameters.

    torch checks some arguments only in a step, and not every optimizer can train such parameters.
    """
    parameters = [nn.Parameter(torch.zeros(shape, device=device)) for shape in ((2, 2), (2,))]
    optimizer = dense_optimizer(config, parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except Exception as fault:  # torch can raise anything for values that it has not checked
        if explanation(str(fault)) is not None:  # the GPU is at fault
            raise
        raise UserError(
            f"optim.dense: torch.optim.{config['name']} cannot train the dense part ({shown(fault, 200)}); "
            "choose another optimizer or other arguments, as in conf/optim"
        ) from fault
