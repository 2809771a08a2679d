"""Checkpoints as directories, written under another name and then renamed; tables are beside the rest.

    step-00000040.ckpt/
      MANIFEST.json            written last: every file's size and BLAKE2b digest
      trainer.pt               dense parameters, optimizer, Lightning's loops, data position, random state,
                               sizes of recpipe's own models, the recipe and the data's columns
      tables/*.safetensors     <t>.weight float32 [rows, D] and <t>.state float32 [rows, S] (none where S
                               is 0), whatever tier the rows were in: a file for each table, <t>.safetensors,
                               or, where tables are sharded, each rank's own parts of them

A directory with a manifest is complete. It is written as ``.ckpt.partial`` and renamed at the end. After a
kill at any moment, either the earlier checkpoint or the new one is complete, under one of the two names.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from recpipe.checkpoint.manifest import MANIFEST, TABLES, TRAINER, read_manifest, seal, verify
from recpipe.checkpoint.table_files import (
    Shapes,
    check_tables,
    holds_npy,
    load_regions,
    read_along,
    rows_of_tables,
    save_tables,
)
from recpipe.common.files import sync
from recpipe.common.meter import counting
from recpipe.common.saved import Damaged, entries
from recpipe.common.tensors import TensorFiles, plain, restored
from recpipe.errors import CheckpointError, UserError
from recpipe.plugin.collection import TableCollection
from recpipe.plugin.tables import SavedRows
from recpipe.tables.collection import SavedByRanks, SavesPlacement
from recpipe.tables.dynamic.growing import GrowingTables

SUFFIX = ".ckpt"
BEST = "best"
"""The name of the checkpoint of a run's best evaluation, without ``SUFFIX``."""
PARTIAL = ".partial"
MODEL = "model"
"""A key of trainer.pt; older checkpoints lack it."""
RECIPE = "recipe"
"""The key of trainer.pt for ``TrainedOn``; older checkpoints lack it."""
OWN = "recpipe"
"""The key of trainer.pt for what Lightning does not know."""
_NAMES = (f"*{SUFFIX}", f"*{SUFFIX}{PARTIAL}")


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose files are checked, and which has exactly the recipe's tables."""

    directory: Path
    trainer: dict[str, Any]
    """The content of trainer.pt."""
    files: TensorFiles
    shapes: Shapes

    @classmethod
    @counting("opening the checkpoint")
    def of(cls, directory: Path, shapes: Shapes) -> OpenCheckpoint:
        """Check everything; ``UserError`` names what is bad."""
        trainer = open_checkpoint(directory)
        return cls(directory, trainer, check_tables(directory / TABLES, shapes), shapes)

    @property
    def rows(self) -> dict[str, SavedRows]:
        """The rows of each table."""
        return rows_of_tables(self.files, self.shapes)

    @property
    def shards(self) -> Path | None:
        """The files that ranks may read without ``rows``; None: an earlier version has written them."""
        return None if holds_npy(self.directory / TABLES) else self.directory / TABLES


