"""What Neo costs and saves: tables spread over ranks, each of which looks up its own for all samples."""

from __future__ import annotations

from recpipe.kit import Facts
from recpipe.plugin import Statement, Work

EXCHANGES = 3
"""All-to-alls of a batch's ids: sizes, lengths, ids."""


def statement(facts: Facts) -> Statement:
    """As if whole tables were given, the largest first, to the rank that has least to look up."""
    ranks = facts.trainers
    if ranks == 1:
        return Statement(why="one rank has all tables: there is nothing to place")
    loads = [0.0] * ranks
    # A group's lookups are taken as spread evenly over its tables.
    work = [(group.lookups * group.dim / len(group.table_rows), group) for group in facts.groups]
    for load in sorted((each for each, group in work for _ in group.table_rows), reverse=True):
        loads[loads.index(min(loads))] += load
    spread = max(loads) / sum(loads)
    floats = sum(
        group.dim * (facts.batch_size * group.features if group.pooled else group.lookups)
        for group in facts.groups
    )
    ids = 8 * sum(group.lookups for group in facts.groups) / ranks
    sizes = {"exchange ids": (ids / EXCHANGES, EXCHANGES), "exchange rows": (4 * floats / ranks, 2)}
    works = tuple(
        Work(
            name=name, place="main", kind="all_to_all", at={"bytes": size, "ranks": float(ranks)}, times=times
        )
        for name, (size, times) in sizes.items()
    )
    return Statement(
        why=f"the busiest of {ranks} ranks has {spread:.0%} of the lookups; ids and rows go between ranks",
        works=works,
        spread=spread,
        unsure="its planner also cuts tables, by rows or columns, and measures exchanges itself",
    )
