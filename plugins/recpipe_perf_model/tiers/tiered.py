"""The tasks of a step whose tables are in tiers, from those of the step with all rows resident, and what the
cold store does for them.

What overlaps is as in ``pipeline/loader.py``, ``tables/tiers/memory.py`` and ``pipeline/step.py``::

    loader    read b+1, plan b+1 |                              once batch b has advanced
    io        fetch b+1          | write what left for b        a queue, in the order of requests
    main      advance b | arrive b | look up | dense | update   arrive waits for the fetch

With micro-batches, ``arrive`` comes after the first of them. With reads ahead, a further thread reads the
rows of batches to come, several batches by one request, and the fetch finds them in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from recpipe.plugin.store import StoreLayout
from recpipe.tables.build import staging_bytes
from recpipe.tables.stores.blocks import BLOCK_BYTES, BlockMap
from recpipe_perf_model.facts.facts import Facts, GroupFacts
from recpipe_perf_model.kernels.linear import Times
from recpipe_perf_model.statement import Moved, Phase, Statement, Work
from recpipe_perf_model.step.walk import Task

LOOK_UP, UPDATE = "look up", "table update"
ONCE = (LOOK_UP, UPDATE, "add up gradients", "dense optimizer", "loop")
"""Tasks that a step has once, however many micro-batches it has. The others belong to samples."""
FARTHEST = 8
"""Steps that a read ahead is walked ahead. How much farther it is makes no difference where the thread that
reads keeps up, and none where it does not."""
PENDING = 3
"""Writes of so many batches ago must have ended before a batch advances."""
WORD = 4


@dataclass(frozen=True)
class Spent:
    """The time of a request: of the thread that makes it, and of what it waits for."""

    busy: float = 0.0
    waits: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.busy + other.busy, self.waits + other.waits)

    def times(self, factor: float) -> Spent:
        """So many of them."""
        return Spent(factor * self.busy, factor * self.waits)

    def task(self, name: str, place: str, after: Mapping[str, int]) -> Task:
        """A task that takes so long."""
        return Task(name, place, self.busy, self.waits, after)


def added(spent: Iterable[Spent]) -> Spent:
    """Their sum."""
    return sum(spent, start=Spent())


def cold_rows(group: GroupFacts, rows: float, share: float) -> list[float]:
    """How many of so many distinct cold ``rows`` are in each table, as in batches' lookups of rows outside of
    the most popular ``share``."""
    stretch, bases = group.stretch, np.concatenate(([0], np.cumsum(group.table_rows)))
    cold = stretch.rows[stretch.ranks >= share]
    if not len(cold):
        cold = stretch.rows
    per_table = np.bincount(
        np.searchsorted(bases, np.unique(cold), "right") - 1, minlength=len(group.table_rows)
    )
    sizes = np.array(group.table_rows, np.float64)
    left, found = rows, np.zeros(len(sizes))
    weights = np.maximum(per_table, 1e-9).astype(np.float64)
    while left > 1e-6 * max(1.0, rows) and (found < sizes).any():  # small tables fill up
        more = np.minimum(sizes - found, left * weights / weights[found < sizes].sum())
        more[found >= sizes] = 0.0
        found += more
        left -= float(more.sum())
    return [float(each) for each in found]


@dataclass(frozen=True)
class Store:
    """The cold store of one group of tables in a run, with its times on a machine."""

    facts: Facts
    group: GroupFacts
    times: Times
    cold_bytes: float = 0.0
    """Bytes of a record in the store, if it is not float32 there."""
    codec: str = ""
    """The codec of records, as ``Statement.codec``."""

    @property
    def width(self) -> int:
        """float32 words of a record in the store."""
        return int(-(-self.cold_bytes // WORD)) if self.cold_bytes else self.group.width

    def touched(self, rows: float, bridged: bool) -> tuple[float, float]:
        """The blocks of ``BLOCK_BYTES`` and the requests with which an ssd store moves so many distinct rows
        that have no slot, on average, if they are anywhere in their tables. ``bridged``: to read them, with
        blocks that alone lie between two others."""
        blocks = requests = 0.0
        cold = cold_rows(self.group, rows, self.facts.share)
        for size, wanted in zip(self.group.table_rows, cold, strict=True):
            layout = BlockMap(StoreLayout(("",), (size,), self.width))
            each, count = layout.rows_per_block, layout.total_blocks
            # A block is left alone if none of its rows is wanted.
            dense = 1 - (1 - min(1.0, wanted / size)) ** each
            alone = dense**2 * (1 - dense) if bridged else 0.0
            begins = count * dense * (1 - dense) ** (2 if bridged else 1)
            blocks += layout.block_bytes / BLOCK_BYTES * (count * (dense + alone))
            requests += max(begins, min(1.0, wanted))
        return blocks, requests

    def request(self, what: str, rows: float) -> Spent:
        """Read, write or rewrite so many distinct rows."""
        if rows < 0.5:
            return Spent()
        facts, kind = self.facts, "ssd" if self.facts.store == "ssd" else "host"
        at: dict[str, float | str] = {"rows": rows, "width": float(self.width)}
        if kind == "ssd":
            bridged = what == "read"
            at["blocks"], at["requests"] = self.touched(rows, bridged)
        elapsed = self.times.seconds(f"{kind} {what}", at)
        busy = min(elapsed, self.times.seconds(f"{kind} {what} busy", at))
        link = facts.emulation.seconds(int(WORD * self.width * rows))
        coding = 0.0
        if self.codec:
            way = "decode" if what == "read" else "encode"
            coding = self.times.seconds(
                f"{way} {self.codec}", {"rows": rows, "width": float(self.group.width)}
            )
        return Spent(busy + coding, elapsed - busy + link)

    def write(self, rows: float, staged: float) -> Spent:
        """Write so many distinct rows. ``staged``: the share of them around which an ssd store still has the
        blocks, so that it need not read these first."""
        if self.facts.store != "ssd":
            return self.request("write", rows)
        return self.request("write", rows).times(staged) + self.request("rewrite", rows).times(1 - staged)

    @property
    def always_staged(self) -> float:
        """The share of an ssd store's blocks that its staging area has room for: those of rows read long ago
        are there with this probability."""
        layout = StoreLayout(tuple(map(str, self.group.table_rows)), self.group.table_rows, self.width)
        return min(1.0, self._room / max(1, BlockMap(layout).total_blocks))

    def staged(self, read: float, written: float) -> float:
        """The share of so many rows ``written`` whose blocks are in an ssd store's staging area when they are
        written, one batch after they were read: between the two, the next batch's blocks have come, and those
        of rows written before that were not there."""
        (reads, _), (writes, _) = self.touched(read, bridged=True), self.touched(written, bridged=False)
        found = 1.0
        for _ in range(50):
            found = min(1.0, max(0.0, (self._room - reads - (1 - found) * writes) / max(1.0, reads)))
        return found

    @property
    def _room(self) -> float:
        """Blocks that the staging area holds."""
        return staging_bytes(self.facts.batch_size * self.group.features) / BLOCK_BYTES


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
        return [*self._loader(), *self._io(), *self._main()]

    def resident_tasks(self) -> list[Task]:
        """The step's tasks if nothing is moved: all rows are resident."""
        step = self.resident(self._samples)
        return [*self._works("main"), *(step.divided or step.tasks)]

    @property
    def _samples(self) -> int:
        """Those of a batch that are trained."""
        return max(1, round(self.statement.kept * self.facts.batch_size))

    # -- the threads -------------------------------------------------------------------------

    def _loader(self) -> list[Task]:
        """Read and plan the next batch, once this one has advanced; and the threads of plugins."""
        plan = Task("plan", "loader", self._sum(f"plan {self.statement.plans}"))
        first, *rest = [*self._reads, *self._works("loader"), plan]
        others = {work.place for work in self.statement.works} - {"loader", "main"}
        return [
            replace(first, after={"advance": 1}),
            *(replace(task, after={}) for task in rest),
            *self._works(*others),
        ]

    @property
    def _reads(self) -> list[Task]:
        return [task for task in self.resident(self.facts.batch_size).tasks if task.place == "loader"]

    def _io(self) -> list[Task]:
        """Fetch and write; with reads ahead, copy what a further thread has read."""
        read, written = self._read, self._written
        begins = "plan" if self.facts.prefetch and self.statement.ahead else "advance"
        if not self._bulk:
            return [read.task("fetch", "io", {begins: 0}), written.task("write", "io", {"advance": 0})]
        # A batch's rows from or to host memory.
        copies = [{"rows": m.read, "width": float(group.width)} for group, m in self._groups if m.read]
        copied = Spent(sum(self.times.seconds("host read", each) for each in copies))
        ago = min(FARTHEST, max(1, self.statement.ahead - 1))
        return [
            (read + written).task("read ahead", "bulk", {"plan": 0}),
            copied.task("fetch", "io", {begins: 0, "read ahead": ago}),
            copied.task("write", "io", {"advance": 0}),
        ]

    def _main(self) -> list[Task]:
        """Advance, then the resident step with its rows in two tiers."""
        samples = self._samples
        own = self._trained(samples)
        arrive = Task("arrive", "main", self._sum("arrive"), after={"fetch": 0})
        # The loader's thread and those of plugins begin when main does, and work on arrays of ids hardly lets
        # go of the interpreter.
        stalls = self.resident(samples).python * sum(task.busy for task in self._loader())
        stalled = Task("wait for the interpreter", "main", waits=stalls)
        advances = {"plan": 0, "write": PENDING, "loop": 1}
        begin = [Task("advance", "main", self._sum("advance"), after=advances), *self._works("main")]
        early = int(self.statement.early * samples)
        if not 0 < early < samples or not any(moved.read for moved in self.phase.moved):
            return [*begin, arrive, stalled, *own]
        first = self._part(early, "popular", LOOK_UP)
        second = self._part(samples - early, "others", "arrive")
        made = {task.name for task in (*first, *second)}
        parts = {task.name for task in own if task.name not in ONCE}
        look_up, once = [], []
        for task in own:
            if task.name == LOOK_UP:
                look_up.append(task)
            elif task.name in ONCE:
                after: dict[str, int] = {}
                for name, ago in task.after.items():
                    # After both micro-batches: the last one's task; the first one's if cores share it alone.
                    both = [f"{name}, others", f"{name}, popular"] if name in parts else [name]
                    last = [each for each in both if each in made or name not in parts]
                    after |= dict.fromkeys(last[:1], ago)
                once.append(replace(task, after=after))
        return [*begin, stalled, *look_up, *first, arrive, *second, *once]

    def _part(self, samples: int, name: str, since: str) -> list[Task]:
        """The dense part of a micro-batch, which begins after task ``since``."""
        parts = [task for task in self._trained(samples) if task.name not in ONCE]
        inside, found = {task.name for task in parts}, []
        for task in parts:
            after = {f"{other}, {name}": ago for other, ago in task.after.items() if other in inside}
            if not after and task.place != "main":
                after = {since: 0}
            found.append(replace(task, name=f"{task.name}, {name}", after=after))
        return found

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

    # -- amounts -----------------------------------------------------------------------------

    @property
    def _groups(self) -> list[tuple[GroupFacts, Moved]]:
        return list(zip(self.facts.groups, self.phase.moved, strict=True))

    @property
    def _changed(self) -> list[tuple[GroupFacts, Moved]]:
        """Those whose rows are updated."""
        return [(group, moved) for group, moved in self._groups if not group.frozen]

    @property
    def _bulk(self) -> bool:
        return self.statement.together > 1 and any(moved.read for moved in self.phase.moved)

    @property
    def _stores(self) -> list[tuple[Store, Moved]]:
        sizes = self.statement.cold_bytes or [0.0] * len(self.facts.groups)
        return [
            (Store(self.facts, group, self.times, size, self.statement.codec), moved)
            for (group, moved), size in zip(self._groups, sizes, strict=True)
        ]

    @property
    def _read(self) -> Spent:
        """Rows of ``together`` batches are read by one request; its time is shared among them."""
        batches = self.statement.together
        return added(
            store.request("read", batches * moved.read).times(1 / batches) for store, moved in self._stores
        )

    @property
    def _written(self) -> Spent:
        """With bulk reads, rows wait until the blocks around them are read for a group: those are staged."""
        batches, found = self.statement.together, []
        for store, moved in self._stores:
            if store.group.frozen:
                continue
            always = 1.0 if self._bulk else store.always_staged
            staged = max(always, store.staged(moved.read, moved.returned))
            found.append(store.write(batches * moved.returned, staged))
            found.append(store.write(batches * moved.evicted, always))
        return added(spent.times(1 / batches) for spent in found)

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

    def _works(self, *places: str) -> list[Task]:
        """What the statement adds in some places."""
        return [self._work(work) for work in self.statement.works if work.place in places]

    def _work(self, work: Work) -> Task:
        seconds = work.times * self.times.seconds(work.kind, work.at)
        after = {"advance": 1} if work.place not in ("loader", "main") else {}
        return Task(work.name, work.place, seconds, after=after)
