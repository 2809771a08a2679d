"""What FAE costs and saves: phases of hot mini-batches, which fetch nothing, and of cold ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from recpipe_perf_model import Facts, KeptLookups, Moved, Phase, Statement, joined_lookups

from recpipe.plugin import RowSpace
from recpipe_fae.classify import hot_samples, sample_of
from recpipe_fae.estimate import Estimate, estimated, stretch
from recpipe_fae.hotset import HotOnUse
from recpipe_fae.prepare import HotRule, choose


@dataclass(frozen=True)
class Separated:
    """Mini-batches of cold samples alone, in all that was read."""

    hot: float
    """The share of samples that are hot."""
    moved: tuple[Moved, ...]
    """What a cold mini-batch moves, for each group."""


def statement(facts: Facts, phases: str, rule: HotRule) -> Statement:
    """A fixed hot set, of rows in a sample of the epoch; mini-batches are separated (``phases`` as in the
    yaml) where the plugin's own estimate says that it can pay, and where a trial confirms it. If lookups were
    too many to be kept, mini-batches are taken not to be separated."""
    counts = facts.counted(rule.sample)

    def on_use(space: RowSpace) -> HotOnUse:
        assert counts is not None, "replays have what was read"
        return HotOnUse(space, choose(counts[space.group], space.bases, rule.threshold, space.slots))

    share = facts.share if counts else min(facts.share, facts.seen(rule.sample))
    mixed = facts.replayed(("fae", rule), on_use, "hot", share).moved
    rows = sum(m.read for m in mixed)
    cache = Statement(
        why=f"the rows looked up most often stay resident; {rows:,.0f} others are read for a batch",
        phases=(Phase(moved=mixed),),
        plans="nocache",
        unsure="the time to find the hot rows before training is not counted",
    )
    if phases == "never" or counts is None:
        return cache
    slots = [int(facts.share * group.rows) for group in facts.groups]
    resident = [
        _mask(choose(each, kept.bases, rule.threshold, own), kept.rows)
        for each, kept, own in zip(counts, facts.kept, slots, strict=True)
    ]
    expected = _estimate(facts, np.concatenate(resident))
    if phases == "auto" and not expected.can_pay:
        told = (
            f"{expected.hot_input_share:.1%} of the samples are hot, so that mini-batches are not separated"
        )
        return replace(cache, why=f"{cache.why}; only {told}")
    found = separated(facts.kept, resident, facts.batch_size, facts.prefetch)
    cold_rows = sum(m.read for m in found.moved)
    return Statement(
        why=(
            f"{found.hot:.0%} of the samples need hot rows alone: their mini-batches fetch nothing, the "
            f"others fetch {cold_rows:,.0f} rows each instead of {rows:,.0f} for every mixed one"
        ),
        phases=(
            Phase(share=found.hot, moved=tuple(Moved() for _ in facts.groups)),
            Phase(share=1 - found.hot, moved=found.moved),
        ),
        plans="nocache",
        unsure="the time to find the hot rows and to classify all samples before training is not counted",
        instead=cache if phases == "auto" else None,
    )


def _mask(rows: NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    found = np.zeros(size, bool)
    found[rows] = True
    return found


def _estimate(facts: Facts, resident: NDArray[np.bool_]) -> Estimate:
    """The run's own, where its stretch was read; else of one as long, of the last batches."""
    epoch, known = -(-facts.epoch_samples // facts.batch_size), len(facts.kept[0].batches)
    first, length = stretch(epoch, facts.seed)
    first = min(first, max(0, known - length))
    batches = range(first, min(known, first + length))
    return estimated((joined_lookups(facts.kept, n) for n in batches), resident, facts.batch_size)


def separated(
    kept: Sequence[KeptLookups], resident: Sequence[NDArray[np.bool_]], size: int, carries: bool
) -> Separated:
    """Cut the cold samples of all that was read into mini-batches of ``size`` of their own, and count the
    rows of each; ``resident``: for each group whether a row is hot. With ``carries``, rows that the
    mini-batch before had are not read again."""
    everywhere = np.concatenate(resident)
    first = np.cumsum([0, *(each.rows for each in kept)])
    samples = cold = 0
    mini: list[NDArray[np.int64]] = []
    rows: list[NDArray[np.int64]] = []
    for number in range(len(kept[0].batches)):
        bags = joined_lookups(kept, number)
        found = everywhere[bags.rows]
        is_cold = ~hot_samples(bags, found)
        ordinal = cold + np.cumsum(is_cold) - 1
        mini.append(ordinal[sample_of(bags)[~found]] // size)
        rows.append(bags.rows[~found])
        samples, cold = samples + len(is_cold), cold + int(is_cold.sum())
    of_batch, looked_up = np.concatenate(mini), np.concatenate(rows)
    batches = max(1e-9, cold / size)
    moved = []
    for low, high in pairwise(first.tolist()):
        own = (looked_up >= low) & (looked_up < high)
        moved.append(_of_group(of_batch[own], looked_up[own], batches, carries))
    return Separated(1 - cold / max(1, samples), tuple(moved))


def _of_group(
    of_batch: NDArray[np.int64], looked_up: NDArray[np.int64], batches: float, carries: bool
) -> Moved:
    """What moves for an average mini-batch, of cold lookups with their mini-batches [L]."""
    apart = 2 + int(of_batch.max(initial=0))
    pairs = np.unique(looked_up * apart + of_batch)  # by row, then by mini-batch; those of two rows are apart
    again = np.diff(pairs) == 1
    rows = len(pairs) / batches
    read = rows - (np.count_nonzero(again) / batches if carries else 0.0)
    lookups = len(looked_up) / batches
    return Moved(read=read, returned=read, slab=rows, slab_lookups=lookups, missed=lookups)
