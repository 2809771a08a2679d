"""Compares the samples that a run trained, their order and batches, with what the data module yields."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from recpipe.data.content import UInt64
from recpipe.data.dataset import Dataset
from recpipe.plugin.api import Invariant
from recpipe.testing.watch import Record, Step

LATE = -1
"""The place of a sample that the data module does not yield."""


@dataclass(frozen=True)
class Epoch:
    """The training samples as the data module yields them: their contents, and where batches end."""

    dataset: Dataset = field(repr=False)
    batch_size: int
    content: UInt64 = field(repr=False)
    outside: UInt64 = field(repr=False)
    ends: NDArray[np.int64] = field(repr=False)


def faults(record: Record, epoch: Epoch, alters: Collection[Invariant]) -> Iterator[tuple[Invariant, str]]:
    """Which of SAMPLE_SET, SAMPLE_ORDER, BATCH_SIZE and ID_SPACE the run broke though its plugin does not
    declare so in ``alters``, each with what happened, as far as it can be told."""
    if Invariant.ID_SPACE not in alters:
        for number, step in enumerate(record.steps, 1):
            strange = places(step.content, epoch.content) == LATE
            if (places(step.outside[strange], epoch.outside) != LATE).any():
                yield Invariant.ID_SPACE, f"step {number} trains samples with other ids than the data has"
                return
    if Invariant.SAMPLE_SET not in alters:
        said = next(_not_the_set(record, epoch, alters), None)
        if said is not None:
            yield Invariant.SAMPLE_SET, said
            return
    if Invariant.SAMPLE_ORDER not in alters:
        # A step with a sample that belongs before one of an earlier step. The order within a batch does not
        # matter.
        last: dict[int, int] = {}
        for number, step in enumerate(record.steps, 1):
            found = step_places(step, epoch, alters)
            found = found[found != LATE]
            if len(found):
                if found.min() < last.get(step.epoch, 0):
                    yield Invariant.SAMPLE_ORDER, f"step {number} trains samples that belong in another step"
                    break
                last[step.epoch] = int(found.max()) + (Invariant.SAMPLE_SET not in alters)
    if Invariant.BATCH_SIZE not in alters:
        yield from ((Invariant.BATCH_SIZE, fault) for fault in _other_sizes(record, epoch, alters))


def places(samples: UInt64, known: UInt64) -> NDArray[np.int64]:
    """The place of each of ``samples`` among ``known``, or ``LATE``. Equal samples all get the same place."""
    order = np.argsort(known, kind="stable")
    at = np.minimum(np.searchsorted(known[order], samples), len(known) - 1)
    found: NDArray[np.int64] = np.where(known[order][at] == samples, order[at], LATE)
    return found


def step_places(step: Step, epoch: Epoch, alters: Collection[Invariant]) -> NDArray[np.int64]:
    """The place of each sample of ``step`` in the epoch; ids are not compared if the plugin alters them."""
    if Invariant.ID_SPACE in alters:
        return places(step.outside, epoch.outside)
    return places(step.content, epoch.content)


def _not_the_set(record: Record, epoch: Epoch, alters: Collection[Invariant]) -> Iterator[str]:
    known = epoch.outside if Invariant.ID_SPACE in alters else epoch.content
    there = np.bincount(places(known, known), minlength=len(known))
    for number in sorted({step.epoch for step in record.steps}):
        steps = record.of_epoch(number)
        found = np.concatenate([step_places(step, epoch, alters) for step in steps])
        strange = int((found == LATE).sum())
        if strange:
            yield f"epoch {number} trains {strange:,} samples that the data module does not yield"
        count = np.bincount(found[found != LATE], minlength=len(known))
        often = int(np.maximum(count - there, 0).sum())
        if often:
            yield f"epoch {number} trains {often:,} samples more often than once"
        missing = np.maximum(there - count, 0)
        if number not in record.whole:  # samples that were still to come are not missing, if they can be told
            missing = missing[: 0 if Invariant.SAMPLE_ORDER in alters else found.max() + 1]
        if missing.any():
            yield f"epoch {number} leaves out {int(missing.sum()):,} of {len(known):,} samples"


def _other_sizes(record: Record, epoch: Epoch, alters: Collection[Invariant]) -> Iterator[str]:
    """A step of another size. Each class of samples may end with a short batch, and so may another order."""
    full = epoch.batch_size
    classes = 2 + len(epoch.ends) // 10
    for number in sorted({step.epoch for step in record.steps}):
        sizes = np.array([len(step.content) for step in record.of_epoch(number)])
        most = int(sizes.max())
        if most > full:
            yield f"a step of epoch {number} sees {most} samples, and data.batch_size is {full}"
        elif Invariant.SAMPLE_ORDER in alters:
            if int((sizes < full).sum()) > classes:
                yield f"{int((sizes < full).sum())} steps of epoch {number} see fewer than {full} samples"
        elif (sizes[:-1] < full).any():
            step = int((sizes < full).argmax())
            yield f"step {step + 1} of epoch {number} sees {int(sizes[step])} samples, not {full}"
