"""Checkpoints as directories: written whole under another name, then renamed; tables beside the rest.

    step-00000040.ckpt/
      MANIFEST.json            written last: every file's size and BLAKE2b digest
      trainer.pt               dense parameters, optimizer, Lightning's loops, data position, random state
      tables/<t>.weight.npy    float32 [rows, D], whatever tier the rows were in
      tables/<t>.state.npy     float32 [rows, S]

A directory is whole when it has a manifest. It is written as ``.ckpt.partial`` and renamed at the end;
a kill at any moment leaves the checkpoint of before or the new one whole, under one of the two names.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from lightning.pytorch.plugins.io import CheckpointIO
from numpy.typing import NDArray

from recpipe.embedding.collection import TableCollection
from recpipe.embedding.tables import Region
from recpipe.errors import UserError

SUFFIX = ".ckpt"
PARTIAL = ".partial"
MANIFEST = "MANIFEST.json"
_NAMES = (f"*{SUFFIX}", f"*{SUFFIX}{PARTIAL}")
Shapes = dict[str, tuple[int, int, int]]
"""Per table: rows, dimension, width of the optimizer state."""


class TableCheckpointIO(CheckpointIO):
    """Lightning's door for saving and loading, for directories that hold the tables too."""

    def __init__(self, storage: TableCollection, shapes: Shapes, writes: bool = True) -> None:
        self.storage = storage
        self.shapes = shapes
        self.writes = writes
        """Whether this rank writes files; the others take part in reading the tables."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write ``path`` atomically; it is durable on return, on the rank that writes."""
        if not self.writes:
            read_along(self.storage)
            return
        final = Path(path)
        partial = final.with_name(final.name + PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            (partial / "tables").mkdir(parents=True)
            _save(_plain(checkpoint), partial / "trainer.pt")
            save_tables(partial / "tables", self.storage, self.shapes)
            _seal(partial)
        except OSError as fault:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"cannot write the checkpoint {final}: {fault.strerror}; "
                "free space or set trainer.checkpoint_dir=DIRECTORY"
            ) from fault
        _discard(final)
        partial.rename(final)
        _sync(final.parent)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verify every file against the manifest, load the tables, return the rest."""
        directory = Path(path)
        verify(directory)
        load_tables(directory / "tables", self.storage, self.shapes)
        try:
            loaded = torch.load(directory / "trainer.pt", map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as fault:
            raise UserError(f"{directory / 'trainer.pt'} is not a checkpoint of recpipe: {fault}") from fault
        restored = _restored(loaded)
        assert isinstance(restored, dict)
        return restored

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint that newer ones replace."""
        if self.writes:
            _discard(Path(path))


def holds_checkpoint(directory: Path) -> bool:
    """Whether a whole checkpoint lies in ``directory``."""
    return any((d / MANIFEST).is_file() for name in _NAMES for d in directory.glob(name))


def newest(directory: Path) -> Path:
    """The newest whole checkpoint in ``directory`` (or ``directory`` itself); ``UserError`` without one."""
    if (directory / MANIFEST).is_file():
        return directory
    found = [d for name in _NAMES for d in directory.glob(name) if (d / MANIFEST).is_file()]
    if not found and (directory / "checkpoints").is_dir():
        return newest(directory / "checkpoints")
    if not found:
        partial = list(directory.glob(f"*{PARTIAL}"))
        extra = f" ({partial[0].name} was cut off while it was written)" if partial else ""
        raise UserError(
            f"resume={directory}: no whole checkpoint there{extra}; name a run's checkpoints directory"
        )
    return max(found, key=lambda d: (_manifest(d)[0], d.name))


def verify(directory: Path) -> None:
    """Compare every file with the manifest; ``UserError`` names the first that differs."""
    for name, (size, digest) in _manifest(directory)[1].items():
        file = directory / name
        if not file.is_file() or file.stat().st_size != size or _digest(file) != digest:
            raise UserError(
                f"{file} is damaged or missing: resume from an older checkpoint in {directory.parent}"
            )


