"""A checkpoint's MANIFEST.json: every file's size and digest, so that what is read is what was written.

Only this module knows what a checkpoint may hold: ``trainer.pt`` and files in ``tables``, all of them in the
manifest and none of them a symbolic link. Names in the manifest are compared with the existing files and
never used as paths, so they cannot lead elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recpipe.common.files import sync
from recpipe.common.meter import counting
from recpipe.common.saved import Damaged, entries, read_json, typed_as
from recpipe.errors import UserError

MANIFEST = "MANIFEST.json"
SCHEMA = 1
BLOCK_BYTES = 1 << 20
TRAINER, TABLES = "trainer.pt", "tables"
_NAME = re.compile(rf"{re.escape(TRAINER)}|{TABLES}/(?!\.\.?$)[^/\0]+", re.DOTALL)


@dataclass(frozen=True)
class Manifest:
    """The manifest's content; ``files``: size in bytes and BLAKE2b digest by relative path."""

    schema: int
    step: int
    files: dict[str, tuple[int, str]]


def read_manifest(directory: Path) -> Manifest:
    """``UserError`` if it is invalid or the checkpoint is not complete."""
    file = directory / MANIFEST
    try:
        content = read_json(file)
        schema = entries({"schema": int}, content)["schema"]
        if schema != SCHEMA:
            raise UserError(
                f"{file} is of schema {schema}, and this recpipe knows {SCHEMA}: read it with the recpipe "
                f"that wrote it, or resume from another checkpoint in {directory.parent}"
            )
        manifest = typed_as(Manifest, content)
        strange = next((name for name in manifest.files if not _NAME.fullmatch(name)), None)
        if strange is not None:
            raise Damaged(f"a checkpoint has no file {strange[:80]!r}")
        for wanted in (TRAINER, f"{TABLES}/"):
            if not any(name.startswith(wanted) for name in manifest.files):
                raise Damaged(f"it lists no {wanted}")
    except (OSError, ValueError) as fault:
        raise UserError(
            f"{file} is damaged ({fault}): remove {directory.name}, or resume from another checkpoint in "
            f"{directory.parent}"
        ) from fault
    return manifest


def verify(directory: Path) -> Manifest:
    """Compare all files with the manifest; ``UserError`` names the first that differs or is not in it."""
    manifest = read_manifest(directory)
    remedy = f"resume from an older checkpoint in {directory.parent}"
    try:
        found = set()
        places = [directory / TRAINER, directory / TABLES]
        if places[1].is_dir() and not places[1].is_symlink():
            places[1:] = sorted(places[1].iterdir())
        for place in places:
            if place.is_symlink() or (place.exists() and not place.is_file()):
                raise UserError(
                    f"{place} is a link or no file at all, and is not followed: put the file itself there"
                )
            if place.exists():
                found.add(str(place.relative_to(directory)))
        whole = sum(size for size, _ in manifest.files.values())
        with counting("checking the checkpoint's bytes", whole) as add:
            for name, (size, digest) in manifest.files.items():
                file = directory / name
                if name not in found or file.stat().st_size != size or _digest(file, add) != digest:
                    raise UserError(f"{file} is damaged or missing: {remedy}")
    except OSError as fault:
        raise UserError(f"cannot read {fault.filename}: {fault.strerror}; {remedy}") from fault
    extra = min(found - manifest.files.keys(), default=None)
    if extra is not None:
        raise UserError(f"{directory / extra} is not in {MANIFEST}: remove it, or {remedy}")
    return manifest


def seal(directory: Path, step: int) -> None:
    """Flush all files to disk, then write the manifest atomically."""
    files = sorted(f for f in directory.rglob("*") if f.is_file())
    listed: dict[str, tuple[int, str]] = {}
    with counting("sealing the checkpoint's bytes", sum(file.stat().st_size for file in files)) as add:
        for file in files:
            add(0)
            sync(file)
            listed[str(file.relative_to(directory))] = file.stat().st_size, _digest(file, add)
    sync(directory / TABLES)
    draft = directory / f"{MANIFEST}.new"
    draft.write_text(json.dumps({"schema": SCHEMA, "step": step, "files": listed}, indent=1))
    sync(draft)
    draft.rename(directory / MANIFEST)
    sync(directory)


def _digest(file: Path, add: Callable[[int], None]) -> str:
    """``add`` is told how many bytes have been read."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
            add(len(block))
    return digest.hexdigest()
