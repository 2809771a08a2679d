"""What Neo costs and saves: tables spread over ranks, each of which looks up its own for all samples."""

from __future__ import annotations

from recpipe_perf_model import Facts, Statement, busiest_part


def statement(facts: Facts) -> Statement:
    """As if tables were given, the largest first, to the rank that has least to look up, and those that are
    too large for one were cut by rows."""
    ranks = facts.trainers
    if ranks == 1:
        return Statement(why="one rank has all tables: there is nothing to place")
    spread = busiest_part(facts)
    return Statement(
        why=f"the busiest of {ranks} ranks has {spread:.0%} of the lookups; ids and rows go between ranks",
        spread=spread,
        unsure="its planner goes by the times of tables, and may cut more of them",
    )
