"""``model.pretrained=FILE``: a safetensors file that a run starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from recpipe.common.tensors import FLOATS, INT64, TensorFiles
from recpipe.errors import UserError
from recpipe.pipeline.placed import PlacedModel, saved_values
from recpipe.plugin.tables import SavedRows, weight_name
from recpipe.tables.groups import ModelTables


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
