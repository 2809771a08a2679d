"""The files that a path, a folder or a pattern means, each with its format and the columns of its folders."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from recpipe.data.config import FilesConfig
from recpipe.data.files import TextRules, check_readable, natural_key, natural_path
from recpipe.data.records import PLAIN, Format, InputFile
from recpipe.data.remote import AnyPath, RemotePath, located
from recpipe.data.text import PACKED
from recpipe.errors import DataError

SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".tab": "csv",
    ".txt": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test", "eval")
"""With one of these the names of files begin that hold a part of the samples, as HuggingFace's data sets have
them."""


def files_of(config: FilesConfig, key: str = "path") -> tuple[InputFile, ...]:
    """The files of a ``data`` node that its ``key`` means."""
    path, kind = getattr(config, key), cast(Format | None, config.format)
    return () if path is None else input_files(path, kind, config.rules(), f"data.{key}")


def input_files(
    path: Any, kind: Format | None = None, rules: TextRules = PLAIN, key: str = "data.path"
) -> tuple[InputFile, ...]:
    """The files that ``path`` means, in time order: a file, a folder, a pattern such as ``day_*.csv``, or a
    list of these, which keeps its order; on this machine or elsewhere (``remote.located``).

    Of a pattern, the files in natural order of their paths; if it means folders alone, what is in these. Of a
    folder, the files of known formats in natural order (day_2 before day_10), those of its Hive
    partitions too, but none whose name begins with a point or an underscore (Spark's ``_SUCCESS``). Of a
    folder without any, those of its folder ``data``, as HuggingFace's data sets have it. ``DataError``, which
    names the ``key``, for a path that does not exist or holds no file, and for a folder with several splits.
    """
    if isinstance(path, (list, tuple)):
        return tuple(file for item in path for file in input_files(item, kind, rules, key))
    base = located(str(path))
    if base.is_dir():
        found = list(_in_folder(base, kind))
        for inner in base.iterdir() if not found else ():
            if inner.name == "data" and inner.is_dir():
                found = list(_in_folder(inner, kind))
        if not found:
            known = " ".join(suffix for suffix, own in SUFFIXES.items() if kind in (None, own))
            raise DataError(
                f"{base}: no data file in this directory; looked for {known}, also in Hive folders"
            )
        _require_one_split(base, found)
    elif base.exists():
        found = [base]
    else:
        matches = sorted(_matches(base), key=natural_path)
        found = [match for match in matches if match.is_file()]
        if not found:
            folders = [match for match in matches if match.name[0] not in "._"]
            found = [file for folder in folders for file in _in_folder(folder, kind)]
        if not found:
            seen_from = "" if isinstance(base, RemotePath) else f", seen from {Path.cwd()}"
            raise DataError(f"{base}: no such file or directory ({key}{seen_from})")
    top = base.parts if base.is_dir() else base.parts[:-1]
    made = []
    for file in found:
        _require_content(file)
        made.append(InputFile(file, kind or _format(file), _partition(file, top), rules))
    kinds = sorted({file.format for file in made})
    if len(kinds) > 1:
        raise DataError(
            f"{base}: holds files of several formats ({', '.join(kinds)}); say which, data.format="
        )
    return tuple(made)


def _matches(pattern: AnyPath) -> Sequence[AnyPath]:
    """The files and folders that a pattern means."""
    if isinstance(pattern, RemotePath):
        return pattern.glob()
    found = glob.glob(str(pattern), recursive=True)  # noqa: PTH207  Path.glob has no absolute patterns
    return [Path(match) for match in found]


def _in_folder(folder: AnyPath, kind: Format | None) -> Iterator[AnyPath]:
    entries: list[AnyPath] = [*folder.iterdir()]
    for entry in sorted(entries, key=natural_key):
        if entry.name[0] in "._":
            continue
        if entry.is_dir() and "=" in entry.name:
            yield from _in_folder(entry, kind)
        elif entry.is_file() and (own := format_by_name(entry)) and kind in (None, own):
            yield entry


def _require_one_split(folder: AnyPath, files: Sequence[AnyPath]) -> None:
    """``DataError`` if the names in a folder say that it holds several splits, ``train-00000-of-00002`` and
    ``test-00000-of-00001`` for example: nobody trains on all of them."""
    found = {word: file for word in SPLITS for file in files if re.match(rf"{word}([-_.]|$)", file.name)}
    if len(found) > 1 and all(any(file.name.startswith(word) for word in found) for file in files):
        keys = {"train": "path", "training": "path", "test": "test_path"}
        where = {word: str(file).removesuffix(file.name) for word, file in found.items()}
        named = " ".join(f"data.{keys.get(word, 'eval_path')}='{where[word]}{word}*'" for word in found)
        raise DataError(
            f"{folder}: holds the splits {', '.join(found)}, each in files of its own: name them, {named}"
        )


def _require_content(file: AnyPath) -> None:
    if not isinstance(file, RemotePath):
        check_readable(file)
    elif not file.size:
        raise DataError(f"{file}: the file is empty")


def format_by_name(file: AnyPath) -> Format | None:
    """The format that the file's suffix says; None: none that is known."""
    return SUFFIXES.get(Path(file.stem).suffix if file.suffix in PACKED else file.suffix)


def _partition(file: AnyPath, top: tuple[str, ...]) -> dict[str, str]:
    """The columns in the names of the folders between ``top`` and ``file``; of a file that a pattern found,
    in all of its folders' names."""
    parts = file.parts[:-1]
    if parts[: len(top)] == top:
        parts = parts[len(top) :]
    found = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if equals and name:
            found[unquote(name)] = "" if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)
    return found


def _format(file: AnyPath) -> Format:
    """By suffix, else by the first bytes."""
    if known := format_by_name(file):
        return known
    with file.open("rb") as stream:
        start = stream.read(6)
    if start.startswith(b"PAR1"):
        return "parquet"
    if start == b"ARROW1":
        return "arrow"
    if start.lower() in (b"<!doct", b"<html>", b"<html "):
        raise DataError(f"{file}: is a web page; name the files that it lists, or a pattern: '{file}*.csv'")
    return "json" if start.lstrip()[:1] == b"{" else "csv"
