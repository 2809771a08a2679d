"""The dense part's optimizer: any class of ``torch.optim`` or of a package, for all parameters or groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from inspect import Parameter, signature
from typing import Any

import torch
from hydra.utils import get_class
from torch import nn
from torch.optim import Optimizer

from recpipe.common.device import explanation
from recpipe.common.validation import fitted, typed
from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.plugin.schedule import Schedule

TARGET = "_target_"
_NO_ARGUMENTS = ("name", TARGET, "match", "schedule", "groups")


@dataclass(frozen=True)
class DenseGroup:
    """Parameters of the dense part that are trained alike; the first one of a recipe has all that are in no
    other."""

    where: str
    """Its place in the recipe."""
    kind: type[Optimizer]
    arguments: Mapping[str, Any]
    globs: tuple[str, ...] = ()
    """Of the parameters' names; empty: of the first group."""
    apart: bool = True
    """Whether it has an optimizer of its own; False: the first group's, with other ``arguments``."""
    schedule: Schedule | None = None

    @property
    def rate(self) -> float | None:
        """The learning rate that the recipe sets, or the class's default; None: it takes none."""
        taken = signature(self.kind).parameters.get("lr")
        rate = self.arguments.get("lr", None if taken is None else taken.default)
        return rate if isinstance(rate, int | float) else None


def dense_groups(config: Mapping[str, Any]) -> list[DenseGroup]:
    """The groups of ``optim.dense``, the one of all other parameters first."""
    first = _group(config, "optim.dense", None)
    others = fitted(list[dict[str, Any]] | None, config.get("groups"), "optim.dense.groups") or ()
    return [first, *(_group(one, f"optim.dense.groups[{n}]", first) for n, one in enumerate(others))]


def _group(config: Mapping[str, Any], where: str, first: DenseGroup | None) -> DenseGroup:
    apart = first is None or "name" in config or TARGET in config
    kind = _class(config, where) if apart or first is None else first.kind
    arguments = {str(key): value for key, value in config.items() if key not in _NO_ARGUMENTS}
    _check_arguments(kind, arguments, where)
    schedule = None if first is None else first.schedule
    if config.get("schedule") is not None:
        schedule = typed(Schedule, config["schedule"], f"{where}.schedule")
    if first is None:
        return DenseGroup(where, kind, arguments, schedule=schedule)
    match = config.get("match")
    globs = (match,) if isinstance(match, str) else tuple(match) if isinstance(match, list) else ()
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise UserError(f"{where}: say which parameters, match: '*.bias' or match: ['*.bias', 'norm*']")
    arguments = arguments if apart else {**first.arguments, **arguments}
    return DenseGroup(where, kind, arguments, globs, apart, schedule)


def _class(config: Mapping[str, Any], where: str) -> type[Optimizer]:
    if config.get(TARGET) is not None:
        target = config[TARGET]
        try:
            found = get_class(str(target))
        except Exception as fault:  # whatever an import raises
            raise UserError(
                f"{where}.{TARGET}: cannot import {shown(target)}: {shown(fault, 200)}"
            ) from fault
        if not (isinstance(found, type) and issubclass(found, Optimizer)):
            raise UserError(f"{where}.{TARGET}: {shown(target)} is no torch.optim.Optimizer")
        return found
    name = str(config.get("name"))
    kinds = {
        n: c
        for n, c in vars(torch.optim).items()
        if isinstance(c, type) and issubclass(c, Optimizer) and c is not Optimizer
    }
    if name not in kinds:
        hint = nearest_or_all(name, sorted(kinds))
        raise UserError(f"{where}.name={shown(name)}: torch.optim has no such optimizer; {hint}")
    return kinds[name]


def _check_arguments(kind: type[Optimizer], arguments: Mapping[str, Any], where: str) -> None:
    takes = signature(kind).parameters
    if any(each.kind is Parameter.VAR_KEYWORD for each in takes.values()):
        return
    for key in arguments:
        if key not in takes or key in ("self", "params"):
            hint = nearest_or_all(key, [knob for knob in takes if knob not in ("self", "params")])
            raise UserError(f"{where}.{shown(key)}: {_called(kind)} takes no such argument; {hint}")


def _called(kind: type) -> str:
    of_torch = getattr(torch.optim, kind.__name__, None) is kind
    return f"torch.optim.{kind.__name__}" if of_torch else f"{kind.__module__}.{kind.__qualname__}"


# -- making it ---------------------------------------------------------------------------------------


def dense_optimizer(
    config: Mapping[str, Any], parameters: Iterable[nn.Parameter], names: Sequence[str] = ()
) -> Optimizer:
    """The optimizer that ``config`` (``optim.dense``) describes over ``parameters``, which have these
    ``names`` in the model (only groups need them).

    It uses the fused implementation, which makes one pass over all parameters, if the optimizer has one for
    their device and the recipe does not choose another (``fused``, ``foreach``, ``differentiable``).
    """
    trained = list(parameters)
    groups = dense_groups(config)
    if len(groups) == 1:
        return _made(groups[0], trained, trained[:1])
    members = _members(groups, dict(zip(names, trained, strict=True)))
    return _several(groups, members, trained[:1])


