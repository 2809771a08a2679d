"""The step of one of several ranks, which all do alike: its share of the batch, and messages between them.

Three ways of keeping rows over ranks are told apart by the statement of what a run does: every trainer has a
replica of the resident rows and of the slab (the default); tables are cut into shards (``spread``); or the
plugin's tables plan, fetch and update rows themselves, in the lookup (``inside``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from recpipe.distributed.ranks import Emulation
from recpipe.plugin.bags import RowIds
from recpipe_perf_model.facts.facts import Facts, GroupFacts
from recpipe_perf_model.kernels.linear import COLLECTIVE_FAMILY, COLLECTIVES
from recpipe_perf_model.machine import MachineProfile
from recpipe_perf_model.statement import Moved, Work
from recpipe_perf_model.step.walk import Task
from recpipe_perf_model.tiers.tiered import LOOK_UP, UPDATE, ResidentStep, Spent, Tiered, added

ID, FLOAT = 8, 4
"""Bytes of an id and of a value."""
OPTIMIZER, IDS = "dense optimizer", "exchange ids"
SENT = ("tell ", "add up ", "exchange ", "send ")
"""How the names of tasks begin that are messages."""
INPUT_EXCHANGES = 3
"""All-to-alls of a batch's ids: sizes, lengths, ids."""
SEEN = 4
"""Batches in which distinct rows of a trainer's share are counted."""


