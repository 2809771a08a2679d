"""Whether cores that share a batch's samples are faster than threads that share every operator: measured.

What is timed is a step of the model itself, both ways, over tables that stand in for its own and are thrown
away. Nothing of the run is trained, fetched or moved.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.backend.calibrate import medians, sizes
from recpipe.backend.choices import FIRST_SHARES, Choices
from recpipe.backend.convert import roomy_paths
from recpipe.backend.host import Notebook
from recpipe.data.parts import batch_size
from recpipe.data.select import between
from recpipe.pipeline.cores import Cores
from recpipe.pipeline.parts import undone
from recpipe.pipeline.placed import PlacedModel
from recpipe.pipeline.step import StagedBatch, StepTimes, accumulate
from recpipe.tables.collection import TableCollection
from recpipe.tables.inputs import GroupIds, count_ids
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.specs import TableSet

STAND_IN_BYTES = 64 << 20
"""Of all tables that are looked up while a step is timed: more than a cache holds, and made in no time."""
LEARNING_RATE = 1e-12
MARGIN = 1.1
"""Cores share a batch where that is so much faster: a run also reads and plans, which takes turns at Python
with them and is not in the time measured."""
NOISE = 1.02
"""The first core takes less than an equal share where that is so much faster again."""
ROUNDS = 9
SMALLEST = 128
"""Samples of the smallest batch that is timed; smaller ones are not shared."""


def measured_sharing(model: PlacedModel, batch: Any, size: int, folder: Path) -> Choices:
    """The faster way through steps of ``model``, as it is or converted, with up to ``size`` samples.

    ``batch``: one like those that will be trained. Known ways are taken from ``folder`` and measured ones
    kept there, as by ``calibrated``.
    """
    threads, notebook = torch.get_num_threads(), Notebook(folder)
    name, trial = signature(model, batch), _Trial(model)
    chosen = dict.fromkeys(map(str, sizes(size)), "openmp")
    for samples in sizes(size):
        if SMALLEST <= samples <= batch_size(batch):
            once = partial(trial.faster, between(batch, 0, samples))
            chosen[str(samples)] = notebook.answer(name, threads, samples, once)
    notebook.keep()
    return {name: {str(threads): chosen}}


def signature(model: PlacedModel, batch: Any) -> str:
    """A name for models that take as long: of the same modules and sizes, with as many ids to look up."""
    ids = count_ids(model.inputs.each(batch)) // max(1, batch_size(batch))
    modules = [(path, type(module).__qualname__) for path, module in model.module.named_modules()]
    shapes = [(name, tuple(p.shape)) for name, p in model.dense_parameters().items()]
    groups = [
        (g.tables.dim, g.tables.optimizer.name, len(g.tables.features), g.tables.pooled, g.tables.weighted)
        for g in model.embeddings.tables.groups
    ]
    described = repr((modules, shapes, groups, ids.bit_length(), model.called.low_precision))
    return f"model {hashlib.sha256(described.encode()).hexdigest()[:16]}"


class _Trial:
    """Steps of ``model`` over tables that stand in for its own."""

    def __init__(self, model: PlacedModel) -> None:
        self.model = model

    @cached_property
    def tables(self) -> dict[TableCollection, ResidentCollection]:
        """What stands in for each group's collection: its tables, with fewer rows."""
        groups, cpu = self.model.embeddings.tables.groups, torch.device("cpu")
        rows = max(1, STAND_IN_BYTES // sum(len(g.tables.tables) * g.tables.record_bytes for g in groups))
        roomy = roomy_paths(self.model.module)
        return {
            own: ResidentCollection(_with_rows(group.tables, rows), cpu, room=group.path in roomy)
            for own, group in zip(self.model.embeddings.collections, groups, strict=True)
        }

    def faster(self, batch: Any) -> str:
        """``openmp``, or one of ``FIRST_SHARES``."""
        count = torch.get_num_threads()
        shared = {name: Cores(count, partial(_always, first)) for name, first in FIRST_SHARES.items()}
        dense, ids = self.model.dense, self._ids(batch)
        runs = [partial(self._step, ids, batch, dense, c) for c in (None, *shared.values())]
        try:
            with undone(self.model):
                openmp, *times = medians(runs, ROUNDS)
        finally:
            for cores in shared.values():
                cores.close()
            for parameter in dense:
                parameter.grad = None
        name, best = "openmp", openmp
        for other, time in zip(shared, times, strict=True):
            if time * (MARGIN if name == "openmp" else NOISE) < best:
                name, best = other, time
        return name

    def _step(self, ids: GroupIds, batch: Any, dense: list[nn.Parameter], cores: Cores | None) -> None:
        for parameter in dense:
            parameter.grad = None
        lookups = self.model.lookups(batch, None, {}, ids)
        for lookup in lookups.all:
            lookup.collection = self.tables[lookup.collection]
        accumulate(self.model, StagedBatch(batch), StepTimes(), cores, lookups)

    def _ids(self, batch: Any) -> GroupIds:
        """Within the rows of the tables that stand in."""
        each = zip(self.model.inputs.each(batch), self.tables.values(), strict=True)
        return tuple(None if ids is None else _within(ids, own.tables) for ids, own in each)


def _within(ids: KeyedJaggedTensor, tables: TableSet) -> KeyedJaggedTensor:
    rows = torch.tensor([tables.tables[table].rows for table in tables.table_of])
    limits = rows.repeat_interleave(torch.tensor(ids.length_per_key()))
    return KeyedJaggedTensor(
        ids.keys(), ids.values() % limits, ids.weights_or_none(), ids.lengths(), ids.offsets()
    )


def _with_rows(tables: TableSet, most: int) -> TableSet:
    """``tables`` with fewer rows, which learn next to nothing: however many steps, the loss stays finite."""
    cut = tuple(replace(table, rows=min(table.rows, most), first=None) for table in tables.tables)
    return replace(tables, tables=cut, optimizer=replace(tables.optimizer, lr=LEARNING_RATE))


def _always(first: float, samples: int) -> float:
    return first
