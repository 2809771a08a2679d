"""The step of one of several ranks, which all do alike: its share of the batch, and messages between them.

Three ways of keeping rows over ranks are told apart by the statement of what a run does: every trainer has a
replica of the resident rows and of the slab (the default); tables are cut into shards (``spread``); or the
plugin's tables plan, fetch and update rows themselves, in the lookup (``inside``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from recpipe_perf_model.facts.group_facts import GroupFacts
from recpipe_perf_model.kernels.moves import COLLECTIVES
from recpipe_perf_model.statement import Moved, Work
from recpipe_perf_model.step.walk import Task
from recpipe_perf_model.tiers.ranks import ID, Messages, Side, added, share_of_distinct
from recpipe_perf_model.tiers.stored import Spent
from recpipe_perf_model.tiers.tiered import LOOK_UP, UPDATE, ResidentStep, Tiered

FLOAT = 4
"""Bytes of a value."""
OPTIMIZER, IDS = "dense optimizer", "exchange ids"
SENT = ("tell ", "add up ", "exchange ", "send ")
"""How the names of tasks begin that are messages."""
INPUT_EXCHANGES = 3
"""All-to-alls of a batch's ids: sizes, lengths, ids."""


@dataclass(frozen=True)
class Ranked(Tiered):
    """One rank's step. ``resident``: the tasks of the step with all rows resident of so many samples, on one
    rank; its reading is that of a whole batch."""

    side: Side
    shards: bool = False
    """Whether ``facts`` and ``phase`` are those of the rank's own shards."""

    def slowed(self, tasks: Sequence[Task]) -> list[Task]:
        """``tasks`` with the work of ranks that share a machine as slow as it is beside that of the others,
        until the slowest is there. Messages were measured so."""
        if self.side.count == 1 or self.side.apart:
            return list(tasks)
        factor = max(1.0, self.times.seconds("side by side", {"seconds": 1.0}))
        return [t if t.name.startswith(SENT) else replace(t, busy=factor * t.busy) for t in tasks]

    def tasks(self) -> list[Task]:
        """The step's tasks, in the order in which each place has them."""
        if self.statement.inside:
            return self._inside()
        if self.statement.spread < 1:
            return self._exchanged(self._of_shards().tasks())
        return super().tasks()

    def resident_tasks(self) -> list[Task]:
        """The same if all rows are in memory: replicas, or shards."""
        step, whole = self.resident(self._mine), self.resident(self.facts.batch_size)
        spread = self.statement.spread
        if spread < 1:
            times = spread * whole.look_up, spread * whole.update
            return self._exchanged(self._summed(self._own(step, *times), rows=False))
        own = [self._row_sizes(group) for group in self.facts.groups]
        look_up, update = (
            sum(self.times.seconds(kind, at) for at in own) for kind in ("rows look up", "rows update")
        )
        told = added(self._messages.gathered(ID * float(at["distinct"])) for at in own)
        tasks = self._summed(self._own(step, look_up, update), rows=True)
        return [Task("tell rows", "main", told.busy, told.waits, {"read": 1}), *tasks]

    # -- parts -------------------------------------------------------------------------------

    @property
    def _mine(self) -> int:
        return -(-max(1, round(self.statement.kept * self.facts.batch_size)) // self.side.count)

    @property
    def _messages(self) -> Messages:
        return Messages(self.times, self.side)

    def _own(self, step: ResidentStep, look_up: float, update: float) -> list[Task]:
        """The resident step's tasks with other times of tables, and its share of the reading."""
        known = {LOOK_UP: look_up - step.look_up, UPDATE: update - step.update}
        parts = [replace(task, busy=max(0.0, task.busy + known.get(task.name, 0.0))) for task in step.tasks]
        each = self.side.count
        return [replace(t, busy=t.busy / each) if t.place == "loader" else t for t in parts]

    def _row_sizes(self, group: GroupFacts) -> dict[str, float | str]:
        """What a trainer's share of a batch looks up."""
        count = self.side.count
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
                spent = added(self._messages.ordered_sum(size) for size in sizes)
                found.append(Task("add up row gradients", "main", spent.busy, spent.waits, task.after))
            if task.name == OPTIMIZER:
                spent = self._messages.ordered_sum(FLOAT * self.resident(self._mine).values)
                found.append(Task("add up dense gradients", "main", spent.busy, spent.waits, task.after))
            found.append(task)
        return found

    # -- replicas of resident rows and of the slab ----------------------------------------------

    def _trained(self, samples: int) -> list[Task]:
        tasks = super()._trained(-(-samples // self.side.count))
        return self._summed(tasks, rows=not self.shards)

    def _sizes(self, group: GroupFacts, moved: Moved) -> dict[str, float | str]:
        """Of shards, a rank has its part of the rows and of the slots."""
        sizes = super()._sizes(group, moved)
        parts = self.side.count if self.shards else 1
        return {**sizes, **{name: float(sizes[name]) / parts for name in ("rows", "slots")}}

    def _sum(self, kind: str) -> float:
        if kind.startswith("slots ") and not self.shards:
            rows = {"slots forward": "rows look up", "slots update": "rows update"}[kind]
            worked = self.facts.changed if kind == "slots update" else self.facts.groups
            return sum(self.times.seconds(rows, self._row_sizes(group)) for group in worked)
        return super()._sum(kind)

    @property
    def _read(self) -> Spent:
        """Every trainer asks each holder for rows of its part, which serves one trainer after the other."""
        asked = 1 if self.shards else self.side.count
        spent = added(store.read(moved.read / asked, self.facts.share) for store, moved in self._stores)
        sent = [moved.read * (ID + FLOAT * group.width) for group, moved in self._groups]
        return self._of_disk(spent.times(asked)) + self._round(sent)

    @property
    def _written(self) -> Spent:
        found = []
        for store, moved in self._stores:
            if store.group.frozen:
                continue
            staged = max(store.always_staged, store.staged(moved.read, moved.returned, self.facts.share))
            found.append(store.write(moved.returned / self._parts, self.facts.share, staged))
            found.append(store.write(moved.evicted / self._parts, self.facts.share, store.always_staged))
        sent = [moved.written * (ID + FLOAT * group.width) / self._parts for group, moved in self._changed]
        return self._of_disk(added(found)) + self._round(sent)

    def _loader(self) -> list[Task]:
        """The ids of shards are planned once they have arrived."""
        tasks = super()._loader()
        if not self.shards:
            return tasks
        return [replace(task, after={IDS: 1}) if task.name == "plan" else task for task in tasks]

    @property
    def _reads(self) -> list[Task]:
        """A rank reads its own samples, unless tiers plan the whole batch."""
        each = self.side.count if self.shards else 1
        return [replace(task, busy=task.busy / each) for task in super()._reads]

    @property
    def _parts(self) -> int:
        """Over how many holders the store's rows are spread."""
        return 1 if self.shards or self.statement.inside else self.side.count

    def _of_disk(self, spent: Spent) -> Spent:
        return Spent(spent.busy, spent.waits * self.side.together)

    def _round(self, sizes: Sequence[float]) -> Spent:
        """A round with the holders: how many, which rows, and their records."""
        if self._parts == 1:
            return Spent()
        sent = self._messages
        return added(sent.all_to_all(ID * 5 * self.side.count) + sent.all_to_all(size) for size in sizes)

    # -- shards ----------------------------------------------------------------------------------

    def _of_shards(self) -> Ranked:
        """The tiers of a rank's own shards, which serve all samples."""
        part = self.statement.spread
        groups = tuple(_cut(group, part) for group in self.facts.groups)
        phase = replace(self.phase, moved=tuple(_scaled(moved, part) for moved in self.phase.moved))
        statement = replace(self.statement, spread=1.0)
        facts = replace(self.facts, groups=groups)
        return replace(self, facts=facts, phase=phase, statement=statement, shards=True)

    def _exchanged(self, tasks: Sequence[Task]) -> list[Task]:
        """``tasks`` with TorchRec's exchanges: pooled rows, the next batch's ids, and rows' gradients."""
        ids, forward, backward = (self._exchange(what) for what in ("ids", "forward", "backward"))
        found = []
        for task in tasks:
            if task.name == UPDATE:
                found.append(Task("exchange row gradients", "main", *backward, task.after))
            found.append(task)
            if task.name == LOOK_UP:
                found += [Task("exchange rows", "main", *forward), Task(IDS, "main", *ids)]
        return found

    def _exchange(self, what: str) -> tuple[float, float]:
        """Seconds that main is busy with an exchange, and waits for the network."""
        busy = waits = 0.0
        for group in self.facts.groups:
            count, tables = self.side.count, len(group.table_rows)
            bags = self.facts.bags(group)
            at = {"tables": float(tables), "dim": float(group.dim), "lookups": group.lookups / count}
            busy += self.times.seconds(f"sharded {what}", {**at, "samples": bags / tables / count})
            size = ID * group.lookups if what == "ids" else FLOAT * group.dim * bags
            sent = size / count * (count - 1) / count
            waits += self._messages.beyond(INPUT_EXCHANGES if what == "ids" else 1, sent)
        return busy, waits

    # -- a plugin's own tables -------------------------------------------------------------------

    def _inside(self) -> list[Task]:
        """Rows are planned, fetched and written in the lookup, by the training thread."""
        count, size = self.side.count, self.facts.batch_size
        share = [share_of_distinct(group, count, size) for group in self.facts.groups]
        groups = tuple(
            replace(group, lookups=group.lookups / count, distinct=part * group.distinct)
            for group, part in zip(self.facts.groups, share, strict=True)
        )
        mine = replace(self, facts=replace(self.facts, groups=groups, batch_size=-(-size // count)))
        plan = sum(mine._plan(*each) for each in mine._groups)
        moved = mine._read + mine._written
        step = self.resident(self._mine)
        look_up, update = (
            sum(self.times.seconds(kind, self._row_sizes(group)) for group in self.facts.groups)
            for kind in ("rows look up", "rows update")
        )
        works = [mine._work(work) for work in self.statement.works]
        begin = [
            Task("plan", "main", plan, after={"read": 1}),
            *works,
            Task("fetch", "main", moved.busy, moved.waits),
        ]
        return [*begin, *self._summed(self._own(step, look_up, update), rows=False)]

    def _work(self, work: Work) -> Task:
        if work.kind in COLLECTIVES and self.side.count > 1:
            spent = self._messages.exchange(work.kind, float(work.at["bytes"])).times(work.times)
            return Task(work.name, work.place, spent.busy, spent.waits)
        return super()._work(work)


def _cut(group: GroupFacts, part: float) -> GroupFacts:
    """The lookups of ``group`` that a rank serves, if it has such a part of them."""
    features = max(1, round(part * group.features))
    return replace(group, lookups=part * group.lookups, distinct=part * group.distinct, features=features)


def _scaled(moved: Moved, part: float) -> Moved:
    return Moved(**{field.name: part * getattr(moved, field.name) for field in fields(moved)})
