"""How many rows an exported program takes for features that are not pooled: any number, as many as for
another feature, or one for each sample.

Compiled code does not check sizes, so a loader must refuse ids that the program was not made for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from torch.export import ExportedProgram

from recpipe.answers.stand_ins import Lookup
from recpipe.errors import UserError, shown

_T = TypeVar("_T")
_Member: TypeAlias = tuple[str, str]
"""``feature`` or ``size``, and its name."""
_SAMPLES = ("samples", "")


@dataclass(frozen=True)
class Alike:
    """Features whose numbers of ids depend on each other."""

    single: tuple[str, ...] = ()
    """Which have exactly one id for each sample."""
    aligned: tuple[tuple[str, ...], ...] = ()
    """Groups of features; those of a group have as many ids as each other for each sample."""


def counts_of(program: ExportedProgram, lookups: Sequence[Lookup]) -> Alike:
    """What ``program`` asks for; ``UserError`` if it takes certain numbers of samples or rows alone."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    sizes = [nodes[str(name)].meta["val"].shape[0] for name in program.graph_signature.user_inputs]
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    ends = (sizes[0], output.args[0][0].meta["val"].shape[0])
    every: list[set[_Member]] = [{_SAMPLES, _free(program, size, "samples")} for size in ends]
    inputs = iter(sizes[1:])
    for lookup in lookups:
        size = next(inputs)
        if lookup.sequence:
            ((feature, _),) = lookup.parts
            every.append({("feature", feature), _free(program, size, f"rows of '{shown(feature)}'")})
            every.append({_SAMPLES, _free(program, next(inputs), "samples")})
    single: tuple[str, ...] = ()
    aligned = []
    for members in joined(every):
        features = tuple(sorted(name for kind, name in members if kind == "feature"))
        if _SAMPLES in members:
            single = features
        elif len(features) > 1:
            aligned.append(features)
    return Alike(single, tuple(sorted(aligned)))


def _free(program: ExportedProgram, size: object, what: str) -> _Member:
    """A dynamic size; ``UserError`` if it is not free."""
    expression = getattr(getattr(size, "node", None), "expr", None)
    if expression is None or not expression.is_symbol:
        raise UserError(f"it takes {size} {what} alone, not any number")
    bounds = program.range_constraints.get(expression)
    if bounds is not None and (bounds.lower > 1 or bounds.upper < 2**31):
        raise UserError(f"it takes {bounds.lower} to {bounds.upper} {what} alone, not any number")
    return "size", str(expression)


def joined(sets: Iterable[set[_T]]) -> list[set[_T]]:
    """Sets that share a member, put together."""
    found: list[set[_T]] = []
    for new in sets:
        apart = [old for old in found if not old & new]
        found = [*apart, new.union(*(old for old in found if old & new))]
    return found
