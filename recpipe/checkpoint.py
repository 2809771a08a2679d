"""Checkpoints as directories: written whole under another name, then renamed; tables beside the rest.

    step-00000040.ckpt/
      MANIFEST.json            written last: every file's size and BLAKE2b digest
      trainer.pt               dense parameters, optimizer, Lightning's loops, data position, random state
      tables/<t>.weight.npy    float32 [rows, D], whatever tier the rows were in
      tables/<t>.state.npy     float32 [rows, S]
      tables/*.safetensors     instead, for sharded tables: each rank's parts of <t>.weight and <t>.state

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

import numpy as np
import torch
from lightning.pytorch.plugins.io import CheckpointIO

from recpipe.embedding.collection import TableCollection
from recpipe.embedding.shard import ShardedCollection
from recpipe.errors import CheckpointError, UserError
from recpipe.table_files import (
    Shapes,
    TensorFiles,
    check_shapes,
    load_regions,
    load_tables,
    read_along,
    save_tables,
)

SUFFIX = ".ckpt"
PARTIAL = ".partial"
MANIFEST = "MANIFEST.json"
_NAMES = (f"*{SUFFIX}", f"*{SUFFIX}{PARTIAL}")


class TableCheckpointIO(CheckpointIO):
    """Lightning's door for saving and loading, for directories that hold the tables too."""

    def __init__(self, storage: TableCollection, shapes: Shapes, writes: bool = True) -> None:
        self.storage = storage
        self.shapes = shapes
        self.writes = writes
        """Whether this rank writes files; the others take part in reading the tables."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write ``path`` atomically; it is durable on return, on the rank that writes."""
        final = Path(path)
        partial = final.with_name(final.name + PARTIAL)
        try:
            if self.writes:
                shutil.rmtree(partial, ignore_errors=True)
                (partial / "tables").mkdir(parents=True)
                _save(_plain(checkpoint), partial / "trainer.pt")
            self._save_tables(partial / "tables")
            if not self.writes:
                return
            _seal(partial)
        except OSError as fault:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint {final}: {fault.strerror}; "
                "free space or set trainer.checkpoint_dir=DIRECTORY"
            ) from fault
        _discard(final)
        partial.rename(final)
        _sync(final.parent)

    def _save_tables(self, directory: Path) -> None:
        """Sharded tables are written by their ranks, others by the rank that writes."""
        if isinstance(self.storage, ShardedCollection):
            from recpipe.embedding.shard_files import save_shards

            self.storage.wait_for_ranks()  # for the directory
            save_shards(self.storage, directory)
        elif self.writes:
            save_tables(directory, self.storage, self.shapes)
        else:
            read_along(self.storage)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verify every file against the manifest, load the tables, return the rest."""
        directory = Path(path)
        verify(directory)
        self._load_tables(directory / "tables")
        try:
            loaded = torch.load(directory / "trainer.pt", map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as fault:
            raise UserError(f"{directory / 'trainer.pt'} is not a checkpoint of recpipe: {fault}") from fault
        restored = _restored(loaded)
        assert isinstance(restored, dict)
        return restored

    def _load_tables(self, directory: Path) -> None:
        """Whatever wrote them, into whatever holds them now."""
        if not any(directory.glob("*.safetensors")):
            load_tables(directory, self.storage, self.shapes)
            return
        files = TensorFiles.sharded(directory)
        check_shapes(files, self.shapes)
        if not isinstance(self.storage, ShardedCollection):
            load_regions(files, self.storage, self.shapes)
            return
        from recpipe.embedding.shard_files import load_shards

        load_shards(self.storage, directory)

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
