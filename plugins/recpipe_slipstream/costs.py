"""What Slipstream costs and saves: a share of the hot samples is left out, once their rows have settled."""

from __future__ import annotations

from dataclasses import replace

from recpipe_perf_model import Facts, Phase, Statement, Work

from recpipe.kit import HotSet, top_rows
from recpipe.plugin import RowSpace
from recpipe_slipstream.verdict import LEAST

SAMPLE = 0.05
"""The share of the epoch in which hot rows are counted."""


def statement(facts: Facts, drop: float) -> Statement:
    """At most a share ``drop`` of the hot samples is left out; how many have settled, only training shows."""
    counts = facts.counted(SAMPLE)

    def hot_set(space: RowSpace) -> HotSet:
        assert counts is not None, "replays have what was read"
        return HotSet(space, top_rows(counts[space.group], space.slots))

    share = facts.share if counts else min(facts.share, facts.seen(SAMPLE))
    cached = facts.replayed("hot set of a sample", hot_set, "hot", share)
    moved, hot = cached.moved, cached.popular
    none = Statement(
        why=f"{hot:.0%} of the samples are hot: too few, or none of them, are left out",
        phases=(Phase(moved=moved),),
        plans="nocache",
        yields=True,
    )
    if drop * hot < LEAST:
        return none
    lookups = sum(group.lookups for group in facts.groups)
    bags = sum(facts.bags(group) for group in facts.groups)
    classify = Work(name="classify samples", kind="reorder", at={"lookups": lookups, "bags": bags})
    return replace(
        none,
        why=f"{hot:.0%} of the samples are hot; up to {drop * hot:.0%} of all are left out and not trained",
        kept=1 - drop * hot,
        works=(classify,),
        unsure="it is lossy, and it leaves out less where rows have not settled, and nothing before that",
        instead=none,
    )
