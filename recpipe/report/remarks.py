"""The remarks under the tables of a comparison: the meaning of marks, faults, the effect of one rounding."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from recpipe.report import figures
from recpipe.report.compared import FACTOR
from recpipe.report.figures import shown_figures


def labelled(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Label, Mapping[str, Any]]]:
    """All rows of compare.json with their labels, marked with ``~`` if no cache was full, ``*`` if the row
    alters what is trained, and ``!`` if it has a fault."""
    marks = [
        "~" * bool(row["cold_start"]) + "*" * bool(row["altered_in_run"]) + "!" * bool(_faults(row))
        for row in rows
    ]
    return list(zip(labels([row["name"] for row in rows], marks), rows, strict=True))


def notes(content: Mapping[str, Any]) -> list[str]:
    """Lines under the tables of compare.json's ``content``: the meaning of columns and marks, how certain the
    figures are, and the effect of rounding. What is true of several rows is one line."""
    rows = content["rows"]
    named = [(label.line, row) for label, row in labelled(rows)]
    cold = _together((name, row["cold_start"]) for name, row in named)
    found = [f"~ {name}: cold start only, {why}; a longer run shows more" for name, why in cold]
    for name, what in _together((name, ", ".join(row["altered_in_run"])) for name, row in named):
        found.append(f"* {name}: alters {what}, so that parameters need not equal other rows'")
    judged = [(name, row) for name, row in named if row["judged"] and not row["altered_in_run"]]
    for name, what in _together((name, " nor ".join(row["altered"])) for name, row in judged):
        found.append(f"{name}: altered no {what} in these runs, and is judged as exact")
    found += [f"! {fault}" for fault in faults(content)]
    verdicts = _together((name, text) for name, row in named for text in row["verdicts"].values())
    found += [f"{name}: {verdict}" for name, verdict in verdicts]
    emulated = dict.fromkeys(figures.emulated(row["emulate"]) for row in rows if row["emulate"])
    found += [f"tiers.emulate: the cold tier is slowed by {delays}" for delays in emulated]
    found += [how_measured(content), *_seeds(content)]
    shares = [row["others_cpu_share"] for row in rows if row["others_cpu_share"] is not None]
    if warning := figures.disturbed(max(shares, default=None), "a run"):
        found.append(f"{warning}: trust the ratios' intervals more than the speeds")
    if content["rounding"] is not None:
        found.append(_rounding(content))
    return found


def _together(named: Iterable[tuple[str, str | None]]) -> list[tuple[str, str]]:
    """Texts that are not empty, each once with the names of all that have it."""
    found: dict[str, list[str]] = {}
    for name, text in named:
        if text:
            found.setdefault(text, []).append(name)
    return [("; ".join(dict.fromkeys(names)), text) for text, names in found.items()]


def how_far(content: Mapping[str, Any]) -> str:
    """The number of rounds, and what ended them."""
    warmup, counted, minutes = content["warmup"], content["counted"], content["minutes"]
    rounds = "1 round" if counted == 1 else f"{counted} rounds"
    if warmup:
        rounds += f" after {warmup} of warm-up, left out"
    if not counted and any(row["samples_per_second"]["median"] for row in content["rows"]):
        rounds = f"the warm-up alone ({rounds.replace('left out', 'whose speeds these are')})"
    return f"{rounds}; ended by compare.minutes={minutes:g}" if content["out_of_time"] else rounds


def how_measured(content: Mapping[str, Any]) -> str:
    """The kind of speed, and the number of rounds."""
    first = labelled(content["rows"])[0][0].line
    text = (
        f"{how_far(content)}; speed, ratio (to {first}, in the same round) and its "
        "interval over all steps; steady: without the first steps; start to end: from process start to rows "
        "written back; memory: resident rows and all beside them"
    )
    if (wanted := content["precision"]) is None:
        return text
    reached = "reached" if content["precise"] else "not reached"
    return f"{text}; {100 * wanted:g}% precision of the ratios {reached}"


def _seeds(content: Mapping[str, Any]) -> list[str]:
    """Quality over several seeds, with its interval."""
    if content["seeds"] < 2:
        return []
    found = [f"quality: means over {content['seeds']} seeds"]
    for label, row in labelled(content["rows"])[1:]:
        parts = [
            f"{key} {figures.signed(row[f'{key}_difference'])} "
            f"({', '.join(figures.signed(end) for end in row[f'{key}_difference_interval'])})"
            f"{f' {sure}' if (sure := row.get(f'{key}_verdict')) else ''}"
            for key in shown_figures(content["rows"])
            if row.get(f"{key}_difference_interval")
        ]
        if parts:
            found.append(f"{label.line}: {'; '.join(parts)}, differences and their 95% intervals")
    return found


def _rounding(content: Mapping[str, Any]) -> str:
    rounding = content["rounding"]
    names = shown_figures(content["rows"])
    lines = {row["name"]: label.line for label, row in labelled(content["rows"])}
    quality = (f"{key} {figures.signed(rounding.get(f'{key}_difference'), 6)}" for key in names)
    return (
        f"one rounding of every first weight moves the parameters of {lines[rounding['name']]} by "
        f"{_both(rounding, '')} and its {', '.join(quality)}; exact rows may differ by "
        f"{_both(rounding, 'allowed_')}, {FACTOR:g} times that"
    )


def faults(content: Mapping[str, Any]) -> list[str]:
    """A line for each row that failed, that is not exact although it must be, or whose evaluation is not the
    model's."""
    return [line for row in content["rows"] for line in _faults(row)]


