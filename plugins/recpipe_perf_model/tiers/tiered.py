"""The tasks of a step whose tables are in tiers, from those of the step with all rows resident.

What overlaps is as in ``pipeline/loader.py``, ``tables/tiers/memory.py`` and ``pipeline/step.py``::

    loader    read b+1, plan b+1 |                              once batch b has advanced
    io        fetch b+1          | write what left for b        a queue, in the order of requests
    main      advance b | arrive b | look up | dense | update   arrive waits for the fetch

With micro-batches, ``arrive`` comes after the first of them. With reads ahead, a further thread reads the
rows of batches to come, several batches by one request, and the fetch finds them in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from recpipe_perf_model.facts.facts import Facts
from recpipe_perf_model.facts.group_facts import GroupFacts
from recpipe_perf_model.kernels.moves import Times
from recpipe_perf_model.statement import Moved, Phase, Statement, Work
from recpipe_perf_model.step.walk import Task
from recpipe_perf_model.tiers.stored import Spent, Store

LOOK_UP, UPDATE = "look up", "table update"
ONCE = (LOOK_UP, UPDATE, "add up gradients", "dense optimizer", "loop")
"""Tasks that a step has once, however many micro-batches it has. The others belong to samples."""
FARTHEST = 8
"""Steps that a read ahead is walked ahead. How much farther it is makes no difference where the thread that
reads keeps up, and none where it does not."""
PENDING = 3
"""Writes of so many batches ago must have ended before a batch advances."""


@dataclass(frozen=True)
class ResidentStep:
    """The step with all rows resident: its tasks, of which those of place ``loader`` read a batch, and the
    seconds that resident tables take of ``look up`` and ``table update``."""

    tasks: Sequence[Task]
    look_up: float
    update: float
    python: float = 0.0
    """The share of the time from ``look up`` to the end of the forward pass in which main runs Python."""
    values: float = 0.0
    """Values of the dense part's parameters."""
    divided: Sequence[Task] = ()
    """The tasks where nothing is moved, so that threads may divide the groups of tables."""


Resident = Callable[[int], ResidentStep]
"""The resident step of so many samples."""


