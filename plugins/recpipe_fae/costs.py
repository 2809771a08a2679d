"""What FAE costs and saves: phases of hot mini-batches, which fetch nothing, and of cold ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from recpipe.kit import Facts, GroupFacts
from recpipe.plugin import Moved, Phase, RowSpace, Statement
from recpipe_fae.estimate import WORTH
from recpipe_fae.hotset import HotOnUse
from recpipe_fae.prepare import HotRule, choose


@dataclass(frozen=True)
class Separated:
    """Mini-batches of cold samples alone."""

    hot: float
    """The share of samples that are hot."""
    moved: tuple[Moved, ...]
    """What a cold mini-batch moves, for each group."""


def statement(facts: Facts, phases: str, rule: HotRule) -> Statement:
    """A fixed hot set, of rows in a sample of the epoch; mini-batches are separated (``phases`` as in the
    yaml) where that can pay, and where a trial confirms it."""
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
    if phases == "never":
        return cache
    found = separated(facts.at(share=share), mixed)
    cold_rows = sum(m.read for m in found.moved)
    gain = rows / max(1.0, (1 - found.hot) * cold_rows)
    if phases == "auto" and (not 0 < found.hot < 1 or gain < WORTH):
        told = f"only {found.hot:.1%} of the samples are hot, so that mini-batches are not separated"
        return replace(cache, why=f"{cache.why}; {told}")
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


def separated(facts: Facts, mixed: tuple[Moved, ...]) -> Separated:
    """Cut the stretch's cold samples into mini-batches of their own and count the rows of each."""
    hot = facts.popular_samples(facts.share)
    cold = np.zeros(facts.batch_size * facts.groups[0].stretch.batches, bool)
    for group in facts.groups:
        missed = group.stretch.samples[group.stretch.ranks >= facts.share]
        cold[missed] = True
    batch_of = (np.cumsum(cold) - 1) // facts.batch_size
    batches = cold.sum() / facts.batch_size
    moved = tuple(
        _of_group(facts, group, each, batch_of, float(batches))
        for group, each in zip(facts.groups, mixed, strict=True)
    )
    return Separated(hot, moved)


def _of_group(facts: Facts, group: GroupFacts, mixed: Moved, batch_of: np.ndarray, batches: float) -> Moved:
    stretch = group.stretch
    missed = stretch.ranks >= facts.share
    pairs = np.unique(np.stack((batch_of[stretch.samples[missed]], stretch.rows[missed])), axis=1)
    rows = pairs.shape[1] / max(1e-9, batches)
    lookups = np.count_nonzero(missed) / max(1e-9, batches)
    fresh = mixed.read / mixed.slab if mixed.slab else 1.0
    return Moved(read=fresh * rows, returned=fresh * rows, slab=rows, slab_lookups=lookups)