class TableCheckpointIO(CheckpointIO):
    """Lightning's interface for saving and loading, for directories that also have the tables."""

    def __init__(
        self,
        storage: TableCollection,
        shapes: Shapes,
        writes: bool = True,
        check: Callable[[dict[str, Any]], None] | None = None,
        model: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
        opened: OpenCheckpoint | None = None,
        growing: GrowingTables | None = None,
    ) -> None:
        self.storage = storage
        self.growing = growing
        """The tables whose ids get rows as they come."""
        self.shapes = shapes
        self.writes = writes
        """Whether this rank writes files; the others take part in reading the tables."""
        self.check = check
        """Raises ``UserError`` or ``Damaged`` if the run cannot go on from a trainer.pt."""
        self.model = model
        """Plain values from which ``recpipe.load`` can make the model; None: its caller must pass the
        model."""
        self.replaces: list[Path] = []
        """Checkpoints of another run, which are removed once this run's first one is whole."""
        self.recipe = recipe
        """The content of ``TrainedOn``; None: the checkpoint cannot be scored by itself."""
        self.opened = opened
        """The checkpoint whose rows the tables were made with; None once it is loaded."""

    @counting("writing the checkpoint")
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write ``path`` atomically; on the rank that writes, it is on the disk on return."""
        final = Path(path)
        partial = final.with_name(final.name + PARTIAL)
        try:
            if self.writes:
                shutil.rmtree(partial, ignore_errors=True)
                (partial / TABLES).mkdir(parents=True)
                save_trainer({**checkpoint, MODEL: self.model, RECIPE: self.recipe}, partial / TRAINER)
            # Sharded tables are written by their ranks, others by the rank that writes.
            ranks = self.storage.offers(SavedByRanks)
            if ranks is not None:
                ranks.save_tables(partial / TABLES)
            elif self.writes:
                save_tables(partial / TABLES, self.storage, self.shapes)
            else:
                read_along(self.storage)
            if not self.writes:
                return
            if self.growing is not None:
                self.growing.save(partial / TABLES)
            seal(partial, int(checkpoint["global_step"]))
        except OSError as fault:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint {final}: {fault.strerror}; "
                "free space or set trainer.checkpoint_dir=DIRECTORY"
            ) from fault
        for earlier in self.replaces:
            if earlier != partial:
                _discard(earlier)
        self.replaces = []
        _discard(final)
        partial.rename(final)
        sync(final.parent)

    @counting("loading the checkpoint")
    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Check everything, then load the tables and return the rest. If a check fails, tables are unchanged.

        The placement is restored first, so that resident rows are loaded directly into their slots and not
        through a cold tier that may keep fewer bits. Tables that were made with these rows are not loaded
        again.
        """
        directory = Path(path)
        made_with, self.opened = self.opened, None
        if made_with is not None and made_with.directory != directory:
            made_with = None
        opened = made_with or OpenCheckpoint.of(directory, self.shapes)
        if self.check is not None:
            with naming(directory):
                self.check(opened.trainer)
        if self.growing is not None:
            self.growing.load(directory / TABLES)
        placed = self.storage.offers(SavesPlacement)
        if placed is not None:
            placed.load_placement_state(opened.trainer.get(OWN, {}).get("placement"))
        if made_with is not None:
            return opened.trainer
        ranks, shards = self.storage.offers(SavedByRanks), opened.shards
        if ranks is None or shards is None:
            load_regions(opened.files, self.storage, self.shapes)
        else:
            ranks.load_tables(shards)
        return opened.trainer

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint that newer ones replace."""
        if self.writes:
            _discard(Path(path))


def holds_checkpoint(directory: Path) -> bool:
    """Whether ``directory`` has a complete checkpoint."""
    return any((found / MANIFEST).is_file() for found in checkpoints_in(directory))


def checkpoints_in(directory: Path) -> list[Path]:
    """The checkpoints in ``directory``, whole or cut off."""
    return [found for name in _NAMES for found in directory.glob(name)]


def newest(directory: Path, key: str = "resume=") -> Path:
    """The newest complete checkpoint in ``directory`` (or ``directory`` itself); ``UserError`` if there is
    none. ``key``: what the user has named it by, for the message."""
    if (directory / MANIFEST).is_file():
        return directory
    if directory.name == BEST and not directory.exists():
        return _best(directory, key)
    found = [d for name in _NAMES for d in directory.glob(name) if (d / MANIFEST).is_file()]
    if not found and (directory / "checkpoints").is_dir():
        return newest(directory / "checkpoints", key)
    if not found:
        partial = list(directory.glob(f"*{PARTIAL}"))
        extra = f" ({partial[0].name} was cut off while it was written)" if partial else ""
        if not directory.exists():
            extra = " (no such directory)"
        raise UserError(
            f"{key}{directory}: no whole checkpoint there{extra}; name a run's checkpoints directory"
        )
    return max(found, key=lambda d: (read_manifest(d).step, d.name))


def _best(directory: Path, key: str) -> Path:
    """The checkpoint of the best evaluation, in the run or among the checkpoints that ``directory`` is in."""
    for place in (directory.parent, directory.parent / "checkpoints"):
        if (found := place / f"{BEST}{SUFFIX}" / MANIFEST).is_file():
            return found.parent
    raise UserError(
        f"{key}{directory}: no best checkpoint there; a run keeps one with "
        "trainer.best_checkpoint=val/logloss (or another figure)"
    )


def open_checkpoint(directory: Path) -> dict[str, Any]:
    """Verify all files against the manifest and read trainer.pt; ``UserError`` names the file that is bad."""
    manifest = verify(directory)
    with naming(directory):
        trainer = load_trainer(directory / TRAINER)
        if trainer["global_step"] != manifest.step:
            raise Damaged(f"of step {trainer['global_step']!r}, and the manifest of {manifest.step}")
    return trainer


@contextmanager
def naming(directory: Path) -> Iterator[None]:
    """In the block, a ``Damaged`` error names trainer.pt."""
    try:
        yield
    except (OSError, Damaged) as fault:
        raise UserError(
            f"{directory / TRAINER} is damaged or of another program: {fault}; "
            f"resume from another checkpoint in {directory.parent}"
        ) from fault


def _discard(directory: Path) -> None:
    """Remove a checkpoint, its manifest first, so that the rest after a kill does not look complete."""
    (directory / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def save_trainer(content: dict[str, Any], file: Path) -> None:
    """``torch.save``, which raises the OSError of a file that cannot be written."""
    with file.open("wb") as stream:
        try:
            torch.save(plain(content), stream)
        except RuntimeError as fault:
            # torch then raises another error about its half-written archive, which hides the reason.
            if isinstance(fault.__context__, OSError):
                raise fault.__context__ from None
            raise


def load_trainer(file: Path) -> dict[str, Any]:
    """Read what ``save_trainer`` wrote; ``Damaged`` if it is not such a file."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # The errors that bytes other than a pickle can raise, by pickle's documentation.
    except Exception as fault:
        reason = str(fault).strip().partition("\n")[0][:200]
        raise Damaged(f"it cannot be read ({type(fault).__name__}: {reason})") from fault
    entries({"global_step": int}, loaded)
    try:
        found: dict[str, Any] = restored(loaded)
    except RecursionError:
        raise Damaged("nested too deeply") from None
    return found
