"""The words of commands on checkpoints: the command's own options, the run's directory, and the rest, which
are overrides of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser

from recpipe.answers.recipe import FREE
from recpipe.common.validation import FilePath, Positive, Text, fitted, one_of
from recpipe.config.compose import active_plugins, check_overrides, compose, readable_errors
from recpipe.errors import UserError, did_you_mean, shown
from recpipe.plugin.calls import blamed
from recpipe.plugin.load import activate

_OF_PLUGINS = ("plugin", "plugins")
T = TypeVar("T")
RUN_DIR = "hydra.run.dir"


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of ``recpipe evaluate``."""

    split: Annotated[str, one_of("all", "eval")] = "all"
    """``all``: every row of the data; ``eval``: its later part, ``data.eval_fraction`` of it."""
    by: Text | None = None
    """A column by whose values the rows are told apart as well."""
    by_top: Positive = 10
    """Values with a line of their own, the most frequent ones; or, of a dense column, buckets."""


@dataclass(frozen=True)
class PredictOptions:
    """The options of ``recpipe predict``."""

    output: FilePath | None = None
    """The file of scores, .parquet or .csv; from Python, None returns the scores."""
    keys: tuple[Text, ...] = ()
    """Columns of the input to copy; none: ``row``, the number of the row from 0."""
    scores: Annotated[str, one_of("probability", "raw")] = "probability"
    """For clicks the probability, for counts the rate; ``raw``: what the model gives, such as logits."""
    overwrite: bool = False
    """Whether an ``output`` that exists is replaced."""
    package: FilePath | None = None
    """The checkpoint's package, whose compiled code then scores, so that a server gives the same bits."""


def parted(words: Sequence[str], kind: type[T], command: str) -> tuple[T, list[str], Path]:
    """Options of ``kind``, overrides of the recipe, and the run's directory: ``hydra.run.dir``, or
    outputs/DATE/TIME as for training. ``UserError`` for a word that is none of these."""
    own = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    rest: list[str] = []
    directory = Path("outputs") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S")
    for word in words:
        key, equals, _ = word.partition("=")
        if word.startswith("-") or not equals:
            raise UserError(
                f"recpipe {command} takes key=value after the checkpoint, not '{shown(word)}'; its options "
                f"are {', '.join(sorted(own))}, beside those of data, tiers and trainer"
            )
        if key not in own and key != RUN_DIR:
            if key not in FREE and (hint := did_you_mean(key, own)):
                raise UserError(f"recpipe {command} has no {shown(key)}.{hint}")
            rest.append(word)
            continue
        check_overrides([word])
        with readable_errors([word]):
            value = OverridesParser.create().parse_override(word).value()
        if key == RUN_DIR:
            directory = Path(str(value))
        else:
            options[key] = [value] if key == "keys" and not isinstance(value, list) else value
    hints = get_type_hints(kind, include_extras=True)
    made = {key: fitted(hints[key], value, key) for key, value in options.items()}
    return kind(**made), rest, directory


def asked_samples(word: str | bool | int) -> bool | int | None:
    """What ``word`` says: true, false, or a number of samples, of at most 15 digits; None: none of these."""
    text = str(word)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None


def of_plugins(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that choose plugins and set their knobs, and the others."""
    mine = [word for word in words if _section(word) in _OF_PLUGINS]
    return mine, [word for word in words if _section(word) not in _OF_PLUGINS]


def _section(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].partition(".")[0]


def the_plugin(words: Sequence[str], kind: type[T], command: str, example: str) -> T:
    """The one plugin that ``words`` choose for ``command``; ``UserError`` unless it is of this ``kind``."""
    plugins = active_plugins(compose(list(words)))
    found = activate(plugins)
    if len(found) != 1 or not isinstance(found[0][1], kind):
        raise UserError(
            f"recpipe {command} takes one plugin for finished models, not {', '.join(plugins) or 'none'}: "
            f"say +plugin={example}"
        )
    origin, plugin = found[0]
    assert isinstance(plugin, kind)
    return blamed(origin, command, plugin)
