"""Predicts the step of a run whose rows are in tiers: the statements of the built-in policies and of plugins,
how several become one, and the step that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Protocol, runtime_checkable

from recpipe.distributed.ranks import Emulation
from recpipe.plugin.api import Plugin
from recpipe.plugin.calls import Origin, blame
from recpipe_perf_model.facts.facts import Facts
from recpipe_perf_model.kernels.linear import Times
from recpipe_perf_model.statement import Phase, Statement
from recpipe_perf_model.step.amounts import Amounts
from recpipe_perf_model.step.step import Step, resident_tasks
from recpipe_perf_model.step.walk import Task, Walked, walk
from recpipe_perf_model.tiers.ranked import Ranked
from recpipe_perf_model.tiers.tiered import Resident, ResidentStep, Tiered

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


@dataclass(frozen=True)
class Kind:
    """One kind of batches."""

    phase: Phase
    tasks: Sequence[Task]
    walked: Walked


@dataclass(frozen=True)
class TieredPrediction:
    """A run with tiers, in its steady state."""

    statement: Statement
    """What it does in the end: as stated, or instead, whichever is faster."""
    kinds: Sequence[Kind]
    step_seconds: float
    """The mean over all kinds of batches."""
    tried: Sequence[float]
    """Seconds of a step of all that it may do, the statement itself first."""
    read: float
    """Rows that a batch reads from the store."""
    missed: float
    """The share of lookups whose row is not resident when the batch comes."""
    memory: Mapping[str, int]
    """Bytes by tier: ``resident``, ``cold`` and ``beside`` (maps, batches and rows on their way)."""


def resident_steps(step: Callable[[int], Step], amounts: Amounts) -> Resident:
    """The resident step of any number of samples; ``step`` captures it, once for each number."""

    @cache
    def made(samples: int) -> ResidentStep:
        known = step(samples)
        captured = known.captured
        tasks = resident_tasks(known, amounts, in_one=True)
        part = next(iter(captured.shares), captured.whole)
        python = amounts.overhead("call", part.calls[0]) + amounts.pipeline(captured)
        busy = {task.name: task.busy for task in tasks}
        return ResidentStep(
            tasks,
            amounts.lookups(captured.groups, "lookup forward"),
            amounts.lookups(captured.groups, "lookup update"),
            min(1.0, python / max(1e-9, busy["look up"] + busy["forward"])),
            float(captured.parameters[1]),
            resident_tasks(known, amounts),
        )

    return made


def predict_tiered(
    facts: Facts,
    stated: Mapping[str, Statement],
    base: Statement,
    times: Times,
    resident: Resident,
    cores: float,
    network: Emulation | None = None,
) -> TieredPrediction:
    """The fastest of what plugins do, by their statements, over ``base``, that of ``tiers.policy``.

    With several trainers it is the step of one of them, which has ``cores`` cores, and ``resident`` is that
    of any number of samples on one rank. ``network``: what it adds to a message between ranks, each of which
    then has a machine of its own; None: they share one."""
    found = [_predicted(facts, each, times, resident, cores, network) for each in choices(stated, base)]
    best = min(found, key=lambda prediction: prediction.step_seconds)
    return replace(best, tried=[prediction.step_seconds for prediction in found])


def _predicted(
    facts: Facts,
    statement: Statement,
    times: Times,
    resident: Resident,
    cores: float,
    network: Emulation | None,
) -> TieredPrediction:
    kinds, count = [], facts.trainers
    for phase in statement.phases or (Phase(),):
        if count > 1 or statement.inside:
            # With several ranks the emulated network is between them, and not before the store.
            alone = facts.at(trainers=1, emulation=Emulation() if count > 1 else facts.emulation)
            between, apart = network or facts.emulation, network is not None
            ranked = Ranked(alone, statement, phase, times, resident, count, between, apart)
            tasks = ranked.slowed(ranked.tasks() if statement.phases else ranked.resident_tasks())
        else:
            tiered = Tiered(facts, statement, phase, times, resident)
            tasks = tiered.tasks() if statement.phases else tiered.resident_tasks()
        kinds.append(Kind(phase, tasks, walk(tasks, cores)))
    mean = sum(kind.phase.share * kind.walked.step_seconds for kind in kinds)
    read, gone = (
        sum(kind.phase.share * getattr(moved, name) for kind in kinds for moved in kind.phase.moved)
        for name in ("read", "missed")
    )
    missed = gone / max(1.0, sum(group.lookups for group in facts.groups))
    whole = sum(group.rows * group.record_bytes for group in facts.groups)
    memory = {"resident": whole, "cold": 0, "beside": statement.memory}
    if statement.phases:
        sizes = statement.cold_bytes or [4.0 * group.width for group in facts.groups]
        cold = sum(int(group.rows * size) for group, size in zip(facts.groups, sizes, strict=True))
        maps = sum(int(4 * group.rows + 8 * facts.share * group.rows) for group in facts.groups)
        memory = {"resident": facts.budget, "cold": cold, "beside": maps + statement.memory}
    return TieredPrediction(statement, kinds, mean, (), read, missed, memory)
