"""A quantized checkpoint: a finished model in low precision, as a directory.

    manifest.json                what the model is, how each table is kept and each linear layer computed;
                                 every file's size and digest
    dense.safetensors            dense parameters and buffers, by name, in float32
    layers.safetensors           for each linear layer in int8 its weights' scales, float32 [outputs]
    tables/<t>.safetensors       "rows" uint8 [kept, row_bytes] (row_types.py says how a row is laid out) and,
                                 where rows are pruned, "places" int32 [rows]: for each id its row among those
                                 kept, or -1

It is written under another name and then renamed, so a directory with a manifest is complete. Tables are
written and read in blocks: they may be larger than memory while they are written.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe.answers.plain import fill_dense
from recpipe.answers.stored import Collection, FloatCheckpoint, configs_of, replace_module
from recpipe.checkpoint.trained_on import TrainedOn
from recpipe.common.files import sync, unwritable
from recpipe.common.saved import Damaged
from recpipe.common.tensors import new_tensors, save_tensors
from recpipe.errors import UserError
from recpipe.pipeline.placed import saved_values
from recpipe_low_precision.bags import LowPrecisionBags, LowPrecisionRows, RowType
from recpipe_low_precision.format import DENSE, is_quantized
from recpipe_low_precision.layers import Layer, put_layers
from recpipe_low_precision.manifest import (
    FORMAT,
    LAYERS,
    SCHEMA,
    QuantizedManifest,
    QuantizedTable,
    damaged,
    dense_files,
    read_manifest,
    table_file,
    told,
    verify,
    write_manifest,
)
from recpipe_low_precision.row_types import encode_rows, row_bytes

ROWS, PLACES = "rows", "places"
BLOCK = 1 << 16
"""Rows that are read at a time."""
Layers = Mapping[str, tuple[Layer, torch.Tensor | None]]
"""Linear layers by path, with the scales of their weights in int8."""
Kept = Mapping[str, NDArray[np.bool_]]
"""For tables that are pruned: which rows are kept, bool [rows]."""


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
        for table in source.shapes:
            write_table(partial / table_file(table), source, table, kinds[table], kept.get(table))
        manifest = QuantizedManifest(
            FORMAT,
            SCHEMA,
            source.step,
            TrainedOn.read(source.trainer, source.directory).to_dict(),
            {t: _table(source, t, kinds[t], kept.get(t)) for t in source.shapes},
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


def _table(source: FloatCheckpoint, table: str, kind: str, kept: NDArray[np.bool_] | None) -> QuantizedTable:
    (rows, dim), place = source.shapes[table], source.places[table]
    count = None if kept is None else int(kept.sum())
    return QuantizedTable(kind, rows, dim, count, place.collection, place.own)


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
    try:
        for path in sorted({table.collection for table in manifest.tables.values()}):
            _put_tables(module, path, directory, manifest)
    except (OSError, ValueError, SafetensorError) as fault:
        raise damaged(directory, fault) from fault


def put_dense(module: nn.Module, directory: Path) -> QuantizedManifest:
    """Set the dense part of ``module`` alone, as ``put_rows`` does; its collections stay."""
    manifest = read_manifest(directory)
    verify(directory, manifest)
    try:
        dense = load_file(directory / DENSE)
        _check_dense(module, dense, directory)
        fill_dense(module, dense)
        scales = load_file(directory / LAYERS) if LAYERS in manifest.files else {}
        put_layers(module, manifest.layers, scales)
    except (OSError, ValueError, SafetensorError) as fault:
        raise damaged(directory, fault) from fault
    module.eval()
    return manifest


def _check_dense(model: nn.Module, dense: Mapping[str, torch.Tensor], directory: Path) -> None:
    own = saved_values(model)
    for name, value in dense.items():
        if name not in own or own[name].shape != value.shape:
            raise UserError(f"{directory} is of another model: '{name}' is missing or of another shape")


def _put_tables(model: nn.Module, path: str, directory: Path, manifest: QuantizedManifest) -> None:
    """Replace the collection at ``path`` by one with the checkpoint's rows."""
    tables = {t.own: (name, t) for name, t in manifest.tables.items() if t.collection == path}
    try:
        old = model.get_submodule(path)
    except AttributeError:
        raise UserError(f"{directory} is of another model: the model has no '{path}'") from None
    kinds = {own: RowType(t.type, t.kept) for own, (_, t) in tables.items()}
    if not isinstance(old, Collection):
        raise UserError(f"{directory} is of another model: '{path}' is no collection of TorchRec's")
    sizes = {c.name: (c.num_embeddings, c.embedding_dim) for c in configs_of(old)}
    if sizes != {own: (t.rows, t.dim) for own, (_, t) in tables.items()}:
        raise UserError(f"{directory} is of another model: the tables of '{path}' differ")
    bags = isinstance(old, EmbeddingBagCollection)
    new = LowPrecisionBags.of(old, kinds) if bags else LowPrecisionRows.of(old, kinds)
    for own, (name, _) in tables.items():
        _read(directory / table_file(name), ROWS, new.rows_of(own))
        if len(new.places_of(own)):
            _read(directory / table_file(name), PLACES, new.places_of(own))
    replace_module(model, path, new)


def _read(file: Path, name: str, into: torch.Tensor) -> None:
    """Fill ``into`` from a tensor in ``file``, in blocks."""
    for start in range(0, len(into), BLOCK):
        with safe_open(file, framework="pt") as opened:
            part = opened.get_slice(name)
            if tuple(part.get_shape()) != tuple(into.shape):
                raise Damaged(f"{file.name}: '{name}' is {part.get_shape()}")
            into[start : start + BLOCK] = part[start : start + BLOCK]
