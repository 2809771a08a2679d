"""A quantized checkpoint opened: for evaluate and predict, for a package, or as a module."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe.answers.row_types import row_bytes
from recpipe.answers.stored import FewTableRows, StoredModel, StoredTable, gather
from recpipe.answers.trained import HostScoring, Trained, open_trained, scored
from recpipe.checkpoint.trained_on import TrainedOn
from recpipe.common.files import RunDir
from recpipe.common.saved import typed_as
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError
from recpipe.model.call import Called
from recpipe_low_precision.bags import LowPrecisionBags, LowPrecisionRows, LowPrecisionTables, RowType
from recpipe_low_precision.checkpoint import (
    PLACES,
    ROWS,
    QuantizedTable,
    damaged,
    put_dense,
    put_rows,
    read_manifest,
    table_file,
)
from recpipe_low_precision.layers import in_float32


def open_quantized(directory: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The model in a quantized checkpoint, in eval mode: called as the float one, with its tables' rows in
    their own types.

    ``model``: the one that training was given in Python, if it was; its collections are replaced and its
    parameters set. Every file is compared with the manifest first. ``UserError`` if one is damaged, or if
    ``model`` is another.
    """
    return open_trained(directory, model=model, kind=QuantizedTrained).model


@dataclass
class QuantizedTrained(Trained):
    """``Trained`` of a quantized checkpoint. Its model is in memory, whatever tiers the recipe has."""

    @classmethod
    def read(cls, directory: Path) -> tuple[Path, dict[str, Any], TrainedOn]:
        """What it keeps of trainer.pt, and what its model was trained on."""
        manifest = read_manifest(directory)
        try:
            trained_on = typed_as(TrainedOn, manifest.trained_on, "trained_on")
        except ValueError as fault:
            raise damaged(directory, fault) from fault
        return directory, {"global_step": manifest.step}, trained_on

    @cached_property
    def called(self) -> Called:
        """How training calls ``model``."""
        called = self.make_called()
        put_rows(called.module, self.directory)
        return called

    @cached_property
    def model(self) -> nn.Module:
        """The model in eval mode, its tables' rows in their own types."""
        return self.called.module

    @contextmanager
    def scoring(self, dataset: Dataset | None = None, run_dir: RunDir | None = None) -> Iterator[Any]:
        """In the block, ``model`` for batches of ``dataset`` (None: ``self.dataset``)."""
        scores = partial(scored, self.called)
        yield HostScoring(self.called.tasks, dataset or self.dataset, self.cfg.data.batch_size, scores)

    def stored(self) -> StoredModel:
        """The model for a package; ``UserError`` if its quality was not judged."""
        if read_manifest(self.directory).judged is False:
            raise UserError(
                f"{self.directory} was written and not judged, as by a command that was killed: make it anew "
                "with 'recpipe quantize'"
            )
        return QuantizedModel(self.make_called(), self.directory)


class QuantizedModel(StoredModel):
    """The model that ``called`` calls, of the class that was trained, with its tables on the disk in the
    quantized checkpoint ``directory``."""

    def __init__(self, called: Called, directory: Path) -> None:
        manifest = put_dense(called.module, directory)
        tables = {
            (table.collection, table.own): _stored(directory / table_file(name), table)
            for name, table in manifest.tables.items()
        }
        super().__init__(called, tables, {path: asdict(layer) for path, layer in manifest.layers.items()})

    def in_float32(self) -> AbstractContextManager[None]:
        """In the block, its linear layers are computed in float32."""
        return in_float32(self.called.module)

    def collection(self, path: str, like: Any, configs: Sequence[Any], rows: FewTableRows) -> nn.Module:
        """A collection with tables ``configs`` of these ``rows`` in their own types."""
        kinds = {
            name: RowType(self.tables[path, name].kind, None if bool(there.all()) else len(own))
            for name, (there, own) in rows.items()
        }
        low: LowPrecisionTables = (
            LowPrecisionBags(configs, kinds, like.is_weighted())
            if isinstance(like, EmbeddingBagCollection)
            else LowPrecisionRows(configs, kinds)
        )
        for name, (there, own) in rows.items():
            if len(own):
                low.rows_of(name).copy_(own)
            if kinds[name].kept is not None:
                low.places_of(name).copy_(torch.where(there, there.cumsum(0) - 1, -1))
        return low


def put_rows_of(called: Called, directory: Path, ids: Mapping[str, torch.Tensor]) -> None:
    """Make the module that ``called`` calls the model in the quantized checkpoint ``directory``, with the
    rows of these ``ids`` alone, int64 by feature: its collections become ``FewRows``.

    The tables may be larger than memory.
    """
    QuantizedModel(called, directory).hold(ids)


def _stored(file: Path, table: QuantizedTable) -> StoredTable:
    def read(name: str, low: int, high: int) -> NDArray[Any]:
        # Opened anew for these rows: what has been read stays in memory until the file is closed.
        with safe_open(file, framework="np") as opened:
            found: NDArray[Any] = opened.get_slice(name)[low:high]
        return found

    def rows(ids: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        places = ids
        if table.kept is not None:
            own = np.empty(len(ids), np.int32)
            gather(ids, own, partial(read, PLACES))
            places = own[own >= 0].astype(np.int64)
            there = torch.from_numpy(own >= 0)
        else:
            there = torch.ones(len(ids), dtype=torch.bool)
        found = np.empty((len(places), row_bytes(table.type, table.dim)), np.uint8)
        gather(places, found, partial(read, ROWS))
        return there, torch.from_numpy(found)

    return StoredTable(table.type, partial(shutil.copyfile, file), rows)
