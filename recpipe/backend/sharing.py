"""Measures whether cores that share a batch's samples are faster than threads that share every operator, and
whether what parts of a model gain by other kernels is a gain of the whole step.

It times a step of the model itself each way, with temporary tables in place of its own. Nothing of the run
is trained, fetched or moved.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from recpipe.backend.calibrate import sizes
from recpipe.backend.choices import FIRST_SHARES, Choices, Notebook
from recpipe.backend.convert import padded_paths, revert
from recpipe.common.meter import Meter
from recpipe.common.timing import seconds_by_round
from recpipe.data.parts import batch_size
from recpipe.data.select import between
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.parts import same_random_numbers
from recpipe.pipeline.placed import PlacedModel
from recpipe.pipeline.step import Cores, StepTimes, accumulate
from recpipe.tables.inputs import GroupIds
from recpipe.tables.proxy import CollectionProxy
from recpipe.tables.resident import ResidentCollection, with_few_rows, within

MARGIN = 1.1
"""Cores share a batch if that is so many times faster. A run also reads and plans, which competes for Python
with the cores and is not in the measured time."""
NOISE = 1.02
"""A model is converted, and the first core takes less than an equal share, if that is so many times
faster."""
ROUNDS = 9
MOST_ROUNDS = 0.75
"""What counts as faster was so in this share of the rounds at least."""
MOST_SECONDS = 5.0
"""After so many of one batch size no further round begins."""
BUDGET_SECONDS = 20.0
"""No larger batch is timed if that would take longer together; that of the size before stands for it."""
LARGER = 4
"""How many times as long the next size takes at least: it has so many times as many samples."""
SMALLEST = 128
"""Samples of the smallest batch that is timed; cores do not share smaller ones."""


def measured_sharing(
    model: PlacedModel, batch: Any, size: int, folder: Path, cores: bool = True, or_plain: bool = False
) -> Choices:
    """The faster way for steps of ``model``, which may be converted, with up to ``size`` samples;
    ``cores``: that they share a batch is one of the ways; ``or_plain``: so are its modules as they are, on
    threads that share every operator.

    ``batch``: a batch like those of the training. Known choices are read from ``folder`` and new ones saved
    there, as in ``calibrated``. Without ``cores`` whole batches alone are timed.
    """
    threads, notebook = torch.get_num_threads(), Notebook(folder)
    name, tables = signature(model, batch, cores), cache(partial(_few_rows, model))
    each = sizes(size) if cores else [size]
    chosen = dict.fromkeys(map(str, each), "openmp")
    spent = last = 0.0
    with Meter() as meter:
        for samples in each:
            if not SMALLEST <= samples <= batch_size(batch):
                continue
            if not notebook.knows(name, threads, samples) and spent + LARGER * last > BUDGET_SECONDS:
                del chosen[str(samples)]
                continue
            if meter.due:
                meter.show(min(1.0, spent / BUDGET_SECONDS), "measuring what makes a step faster")
            cut, begun = batch if samples == batch_size(batch) else between(batch, 0, samples), perf_counter()
            once = partial(_faster, model, tables, cut, cores, or_plain)
            chosen[str(samples)] = notebook.answer(name, threads, samples, once)
            last = perf_counter() - begun
            spent += last
    notebook.keep()
    return {name: {str(threads): chosen}}


def signature(model: PlacedModel, batch: Any, cores: bool = True) -> str:
    """A name for models that take equally long: with the same modules and sizes and the same number of
    ids. What stands in place of the tables' modules is told by the features of each kind of tables, whatever
    recpipe calls it, and whatever groups a plugin makes of them: a run with it rounds as one without.
    ``cores``: whether they may share a batch."""
    each = model.inputs.each(batch)
    ids = sum(own.values().numel() for own in each if own is not None) // max(1, batch_size(batch))
    modules = [
        (path, type(module).__qualname__)
        for path, module in model.module.named_modules()
        if not isinstance(module, CollectionProxy)
    ]
    shapes = [(name, tuple(p.shape)) for name, p in model.dense_parameters().items()]
    kinds = Counter[tuple[Any, ...]]()
    for tables in (group.tables for group in model.embeddings.tables.groups):
        kind = (tables.dim, tables.optimizer.name, tables.pooled, tables.weighted)
        kinds[kind] += len(tables.features)
    described = repr((modules, shapes, sorted(kinds.items()), ids.bit_length(), model.called.low_precision))
    described += "" if cores else " whole"
    return f"model {hashlib.sha256(described.encode()).hexdigest()[:16]}"


def _few_rows(model: PlacedModel) -> list[ResidentCollection]:
    """The replacement of each group's collection: the same tables with fewer rows."""
    groups, cpu = model.embeddings.tables.groups, torch.device("cpu")
    wide = padded_paths(model.module)
    made = zip(groups, with_few_rows(model.embeddings.tables), strict=True)
    return [ResidentCollection(cut, cpu, padded=group.path in wide) for group, cut in made]


