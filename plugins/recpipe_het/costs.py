"""What HET costs and saves: rows of a trainer's cache are neither pulled nor pushed until their bound."""

from __future__ import annotations

from collections.abc import Iterator

from recpipe_perf_model import Facts, GroupFacts, Moved, Phase, Statement, Work, share_of_distinct

LRU = "lru"
HEAD = 16
"""Bytes of a row's number and version in a message."""
CHECKS = 4
"""How often a row's version and its number of updates are looked up in a step."""
COPIES = 3
"""How often a row's record is copied: out of a line, into it, and to be pooled."""


def statement(facts: Facts, cache: str, bound: int) -> Statement:
    """Training waits for a batch's pulls. A cached row is pushed once ``bound`` + 1 updates wait, taken
    together, or when it leaves; a holder reads a pushed row, and writes it. Other trainers' updates make rows
    be pulled as often as they are pushed."""
    policy = LRU if cache == LRU else "lfu"
    moved: list[Moved] = []
    works: list[Work] = []
    pulled = rows = 0.0
    for number, group in enumerate(facts.groups):
        own = group.distinct * share_of_distinct(group, facts.trainers, facts.batch_size)
        pulls, pushes = _traffic(facts, group, own, policy, bound)
        moved.append(Moved(read=pulls + pushes, returned=pushes, placed=pulls, slab=pushes))
        works += _works(facts, number, own, pulls, pushes)
        pulled, rows = pulled + pulls, rows + own
    return Statement(
        why=f"of {rows:,.0f} distinct rows a trainer and batch, {pulled:,.0f} are pulled from their holders",
        phases=(Phase(moved=tuple(moved)),),
        plans=policy,
        ahead=0,
        inside=True,
        works=tuple(works),
        memory=sum(8 * group.rows for group in facts.groups),
        unsure="how often trainers' updates meet in one row",
    )


def _traffic(facts: Facts, group: GroupFacts, own: float, policy: str, bound: int) -> tuple[float, float]:
    """Rows that a trainer pulls and pushes in a batch of ``own`` distinct rows."""
    # A trainer's cache has seen its own part of the run alone.
    own_steps = max(1, facts.steps // facts.trainers)
    known = group if facts.late else group.from_empty(own_steps)
    misses = known.misses(policy, facts.share)
    new = share_of_distinct(group, facts.trainers, facts.batch_size, facts.share)
    missed = min(own, misses.rows * new)
    # A row waits for its first ``bound`` updates, which take as many batches at least.
    begun = 1.0 if facts.late else max(0.0, 1 - bound / max(1, facts.steps))
    again = begun * (own - missed) / (bound + 1)
    stale = min(own - missed, again * (facts.trainers - 1))
    return missed + stale, again + facts.at(steps=own_steps).full(group, facts.share) * missed


def _works(facts: Facts, number: int, own: float, pulls: float, pushes: float) -> Iterator[Work]:
    """Versions and records of ``own`` rows, and the messages of a round between several trainers."""
    group = facts.groups[number]
    for name, width, times in (("check versions", 2, CHECKS), ("copy records", group.width, COPIES)):
        at = {"rows": own, "width": float(width)}
        yield Work(name=f"{name} {number}", kind="host read", at=at, times=times, place="main")
    if facts.trainers == 1:
        return
    record = HEAD + 4 * group.width
    sizes = {"sizes": 64.0, "checks": HEAD * own, "pulls": record * pulls, "pushes": record * pushes}
    for name, size in sizes.items():
        at = {"bytes": size, "ranks": float(facts.trainers)}
        # How many records come is told first.
        times = 2 if name == "pulls" else 1
        if size:
            kind, what = "all_to_all", f"send {name} {number}"
            yield Work(name=what, kind=kind, at={**at, "bytes": size / times}, times=times, place="main")
