"""What people write: amounts of memory, words of the command line that Hydra is to compose (their own model,
``model._target_=X model.k=v``; an optimizer's arguments, ``optim.dense.weight_decay=0.01``; a list,
``advise.memory=8GiB,16GiB``), and objects of their choice, ``_target_: package.Class``."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate

from recpipe.errors import UserError, shown

CUSTOM = "custom"
"""The option of ``model=`` for any class, with the keys that recpipe itself reads."""
FREE = {"optim.dense": ("name", "lr", "schedule", "groups"), "optim.by_table": ()}
"""Mappings that may have other keys than those which the recipe's yaml lists: a class's arguments, tables'
names."""
_LIST = "advise.memory="
"""A key whose value is a list; Hydra takes ``a,b`` without brackets for a sweep."""
_DIRECTORY = ("--config-dir", "-cd")
_PATH = ("--config-path", "-cp")
_NAME = ("--config-name", "-cn")
_VALUED = (*_DIRECTORY, *_PATH, *_NAME, "--cfg", "-c", "--package", "-p", "--experimental-rerun")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_MOST = 2.0**62
"""A number of bytes that no machine has; larger ones would overflow."""
T = TypeVar("T")


def for_hydra(
    words: Sequence[str], built_in: Collection[str], installed: Callable[[], Collection[str]]
) -> list[str]:
    """Add ``model=custom`` to ``words`` if only ``model._target_`` chooses the model, and replace
    ``model.KEY`` by ``++model.KEY`` if the model is not one of ``built_in`` and may have any keys.

    The mappings in ``FREE`` may have any keys too. ``advise.memory=8GiB,16GiB`` becomes a list. ``installed``
    returns the models that packages offer; it is called only if that matters.

    Hydra refuses a plain ``model.KEY=`` whose key no yaml has. If a user's own yaml may choose the model, any
    key is let through, and the typed recipe refuses unknown ones later. Applying the function twice changes
    nothing more. Raises ``UserError`` if the words ask for a class and also for a model that has one.
    """
    words = _anchored(words)
    for number, word in enumerate(words):
        value = word.removeprefix(_LIST)
        if word != value and not value.startswith("["):
            words[number] = f"{_LIST}[{value}]"
    for section, listed in FREE.items():
        words = opened(words, section, listed)
    if not any(word.lstrip("+").startswith("model.") for word in words):
        return words
    targets = [word for word in words if word.lstrip("+").startswith("model._target_=")]
    chosen = list(named(words, "model"))
    known = [option for option in chosen if option in built_in]
    if targets and chosen:
        classed = next((option for option in chosen if option in {*built_in, *installed()}), None)
        if classed is not None:
            raise UserError(
                f"model={shown(classed)} and {shown(targets[0])} each choose a model: leave one of them out"
            )
    if targets and not chosen and not _given(words, *_PATH, *_NAME):
        # Placed among the overrides: Hydra's parser wants them in one piece.
        words.insert(words.index(targets[0]), f"model={CUSTOM}")
    own_yaml = _given(words, *_DIRECTORY, *_PATH, *_NAME, "hydra.searchpath", "+hydra.searchpath")
    if not (targets or own_yaml or len(known) < len(chosen)):
        return words
    return opened(words, "model")


def options_first(words: Sequence[str]) -> list[str]:
    """``words`` with Hydra's options (``-m``, ``--cfg job``) before the overrides, of both their order kept.

    Hydra's parser takes overrides in one piece only, and calls those after an option in their middle
    unrecognized.
    """
    options: list[str] = []
    overrides: list[str] = []
    before = ""
    for word in words:
        # --info takes a value or none.
        value = before in _VALUED or (before in ("--info", "-i") and "=" not in word)
        (options if value or word.startswith("-") else overrides).append(word)
        before = "" if value else word
    return [*options, *overrides]


def opened(words: Sequence[str], section: str, listed: Collection[str] = ()) -> list[str]:
    """Replace ``SECTION.KEY`` by ``++SECTION.KEY`` in ``words``, so that Hydra accepts a key that no yaml
    has; likewise ``SECTION={KEY: VALUE}``. The keys that are ``listed`` in each yaml stay."""
    start = (f"{section}.", f"{section}={{")
    there = tuple(f"{section}.{key}=" for key in listed)
    return [
        f"++{word}" if word.startswith(start) and "=" in word and not word.startswith(there) else word
        for word in words
    ]


def named(words: Sequence[str], group: str) -> Iterator[str]:
    """The options that ``group=a`` or ``group=a,b`` name."""
    for word in words:
        if word.lstrip("+").startswith(f"{group}="):
            override = OverridesParser.create().parse_override(word)
            options = override.sweep_iterator() if override.is_choice_sweep() else [override.value()]
            yield from map(str, options)


def _given(words: Sequence[str], *names: str) -> bool:
    return any(word.partition("=")[0] in names for word in words)


def _anchored(words: Sequence[str]) -> list[str]:
    """Make ``--config-path`` in ``words`` relative to the current directory, as ``--config-dir`` is.

    Hydra would take it relative to recpipe's own files.
    """
    made: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        joined = equals and name in _PATH
        if joined or (made and made[-1] in _PATH):
            start, path = (f"{name}=", value) if joined else ("", word)
            word = word if path.startswith("pkg://") else f"{start}{Path(path).expanduser().absolute()}"
        made.append(word)
    return made


@dataclass(frozen=True)
class Amount:
    """So many bytes, or a share of a whole that is not known yet."""

    number: float
    """Bytes, or the share."""
    is_share: bool

    @classmethod
    def parsed(cls, text: object, key: str) -> Amount:
        """Parse ``1048576``, ``64MiB``, ``1.5 GB`` or a share such as ``10%``.

        ``key`` is the recipe's key, which the ``UserError`` for any other text names.
        """
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([a-zA-Z]*|%)\s*", str(text))
        unit = found.group(2).lower() if found else "?"
        if found is None or (unit != "%" and unit not in _UNITS):
            raise UserError(
                f"{key}={shown(text)}: give bytes (1000000), a size (64MiB, 1.5GB) or a share of the whole "
                "(10%)"
            )
        number = float(found.group(1))
        return cls(number / 100, True) if unit == "%" else cls(number * _UNITS[unit], False)

    def of(self, whole: int) -> int:
        """Bytes, where shares are of ``whole`` bytes."""
        return int(min(self.number * whole if self.is_share else self.number, _MOST))


def readable_bytes(count: float) -> str:
    """``count`` bytes with a binary unit and three digits: ``64.0 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def make(kind: type[T], chosen: Mapping[str, Any], key: str) -> T:
    """Make the object that ``chosen`` describes, which must be a ``kind``.

    Raises ``UserError`` for anything else, naming its ``key`` in the recipe.
    """
    if "_target_" not in chosen:
        raise UserError(f"{key}={dict(chosen)}: say which class, {key}={{_target_: package.Class, ...}}")
    target = chosen["_target_"]
    try:
        made = instantiate(dict(chosen), _convert_="all")
    except UserError:
        raise
    except Exception as fault:  # Hydra 1.4 hands on what the class raises
        raise UserError(f"{key}: cannot make {target}: {_reason(fault)}") from fault
    if not isinstance(made, kind):
        raise UserError(
            f"{key}: {target} makes a {type(made).__name__}, not a {kind.__module__}.{kind.__qualname__}"
        )
    return made


def made_within(value: Any, key: str) -> Any:
    """``value``, a plain value of a recipe, with each mapping that has a ``_target_`` replaced by the object.

    Raises ``UserError``, naming ``key``.
    """
    if not _has_target(value):
        return value
    try:
        if isinstance(value, dict):
            return instantiate(value, _convert_="all")
        return [made_within(item, f"{key}[{index}]") for index, item in enumerate(value)]
    except UserError:
        raise
    except Exception as fault:
        raise UserError(f"{key}: cannot be made: {_reason(fault)}") from fault


def _has_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(map(_has_target, value.values()))
    return isinstance(value, list) and any(map(_has_target, value))


def _reason(fault: BaseException) -> str:
    """The root cause of an error, in one line."""
    while fault.__cause__ is not None:
        fault = fault.__cause__
    return " ".join(str(fault).split()) or type(fault).__name__


def quoted(key: str, path: Path | str) -> str:
    """``key='path'`` in Hydra's grammar, for a path with any characters."""
    # In quotes a backslash counts only before a quote (the closing one too), and ${ starts an interpolation.
    text = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), str(path))
    text = text.replace("${", "\\${")
    return f"{key}='{text}'"
