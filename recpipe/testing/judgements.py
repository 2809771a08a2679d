"""Whether a run has the model, the tables and the final parameters of a run without plugins."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.api import Invariant
from recpipe.testing.runs import Trained

Parameters = Mapping[str, NDArray[Any]]
DENSE = "dense/"
"""Prefix of the names of dense parameters; the others are tables and their optimizers' states."""
LOSSES = 1e-5
"""How far two losses of the same samples may be apart."""
FIGURES = {"logloss": LOSSES, "loss": LOSSES, "ne": 10 * LOSSES, "auc": 10 * LOSSES}
"""How far figures of the same held-out samples may be apart; a pair of scores that changes places moves the
AUC by one in the number of pairs."""


def same_samples(mine: Trained, other: Trained, steps: int | None = None) -> bool:
    """Whether both runs trained the same samples in each of the first ``steps`` steps, in any order within a
    step. None: in all steps, and equally many of them."""
    own, theirs = mine.record.steps[:steps], other.record.steps[:steps]
    pairs = zip(own, theirs, strict=False)
    return len(own) == len(theirs) and all(
        np.array_equal(np.sort(a.content), np.sort(b.content)) for a, b in pairs
    )


def model_faults(mine: Trained, plain: Trained) -> Iterator[str]:
    """How the model, its first parameters or its loss differ from the recipe's. ``plain`` is a run without
    the plugin that trained the same samples in its first step."""
    own, theirs = _dense(mine.parameters), _dense(plain.parameters)
    if own.keys() != theirs.keys():
        yield f"its dense parameters are {_names(own)}, not {_names(theirs)}"
        return
    for name, value in theirs.items():
        if own[name].shape != value.shape:
            yield f"{name} is {own[name].shape}, not {value.shape}"
            return
    for name, value in plain.record.first.items():
        if not np.array_equal(mine.record.first.get(name, value), value):
            yield f"{name} begins with other values"
            return
    loss, expected = mine.record.steps[0].loss, plain.record.steps[0].loss
    if not abs(loss - expected) <= LOSSES * max(1.0, abs(expected)):
        yield f"the loss of the first step is {loss:.7g}, not {expected:.7g}"


def layout_faults(mine: Trained, plain: Trained) -> Iterator[str]:
    """How the tables' names, shapes or types differ."""
    own = {name: value for name, value in mine.parameters.items() if not name.startswith(DENSE)}
    theirs = {name: value for name, value in plain.parameters.items() if not name.startswith(DENSE)}
    if own.keys() != theirs.keys():
        yield f"its tables are {_names(own)}, not {_names(theirs)}"
        return
    for name, value in theirs.items():
        if own[name].shape != value.shape:
            yield f"{name} is {own[name].shape}, not {value.shape}"
        elif _in_half(own[name]) and not _in_half(value):
            yield f"{name} holds no value that 16 bits could not: it was not stored in float32"


@dataclass(frozen=True)
class Apart:
    """The largest difference between the parameters of two runs, and the parameter that has it."""

    most: float
    name: str = ""
    values: int = 0
    """How many of that parameter's values are more than the tolerance apart."""


def furthest(mine: Trained, plain: Trained, tolerance: float) -> Apart:
    """The largest difference over all parameters that both runs have in the same shape, optimizer states
    included."""
    found = Apart(0.0)
    for name, value in plain.parameters.items():
        other = mine.parameters.get(name)
        if other is None or other.shape != value.shape or not value.size:
            continue
        apart = np.abs(other.astype(np.float64) - value)
        most = float(apart.max()) if not np.isnan(apart).any() else math.inf
        if most > found.most:
            found = Apart(most, name, int((apart > tolerance).sum()))
    return found


def update_faults(mine: Trained, plain: Trained, tolerance: float) -> Iterator[str]:
    """How the losses of steps, the final parameters or the evaluations differ. ``plain`` is a run without the
    plugin that trained the same samples in each step."""
    apart = furthest(mine, plain, tolerance)
    if apart.most > tolerance:
        yield (
            f"after {len(mine.record.steps)} steps {apart.name} is up to {apart.most:.2g} from its values "
            f"without the plugin, on the same samples; {apart.values:,} of them are more than {tolerance:g} "
            "apart"
        )
    for number, (own, theirs) in enumerate(zip(mine.record.steps, plain.record.steps, strict=True), 1):
        if not abs(own.loss - theirs.loss) <= LOSSES * max(1.0, abs(theirs.loss)):
            yield f"the loss of step {number} is {own.loss:.7g}, and {theirs.loss:.7g} without it"
            break
    for figure, limit in FIGURES.items():
        found, expected = mine.report["quality"].get(figure), plain.report["quality"].get(figure)
        if found is not None and expected is not None and not abs(found - expected) <= limit:
            yield f"the held-out {figure} is {found:.7g}, and {expected:.7g} of the run without it"


def comparable(alters: Collection[Invariant]) -> bool:
    """Whether a run without plugins that trains the same samples must end with the same parameters."""
    return not {Invariant.EXACT_GRADIENT, Invariant.MODEL, Invariant.TABLE_LAYOUT} & set(alters)


def _dense(parameters: Parameters) -> Parameters:
    return {name: value for name, value in parameters.items() if name.startswith(DENSE)}


def _names(parameters: Parameters) -> str:
    return ", ".join(sorted(parameters)) or "none"


def _in_half(values: NDArray[Any]) -> bool:
    """Whether every value can be written in float16, or every value in bfloat16."""
    if not values.any():
        return False
    single = np.ascontiguousarray(values, np.float32)
    with np.errstate(over="ignore"):
        half = single.astype(np.float16).astype(np.float32)
    return bool(np.array_equal(half, single) or not (single.view(np.uint32) & 0xFFFF).any())
