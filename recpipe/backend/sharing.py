"""Measures whether cores that share a batch's samples are faster than threads that share every operator.

It times a step of the model itself both ways, with temporary tables in place of its own. Nothing of the run
is trained, fetched or moved.
"""

from __future__ import annotations

import hashlib
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from recpipe.backend.calibrate import sizes
from recpipe.backend.choices import FIRST_SHARES, Choices, Notebook
from recpipe.backend.convert import roomy_paths
from recpipe.common.meter import Meter
from recpipe.common.timing import median_seconds
from recpipe.data.parts import batch_size
from recpipe.data.select import between
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.parts import same_random_numbers
from recpipe.pipeline.placed import PlacedModel
from recpipe.pipeline.step import Cores, StepTimes, accumulate
from recpipe.tables.inputs import GroupIds, count_ids
from recpipe.tables.resident import ResidentCollection, with_few_rows, within

MARGIN = 1.1
"""Cores share a batch if that is so many times faster. A run also reads and plans, which competes for Python
with the cores and is not in the measured time."""
NOISE = 1.02
"""The first core takes less than an equal share if that is again so many times faster."""
ROUNDS = 9
MOST_SECONDS = 5.0
"""After so many of one batch size no further round begins."""
BUDGET_SECONDS = 20.0
"""No larger batch is timed if that would take longer together; that of the size before stands for it."""
LARGER = 4
"""How many times as long the next size takes at least: it has so many times as many samples."""
SMALLEST = 128
"""Samples of the smallest batch that is timed; cores do not share smaller ones."""


def measured_sharing(model: PlacedModel, batch: Any, size: int, folder: Path) -> Choices:
    """The faster way for steps of ``model``, which may be converted, with up to ``size`` samples.

    ``batch``: a batch like those of the training. Known choices are read from ``folder`` and new ones saved
    there, as in ``calibrated``.
    """
    threads, notebook = torch.get_num_threads(), Notebook(folder)
    name, trial = signature(model, batch), _Trial(model)
    chosen = dict.fromkeys(map(str, sizes(size)), "openmp")
    spent = last = 0.0
    with Meter() as meter:
        for samples in sizes(size):
            if not SMALLEST <= samples <= batch_size(batch):
                continue
            if not notebook.knows(name, threads, samples) and spent + LARGER * last > BUDGET_SECONDS:
                del chosen[str(samples)]
                continue
            if meter.due:
                meter.show(min(1.0, spent / BUDGET_SECONDS), "measuring whether cores share a batch")
            once, begun = partial(trial.faster, between(batch, 0, samples)), perf_counter()
            chosen[str(samples)] = notebook.answer(name, threads, samples, once)
            last = perf_counter() - begun
            spent += last
    notebook.keep()
    return {name: {str(threads): chosen}}


def signature(model: PlacedModel, batch: Any) -> str:
    """A name for models that take equally long: with the same modules and sizes and the same number of
    ids."""
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
    """Steps of ``model`` with temporary tables in place of its own."""

    def __init__(self, model: PlacedModel) -> None:
        self.model = model

    @cached_property
    def tables(self) -> list[ResidentCollection]:
        """The replacement of each group's collection: the same tables with fewer rows."""
        groups, cpu = self.model.embeddings.tables.groups, torch.device("cpu")
        roomy = roomy_paths(self.model.module)
        made = zip(groups, with_few_rows(self.model.embeddings.tables), strict=True)
        return [ResidentCollection(cut, cpu, padded=group.path in roomy) for group, cut in made]

    def faster(self, batch: Any) -> str:
        """``openmp``, or one of ``FIRST_SHARES``."""
        count = torch.get_num_threads()
        shared = {name: Cores(count, partial(_always, first)) for name, first in FIRST_SHARES.items()}
        each = zip(self.model.inputs.each(batch), self.tables, strict=True)
        # Within the rows of the temporary tables.
        ids = tuple(None if ids is None else within(ids, own.tables) for ids, own in each)
        dense, copied = self.model.dense, self.model.copied()
        runs = [partial(self._step, copied, ids, batch, dense, c) for c in (None, *shared.values())]
        try:
            with same_random_numbers():
                openmp, *times = median_seconds(runs, ROUNDS, most=MOST_SECONDS)
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

    def _step(
        self, model: PlacedModel, ids: GroupIds, batch: Any, dense: list[nn.Parameter], cores: Cores | None
    ) -> None:
        for parameter in dense:
            parameter.grad = None
        pairs = zip(self.tables, ids, strict=True)
        taken = InFlight(batch)
        taken.take_in([None if own is None else tables.input_dist(own) for tables, own in pairs])
        accumulate(model, taken, StepTimes(), cores)


def _always(first: float, samples: int) -> float:
    return first
