"""A checkpoint without recpipe: ``recpipe.load`` makes it into a model of torch and TorchRec modules, and
``recpipe unshard CHECKPOINT FILE`` into one safetensors file, which ``model.pretrained=FILE`` starts a run
from."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recpipe.checkpoint.averaged import WEIGHTS, saved_tables, with_weights
from recpipe.checkpoint.manifest import TABLES
from recpipe.checkpoint.table_files import saved_weights
from recpipe.checkpoint.table_io import MODEL, naming, newest, open_checkpoint
from recpipe.common.console import alone, capture_logs
from recpipe.common.files import sync
from recpipe.common.meter import counting
from recpipe.common.owned import require_absent, written_alone
from recpipe.common.process import quieted
from recpipe.common.saved import entries, tensor, typed_as
from recpipe.common.tensors import INT64, Streamed, write_tensors
from recpipe.errors import UserError, shown
from recpipe.model.dlrm import META, DlrmSizes, make_dlrm
from recpipe.model.losses.tasks import LOG_VARIANCES
from recpipe.pipeline.placed import saved_values
from recpipe.plugin.tables import to_numpy
from recpipe.private_api import module_name
from recpipe.tables.dynamic.saved import saved_keys


def load_checkpoint(
    checkpoint: Path, model: nn.Module | None = None, weights: str | None = None
) -> nn.Module:
    """The ``checkpoint`` (or the newest in that folder) as a module in eval mode, without optimizer state.

    ``model`` None: one of recpipe's own models, made from the sizes in the checkpoint. Otherwise ``model``,
    with its parameters and saved buffers replaced. Parameters of embedding collections are found by their
    tables' names, all others by the names that they had in training. ``UserError``, before any parameter is
    changed, if the two do not fit.
    """
    directory = newest(checkpoint.expanduser())
    trainer = opened(directory, weights)
    if model is not None:
        fill(model, directory, trainer)
        return model.eval()
    dense, tables = saved_dense(directory, trainer), saved_weights(saved_tables(directory, trainer))
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
    fill_dense(made, dense)
    _fill_tables(made, tables, names)
    return made.eval()


def fill(model: nn.Module, directory: Path, trainer: Mapping[str, Any]) -> None:
    """Replace the parameters and saved buffers of ``model`` by those of the open checkpoint ``directory``;
    ``UserError``, before any is changed, if the two do not fit."""
    dense, tables = saved_dense(directory, trainer), saved_weights(saved_tables(directory, trainer))
    names = parameters_of_tables(model, dense, tables, directory)
    fill_dense(model, dense)
    _fill_tables(model, tables, names)


def opened(directory: Path, weights: str | None) -> dict[str, Any]:
    """The checked content of the checkpoint's trainer.pt, with the dense part of ``weights``
    (``with_weights``)."""
    trainer = open_checkpoint(directory)
    with naming(directory):
        return with_weights(trainer, weights, directory)


def fill_dense(module: nn.Module, dense: Mapping[str, torch.Tensor]) -> None:
    """Set the parameters and buffers of ``module`` that ``dense`` names."""
    own = saved_values(module)
    with torch.no_grad():
        for name, value in dense.items():
            own[name].copy_(value)


def _fill_tables(model: nn.Module, tables: Mapping[str, Streamed], names: Mapping[str, str]) -> None:
    own = saved_values(model)
    with torch.no_grad():
        for table, (_, blocks) in tables.items():
            start, target = 0, own[names[table]]
            for block in blocks:
                target[start : start + len(block)] = torch.from_numpy(block)
                start += len(block)


def parameters_of_tables(
    model: nn.Module, dense: Mapping[str, torch.Tensor], tables: Mapping[str, Streamed], directory: Path
) -> dict[str, str]:
    """The name of each table's parameter; ``UserError`` if ``model`` has other tables than the checkpoint."""
    own = saved_values(model)
    kinds = ("embedding_bags", "embeddings")  # the modules of tables in TorchRec's collections
    names: dict[str, str] = {}
    for table in tables:
        called = {module_name(table), table}  # a name may have been made fit for a module already
        ends = tuple(f"{kind}.{name}.weight" for kind in kinds for name in called)
        found = [name for name in own if name.endswith(ends)]
        if not found:  # several collections have a table of that name, which follows its collection's path
            path, _, name = table.rpartition(".")
            found = [key for kind in kinds if (key := f"{path}.{kind}.{name}.weight") in own]
        if len(found) != 1:
            raise UserError(
                f"{directory} is of another model: {len(found) or 'none'} of the model's embedding "
                f"collections {'have' if len(found) > 1 else 'has'} a table '{table}'; pass the model that "
                "was trained"
            )
        names[table] = found[0]
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


