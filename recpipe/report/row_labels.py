"""How a comparison's rows are called where there is little room: the recipe, and apart from it its settings,
whose keys are as short as they can be. compare.json has the whole names."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from textwrap import wrap


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
    split = [_split(name) for name in names]
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


def _split(name: str) -> tuple[str, list[tuple[str, str]]]:
    """The recipe, and keys and values of its settings."""
    recipe, settings = parted(name)
    # lru@bagpipe is lru with the memory of the row bagpipe.
    knob = f"plugins.{recipe.rpartition('@')[2]}."
    pairs = [setting.partition("=") for setting in settings]
    return recipe, [(key.lstrip("+").removeprefix(knob), value) for key, _, value in pairs]


def _short(key: str, keys: Collection[str]) -> str:
    """The shortest end of ``key``, in whole parts, that no other of the ``keys`` has."""
    parts = key.split(".")
    ends = [".".join(parts[start:]) for start in reversed(range(len(parts)))]
    others = [f".{other}" for other in keys if other != key]
    return next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), key)
