"""What is judged of a run with a plugin, beside a run without it: the model, the tables and the final
parameters, whether the technique took place, what it leaves in the process, and whether it can be resumed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin.api import Contribution, Invariant
from recpipe.testing.process import NAMELESS
from recpipe.testing.runs import Trained
from recpipe.testing.samples import Epoch, faults
from recpipe.testing.watch import Moves, Step

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
    own, theirs = (
        {name: value for name, value in run.parameters.items() if name.startswith(DENSE)}
        for run in (mine, plain)
    )
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
    own, theirs = (
        {name: value for name, value in run.parameters.items() if not name.startswith(DENSE)}
        for run in (mine, plain)
    )
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


REMEDY = "the technique did not take place; give the suite knobs or overrides with which it does"


_OF_SAMPLES = (Invariant.SAMPLE_SET, Invariant.SAMPLE_ORDER, Invariant.BATCH_SIZE, Invariant.ID_SPACE)


def idle(plugin: str, parts: Contribution, mine: Trained, pins: bool) -> Iterator[str]:
    """Parts of the plugin that did nothing in the run, each with a remedy."""
    steps = mine.record.steps
    tiers = mine.report["recipe"]["tiers"]
    words = " ".join(f"tiers.{key}={tiers[key]}" for key in ("policy", "resident_bytes"))
    run = f"{len(steps)} batches under {words}"
    if parts.splitter is not None and not any(len(step.bounds) > 1 for step in steps):
        yield (
            f"its splitter cut none of {run}; it can where some samples of a batch need cold rows and others "
            'do not: try overrides = ("tiers.policy=lfu", "tiers.resident_bytes=60%"), or a smaller budget '
            "where too few samples need cold rows"
        )
    groups = mine.report["assembly"]["tiers"]["groups"]
    owned = [number for number, group in enumerate(groups) if group["cache"] == plugin]
    moves = [step.moves[number] for step in steps if step.moves for number in owned]
    tiered = [each for each in moves if each is not None]
    if not tiered:
        return
    if not any(len(each["placed"]) for each in tiered):
        yield f"its cache placed no row in {run}; set knobs with which it decides within so few batches"
    elif not pins and not any((each["evicted"] >= 0).any() for each in tiered):
        yield (
            f"its cache evicted no row in {run}; set a smaller budget, "
            'overrides = ("tiers.resident_bytes=10%",), or pins = True where it never evicts'
        )


def kept(mine: Trained, plain: Trained, epoch: Epoch, alters: Collection[Invariant]) -> Iterator[Invariant]:
    """Invariants that the plugin declares to alter although the run kept them."""
    for invariant in _OF_SAMPLES:
        others = set(alters) - {invariant}
        if invariant in alters and not any(
            found is invariant for found, _ in faults(mine.record, epoch, others)
        ):
            yield invariant
    if Invariant.EXACT_GRADIENT in alters and same_samples(mine, plain):
        apart = furthest(mine, plain, 0.0)
        if not apart.most:
            yield Invariant.EXACT_GRADIENT


_MOMENTS = [
    f"{moment} with other random numbers of {whose}"
    for moment in ("begins", "ends")
    for whose in ("Python's", "numpy's", "torch's")
]


def traces(mine: Trained, plain: Trained, after: int = 0) -> Iterator[str]:
    """What ``mine`` changes while it trains, what it leaves, and where it disturbs random numbers; ``after``:
    the step from which it was resumed."""
    for what, step in mine.record.changed.items():
        if what not in plain.record.changed:
            yield f"it {what}, first seen in step {step}"
    # Ranks meet over sockets, how many depends on who has work to share; their process's end closes them.
    meets = mine.report["ranks"]["world"] > 1 or mine.report["assembly"]["sharded"]
    for what in mine.left:
        if what not in plain.left and not (meets and NAMELESS in what):
            yield f"a run with it {what}"
    steps = zip(mine.record.steps, plain.record.steps[after:], strict=False)
    for number, (own, theirs) in enumerate(steps, after + 1):
        # A resumed run gets the checkpoint's random numbers when its first step has begun.
        known = 3 if after and number == after + 1 else 0
        for moment, found, expected in zip(
            _MOMENTS[known:], own.random[known:], theirs.random[known:], strict=True
        ):
            if found != expected:
                yield f"step {number} {moment} than without it"
                return


ELSEWHERE = "what later decisions depend on must be in state_dict()"


def resumed_faults(whole: Trained, rest: Trained, step: int, moves: bool = True) -> Iterator[str]:
    """The first bitwise differences between ``whole`` and ``rest``, which was resumed after ``step``.

    ``moves`` False: micro-batches and the rows that are moved may differ.
    """
    expected, found = whole.record.steps[step:], rest.record.steps
    if len(expected) != len(found):
        yield f"it trains {len(found)} steps, not {len(expected)}"
    for number, (own, theirs) in enumerate(zip(found, expected, strict=False), step + 1):
        difference = _difference(own, theirs, moves)
        if difference:
            yield f"step {number} {difference} than in the run that never stopped: {ELSEWHERE}"
            return
    for name, value in whole.parameters.items():
        if not np.array_equal(rest.parameters[name], value):
            yield f"{name} does not end with the bits of the run that never stopped"
            return


def _difference(own: Step, theirs: Step, moves: bool) -> str:
    """In what two runs of a step differ; empty if in nothing."""
    if not np.array_equal(np.sort(own.content), np.sort(theirs.content)):
        return "trains other samples"
    if not np.array_equal(own.content, theirs.content):
        return "trains its samples in another order"
    if moves and own.bounds != theirs.bounds:
        return f"has other micro-batches ({own.bounds}, not {theirs.bounds})"
    if moves and not all(_same(a, b) for a, b in zip(own.moves, theirs.moves, strict=True)):
        return "moves other rows between the tiers"
    if own.loss != theirs.loss:
        return "has another loss"
    return ""


def _same(own: Moves | None, theirs: Moves | None) -> bool:
    if own is None or theirs is None:
        return own is theirs
    return all(np.array_equal(own[name], value) for name, value in theirs.items())
