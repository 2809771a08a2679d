"""Translates words that people write into what Hydra composes: their own model (``model._target_=X
model.k=v``), an optimizer's arguments (``optim.dense.weight_decay=0.01``), and several amounts of memory
(``advise.memory=8GiB,16GiB``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from recpipe.errors import UserError, shown

CUSTOM = "custom"
"""The option of ``model=`` for any class, with the keys that recpipe itself reads."""
FREE = {"optim.dense": ("name", "lr"), "optim.by_table": ()}
"""Mappings that may have other keys than those which the recipe's yaml lists: a class's arguments, tables'
names."""
_LIST = "advise.memory="
"""A key whose value is a list; Hydra takes ``a,b`` without brackets for a sweep."""
_DIRECTORY = ("--config-dir", "-cd")
_PATH = ("--config-path", "-cp")
_NAME = ("--config-name", "-cn")


_VALUED = (*_DIRECTORY, *_PATH, *_NAME, "--cfg", "-c", "--package", "-p", "--experimental-rerun")


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
    words = _anchored([_listed(word) for word in words])
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


def _listed(word: str) -> str:
    """``advise.memory=a,b`` with brackets around its value."""
    value = word.removeprefix(_LIST)
    return f"{_LIST}[{value}]" if word.startswith(_LIST) and not value.startswith("[") else word


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
        if name in _PATH and equals:
            word = f"{name}={_absolute(value)}"
        elif made and made[-1] in _PATH:
            word = _absolute(word)
        made.append(word)
    return made


def _absolute(path: str) -> str:
    return path if path.startswith("pkg://") else str(Path(path).expanduser().absolute())
