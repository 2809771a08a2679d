"""``recpipe unshard CHECKPOINT FILE`` writes a checkpoint's tables and dense parameters into one safetensors
file, which ``model.pretrained=FILE`` starts a run from."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.answers.plain import saved_dense
from recpipe.checkpoint.manifest import TABLES
from recpipe.checkpoint.table_files import saved_weights
from recpipe.checkpoint.table_io import newest, open_checkpoint
from recpipe.common.console import alone, capture_logs
from recpipe.common.files import sync
from recpipe.common.meter import counting
from recpipe.common.owned import require_absent, written_alone
from recpipe.common.process import quieted
from recpipe.common.tensors import INT64, Streamed, write_tensors
from recpipe.errors import UserError, shown
from recpipe.plugin.tables import to_numpy


def unshard_command(words: Sequence[str]) -> int:
    """``recpipe unshard CHECKPOINT FILE [overwrite=true]``."""
    overwrite = False
    for word in words[2:]:
        key, _, value = word.partition("=")
        if key != "overwrite" or value.lower() not in ("true", "false"):
            raise UserError(f"recpipe unshard takes overwrite=true after the file, not '{shown(word)}'")
        overwrite = value.lower() == "true"
    with quieted(), alone(), capture_logs(None):
        return unshard(Path(words[0]), Path(words[1]), overwrite)


def unshard(checkpoint: Path, target: Path, overwrite: bool = False) -> int:
    """Write ``<table>`` (float32 [rows, D]) for each table, and every dense parameter (float32) and saved
    buffer (float32, whole numbers as int64) under its name.

    ``checkpoint`` is a checkpoint, or a folder whose newest one is taken. Tables may be larger than memory.
    ``UserError`` if ``target`` exists, unless ``overwrite``.
    """
    require_absent("", target, overwrite)
    directory = newest(checkpoint.expanduser())
    dense = saved_dense(directory, open_checkpoint(directory))
    tensors: dict[str, Streamed] = {name: (value.shape, [_array(value)]) for name, value in dense.items()}
    types = {name: INT64 for name, value in dense.items() if not value.is_floating_point()}
    tables = saved_weights(directory / TABLES)
    clash = min(tables.keys() & tensors.keys(), default=None)
    if clash is not None:
        raise UserError(f"table '{clash}' has the name of a dense parameter; rename the table")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        owned = written_alone("", target, overwrite, ("unshard", str(directory)))
        with owned, tempfile.TemporaryDirectory(dir=target.parent, prefix=".unshard-") as folder:
            partial = Path(folder, "file")
            with counting("writing rows", sum(shape[0] for shape, _ in tables.values())) as add:
                tensors |= {n: (shape, _told(blocks, add)) for n, (shape, blocks) in tables.items()}
                write_tensors(partial, tensors, types)
                sync(partial)
            partial.replace(target)
    except OSError as fault:
        raise UserError(f"cannot write {target}: {fault.strerror}; choose another file") from fault
    print(f"wrote {target}: {len(tensors)} tensors of {directory}")
    return 0


def _told(blocks: Iterable[NDArray[np.float32]], add: Callable[[int], None]) -> Iterator[NDArray[np.float32]]:
    """The ``blocks`` of rows; ``add`` is told how many have been written."""
    for block in blocks:
        yield block
        add(len(block))


def _array(value: torch.Tensor) -> NDArray[Any]:
    """The tensor as a float32 array, or int64 for whole numbers."""
    return to_numpy(value) if value.is_floating_point() else value.long().numpy()