@dataclass(frozen=True)
class Tiered:
    """One kind of batches of a run with tiers, to be timed.

    Args:
        facts: the run.
        statement: what its policy and plugins do.
        phase: the kind of batches.
        times: of tiers and stores on the machine.
        resident: the tasks of the step with all rows resident.
    """

    facts: Facts
    statement: Statement
    phase: Phase
    times: Times
    resident: Resident

    def tasks(self) -> list[Task]:
        """The step's tasks, in the order in which each place has them."""
        samples = max(1, round(self.statement.kept * self.facts.batch_size))
        return [*self._loader(), *self._io(), *self._main(samples)]

    def resident_tasks(self) -> list[Task]:
        """The step's tasks if nothing is moved: all rows are resident."""
        samples = max(1, round(self.statement.kept * self.facts.batch_size))
        works = [self._work(work) for work in self.statement.works if work.place == "main"]
        step = self.resident(samples)
        return [*works, *(step.divided or step.tasks)]

    # -- the threads -------------------------------------------------------------------------

    def _loader(self) -> list[Task]:
        """Read and plan the next batch, once this one has advanced."""
        works = self.statement.works
        plans = [Task("plan", "loader", sum(self._plan(*each) for each in self._groups))]
        first, *rest = [*self._reads, *(self._work(w) for w in works if w.place == "loader"), *plans]
        return [
            replace(first, after={"advance": 1}),
            *(replace(task, after={}) for task in rest),
            *(self._work(work) for work in works if work.place not in ("loader", "main")),
        ]

    def _io(self) -> list[Task]:
        """Fetch and write; with reads ahead, copy what a further thread has read."""
        read, written = self._read, self._written
        begins = "plan" if self.facts.prefetch and self.statement.ahead else "advance"
        if not self._bulk:
            return [
                _stored("fetch", "io", read, {begins: 0}),
                _stored("write", "io", written, {"advance": 0}),
            ]
        ago = min(FARTHEST, max(1, self.statement.ahead - 1))
        return [
            _stored("read ahead", "bulk", read + written, {"plan": 0}),
            _stored("fetch", "io", self._copied, {begins: 0, "read ahead": ago}),
            _stored("write", "io", self._copied, {"advance": 0}),
        ]

    def _main(self, samples: int) -> list[Task]:
        """Advance, then the resident step with its rows in two tiers."""
        own = self._trained(samples)
        arrive = Task("arrive", "main", self._sum("arrive"), after={"fetch": 0})
        stalled = Task("wait for the interpreter", "main", waits=self._stalled(samples))
        begin = [
            Task("advance", "main", self._sum("advance"), after={"plan": 0, "write": PENDING, "loop": 1}),
            *(self._work(work) for work in self.statement.works if work.place == "main"),
        ]
        early = int(self.statement.early * samples)
        if not 0 < early < samples or not self._read_rows:
            return [*begin, arrive, stalled, *own]
        before = [task for task in own if task.name == LOOK_UP]
        first = self._part(early, "popular", LOOK_UP)
        second = self._part(samples - early, "others", arrive.name)
        made = {task.name for task in (*first, *second)}
        parts = {task.name for task in own if task.name not in ONCE}

        def ended(name: str) -> str | None:
            """What a task that follows both micro-batches waits for: the last one's task; the first one's if
            cores share it alone; nothing if they share neither."""
            found = (f"{name}, others", f"{name}, popular")
            return next((each for each in found if each in made), None) if name in parts else name

        once = [
            replace(
                task, after={last: ago for n, ago in task.after.items() if (last := ended(n)) is not None}
            )
            for task in own
            if task.name in ONCE and task.name != LOOK_UP
        ]
        return [*begin, stalled, *before, *first, arrive, *second, *once]

    def _stalled(self, samples: int) -> float:
        """How long main waits for the loader's thread, and threads of plugins, to let go of the interpreter:
        they begin when main does, and work on arrays of ids hardly lets go of it."""
        return self.resident(samples).python * sum(task.busy for task in self._loader())

    def _part(self, samples: int, name: str, since: str) -> list[Task]:
        """The dense part of a micro-batch, which begins after task ``since``."""
        parts = [task for task in self._trained(samples) if task.name not in ONCE]
        inside = {task.name for task in parts}

        def after(task: Task) -> dict[str, int]:
            own = {f"{other}, {name}": ago for other, ago in task.after.items() if other in inside}
            return own or ({since: 0} if task.place != "main" else {})

        return [replace(task, name=f"{task.name}, {name}", after=after(task)) for task in parts]

    def _trained(self, samples: int) -> list[Task]:
        """The resident step's tasks but for the loader's, with rows in two tiers."""
        step = self.resident(samples)
        reads = {task.name for task in step.tasks if task.place == "loader"}
        found = []
        for task in step.tasks:
            if task.place == "loader":
                continue
            after = {
                "advance" if n in reads else n: 0 if n in reads else ago for n, ago in task.after.items()
            }
            busy = task.busy
            if task.name == LOOK_UP:
                busy = max(0.0, busy - step.look_up) + self._sum("slots forward")
            elif task.name == UPDATE:
                busy = max(0.0, busy - step.update) + self._sum("slots update")
            found.append(replace(task, busy=busy, after=after))
        return found

    @property
    def _reads(self) -> list[Task]:
        return [task for task in self.resident(self.facts.batch_size).tasks if task.place == "loader"]

    # -- amounts -----------------------------------------------------------------------------

    @property
    def _groups(self) -> list[tuple[GroupFacts, Moved]]:
        return list(zip(self.facts.groups, self.phase.moved, strict=True))

    @property
    def _changed(self) -> list[tuple[GroupFacts, Moved]]:
        """Those whose rows are updated."""
        return [(group, moved) for group, moved in self._groups if not group.frozen]

    @property
    def _read_rows(self) -> float:
        return sum(moved.read for moved in self.phase.moved)

    @property
    def _bulk(self) -> bool:
        return self.statement.together > 1 and self._read_rows > 0

    @property
    def _read(self) -> Spent:
        """Rows of ``together`` batches are read by one request; its time is shared among them."""
        batches = self.statement.together
        return _sum(
            store.read(batches * moved.read, self.facts.share).times(1 / batches)
            for store, moved in self._stores
        )

    @property
    def _written(self) -> Spent:
        """With bulk reads, rows wait until the blocks around them are read for a group: those are staged."""
        batches, share = self.statement.together, self.facts.share
        found = []
        for store, moved in self._stores:
            if store.group.frozen:
                continue
            always = 1.0 if self._bulk else store.always_staged
            staged = max(always, store.staged(moved.read, moved.returned, share))
            found.append(store.write(batches * moved.returned, share, staged))
            found.append(store.write(batches * moved.evicted, share, always))
        return _sum(spent.times(1 / batches) for spent in found)

    @property
    def _copied(self) -> Spent:
        """A batch's rows from or to host memory."""
        at = [
            {"rows": moved.read, "width": float(group.width)} for group, moved in self._groups if moved.read
        ]
        return Spent(sum(self.times.seconds("host read", each) for each in at))

    @property
    def _stores(self) -> list[tuple[Store, Moved]]:
        sizes = self.statement.cold_bytes or [0.0] * len(self.facts.groups)
        return [
            (Store(self.facts, group, self.times, size, self.statement.codec), moved)
            for (group, moved), size in zip(self._groups, sizes, strict=True)
        ]

    def _plan(self, group: GroupFacts, moved: Moved) -> float:
        return self.times.seconds(f"plan {self.statement.plans}", self._sizes(group, moved))

    def _sum(self, kind: str) -> float:
        worked = self._changed if kind == "slots update" else self._groups
        return sum(self.times.seconds(kind, self._sizes(*each)) for each in worked)

    def _sizes(self, group: GroupFacts, moved: Moved) -> dict[str, float | str]:
        kept = self.statement.kept
        return {
            "lookups": group.lookups * kept,
            "bags": self.facts.bags(group) * kept,
            "rows": float(group.rows),
            "slots": self.facts.share * group.rows,
            "dim": float(group.dim),
            "width": float(group.width),
            "hits": (group.lookups - moved.slab_lookups) * kept,
            "hot": max(0.0, group.distinct - moved.slab) * kept,
            "missed": moved.placed + moved.slab,
            "leaving": moved.slab + moved.evicted,
            "slab": moved.slab,
            "slab_lookups": moved.slab_lookups,
        }

    def _work(self, work: Work) -> Task:
        seconds = work.times * self.times.seconds(work.kind, work.at)
        after = {"advance": 1} if work.place not in ("loader", "main") else {}
        return Task(work.name, work.place, seconds, after=after)


def _sum(spent: Iterable[Spent]) -> Spent:
    total = Spent()
    for each in spent:
        total = total + each
    return total


def _stored(name: str, place: str, spent: Spent, after: dict[str, int]) -> Task:
    return Task(name, place, spent.busy, spent.waits, after)