def saved_dense(directory: Path, trainer: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The model's dense parameters and saved buffers by name, in the ``trainer`` of the checkpoint
    ``directory``."""
    with naming(directory):
        dense: dict[str, torch.Tensor] = entries({"state_dict": dict[str, torch.Tensor]}, trainer)[
            "state_dict"
        ]
        for name, value in dense.items():
            tensor(value, value.dtype, tuple(value.shape), name)
    return {name: value for name, value in dense.items() if name != LOG_VARIANCES}


def unshard_command(words: Sequence[str]) -> int:
    """``recpipe unshard CHECKPOINT FILE [overwrite=true] [weights=last]``."""
    overwrite, weights = False, None
    for word in words[2:]:
        key, _, value = word.partition("=")
        if key == "weights" and value in WEIGHTS:
            weights = value
            continue
        if key != "overwrite" or value.lower() not in ("true", "false"):
            raise UserError(
                f"recpipe unshard takes overwrite=true and weights=last after the file, not '{shown(word)}'"
            )
        overwrite = value.lower() == "true"
    with quieted(), alone(), capture_logs(None):
        return unshard(Path(words[0]), Path(words[1]), overwrite, weights)


def unshard(checkpoint: Path, target: Path, overwrite: bool = False, weights: str | None = None) -> int:
    """Write ``<table>`` (float32 [rows, D]) for each table, and every dense parameter (float32) and saved
    buffer (float32, whole numbers as int64) under its name. Of a table whose ids got rows as they came,
    ``<table>.keys`` int64 [n] are those of its rows from the third one on.

    ``checkpoint`` is a checkpoint, or a folder whose newest one is taken. Tables may be larger than memory.
    ``UserError`` if ``target`` exists, unless ``overwrite``.
    """
    require_absent("", target, overwrite)
    directory = newest(checkpoint.expanduser())
    trainer = opened(directory, weights)
    dense = saved_dense(directory, trainer)
    tensors: dict[str, tuple[tuple[int, ...], list[NDArray[Any]]]] = {}
    for name, value in dense.items():
        whole = value.long().numpy() if not value.is_floating_point() else to_numpy(value)
        tensors[name] = (value.shape, [whole])
    for name, keys in saved_keys(directory / TABLES).items():
        tensors[f"{name}.keys"] = keys.shape, [keys]
    types = {name: INT64 for name, (_, blocks) in tensors.items() if blocks[0].dtype.kind == "i"}
    tables = saved_weights(saved_tables(directory, trainer))
    clash = min(tables.keys() & tensors.keys(), default=None)
    if clash is not None:
        raise UserError(f"table '{clash}' has the name of a dense parameter; rename the table")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        owned = written_alone("", target, overwrite, ("unshard", str(directory)))
        with owned, tempfile.TemporaryDirectory(dir=target.parent, prefix=".unshard-") as folder:
            partial = Path(folder, "file")
            with counting("writing rows", sum(shape[0] for shape, _ in tables.values())) as add:
                rows: dict[str, Streamed] = {n: (s, _told(blocks, add)) for n, (s, blocks) in tables.items()}
                write_tensors(partial, {**tensors, **rows}, types)
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
