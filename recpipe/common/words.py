"""A user's words for a model of their own, made into what Hydra composes: ``model._target_=X model.k=v``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from recpipe.errors import UserError, shown

CUSTOM = "custom"
"""The option of ``model=`` that has recpipe's own keys for any class."""
_DIRECTORY = ("--config-dir", "-cd")
_PATH = ("--config-path", "-cp")
_NAME = ("--config-name", "-cn")


def for_hydra(
    words: Sequence[str], built_in: Collection[str], installed: Callable[[], Collection[str]]
) -> list[str]:
    """``words`` with ``model=custom`` where ``model._target_`` is all that chooses a model, and with
    ``++model.KEY`` for ``model.KEY`` where the model may have any keys: one that is not of ``built_in``.

    ``installed`` tells which models packages offer; looked up where it matters.

    Hydra refuses a plain ``model.KEY=`` whose key no yaml has. Where a yaml of the user's own may choose the
    model, any key is let through: the typed recipe then refuses unknown ones. Applied twice, it changes
    nothing. Raises ``UserError`` where both a class and a model that has one are asked for.
    """
    words = _anchored(words)
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
        # Among the overrides: Hydra's parser wants them in one piece.
        words.insert(words.index(targets[0]), f"model={CUSTOM}")
    own_yaml = _given(words, *_DIRECTORY, *_PATH, *_NAME, "hydra.searchpath", "+hydra.searchpath")
    if not (targets or own_yaml or len(known) < len(chosen)):
        return words
    return opened(words, "model")


def opened(words: Sequence[str], section: str) -> list[str]:
    """``words`` with ``++SECTION.KEY`` for ``SECTION.KEY``: a key that no yaml has is let through."""
    start = f"{section}."
    return [f"++{word}" if word.startswith(start) and "=" in word else word for word in words]


def named(words: Sequence[str], group: str) -> Iterator[str]:
    """What ``group=a`` and ``group=a,b`` name."""
    for word in words:
        if word.lstrip("+").startswith(f"{group}="):
            override = OverridesParser.create().parse_override(word)
            options = override.sweep_iterator() if override.is_choice_sweep() else [override.value()]
            yield from map(str, options)


def _given(words: Sequence[str], *names: str) -> bool:
    return any(word.partition("=")[0] in names for word in words)


def _anchored(words: Sequence[str]) -> list[str]:
    """``words`` whose ``--config-path`` starts at the current directory, as ``--config-dir`` does.

    Hydra would look beside recpipe's own files.
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
