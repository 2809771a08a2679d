"""Several trainers against one holder in one process, under any schedule; integer-valued gradients."""

from __future__ import annotations

import numpy as np
from recpipe_het.holder import Bounds, Check, Floats, Holder, Missed, MissedTotals, Push, Rows
from recpipe_het.lines import UPDATES, Lines, Pending

from recpipe.plugin.policy import CachePolicy, RowSpace
from recpipe.plugin.store import StoreLayout
from recpipe.plugin.tables import TableOptimizer
from recpipe.tables.stores import make_store
from recpipe.tables.tiers.policies import Lru

DIM = 4


class Worker:
    """One trainer's lines, and a ledger of its own updates."""

    def __init__(self, lines: Lines, rows: int) -> None:
        self.lines = lines
        self.made = np.zeros(rows, np.int64)


class World:
    """Trainers and their holder. Every read checks what the protocol promises and keeps the maxima."""

    def __init__(
        self,
        workers: int = 3,
        bounds: tuple[int, ...] = (1,),
        rows: int = 60,
        slots: int = 12,
        policy: type[CachePolicy] = Lru,
        optimizer: str = "sgd",
        slack: int = 0,
        updates: str = "each",
    ) -> None:
        tables = len(bounds)
        layout = StoreLayout(
            tuple(f"t{i}" for i in range(tables)),
            (rows // tables,) * tables,
            DIM + {"sgd": 0, "adagrad": DIM, "rowwise_adagrad": 1}[optimizer],
        )
        self.optimizer = TableOptimizer(optimizer, 1.0)
        store = make_store("host", layout, lambda t, a, b: np.zeros((b - a, layout.width), np.float32))
        kept = Bounds(layout.bases, np.array(bounds))
        loosened = Bounds(layout.bases, kept.updates + slack)
        self.holder = Holder(store, self.optimizer, DIM, loosened, Missed(workers, rows))
        self.rows = rows

        def make() -> CachePolicy:
            return policy(RowSpace(layout.bases, slots))

        def pending() -> Pending:
            return UPDATES[updates](slots, self.optimizer, DIM, layout.width)

        self.workers = [Worker(Lines(make, kept, pending()), rows) for _ in range(workers)]
        self.applied = np.zeros((workers, rows), np.int64)
        self.total = np.zeros((rows, DIM), np.float32)
        self.stale = np.zeros(rows, np.int64)
        self.unseen = np.zeros(rows, np.int64)
        self.peer = np.zeros(rows, np.int64)
        self.missed = MissedTotals()
        """By the ledgers, as the holder should have counted."""
        self.seen = np.zeros((workers, workers, rows), np.int64)
        self.pulled = self.pushed = self.asked = 0

    def push(self, pushes: list[tuple[int, Push]]) -> None:
        """Apply one round's pushes, by worker."""
        self.holder.push(pushes)
        for who, push in pushes:
            self.applied[who, push.rows] += push.updates
            self.pushed += len(push.rows)

    def read(self, who: int, check: Check) -> Floats:
        """Answer a check, measure staleness, return the worker's view."""
        reply = self.holder.pull(who, check)
        self.pulled += len(reply.positions)
        self.asked += len(check.rows)
        worker, rows = self.workers[who], check.rows
        got = rows[reply.positions]
        self.seen[who][:, got] = self.applied[:, got]
        view = worker.lines.receive(reply)
        slots = worker.lines.residents.slot_of(rows)
        cached = slots >= 0
        stale = self.holder.versions[rows[cached]] - worker.lines.version[slots[cached]]
        self.stale[rows[cached]] = np.maximum(self.stale[rows[cached]], stale)
        # After a round no line is over its bound.
        assert (worker.lines.updates[slots[cached]] <= worker.lines.bounds.of(rows[cached])).all()
        others = [w for w in range(len(self.workers)) if w != who]
        missing = np.stack(
            [self.workers[w].made[rows] - self.seen[who][w][rows] for w in others] or [0 * rows]
        )
        of_all = missing.sum(axis=0)
        read = MissedTotals(len(rows), int((of_all > 0).sum()), int(of_all.sum()), int(of_all.max(initial=0)))
        self.missed = self.missed.plus(read)
        self.unseen[rows] = np.maximum(self.unseen[rows], of_all)
        self.peer[rows] = np.maximum(self.peer[rows], missing.max(axis=0))
        return view

    def start(self, who: int, rows: Rows) -> tuple[Push, Check]:
        """Open a batch of distinct ``rows``."""
        return self.workers[who].lines.open(rows, rows)

    def finish(self, who: int, rows: Rows, gradients: Floats) -> None:
        """The worker's local update."""
        self.workers[who].made[rows] += 1
        self.total[rows] += gradients
        self.workers[who].lines.add(gradients)
        assert self.holder.missed is not None
        self.holder.missed.made(who, 1)

    def step(self, who: int, rows: Rows, gradients: Floats) -> Floats:
        """A batch of one worker alone, as in an asynchronous run; its view of the rows before the update."""
        push, check = self.start(who, rows)
        self.push([(who, push)])
        view = self.read(who, check)
        self.finish(who, rows, gradients)
        self.push([(who, self.workers[who].lines.due())])
        return view

    def flush(self) -> None:
        """Push everything."""
        self.push([(who, worker.lines.flush()) for who, worker in enumerate(self.workers)])


def batch(rng: np.random.Generator, rows: int, size: int = 6) -> tuple[Rows, Floats]:
    """Skewed distinct rows and integer-valued gradients."""
    ids = np.unique(np.minimum(rng.zipf(1.3, size) - 1, rows - 1)).astype(np.int64)
    return ids, rng.integers(-3, 4, (len(ids), DIM)).astype(np.float32)


def schedule(world: World, seed: int, steps: int = 200) -> None:
    """A random schedule of the workers' steps."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        who = int(rng.integers(len(world.workers)))
        world.step(who, *batch(rng, world.rows))
