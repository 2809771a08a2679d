"""What HET costs and saves: rows of a trainer's cache are neither pulled nor pushed until their bound."""

from __future__ import annotations

from recpipe.kit import Facts
from recpipe.plugin import Moved, Phase, Statement

LRU = "lru"


def statement(facts: Facts, cache: str, bound: int) -> Statement:
    """Training waits for a batch's pulls. Of cached rows it pushes one update in ``bound`` + 1, taken
    together; other trainers' updates make it pull them as often."""
    moved = tuple(_moved(facts, number, LRU if cache == LRU else "lfu", bound) for number in _groups(facts))
    rows = sum(group.distinct for group in facts.groups)
    pulled = sum(m.read for m in moved)
    return Statement(
        why=f"of {rows:,.0f} distinct rows a batch, {pulled:,.0f} are pulled from their holders",
        phases=(Phase(moved=moved),),
        plans=LRU if cache == LRU else "lfu",
        ahead=0,
        memory=sum(8 * group.rows for group in facts.groups),
        unsure="its own tables are timed as if they were tiers",
    )


def _groups(facts: Facts) -> range:
    return range(len(facts.groups))


def _moved(facts: Facts, number: int, policy: str, bound: int) -> Moved:
    group = facts.groups[number]
    misses = group.misses(policy, facts.share)
    held = group.distinct - misses.rows
    again = held / (bound + 1)
    stale = again * (facts.trainers - 1)
    return Moved(
        read=misses.rows + min(held, stale),
        evicted=misses.rows + again,
        placed=misses.rows + min(held, stale),
    )