def _faults(row: Mapping[str, Any]) -> list[str]:
    found = []
    if row["failed"] is not None:
        found.append(str(row["failed"]))
    if row["evaluation_fault"] is not None:
        found.append(f"row '{row['name']}': {row['evaluation_fault']}")
    how = _not_exact(row)
    if how is not None:
        said = "declares itself exact" if not row["altered"] else "altered nothing, as its plugins say"
        found.append(f"row '{row['name']}' {said}, but {how}")
    return found


def _not_exact(row: Mapping[str, Any]) -> str | None:
    """In what a row that must be exact is not; None: in nothing."""
    if row["not_comparable"] is not None:
        return f"its parameters cannot be compared: {row['not_comparable']}"
    wrong = next((each for each in row["judged"] if each["faults"]), None)
    if wrong is None:
        return None
    where = f" in round {wrong['round']}" if wrong["round"] > 1 else ""
    where += f" (seed {wrong['seed']})" if wrong["seed"] else ""
    for what in ("parameter", "prediction"):
        if f"{what}s" in wrong["faults"]:
            kind = "parameters" if what == "parameter" else "held-out predictions"
            text = (
                f"its {kind} differ by {_both(wrong, '', what)}{where}, where rounding explains "
                f"{_both(wrong, 'allowed_', what)}"
            )
            if what == "parameter":
                return text
            return f"{text}, and its parameters do not: what was evaluated is not the model"
    loss, allowed = (figures.scientific(wrong[f"{kind}heldout_loss_difference"]) for kind in ("", "allowed_"))
    return (
        f"its held-out loss differs by {loss}{where}, where rounding explains {allowed}, and its parameters "
        "and predictions do not"
    )


def _both(figures_of: Mapping[str, Any], kind: str, what: str = "parameter") -> str:
    largest, rms = (figures.scientific(figures_of[f"{kind}{n}_{what}_difference"]) for n in ("max", "rms"))
    return f"{largest} (rms {rms})"


@dataclass(frozen=True)
class Label:
    """A row named ``recipe:key=value:key=value``."""

    recipe: str
    settings: tuple[str, ...] = ()
    """``key=value`` with short keys."""
    marks: str = ""

    @property
    def line(self) -> str:
        """All in one line, without marks: ``hotline (split=never, prefetch=false)``."""
        return f"{self.recipe} ({', '.join(self.settings)})" if self.settings else self.recipe

    @property
    def lines(self) -> list[str]:
        """The recipe with its marks, and a line for each setting."""
        return [self.recipe + self.marks, *self.settings]

    def wrapped(self, width: int) -> str:
        """The recipe with its marks, and below it its settings, in lines of at most ``width`` characters."""
        parts = (self.recipe + self.marks, ", ".join(self.settings))
        return "\n".join(line for part in parts for line in wrap(part, width, break_on_hyphens=False))


def labels(names: Sequence[str], marks: Sequence[str] = ()) -> list[Label]:
    """Labels of the rows with these ``names``, which are all rows of the comparison, and their ``marks``.

    A plugin's own knob loses ``plugins.NAME.``. Any other key keeps its last part, or as many of its last
    parts as tell it from the other rows' keys.
    """
    split: list[tuple[str, list[tuple[str, str]]]] = []
    for name in names:
        recipe, settings = parted(name)
        # lru@bagpipe is lru with the memory of the row bagpipe.
        knob = f"plugins.{recipe.rpartition('@')[2]}."
        parts = [setting.partition("=") for setting in settings]
        split.append((recipe, [(key.lstrip("+").removeprefix(knob), value) for key, _, value in parts]))
    keys = {key for _, settings in split for key, _ in settings}
    return [
        Label(recipe, tuple(f"{_short(key, keys)}={value}" for key, value in settings), mark)
        for (recipe, settings), mark in zip(split, marks or [""] * len(names), strict=True)
    ]


def parted(name: str) -> tuple[str, list[str]]:
    """A row's recipe, and its settings as they are written. A colon begins a setting only before ``key=``, so
    that values may have others: ``hotline:tiers.dir=s3://rows:seed=2`` has two settings."""
    recipe, colon, rest = name.partition(":")
    return recipe, re.split(r":(?=[+~]*[A-Za-z_][\w./@-]*=)", rest) if colon else []


def _short(key: str, keys: Collection[str]) -> str:
    """The shortest end of ``key``, in whole parts, that no other of the ``keys`` has."""
    parts = key.split(".")
    ends = [".".join(parts[start:]) for start in reversed(range(len(parts)))]
    others = [f".{other}" for other in keys if other != key]
    return next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), key)
