"""``recpipe unshard CHECKPOINT FILE`` writes a checkpoint's tables and dense parameters into one safetensors
file; ``model.pretrained=FILE`` starts a run from such a file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recpipe.checkpoint.manifest import TABLES
from recpipe.checkpoint.table_files import saved_weights
from recpipe.checkpoint.table_io import naming, newest, open_checkpoint
from recpipe.common.console import alone, heard
from recpipe.common.counting import counting
from recpipe.common.durable import sync
from recpipe.common.owned import require_absent, written_alone
from recpipe.common.quiet import quieted
from recpipe.common.saved import entries, tensor
from recpipe.common.tensor_files import FLOATS, INT64, TensorFiles
from recpipe.common.tensor_writer import Streamed, write_tensors
from recpipe.errors import UserError, shown
from recpipe.pipeline.placed import PlacedModel, saved_values
from recpipe.tables.groups import ModelTables
from recpipe.tables.specs import SavedRows, to_numpy, weight_name


def unshard_command(words: Sequence[str]) -> int:
    """``recpipe unshard CHECKPOINT FILE [overwrite=true]``."""
    overwrite = False
    for word in words[2:]:
        key, _, value = word.partition("=")
        if key != "overwrite" or value.lower() not in ("true", "false"):
            raise UserError(f"recpipe unshard takes overwrite=true after the file, not '{shown(word)}'")
        overwrite = value.lower() == "true"
    with quieted(), alone(), heard(None):
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


def saved_dense(directory: Path, trainer: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The dense parameters and saved buffers by name, in the ``trainer`` of the checkpoint ``directory``."""
    with naming(directory):
        dense: dict[str, torch.Tensor] = entries({"state_dict": dict[str, torch.Tensor]}, trainer)[
            "state_dict"
        ]
        for name, value in dense.items():
            tensor(value, value.dtype, tuple(value.shape), name)
    return dense


@dataclass(frozen=True)
class Pretrained:
    """A file that a run starts from.

    A tensor is a table's weights under the table's name (or ``<table>.weight``), or a dense parameter under
    its own. Parameters that the file lacks keep their first values.
    """

    files: TensorFiles
    rows: dict[str, SavedRows]
    """The tables that it has: their weights, with optimizer state of zero."""

    @classmethod
    def of(cls, file: Path, module: nn.Module, tables: ModelTables) -> Pretrained:
        """Open ``file`` for ``module``, which still has its own collections of ``tables``; ``UserError`` for
        any other name or shape."""
        within = tuple(f"{group.path}." for group in tables.groups)
        dense = {name: p for name, p in saved_values(module).items() if not name.startswith(within)}
        counts = any(not value.is_floating_point() for value in dense.values())
        files = TensorFiles.single(file, (*FLOATS, INT64) if counts else FLOATS)
        shapes = tables.shapes()
        keys = {name: name if name in files.pieces else weight_name(name) for name in shapes}
        known: dict[str, tuple[int, ...]] = {key: shapes[name][:2] for name, key in keys.items()}
        known |= {name: tuple(p.shape) for name, p in dense.items()}
        for key in files.pieces:
            if key not in known:
                raise UserError(f"{file}: '{key}' is neither a table nor a dense parameter of this model")
            if files.shape(key) != known[key]:
                raise UserError(f"{file}: '{key}' is {files.shape(key)}, but this model's is {known[key]}")
        if not files.pieces:
            raise UserError(f"{file} holds no tensors")
        held = {name: key for name, key in keys.items() if key in files.pieces}
        return cls(files, {name: _weights(files, key, shapes[name][2]) for name, key in held.items()})

    def load_dense(self, model: PlacedModel) -> list[str]:
        """Set the dense parameters that the file has; returns the names of all that it has."""
        with torch.no_grad():
            for name, parameter in model.dense_state().items():
                if name in self.files.pieces:
                    parameter.copy_(self.files.whole(name))
        return sorted(self.files.pieces)


def _weights(files: TensorFiles, name: str, width: int) -> SavedRows:
    return lambda start, stop: (files.rows(name, start, stop), np.zeros((stop - start, width), np.float32))
