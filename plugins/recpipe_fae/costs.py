"""What FAE costs and saves: phases of hot mini-batches, which fetch nothing, and of cold ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from recpipe_perf_model import Facts, KeptLookups, Moved, Phase, Statement, joined_lookups

from recpipe.plugin import RowSpace
from recpipe_fae.classify import hot_samples, sample_of
from recpipe_fae.estimate import estimated, stretch
from recpipe_fae.prepare import HotOnUse, choose


def statement(facts: Facts, phases: str, sample: float, threshold: float | None) -> Statement:
    """A fixed hot set, of rows in a sample of the epoch; mini-batches are separated (``phases`` as in the
    yaml) where the plugin's own estimate says that it can pay, and where a trial confirms it. If lookups were
    too many to be kept, mini-batches are taken not to be separated."""
    counts = facts.counted(sample)

    def on_use(space: RowSpace) -> HotOnUse:
        assert counts is not None, "replays have what was read"
        return HotOnUse(space, choose(counts[space.group], space.bases, threshold, space.slots))

    share = facts.share if counts else min(facts.share, facts.seen(sample))
    mixed = facts.replayed(("fae", sample, threshold), on_use, "hot", share).moved
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
    resident = [np.zeros(kept.rows, bool) for kept in facts.kept]
    for hot, each, kept, own in zip(resident, counts, facts.kept, slots, strict=True):
        hot[choose(each, kept.bases, threshold, own)] = True
    # The run's own stretch where it was read; else one as long, of the last batches.
    epoch, known = -(-facts.epoch_samples // facts.batch_size), len(facts.kept[0].batches)
    first, length = stretch(epoch, facts.seed)
    first = min(first, max(0, known - length))
    batches = range(first, min(known, first + length))
    expected = estimated(
        (joined_lookups(facts.kept, n) for n in batches), np.concatenate(resident), facts.batch_size
    )
    if phases == "auto" and not expected.can_pay:
        told = (
            f"{expected.hot_input_share:.1%} of the samples are hot, so that mini-batches are not separated"
        )
        return replace(cache, why=f"{cache.why}; only {told}")
    hot_share, cold = separated(facts.kept, resident, facts.batch_size, facts.prefetch)
    cold_rows = sum(m.read for m in cold)
    return Statement(
        why=(
            f"{hot_share:.0%} of the samples need hot rows alone: their mini-batches fetch nothing, the "
            f"others fetch {cold_rows:,.0f} rows each instead of {rows:,.0f} for every mixed one"
        ),
        phases=(
            Phase(share=hot_share, moved=tuple(Moved() for _ in facts.groups)),
            Phase(share=1 - hot_share, moved=cold),
        ),
        plans="nocache",
        unsure="the time to find the hot rows and to classify all samples before training is not counted",
        instead=cache if phases == "auto" else None,
    )


def separated(
    kept: Sequence[KeptLookups], resident: Sequence[NDArray[np.bool_]], size: int, carries: bool
) -> tuple[float, tuple[Moved, ...]]:
    """Cut the cold samples of all that was read into mini-batches of ``size`` of their own: the share of
    samples that are hot, and what a cold mini-batch moves, for each group.

    ``resident``: for each group whether a row is hot. With ``carries``, rows that the mini-batch before had
    are not read again.
    """
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
        of_own, own_rows = of_batch[own], looked_up[own]
        apart = 2 + int(of_own.max(initial=0))
        pairs = np.unique(
            own_rows * apart + of_own
        )  # by row, then by mini-batch; those of two rows are apart
        again = np.diff(pairs) == 1
        rows_each = len(pairs) / batches
        read = rows_each - (np.count_nonzero(again) / batches if carries else 0.0)
        lookups = len(own_rows) / batches
        moved.append(Moved(read=read, returned=read, slab=rows_each, slab_lookups=lookups, missed=lookups))
    return 1 - cold / max(1, samples), tuple(moved)
