"""The files of a recipe with what it derives from their records: joins first, then sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from recpipe.common.own_cache import default_cache_dir
from recpipe.data.config import FilesConfig
from recpipe.data.joins import JoinedFile, SideTable, contents, joined
from recpipe.data.listing import files_of
from recpipe.data.records import InputFile
from recpipe.data.sessions import SessionFile


def derived_files(config: FilesConfig, keys: Sequence[str] = ("path",)) -> list[list[InputFile]]:
    """The files of each of the ``keys`` of ``config`` whose records its features are read from. Side tables
    are read once for all; sessions are one file of each key."""
    found = [files_of(config, key) for key in keys]
    every = iter(joined([file for files in found for file in files], config.joined))
    derived = [list(islice(every, len(files))) for files in found]
    return [_sessions(config, files) if files and config.grouped else files for files in derived]


def _sessions(config: FilesConfig, files: Sequence[InputFile]) -> list[InputFile]:
    assert config.grouped is not None
    room = Path(config.cache_dir).expanduser() if config.cache_dir else default_cache_dir()
    first, skips = files[0], config.on_bad_row == "skip"
    made = SessionFile(
        first.path,
        first.format,
        first.partition,
        first.rules,
        inputs=tuple(files),
        rule=config.grouped,
        room=room,
        skips=skips,
    )
    return [made]


def side_table(file: InputFile, key: str) -> SideTable | None:
    """The one that is joined by the column ``key`` of a derived file."""
    log = file.inputs[0] if isinstance(file, SessionFile) else file
    sides = log.sides if isinstance(log, JoinedFile) else ()
    return next((side for side in sides if side.left == key), None)


def derived_recipe(config: FilesConfig) -> dict[str, Any]:
    """What samples depend on beside the files themselves; empty where nothing is derived."""
    found: dict[str, Any] = {}
    if config.joined:
        found["joins"] = contents(config.joined)
    if config.grouped is not None:
        found["sessions"] = asdict(config.grouped)
    return found
