"""The manifest of a quantized checkpoint: what its model is, how each table is kept, and every file's digest.

manifest.b2sum has the manifest's own digest, as ``b2sum`` writes and checks it. Names in the manifest are
compared with those that a quantized checkpoint has, and never used as paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any
from urllib.parse import quote

from recpipe.checkpoint.trained_on import TrainedOn
from recpipe.common.files import sync
from recpipe.common.saved import Damaged, read_json, typed_as
from recpipe.errors import UserError
from recpipe_low_precision.format import DENSE, MANIFEST
from recpipe_low_precision.layers import Layer
from recpipe_low_precision.row_types import ROW_TYPES, row_bytes

DIGEST = "manifest.b2sum"
LAYERS = "layers.safetensors"
FORMAT = "recpipe quantized checkpoint"
SCHEMA = 2
"""1 was the same without the digest, and is read as well."""


@dataclass(frozen=True)
class QuantizedTable:
    """A table of a quantized checkpoint; ``kept`` None: no row was pruned."""

    type: str
    rows: int
    dim: int
    kept: int | None
    collection: str
    """The path of its collection in the model."""
    own: str
    """The table's name in the collection."""

    def __post_init__(self) -> None:
        if self.type not in ROW_TYPES or min(self.rows, self.dim) < 1 or (self.kept or 0) < 0:
            raise Damaged("a table has no known type or size")

    @property
    def bytes(self) -> int:
        """Bytes of its rows, and of its table of places."""
        return table_bytes(self.type, self.rows, self.dim, self.kept)


def table_bytes(kind: str, rows: int, dim: int, kept: int | None = None) -> int:
    """Bytes of a table with rows of ``kind``; with ``kept`` rows, those and int32 places of all ``rows``."""
    return rows * row_bytes(kind, dim) if kept is None else kept * row_bytes(kind, dim) + 4 * rows


@dataclass(frozen=True)
class QuantizedManifest:
    """The content of manifest.json."""

    format: str
    schema: int
    step: int
    """How many steps the checkpoint that was quantized had been trained."""
    trained_on: dict[str, Any]
    """The recipe that trained it and the data's columns (``TrainedOn``)."""
    tables: dict[str, QuantizedTable]
    files: dict[str, tuple[int, str]]
    """Size and BLAKE2b digest of each file, by relative path."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What the quantizer measured."""
    layers: dict[str, Layer] = field(default_factory=dict)
    """The linear layers that are not computed in float32, by their paths in the model."""
    judged: bool | None = None
    """Whether its quality was measured after it was written; None: earlier versions do not say."""


def dense_files(layers: Mapping[str, Layer]) -> list[str]:
    """The files of the dense part."""
    return [DENSE, LAYERS] if any(layer.type == "int8" for layer in layers.values()) else [DENSE]


def table_file(table: str) -> str:
    """The relative path of a table's file; it is safe for any table's name."""
    return f"tables/{quote(table, safe='')}.safetensors"


def told(file: Path) -> tuple[int, str]:
    """Size and digest of a file."""
    with file.open("rb") as stream:
        return file.stat().st_size, file_digest(stream, lambda: blake2b(digest_size=16)).hexdigest()


def seal(directory: Path) -> None:
    """Write the digest of the manifest in ``directory``."""
    (directory / DIGEST).write_bytes(_digest_of((directory / MANIFEST).read_bytes()))


def _digest_of(text: bytes) -> bytes:
    return f"{blake2b(text).hexdigest()}  {MANIFEST}\n".encode()


def read_manifest(directory: Path) -> QuantizedManifest:
    """The manifest of a quantized checkpoint; ``UserError`` if it is damaged or of another format."""
    file = directory / MANIFEST
    try:
        manifest = typed_as(QuantizedManifest, read_json(file))
        if manifest.schema != 1 and (directory / DIGEST).read_bytes() != _digest_of(file.read_bytes()):
            raise Damaged(f"it is not as it was written, {DIGEST}")
        if manifest.format != FORMAT or manifest.schema not in (1, SCHEMA):
            raise Damaged(f"{manifest.format!r} of schema {manifest.schema}, not {FORMAT!r} of {SCHEMA}")
        if set(manifest.files) != {*dense_files(manifest.layers), *map(table_file, manifest.tables)}:
            raise Damaged("it lists other files than a quantized checkpoint has")
    except (OSError, ValueError) as fault:
        raise damaged(file, fault) from fault
    return manifest


def write_manifest(directory: Path, manifest: QuantizedManifest) -> None:
    """Write the manifest and its digest into ``directory``, in place of those there, and flush them to
    disk."""
    (directory / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1), encoding="utf-8")
    seal(directory)
    sync(directory / MANIFEST)
    sync(directory / DIGEST)


def require_judged(directory: Path) -> None:
    """``UserError`` for a quantized checkpoint whose quality was not measured after it was written."""
    if read_manifest(directory).judged is False:
        raise UserError(
            f"{directory} was written and not judged, as by a command that was killed: make it anew with "
            "'recpipe quantize'"
        )


def recipe_of(manifest: QuantizedManifest, directory: Path) -> TrainedOn:
    """What the model was trained on; ``UserError`` if the manifest of ``directory`` is damaged."""
    try:
        return typed_as(TrainedOn, manifest.trained_on, "trained_on")
    except ValueError as fault:
        raise damaged(directory, fault) from fault


def verify(directory: Path, manifest: QuantizedManifest) -> None:
    """``UserError`` for the first file that is not the one that was written."""
    for name, expected in manifest.files.items():
        file = directory / name
        if file.is_symlink() or not file.is_file() or told(file) != tuple(expected):
            raise UserError(f"{file} is damaged or missing: quantize the checkpoint again")


def damaged(place: Path, fault: Exception) -> UserError:
    """The error for what cannot be read, and the remedy."""
    return UserError(f"{place} is damaged ({fault}): quantize the checkpoint again")