@dataclass(frozen=True)
class Ranked(Tiered):
    """One rank's step. ``resident``: the tasks of the step with all rows resident of so many samples, on one
    rank; its reading is that of a whole batch."""

    count: int
    """How many ranks there are."""
    network: Emulation = field(default_factory=Emulation)
    """What a message between two of them takes beyond this machine's own work for it."""
    apart: bool = False
    """Whether each has a machine of its own; else they share a disk."""
    shards: bool = False
    """Whether ``facts`` and ``phase`` are those of the rank's own shards."""

    def slowed(self, tasks: Sequence[Task]) -> list[Task]:
        """``tasks`` with the work of ranks that share a machine as slow as it is beside that of the others,
        until the slowest is there. Messages were measured so."""
        if self.count == 1 or self.apart:
            return list(tasks)
        factor = max(1.0, self.times.seconds("side by side", {"seconds": 1.0}))
        return [t if t.name.startswith(SENT) else replace(t, busy=factor * t.busy) for t in tasks]

    def tasks(self) -> list[Task]:
        """The step's tasks, in the order in which each place has them."""
        if self.statement.inside:
            return self._inside()
        if self.statement.spread >= 1:
            return super().tasks()
        # The tiers of a rank's own shards, which serve all samples.
        part, groups = self.statement.spread, []
        for group in self.facts.groups:
            features = max(1, round(part * group.features))
            cut = replace(group, lookups=part * group.lookups, distinct=part * group.distinct)
            groups.append(replace(cut, features=features))
        moved = tuple(
            Moved(**{each.name: part * getattr(rows, each.name) for each in fields(rows)})
            for rows in self.phase.moved
        )
        shards = replace(
            self,
            facts=replace(self.facts, groups=tuple(groups)),
            phase=replace(self.phase, moved=moved),
            statement=replace(self.statement, spread=1.0),
            shards=True,
        )
        return self._exchanged(shards.tasks())

    def resident_tasks(self) -> list[Task]:
        """The same if all rows are in memory: replicas, or shards."""
        whole, spread = self.resident(self.facts.batch_size), self.statement.spread
        if spread < 1:
            own = self._own(spread * whole.look_up, spread * whole.update)
            return self._exchanged(self._summed(own, rows=False))
        # Each tells the others its rows: how many, then which.
        rows = [float(self._row_sizes(group)["distinct"]) for group in self.facts.groups]
        told = added(
            self._exchange("all_to_all", ID * size * self.count) for each in rows for size in (1, each)
        )
        own = self._own(self._sum("slots forward"), self._sum("slots update"))
        return [told.task("tell rows", "main", {"read": 1}), *self._summed(own, rows=True)]

    # -- parts -------------------------------------------------------------------------------

    @property
    def _mine(self) -> ResidentStep:
        return self.resident(-(-self._samples // self.count))

    def _own(self, look_up: float, update: float) -> list[Task]:
        """The resident step's tasks with other times of tables, and its share of the reading."""
        step = self._mine
        known = {LOOK_UP: look_up - step.look_up, UPDATE: update - step.update}
        parts = [replace(task, busy=max(0.0, task.busy + known.get(task.name, 0.0))) for task in step.tasks]
        each = self.count
        return [replace(t, busy=t.busy / each) if t.place == "loader" else t for t in parts]

    def _row_sizes(self, group: GroupFacts) -> dict[str, float | str]:
        """What a trainer's share of a batch looks up."""
        count = self.count
        distinct = group.distinct * share_of_distinct(group, count, self.facts.batch_size)
        bags = self.facts.bags(group)
        sizes = {"lookups": group.lookups / count, "bags": bags / count, "distinct": distinct}
        return {**sizes, "dim": float(group.dim)}

    def _summed(self, tasks: Sequence[Task], rows: bool) -> list[Task]:
        """``tasks`` with the sums over ranks: of the gradients of ``rows`` that any of them looks up, and of
        the dense part's."""
        found = []
        for task in tasks:
            if task.name == UPDATE and rows:
                sizes = [FLOAT * group.dim * group.distinct for group in self.facts.changed]
                spent = added(self._ordered_sum(size) for size in sizes)
                found.append(spent.task("add up row gradients", "main", task.after))
            if task.name == OPTIMIZER:
                spent = self._ordered_sum(FLOAT * self._mine.values)
                found.append(spent.task("add up dense gradients", "main", task.after))
            found.append(task)
        return found

    # -- messages between all ranks; sizes are bytes that each rank gives -------------------------

    def _exchange(self, kind: str, size: float, sent: float | None = None) -> Spent:
        """One of the collectives, of parts for each rank; ``sent``: bytes that leave the rank, if these are
        not all of the parts for others."""
        if self.count == 1:
            return Spent()
        at = {"bytes": size, "ranks": float(self.count)}
        elapsed = self.times.seconds(kind, at)
        busy = min(elapsed, self.times.seconds(f"{kind} busy", at))
        sent = size * (self.count - 1) / self.count if sent is None else sent
        return Spent(busy, elapsed - busy + self._beyond(1, sent))

    def _ordered_sum(self, size: float) -> Spent:
        """``Channel.ordered_sum``: parts are sent to the rank that adds them up, and sums to all."""
        part = size / self.count
        gathered = self._exchange("all_gather", part, part * (self.count - 1))
        return self._exchange("all_to_all", size) + gathered

    def _beyond(self, times: float, size: float) -> float:
        """Seconds that the network adds to so many messages of ``size`` bytes together."""
        return self.network.seconds(int(size)) + (times - 1) * self.network.seconds(0)

    # -- replicas of resident rows and of the slab ----------------------------------------------

    def _trained(self, samples: int) -> list[Task]:
        tasks = super()._trained(-(-samples // self.count))
        return self._summed(tasks, rows=not self.shards)

    def _sizes(self, group: GroupFacts, moved: Moved) -> dict[str, float | str]:
        """Of shards, a rank has its part of the rows and of the slots."""
        sizes = super()._sizes(group, moved)
        parts = self.count if self.shards else 1
        return {**sizes, **{name: float(sizes[name]) / parts for name in ("rows", "slots")}}

    def _sum(self, kind: str) -> float:
        """Replicas look up and update a share of the batch in plain arrays."""
        if kind.startswith("slots ") and not self.shards:
            rows = {"slots forward": "rows look up", "slots update": "rows update"}[kind]
            worked = self.facts.changed if kind == "slots update" else self.facts.groups
            return sum(self.times.seconds(rows, self._row_sizes(group)) for group in worked)
        return super()._sum(kind)

    @property
    def _reads(self) -> list[Task]:
        """A rank reads its own samples, unless tiers plan the whole batch."""
        each = self.count if self.shards else 1
        return [replace(task, busy=task.busy / each) for task in super()._reads]

    @property
    def _read(self) -> Spent:
        """Every trainer asks each holder for rows of its part, which serves one trainer after the other."""
        asked = 1 if self.shards else self.count
        spent = added(store.request("read", moved.read / asked) for store, moved in self._stores)
        sent = [moved.read * (ID + FLOAT * group.width) for group, moved in self._groups]
        return self._of_holders(spent.times(asked), sent)

    @property
    def _written(self) -> Spent:
        found, parts = [], self._holders
        for store, moved in self._stores:
            if store.group.frozen:
                continue
            always = store.always_staged
            staged = max(always, store.staged(moved.read, moved.returned))
            found.append(store.write(moved.returned / parts, staged))
            found.append(store.write(moved.evicted / parts, always))
        sent = [moved.written * (ID + FLOAT * group.width) / parts for group, moved in self._changed]
        return self._of_holders(added(found), sent)

    @property
    def _holders(self) -> int:
        """Over how many ranks the store's rows are spread."""
        return 1 if self.shards or self.statement.inside else self.count

    def _of_holders(self, spent: Spent, sizes: Sequence[float]) -> Spent:
        """``spent`` at a disk that ranks may share, with a round of messages: how many rows, which, and their
        records."""
        spent = Spent(spent.busy, spent.waits * (1 if self.apart else self.count))
        if self._holders > 1:
            asks = ID * 5 * self.count
            spent += added(self._exchange("all_to_all", each) for size in sizes for each in (asks, size))
        return spent

    # -- shards ----------------------------------------------------------------------------------

    def _exchanged(self, tasks: Sequence[Task]) -> list[Task]:
        """``tasks`` with TorchRec's exchanges: pooled rows, the next batch's ids, which are planned once they
        have arrived, and rows' gradients."""
        ids, forward, backward = (self._sharded(what) for what in ("ids", "forward", "backward"))
        found = []
        for task in tasks:
            if task.name == UPDATE:
                found.append(backward.task("exchange row gradients", "main", task.after))
            found.append(replace(task, after={IDS: 1}) if task.name == "plan" else task)
            if task.name == LOOK_UP:
                found += [forward.task("exchange rows", "main", {}), ids.task(IDS, "main", {})]
        return found

    def _sharded(self, what: str) -> Spent:
        """An exchange, in which main waits for the network."""
        busy = waits = 0.0
        for group in self.facts.groups:
            count, tables = self.count, len(group.table_rows)
            bags = self.facts.bags(group)
            at = {"tables": float(tables), "dim": float(group.dim), "lookups": group.lookups / count}
            busy += self.times.seconds(f"sharded {what}", {**at, "samples": bags / tables / count})
            size = ID * group.lookups if what == "ids" else FLOAT * group.dim * bags
            sent = size / count * (count - 1) / count
            waits += self._beyond(INPUT_EXCHANGES if what == "ids" else 1, sent)
        return Spent(busy, waits)

    # -- a plugin's own tables -------------------------------------------------------------------

    def _inside(self) -> list[Task]:
        """Rows are planned, fetched and written in the lookup, by the training thread."""
        count, size, groups = self.count, self.facts.batch_size, []
        for group in self.facts.groups:
            distinct = share_of_distinct(group, count, size) * group.distinct
            groups.append(replace(group, lookups=group.lookups / count, distinct=distinct))
        mine = replace(self, facts=replace(self.facts, groups=tuple(groups), batch_size=-(-size // count)))
        plan = Task("plan", "main", mine._sum(f"plan {self.statement.plans}"), after={"read": 1})
        works = [mine._work(work) for work in self.statement.works]
        fetch = (mine._read + mine._written).task("fetch", "main", {})
        own = self._own(self._sum("slots forward"), self._sum("slots update"))
        return [plan, *works, fetch, *self._summed(own, rows=False)]

    def _work(self, work: Work) -> Task:
        if work.kind in COLLECTIVES and self.count > 1:
            spent = self._exchange(work.kind, float(work.at["bytes"])).times(work.times)
            return spent.task(work.name, work.place, {})
        return super()._work(work)


def share_of_distinct(group: GroupFacts, trainers: int, batch_size: int, above: float = 0.0) -> float:
    """How many of a batch's distinct rows a trainer's share of its samples has, on average, as a share of
    them; ``above``: of the rows beyond the most popular ones, which are such a share of all."""
    stretch, size = group.stretch, max(1, batch_size)
    wanted = (stretch.samples < SEEN * size) & (stretch.ranks >= above)
    rows, samples = stretch.rows[wanted], stretch.samples[wanted]
    part = samples % size * trainers // size
    whole = _distinct(rows, samples // size)
    return _distinct(rows, samples // size * trainers + part) / trainers / whole if whole else 1 / trainers


def _distinct(rows: RowIds, among: NDArray[np.int64]) -> int:
    """How many different pairs there are."""
    return len(np.unique(among * (int(rows.max(initial=0)) + 1) + rows))


def busiest_part(facts: Facts) -> float:
    """The share of the lookups that the busiest rank has if tables are given, the largest first, to the rank
    that has least, and those with more than a rank's mean are cut into equal parts before. A group's lookups
    are taken as spread evenly over its tables."""
    ranks = facts.trainers
    work = [(group.lookups * group.dim / len(group.table_rows), group) for group in facts.groups]
    whole = [load for load, group in work for _ in group.table_rows]
    parts = [ranks if load * ranks > sum(whole) else 1 for load in whole]
    loads = [0.0] * ranks
    cut = (load / count for load, count in zip(whole, parts, strict=True) for _ in range(count))
    for load in sorted(cut, reverse=True):
        loads[loads.index(min(loads))] += load
    return max(loads) / max(sum(loads), 1e-12)


def measured_with(profile: MachineProfile, ranks: int) -> MachineProfile:
    """``profile`` with the messages between so many ranks alone, if there are any; else with all of them."""
    samples = profile.samples.get(COLLECTIVE_FAMILY, ())
    own = tuple(sample for sample in samples if sample.at.get("ranks") == ranks)
    return replace(profile, samples={**profile.samples, COLLECTIVE_FAMILY: own or samples})