def _several(
    groups: Sequence[DenseGroup], members: Sequence[list[nn.Parameter]], some: Sequence[nn.Parameter]
) -> Optimizer:
    """One optimizer over ``members`` of each of ``groups``; ``some``: any parameter, for their device."""
    of_first = [n for n, group in enumerate(groups) if not group.apart or not n]
    given = [{**(groups[n].arguments if n else {}), "params": members[n]} for n in of_first]
    first = _made(groups[0], given, some)
    others = {n: _made(groups[n], members[n], some) for n in range(len(groups)) if n not in of_first}
    if not others:
        return first
    return Together([(first, of_first), *((made, [n]) for n, made in others.items())])


def _members(groups: Sequence[DenseGroup], named: Mapping[str, nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters of each group; the first one that matches counts. ``UserError`` for a glob that matches
    none."""
    members: list[list[nn.Parameter]] = [[] for _ in groups]
    for name, parameter in named.items():
        matching = (n for n, g in enumerate(groups) if any(fnmatchcase(name, glob) for glob in g.globs))
        members[next(matching, 0)].append(parameter)
    for group in groups:
        for glob in group.globs:
            if not any(fnmatchcase(name, glob) for name in named):
                raise UserError(
                    f"{group.where}.match={shown(glob)}: no such parameter; "
                    f"{nearest_or_all(glob, list(named))}"
                )
    return members


def _made(group: DenseGroup, parameters: Any, some: Sequence[nn.Parameter]) -> Optimizer:
    kind, knobs = group.kind, dict(group.arguments)
    takes = signature(kind).parameters
    if "fused" in takes and not knobs.keys() & {"fused", "foreach", "differentiable"}:
        # False instead of None would also rule out torch's pass over all parameters at once (foreach).
        device = some[0].device.type if some else "cpu"
        knobs["fused"] = _has_fused(kind, device) or None  # type: ignore[arg-type]
    try:
        return kind(parameters, **knobs)
    except (TypeError, ValueError) as fault:
        raise UserError(
            f"{group.where}: {_called(kind)} does not take {shown(knobs, 80)}: {shown(fault, 200)}"
        ) from fault


@cache
def _has_fused(kind: type[Optimizer], device: str) -> bool:
    """Whether ``kind`` has a fused implementation for ``device``; torch 2.11 lacks Adagrad's for a GPU."""
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.ones_like(parameter)
    try:
        kind([parameter], fused=True).step()  # type: ignore[call-arg]
    except RuntimeError:
        return False
    return True


class Together(Optimizer):
    """Several optimizers as one, which has all their groups and their state.

    ``parts``: each with the numbers of its groups here.
    """

    def __init__(self, parts: Sequence[tuple[Optimizer, Sequence[int]]]) -> None:
        every = [parameter for part, _ in parts for g in part.param_groups for parameter in g["params"]]
        super().__init__(every, {})
        self.parts = list(parts)
        self.defaults = parts[0][0].defaults
        numbered = [pair for part, own in parts for pair in zip(own, part.param_groups, strict=True)]
        self.param_groups = [group for _, group in sorted(numbered, key=lambda pair: pair[0])]
        for part, _ in parts:
            self.state.update(part.state)  # some begin with it
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Hand loaded groups and state on to the parts."""
        super().__setstate__(state)
        for part, own in self.parts:
            part.__setstate__({"state": self.state, "param_groups": [self.param_groups[n] for n in own]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """A step of each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, _ in self.parts:
            part.step()
        return loss


def name_of(optimizer: Optimizer) -> str:
    """The classes that make its steps."""
    parts = [part for part, _ in optimizer.parts] if isinstance(optimizer, Together) else [optimizer]
    return ", ".join(type(part).__name__ for part in parts)


def try_out(config: Mapping[str, Any], device: torch.device) -> None:
    """Try one step of each optimizer over a matrix and a vector, like the dense part's parameters.

    torch checks some arguments only in a step, and not every optimizer can train such parameters: one for
    matrices alone needs groups that leave it no others.
    """
    groups = dense_groups(config)
    for group in groups:
        matrix, vector = (nn.Parameter(torch.zeros(shape, device=device)) for shape in ((2, 2), (2,)))
        try:
            _try(group, [matrix, vector])
        except UserError as fault:
            _try(group, [matrix])
            if len(groups) == 1:
                raise UserError(
                    f"{group.where}: {_called(group.kind)} trains matrices alone, and the dense part has "
                    "vectors, too: give those an optimizer of their own, "
                    "optim.dense.groups=[{match: ['*.bias', '*norm*'], name: AdamW, lr: 0.001}]"
                ) from fault


def _try(group: DenseGroup, parameters: list[nn.Parameter]) -> None:
    optimizer = _made(group, parameters, parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except Exception as fault:  # torch can raise anything for values that it has not checked
        if explanation(str(fault)) is not None:  # the GPU is at fault
            raise
        raise UserError(
            f"{group.where}: {_called(group.kind)} cannot train the dense part ({shown(fault, 200)}); "
            "choose another optimizer or other arguments, as in conf/optim"
        ) from fault