def _manifest(directory: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """The step, and the size and digest of every file; ``UserError`` where the manifest makes no sense."""
    try:
        content = json.loads((directory / MANIFEST).read_bytes())
        return int(content["step"]), {
            str(name): (size, digest) for name, (size, digest) in content["files"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as fault:
        raise UserError(
            f"{directory / MANIFEST} is damaged ({type(fault).__name__}): remove {directory.name}, "
            f"or resume from another checkpoint in {directory.parent}"
        ) from fault


def save_tables(
    directory: Path, storage: TableCollection, shapes: Shapes, weights_part: str = "weight"
) -> None:
    """Write every table's weights and optimizer state as .npy files, a chunk of rows at a time.

    ``weights_part`` names the weights' files as in ``table_file``.
    """
    files: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    for region in storage.regions():
        if region.table not in files:
            files.clear()
            files[region.table] = _create(directory, region.table, shapes[region.table], weights_part)
        weights, state = files[region.table]
        rows = slice(region.start, region.stop)
        weights[rows, region.left : region.right], state[rows] = storage.read(region)


def read_along(storage: TableCollection) -> None:
    """Take part in ``save_tables`` on a rank that writes nothing: reading tables takes all trainers."""
    for region in storage.regions():
        storage.read(region)


def load_tables(directory: Path, storage: TableCollection, shapes: Shapes) -> None:
    """Read back ``save_tables``' files into ``storage``; ``UserError`` where sizes differ."""
    opened: dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    for region in storage.regions():
        if region.table not in opened:
            opened.clear()
            opened[region.table] = _open(directory, region.table, shapes[region.table])
        weights, state = opened[region.table]
        storage.write(region, _cut(region, weights, state))


def _cut(
    region: Region, weights: NDArray[np.float32], state: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rows = slice(region.start, region.stop)
    return np.array(weights[rows, region.left : region.right]), np.array(state[rows])


def table_file(directory: Path, table: str, part: str) -> Path:
    """Where a table's ``weight`` or ``state`` lies ('': ``<table>.npy``); any table name is made safe."""
    return directory / f"{quote(table, safe='')}{part and '.'}{part}.npy"


def _create(
    directory: Path, table: str, shape: tuple[int, int, int], weights_part: str
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rows, dim, state = shape
    return new_array(table_file(directory, table, weights_part), (rows, dim)), new_array(
        table_file(directory, table, "state"), (rows, state)
    )


def new_array(path: Path, shape: tuple[int, int]) -> NDArray[np.float32]:
    """A new memory-mapped .npy file of float32 zeros (an array in memory when ``shape`` is empty)."""
    if 0 in shape:
        empty = np.zeros(shape, np.float32)
        np.save(path, empty)
        return empty
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    # Take the blocks now: on a full disk, writing to a sparse mapping ends the process by SIGBUS.
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _open(
    directory: Path, table: str, shape: tuple[int, int, int]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rows, dim, state = shape
    arrays = []
    for part, expected in (("weight", (rows, dim)), ("state", (rows, state))):
        file = table_file(directory, table, part)
        if not file.is_file():
            raise UserError(
                f"{file} is missing: the checkpoint is of a model without table '{table}'; use its recipe"
            )
        array = np.load(file, mmap_mode=None if 0 in expected else "r", allow_pickle=False)
        if array.shape != expected:
            raise UserError(
                f"{file} holds {array.shape}, but the recipe's table has {expected}; use its recipe"
            )
        arrays.append(array)
    return arrays[0], arrays[1]


def _seal(partial: Path) -> None:
    """Flush all files to disk and write the manifest, last of all and in one step."""
    files = sorted(f for f in partial.rglob("*") if f.is_file())
    for file in files:
        _sync(file)
    entries = {str(f.relative_to(partial)): [f.stat().st_size, _digest(f)] for f in files}
    step = torch.load(partial / "trainer.pt", weights_only=True, mmap=True)["global_step"]
    _sync(partial / "tables")
    manifest = partial / f"{MANIFEST}.new"
    manifest.write_text(json.dumps({"schema": 1, "step": int(step), "files": entries}, indent=1))
    _sync(manifest)
    manifest.rename(partial / MANIFEST)
    _sync(partial)


def _save(content: Any, file: Path) -> None:
    """``torch.save``, with the OSError of a file that cannot be written."""
    with file.open("wb") as stream:
        try:
            torch.save(content, stream)
        except RuntimeError as fault:
            # torch then trips over its own half-written archive, which hides the reason.
            if isinstance(fault.__context__, OSError):
                raise fault.__context__ from None
            raise


def _discard(directory: Path) -> None:
    """Remove a checkpoint, its manifest first: what a kill leaves of it is not taken for a whole one."""
    (directory / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_ARRAY = "numpy"


def _plain(value: Any) -> Any:
    """``value`` with numpy arrays as tagged tensors, so that ``torch.load(weights_only=True)`` reads it."""
    if isinstance(value, np.ndarray):
        return {_ARRAY: torch.from_numpy(np.ascontiguousarray(value))}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(v) for v in value)
    return str(value) if isinstance(value, Path) else value


def _restored(value: Any) -> Any:
    """The inverse of ``_plain`` for arrays."""
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return value[_ARRAY].numpy()
        return {k: _restored(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_restored(v) for v in value)
    return value