def _faster(
    model: PlacedModel,
    tables: Callable[[], list[ResidentCollection]],
    batch: Any,
    cores: bool,
    or_plain: bool,
) -> str:
    """``plain``, if asked for, ``openmp`` or, with ``cores``, one of ``FIRST_SHARES``: the simplest of these
    than which none is clearly faster, by steps of ``batch`` with temporary ``tables`` in place of the model's
    own."""
    count, dense, copied = torch.get_num_threads(), model.dense, model.copied()
    few, given = tables(), model.inputs.each(batch)
    # Ids within the rows of the temporary tables.
    ids = tuple(
        None if own is None else within(own, each.tables) for each, own in zip(few, given, strict=True)
    )
    shares = FIRST_SHARES if cores else {}
    shared = {name: Cores(count, partial(_always, first)) for name, first in shares.items()}
    ways = {"plain": partial(_train_as_it_is, model.copied(), batch, few, ids)} if or_plain else {}
    ways |= {"openmp": partial(_train, copied, batch, few, ids, None)}
    ways |= {name: partial(_train, copied, batch, few, ids, own) for name, own in shared.items()}
    try:
        with same_random_numbers():
            times = dict(
                zip(ways, seconds_by_round([*ways.values()], ROUNDS, most=MOST_SECONDS), strict=True)
            )
    finally:
        for own in shared.values():
            own.close()
        for parameter in dense:
            parameter.grad = None
    best, *others = times
    for name in others:
        begins_to_share = name in shared and best not in shared
        if _clearly_faster(times[name], times[best], MARGIN if begins_to_share else NOISE):
            best = name
    return best


def _clearly_faster(times: Sequence[float], others: Sequence[float], margin: float) -> bool:
    """Whether rounds took ``times`` where the same rounds took ``others`` another way: less than these by
    ``margin`` at the median, and less in most rounds. Something else on the machine may make the median of a
    few rounds say anything."""
    ratios = [other / own for own, other in zip(times, others, strict=True)]
    faster = sum(ratio > 1 for ratio in ratios)
    return median(ratios) > margin and faster >= MOST_ROUNDS * len(ratios)


def _train(
    model: PlacedModel,
    batch: Any,
    tables: Sequence[ResidentCollection],
    ids: GroupIds,
    cores: Cores | None,
) -> None:
    for parameter in model.dense:
        parameter.grad = None
    taken = InFlight(batch, ids=ids)
    taken.take_in(tables)
    accumulate(model, taken, StepTimes(), cores)


def _train_as_it_is(
    model: PlacedModel, batch: Any, tables: Sequence[ResidentCollection], ids: GroupIds
) -> None:
    """``_train`` of a copy, without any conversion, with all rows looked up by FBGEMM."""
    revert(model.module)
    kernels = [own.tables.kernel for own in tables]
    before = [kernel.faster for kernel in kernels]
    try:
        for kernel in kernels:
            kernel.faster = None
        with _without_padding(model):
            _train(model, batch, tables, ids, None)
    finally:
        for kernel, faster in zip(kernels, before, strict=True):
            kernel.faster = faster


@contextmanager
def _without_padding(model: PlacedModel) -> Iterator[None]:
    padded = [proxy for proxy in model.bound if proxy.padded]
    try:
        for proxy in padded:
            proxy.padded = False
        yield
    finally:
        for proxy in padded:
            proxy.padded = True


def _always(first: float, samples: int) -> float:
    return first
