"""``recpipe.load``: makes a checkpoint into a model of torch and TorchRec modules, with all tables in
memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recpipe.checkpoint.manifest import TABLES
from recpipe.checkpoint.table_files import saved_weights
from recpipe.checkpoint.table_io import MODEL, naming, newest, open_checkpoint
from recpipe.common.saved import entries, tensor, typed_as
from recpipe.common.tensors import Streamed
from recpipe.errors import UserError
from recpipe.model.dlrm import META, DlrmSizes, make_dlrm
from recpipe.pipeline.placed import saved_values
from recpipe.private_api import module_name


def load_checkpoint(checkpoint: Path, model: nn.Module | None = None) -> nn.Module:
    """The ``checkpoint`` (or the newest in that folder) as a module in eval mode, without optimizer state.

    ``model`` None: one of recpipe's own models, made from the sizes in the checkpoint. Otherwise ``model``,
    with its parameters and saved buffers replaced. Parameters of embedding collections are found by their
    tables' names, all others by the names that they had in training. ``UserError``, before any parameter is
    changed, if the two do not fit.
    """
    directory = newest(checkpoint.expanduser())
    trainer = open_checkpoint(directory)
    if model is not None:
        fill(model, directory, trainer)
        return model.eval()
    dense, tables = saved_dense(directory, trainer), saved_weights(directory / TABLES)
    with naming(directory):
        noted = trainer.get(MODEL)
        sizes = None if noted is None else typed_as(DlrmSizes, noted, MODEL)
    if sizes is None:
        raise UserError(
            f"{directory} does not say how its model is made (it is of an earlier version, or not of "
            "recpipe's own): pass the model, recpipe.load(checkpoint, model=MODULE); for model=dlrm that is "
            "TorchRec's DLRM over an EmbeddingBagCollection of these tables"
        )
    # Sizes are compared with the files before memory is allocated for them.
    names = parameters_of_tables(make_dlrm(sizes, META), dense, tables, directory)
    cpu = torch.device("cpu")
    made: nn.Module = make_dlrm(sizes, cpu, tables=cpu)
    _fill(made, dense, tables, names)
    return made.eval()


def fill(model: nn.Module, directory: Path, trainer: Mapping[str, Any]) -> None:
    """Replace the parameters and saved buffers of ``model`` by those of the open checkpoint ``directory``;
    ``UserError``, before any is changed, if the two do not fit."""
    dense, tables = saved_dense(directory, trainer), saved_weights(directory / TABLES)
    _fill(model, dense, tables, parameters_of_tables(model, dense, tables, directory))


def parameters_of_tables(
    model: nn.Module, dense: Mapping[str, torch.Tensor], tables: Mapping[str, Streamed], directory: Path
) -> dict[str, str]:
    """The name of each table's parameter; ``UserError`` if ``model`` has other tables than the checkpoint."""
    own = saved_values(model)
    names = {table: _table_parameter(table, own, directory) for table in tables}
    left, extra = own.keys() - names.values() - dense.keys(), dense.keys() - own.keys()
    if left or extra:
        name, what = (min(left), "the checkpoint lacks") if left else (min(extra), "the model has no")
        raise UserError(f"{directory} is of another model: {what} '{name}'; pass the model that was trained")
    shapes = {name: tuple(value.shape) for name, value in dense.items()}
    shapes |= {names[table]: tuple(shape) for table, (shape, _) in tables.items()}
    for name, shape in shapes.items():
        if own[name].shape != shape:
            raise UserError(
                f"{directory} is of another model: '{name}' is {shape} there and {tuple(own[name].shape)} "
                "here; pass the model that was trained"
            )
    return names


def _fill(
    model: nn.Module,
    dense: Mapping[str, torch.Tensor],
    tables: Mapping[str, Streamed],
    names: Mapping[str, str],
) -> None:
    own = saved_values(model)
    with torch.no_grad():
        for name, value in dense.items():
            own[name].copy_(value)
        for table, (_, blocks) in tables.items():
            start, target = 0, own[names[table]]
            for block in blocks:
                target[start : start + len(block)] = torch.from_numpy(block)
                start += len(block)


_KINDS = ("embedding_bags", "embeddings")
"""The names of the modules of tables in TorchRec's collections."""


def _table_parameter(table: str, parameters: Mapping[str, torch.Tensor], directory: Path) -> str:
    """The one parameter of an embedding collection for ``table``. If several collections have a table of that
    name, ``table`` begins with the collection's path."""
    path, _, own = table.rpartition(".")
    names = [f"{kind}.{module_name(table)}.weight" for kind in _KINDS]
    found = [name for name in parameters if name.endswith(tuple(names))]
    if not found:
        names = [f"{path}.{kind}.{own}.weight" for kind in _KINDS]
        found = [name for name in parameters if name in names]
    if len(found) != 1:
        raise UserError(
            f"{directory} is of another model: {len(found) or 'none'} of the model's embedding collections "
            f"{'have' if len(found) > 1 else 'has'} a table '{table}'; pass the model that was trained"
        )
    return found[0]


def saved_dense(directory: Path, trainer: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The dense parameters and saved buffers by name, in the ``trainer`` of the checkpoint ``directory``."""
    with naming(directory):
        dense: dict[str, torch.Tensor] = entries({"state_dict": dict[str, torch.Tensor]}, trainer)[
            "state_dict"
        ]
        for name, value in dense.items():
            tensor(value, value.dtype, tuple(value.shape), name)
    return dense
