"""The statements of the built-in cache policies, those of plugins, and how several become one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Protocol, runtime_checkable

from recpipe.plugin.api import Plugin
from recpipe.plugin.calls import Origin, blame
from recpipe_perf_model.facts.facts import Facts
from recpipe_perf_model.statement import Phase, Statement

RESIDENT = Statement(why="all rows are resident: nothing is fetched or moved")
SAYS = {
    "nocache": "every row is read and written back in every batch",
    "lru": "rows that were looked up last stay resident",
    "lfu": "rows that were looked up most often stay resident",
    "hot": "a fixed set of rows stays resident",
}


def of_policy(policy: str, facts: Facts, share: float | None = None) -> Statement:
    """The statement of ``tiers.policy``: resident, nocache, lru or lfu; and hot, a fixed set of the rows
    looked up most often. ``share``: of the rows that have a slot, if it is not all that the budget holds."""
    if policy == "resident":
        return RESIDENT
    moved = facts.cached(policy, share)
    read, distinct = sum(m.read for m in moved), sum(group.distinct for group in facts.groups)
    why = f"{SAYS[policy]}: of {distinct:,.0f} distinct rows a batch, {read:,.0f} are read from the store"
    plans = policy if policy != "hot" else "nocache"
    return Statement(why=why, phases=(Phase(moved=moved),), plans=plans)


def over_ranks(statement: Statement, facts: Facts) -> Statement:
    """``statement`` with each table's rows spread evenly over the ranks of ``facts``, as TorchRec's planner
    cuts them on a CPU."""
    why = f"each of {facts.trainers} ranks has a part of the rows, and serves all of them; {statement.why}"
    unsure = "TorchRec's planner may place tables otherwise"
    return replace(statement, why=why, spread=1 / facts.trainers, unsure=unsure)


def merged(stated: Mapping[str, Statement], base: Statement) -> Statement:
    """The statement of a run with several plugins; ``base``: that of ``tiers.policy``.

    One of them decides which rows are resident: a cache that does not yield to others; each other aspect is
    that of the plugin that sets it, and work and memory add up. ``instead`` is left out: see ``choices``."""
    if not stated:
        return base
    order = sorted(stated, key=lambda name: (not stated[name].phases, stated[name].yields))
    found = base
    for name in reversed(order):  # the one that owns the cache comes last, and wins
        own = stated[name]
        found = replace(
            found,
            phases=own.phases or found.phases,
            plans=own.plans if own.phases else found.plans,
            early=own.early or found.early,
            kept=own.kept * found.kept,
            ahead=own.ahead if own.ahead != 1 else found.ahead,
            together=max(own.together, found.together),
            cold_bytes=own.cold_bytes or found.cold_bytes,
            codec=own.codec or found.codec,
            works=(*found.works, *own.works),
            spread=min(own.spread, found.spread),
            inside=own.inside or found.inside,
            memory=own.memory + found.memory,
        )
    why = "; ".join(stated[name].why for name in order)
    unsure = "; ".join(stated[name].unsure for name in order if stated[name].unsure)
    return replace(found, why=why, unsure=unsure, instead=None)


def choices(stated: Mapping[str, Statement], base: Statement) -> list[Statement]:
    """What a run with several plugins may turn out to do, where each does as it states or, once it has
    measured that this is faster, something else instead; the first one is as all of them state."""
    chains = []
    for at in stated.values():
        chain = [at]
        while chain[-1].instead is not None:
            chain.append(chain[-1].instead)
        chains.append(chain)
    return [merged(dict(zip(stated, each, strict=True)), base) for each in product(*chains)]


@runtime_checkable
class StatesCosts(Protocol):
    """A plugin that can be judged without a run."""

    def costs(self, facts: Facts) -> Statement | None:
        """What the plugin costs and saves where ``facts`` hold; None: it states nothing.

        It must be cheap, and depend on ``facts`` and the knobs alone.
        """


def costs_of(origin: Origin, plugin: Plugin, facts: Facts) -> Statement | None:
    """What ``plugin`` states of its costs; None if it states nothing."""
    return blame(origin, "costs", plugin.costs)(facts) if isinstance(plugin, StatesCosts) else None
