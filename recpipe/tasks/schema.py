"""``recpipe schema``: looks at files that nobody has described, and writes a proposal of their features."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser

from recpipe.common.console import alone, capture_logs
from recpipe.common.validation import FilePath, Positive, Text, fitted
from recpipe.config.compose import check_overrides, readable_errors
from recpipe.data.config import AUTO, FilesConfig
from recpipe.data.proposal.propose import ROWS, propose
from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.report.proposed import show_proposal

GIVEN = (
    *("format", "separator", "header", "columns", "quote", "encoding"),
    *("joins", "sessions", "negatives"),
)
"""Keys of ``data=files`` that say how its text is written, and what is derived from its records."""


@dataclass
class SchemaOptions:
    """``label``: as ``data.label``; null: found by name. ``weight``: the column of samples' weights.
    ``output``: the file that is written. ``sample``: about how many rows are read. ``overwrite``: whether
    ``output`` may be there. The others are those of ``data=files``."""

    label: Text | list[Text] | dict[Text, Text] | None = None
    weight: Text | None = None
    output: FilePath = "features.yaml"
    sample: Positive = ROWS
    overwrite: bool = False
    format: Text | None = None
    separator: Text | None = None
    header: bool | None = None
    columns: list[Text] = field(default_factory=list)
    quote: Text | None = '"'
    encoding: Text = "utf-8"
    joins: list[dict[str, Any]] = field(default_factory=list)
    sessions: dict[str, Any] | None = None
    negatives: dict[str, Any] | None = None


def schema(words: Sequence[str]) -> int:
    """``recpipe schema FILES key=value ...``; returns 0."""
    paths, options, given = of_command(words)
    output = Path(options.output).expanduser()
    if output.exists() and not options.overwrite:
        raise UserError(f"{output}: is there already; output=OTHER.yaml, or overwrite=true replaces it")
    with alone(), capture_logs(None):
        config = FilesConfig(
            path=paths if len(paths) > 1 else paths[0],
            features=AUTO,
            label=options.label,
            weight=options.weight,
            **{key: getattr(options, key) for key in GIVEN},
        )
        proposal = propose(config, options.sample)
        show_proposal(proposal)
        proposal.features()
        command = train_command(paths, output, given)
        proposal.write(output, [f"Train with: {command}"])
        print(f"{output} is written: look at it, change what you know better, and train with\n  {command}")
    return 0


def train_command(paths: Sequence[str], output: Path, given: Sequence[str]) -> str:
    """The command that trains from these files; ``given``: the words that say how they are read."""
    quoted = [path if re.fullmatch(r"[\w./~ -]+", path) else f"'{path}'" for path in paths]
    path = quoted[0] if len(paths) == 1 else f"[{','.join(quoted)}]"
    words = ["data=files", f"data.path={path}", f"data.features={output}"]
    return shlex.join(["python", "-m", "recpipe", *words, *(f"data.{word}" for word in given)])


def of_command(words: Sequence[str]) -> tuple[list[str], SchemaOptions, list[str]]:
    """The command's files, its options, and the words of those that are also keys of ``data=files``."""
    hints = get_type_hints(SchemaOptions, include_extras=True)
    names = [option.name for option in fields(SchemaOptions)]
    paths: list[str] = []
    found: dict[str, Any] = {}
    given: list[str] = []
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals or Path(word).exists() or "/" in key:
            paths.append(word)
            continue
        key = key.removeprefix("data.")
        if key not in names:
            raise UserError(f"recpipe schema has no '{shown(key)}'; {nearest_or_all(key, names)}")
        check_overrides([word])
        with readable_errors([word]):
            parsed = OverridesParser.create().parse_override(word)
        if parsed.is_sweep_override():
            raise UserError(f"{shown(word)}: several are written {key}=[{word.partition('=')[2]}]")
        found[key] = fitted(hints[key], parsed.value(), key)
        given += [word.removeprefix("data.")] if key in GIVEN else []
    return paths, SchemaOptions(**found), given
