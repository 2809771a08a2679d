"""The words of ``recpipe package``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recpipe.errors import UserError, did_you_mean, shown

_USAGE = "say recpipe package CHECKPOINT DIRECTORY [instruction_set=avx2]"


def package_words(words: Sequence[str]) -> tuple[Path, Path, str | None]:
    """Checkpoint, directory and instruction set in ``CHECKPOINT DIRECTORY [instruction_set=avx2|avx512]``."""
    paths = [Path(word) for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    unknown = next((key for key in options if key != "instruction_set"), None)
    if unknown is not None:
        raise UserError(
            f"recpipe package has no {shown(unknown)}.{did_you_mean(unknown, ['instruction_set'])} {_USAGE}"
        )
    if len(paths) != 2:
        raise UserError(_USAGE)
    return paths[0], paths[1], options.get("instruction_set")
