"""A quantized checkpoint: a finished model in low precision, as a directory.

    manifest.json                what the model is, how each table is kept and each linear layer computed;
                                 every file's size and digest
    dense.safetensors            dense parameters and buffers, by name, in float32
    layers.safetensors           for each linear layer in int8 its weights' scales, float32 [outputs]
    tables/<t>.safetensors       "rows" uint8 [kept, row_bytes] (row_types.py says how a row is laid out) and,
                                 where rows are pruned, "places" int32 [rows]: for each id its row among those
                                 kept, or -1
    manifest.b2sum               the manifest's own digest, as ``b2sum`` writes and checks it

It is written under another name and then renamed, so a directory with a manifest is complete. Names in the
manifest are compared with those that a quantized checkpoint has, and never used as paths. Tables are written
and read in blocks: they may be larger than memory while they are written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe.answers.plain import fill_dense
from recpipe.answers.row_types import ROW_TYPES, encode_rows, row_bytes
from recpipe.answers.stored import Collection, FloatCheckpoint, configs_of, replace_module
from recpipe.checkpoint.trained_on import TrainedOn
from recpipe.common.files import sync, unwritable
from recpipe.common.saved import Damaged, read_json, typed_as
from recpipe.common.tensors import new_tensors, save_tensors
from recpipe.errors import UserError
from recpipe.pipeline.placed import saved_values
from recpipe_low_precision.bags import LowPrecisionBags, LowPrecisionRows, RowType
from recpipe_low_precision.format import DENSE, MANIFEST, is_quantized
from recpipe_low_precision.layers import Layer, put_layers

DIGEST = "manifest.b2sum"
LAYERS = "layers.safetensors"
FORMAT = "recpipe quantized checkpoint"
SCHEMA = 2
"""1 was the same without the digest, and is read as well."""
ROWS, PLACES = "rows", "places"
BLOCK = 1 << 16
"""Rows that are read at a time."""
Layers = Mapping[str, tuple[Layer, torch.Tensor | None]]
"""Linear layers by path, with the scales of their weights in int8."""
Kept = Mapping[str, NDArray[np.bool_]]
"""For tables that are pruned: which rows are kept, bool [rows]."""


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


def damaged(place: Path, fault: Exception) -> UserError:
    """The error for what cannot be read, and the remedy."""
    return UserError(f"{place} is damaged ({fault}): quantize the checkpoint again")


def write_quantized(
    target: Path,
    source: FloatCheckpoint,
    kinds: Mapping[str, str],
    kept: Kept | None = None,
    figures: Mapping[str, Any] | None = None,
    layers: Layers | None = None,
) -> QuantizedManifest:
    """Write ``source`` to the directory ``target``, each table's rows in the type that ``kinds`` names, and
    ``layers`` to be computed as they say.

    Replaces a quantized checkpoint there; ``UserError`` if something else is there, for a row that its type
    cannot hold, and if files cannot be written.
    """
    require_free(target)
    partial = target.with_name(f"{target.name}.partial")
    kept, layers = kept or {}, layers or {}
    scales = {path: own for path, (_, own) in layers.items() if own is not None}
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "tables").mkdir(parents=True)
        save_tensors(partial / DENSE, source.dense)
        if scales:
            save_tensors(partial / LAYERS, scales)
        how = {path: layer for path, (layer, _) in layers.items()}
        tables = {}
        for table, (rows, dim) in source.shapes.items():
            place, own = source.places[table], kept.get(table)
            count = None if own is None else int(own.sum())
            tables[table] = QuantizedTable(kinds[table], rows, dim, count, place.collection, place.own)
            write_table(partial / table_file(table), source, table, kinds[table], own)
        manifest = QuantizedManifest(
            FORMAT,
            SCHEMA,
            source.step,
            TrainedOn.read(source.trainer, source.directory).to_dict(),
            tables,
            {name: told(partial / name) for name in (*dense_files(how), *map(table_file, source.shapes))},
            dict(figures or {}),
            how,
            judged=False,
        )
        write_manifest(partial, manifest)
        for file in (*(partial / name for name in manifest.files), partial / "tables", partial):
            sync(file)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        sync(target.parent)
    except OSError as fault:
        shutil.rmtree(partial, ignore_errors=True)
        raise unwritable(target, fault, "choose another directory, output=DIRECTORY") from fault
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return read_manifest(target)


def take_place(judged: Path, target: Path) -> None:
    """Note in the quantized checkpoint ``judged`` that its quality was measured, and rename it to ``target``,
    in place of one there."""
    write_manifest(judged, replace(read_manifest(judged), judged=True))
    try:
        shutil.rmtree(target, ignore_errors=True)
        judged.rename(target)
        sync(target.parent)
    except OSError as fault:
        raise unwritable(target, fault, "choose another directory, output=DIRECTORY") from fault


def require_free(target: Path) -> None:
    """``UserError`` if something else than a quantized checkpoint is at ``target``, or if no folder can be
    made there."""
    if target.exists() and not is_quantized(target) and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} holds other files: name a new directory, output=DIRECTORY")


def write_table(
    file: Path, source: FloatCheckpoint, table: str, kind: str, kept: NDArray[np.bool_] | None = None
) -> None:
    """Write a table of ``source`` with rows of ``kind``, piece by piece; ``kept``: the rows that are not
    pruned."""
    rows, dim = source.shapes[table]
    width = row_bytes(kind, dim)
    shapes: dict[str, tuple[int, ...]] = {ROWS: (rows if kept is None else int(kept.sum()), width)}
    if kept is not None:
        shapes[PLACES] = (rows,)
    metadata = {"type": kind, "dim": str(dim)}
    with new_tensors(file, shapes, metadata, {ROWS: "U8", PLACES: "I32"}) as put:
        done = 0
        for start, values in source.blocks(table):
            chosen = values
            if kept is not None:
                own = kept[start : start + len(values)]
                chosen = values[torch.from_numpy(own)]
                put(PLACES, start, np.where(own, done + np.cumsum(own) - 1, -1))
            if len(chosen):
                put(ROWS, done * width, encode_rows(chosen, kind, table, start).numpy())
            done += len(chosen)


def put_rows(module: nn.Module, directory: Path) -> None:
    """Make ``module``, of the class that was trained, the model in the quantized checkpoint ``directory``:
    its dense part is set, and its collections are replaced. It is then in eval mode."""
    manifest = put_dense(module, directory)
    other = f"{directory} is of another model"
    try:
        for path in sorted({table.collection for table in manifest.tables.values()}):
            tables = {t.own: (name, t) for name, t in manifest.tables.items() if t.collection == path}
            try:
                old = module.get_submodule(path)
            except AttributeError:
                raise UserError(f"{other}: the model has no '{path}'") from None
            if not isinstance(old, Collection):
                raise UserError(f"{other}: '{path}' is no collection of TorchRec's")
            sizes = {c.name: (c.num_embeddings, c.embedding_dim) for c in configs_of(old)}
            if sizes != {own: (t.rows, t.dim) for own, (_, t) in tables.items()}:
                raise UserError(f"{other}: the tables of '{path}' differ")
            kinds = {own: RowType(t.type, t.kept) for own, (_, t) in tables.items()}
            bags = isinstance(old, EmbeddingBagCollection)
            new = LowPrecisionBags.of(old, kinds) if bags else LowPrecisionRows.of(old, kinds)
            for own, (name, _) in tables.items():
                _read(directory / table_file(name), ROWS, new.rows_of(own))
                if len(new.places_of(own)):
                    _read(directory / table_file(name), PLACES, new.places_of(own))
            replace_module(module, path, new)
    except (OSError, ValueError, SafetensorError) as fault:
        raise damaged(directory, fault) from fault


def put_dense(module: nn.Module, directory: Path) -> QuantizedManifest:
    """Set the dense part of ``module`` alone, as ``put_rows`` does; its collections stay."""
    manifest = read_manifest(directory)
    for name, expected in manifest.files.items():
        file = directory / name
        if file.is_symlink() or not file.is_file() or told(file) != tuple(expected):
            raise UserError(f"{file} is damaged or missing: quantize the checkpoint again")
    try:
        dense = load_file(directory / DENSE)
        own = saved_values(module)
        for name, value in dense.items():
            if name not in own or own[name].shape != value.shape:
                raise UserError(f"{directory} is of another model: '{name}' is missing or of another shape")
        fill_dense(module, dense)
        scales = load_file(directory / LAYERS) if LAYERS in manifest.files else {}
        put_layers(module, manifest.layers, scales)
    except (OSError, ValueError, SafetensorError) as fault:
        raise damaged(directory, fault) from fault
    module.eval()
    return manifest


def _read(file: Path, name: str, into: torch.Tensor) -> None:
    """Fill ``into`` from a tensor in ``file``, in blocks."""
    for start in range(0, len(into), BLOCK):
        with safe_open(file, framework="pt") as opened:
            part = opened.get_slice(name)
            if tuple(part.get_shape()) != tuple(into.shape):
                raise Damaged(f"{file.name}: '{name}' is {part.get_shape()}")
            into[start : start + BLOCK] = part[start : start + BLOCK]
