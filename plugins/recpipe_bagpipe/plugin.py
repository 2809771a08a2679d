"""BagPipe as a plugin: the lookahead policy of a single trainer, or the replicas of several; figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from recpipe.kit import HoldersStore, milliseconds
from recpipe.plugin import (
    Batch,
    Cache,
    CachePolicy,
    ColdStore,
    Context,
    Contribution,
    Figure,
    GroupInfo,
    Invariant,
    Link,
    Plugin,
    PluginError,
    RowSpace,
    RunFigures,
    TableCollection,
    TierParts,
    UserError,
)
from recpipe_bagpipe.bulk import BulkStore
from recpipe_bagpipe.policy import Lookahead, NoBulk
from recpipe_bagpipe.replicas import Replicas
from recpipe_bagpipe.window import Pace

if TYPE_CHECKING:
    from recpipe_perf_model import Facts, Statement


AUTO = "auto"
SEVERAL_LOOKAHEAD = 200
"""The lookahead of several trainers where none is given: the paper's."""
WAITING, WRITES = 0.5, 0.15
"""Shares of the budget that batches and rows on their way, and rows that wait to be written, may take."""
RESERVED = 0.1
"""What of ``WAITING`` is taken out of the slots. The rest is on top, and in the report's memory: without
it a window has two or three batches, which does not pay."""
LEAST_WRITES = 512
"""Rows that wait to be written at most, however small the budget is."""
CALM = 0.05
"""The share of the store's time that is as good as nothing where training waits for it."""


class BagPipe(Plugin):
    """Reads batches ahead: rows that they need arrive in time, others are written back in bulk (SOSP 2023).

    Exact: every batch sees every earlier update.
    """

    api = (2, 7)
    relies_on = frozenset({Invariant.TABLE_LAYOUT, Invariant.ID_SPACE})
    takes_rows = True

    def __init__(
        self, *, lookahead: int | str, cleanup: int | float, increase: int = 1, decrease: int = 2
    ) -> None:
        if lookahead != AUTO and (isinstance(lookahead, str) or lookahead < 1):
            raise PluginError(
                f"plugins.bagpipe.lookahead={lookahead}: must be auto or a number of at least 1"
            )
        for name, value, least in (("increase", increase, 1), ("decrease", decrease, 2)):
            if value < least:
                raise PluginError(f"plugins.bagpipe.{name}={value}: must be at least {least}")
        if not cleanup > 0 or (isinstance(cleanup, float) and cleanup > 1):
            raise PluginError(
                f"plugins.bagpipe.cleanup={cleanup}: give a whole number of batches, or a share of the "
                "lookahead above 0, up to 1"
            )
        self.auto = lookahead == AUTO
        self.lookahead = SEVERAL_LOOKAHEAD if isinstance(lookahead, str) else lookahead
        self.increase, self.decrease = increase, decrease
        self.cleanup = cleanup if isinstance(cleanup, int) else max(1, int(cleanup * self.lookahead))
        if self.cleanup > self.lookahead:
            raise PluginError(
                f"plugins.bagpipe.cleanup={cleanup}: rows would expire in rounds further apart than "
                f"plugins.bagpipe.lookahead={lookahead}; lower it"
            )

    def contribute(self, ctx: Context) -> Contribution:
        """The cache of all tables, the stream it looks ahead in, and the report."""
        tables = PlannedTables(self, ctx)
        return Contribution(
            # Plugins that drop or reorder whole batches must do so before they are planned.
            stream=[Link(tables.stream)],
            cache=[tables],
            report=[tables.figures],
        )

    def costs(self, facts: Facts) -> Statement:
        """State what the performance model needs for a prediction without a run."""
        from recpipe_bagpipe.costs import statement

        lookahead = None if self.auto else self.lookahead
        return statement(facts, lookahead, slots=1 - RESERVED - WRITES, waiting=WAITING)


class PlannedTables(Cache):
    """Makes the policy of a single trainer or the collection of several, and keeps it for the report."""

    def __init__(self, knobs: BagPipe, ctx: Context) -> None:
        self.knobs, self.trainers = knobs, ctx.trainers
        self.on_gpu = ctx.device.startswith("cuda")
        self.budgets = {group.tables: group.slots * group.record_bytes for group in ctx.groups}
        """Each group's share of the resident bytes."""
        self.rows = {g.tables: sum(ctx.tables[name].rows for name in g.tables) for g in ctx.groups}
        # For each group of tables:
        self.policies: list[Lookahead] = []
        self.replicas: list[Replicas] = []
        self._parts: list[TierParts] = []
        self._stores: list[ColdStore] = []

    def beside(self, group: GroupInfo) -> int:
        """What a single trainer's batches and rows on their way take of the budget; nothing if every row can
        be resident, or if the budget is a GPU's memory, in which none of them are."""
        if self.trainers > 1 or self.on_gpu or group.slots >= self.rows[group.tables]:
            return 0
        return int((RESERVED + WRITES) * group.slots * group.record_bytes)

    def store(self, store: ColdStore) -> ColdStore:
        """The store in bulk for a single trainer; several trainers make their own rounds.

        Rows in host memory stay as they are: bulk reads would copy them from there to there.
        """
        if self.trainers == 1 and not store.is_memory:
            rows = int(WRITES * self.budgets[store.layout.tables]) // _row_bytes(store)
            store = BulkStore(store, write_rows=max(LEAST_WRITES, rows))
        self._stores.append(store)
        return store

    def collection(self, parts: TierParts) -> TableCollection | None:
        """Replicas on each rank that trains, if these are several."""
        self._parts.append(parts)
        if self.trainers == 1:
            return None
        ranks = parts.ranks
        channels = ranks.channel(ranks.trainers), ranks.channel(ranks.trainers)  # made on every rank
        if not ranks.trains:
            return None
        if parts.device.type != "cpu":
            raise UserError(
                f"trainer.device={parts.device}: bagpipe over several trainers keeps its replicas in host "
                "memory; use trainer.device=cpu"
            )
        assert isinstance(parts.store, HoldersStore), "several trainers share one store"
        knobs = self.knobs
        self.replicas.append(
            Replicas(
                parts,
                parts.store,
                channels,
                lookahead=knobs.lookahead,
                cleanup=knobs.cleanup,
                increase=knobs.increase,
                decrease=knobs.decrease,
            )
        )
        return self.replicas[-1]

    def policy(self, space: RowSpace) -> CachePolicy:
        """The policy of a single trainer."""
        parts, store = self._parts[-1], self._stores[-1]  # store() and collection() of the group came first
        budget = self.budgets[store.layout.tables]
        fixed = None if self.knobs.auto else max(1, self.knobs.lookahead // 2)
        bulk, row_bytes = (store, _row_bytes(store)) if isinstance(store, BulkStore) else (NoBulk(), 0)
        pace = Pace(fixed, int(WAITING * budget), row_bytes, lambda: bulk.waited)
        self.policies.append(Lookahead(space, parts.distinct, bulk, pace))
        return self.policies[-1]

    def stream(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Read and plan ahead; the stream of each group of tables reads from that of the previous one."""
        for policy in self.policies:
            batches = policy.stream(batches)
        for number, tables in enumerate(self.replicas, 1):
            batches = tables.stream(batches, around=len(self.replicas) - number)
        return batches

    def figures(self, run: RunFigures) -> dict[str, Figure]:
        """The rows that were moved, and how far ahead."""
        if self.replicas:
            groups = [tables.figures() for tables in self.replicas]
            total: dict[str, Figure] = {name: sum(group[name] for group in groups) for name in groups[0]}
            return total | {"replicas": groups[0]["replicas"]}  # the same for all groups
        if not self.policies:
            return {"verdict": "nothing is read ahead: the model makes the ids of all its tables"}
        policies, bulks = self.policies, [s for s in self._stores if isinstance(s, BulkStore)]
        window = sum(p.window_sum for p in policies) / max(1, sum(p.step for p in policies))
        cold = f"its window of {window:.0f} batches is longer than the run's {run.steps}"
        return {
            **({"cold_start": cold} if window >= run.steps else {}),
            "verdict": _verdict(run, policies, bulks, window),
            "rows_fetched": sum(b.announced_rows for b in bulks),
            "rows_expired": sum(p.evicted for p in policies),
            "rows_written": run.io.rows_written,
            "fetch_groups": sum(b.announced for b in bulks),
            # Rows that training read itself, beside the bulk reads.
            "critical_misses": run.io.rows_read - sum(b.background().rows_read for b in bulks),
            "lookahead_mean": window,
            "lookahead_least": min(p.window_least for p in policies),
            "lookahead_bytes": sum(p.waiting_bytes for p in policies),
            "buffer_bytes": sum(b.peak_bytes for b in bulks),
            "wait_seconds": sum(b.waited for b in bulks),
        }


def _row_bytes(store: ColdStore) -> int:
    """Bytes of a row on its way: its record, its number and what finds it."""
    return 4 * store.layout.width + 17


def _verdict(
    run: RunFigures, policies: Sequence[Lookahead], bulks: Sequence[BulkStore], window: float
) -> str:
    """Whether looking ahead has paid: what was hidden, and what the window did, of so many batches on
    average."""
    reading = sum(b.background().read_seconds for b in bulks)
    writing = sum(b.background().write_seconds for b in bulks)
    waited = sum(b.waited for b in bulks)
    rows, groups = sum(b.announced_rows for b in bulks), sum(b.announced for b in bulks)
    if bulks and not rows:
        return "no row had to be read ahead"
    singles = min(policy.singles for policy in policies)
    if all(policy.pace.off for policy in policies) and singles:
        told = f"{singles} of {run.steps} batches read their rows themselves, as with lru"
        pace = policies[0].pace
        times = f"{milliseconds(pace.without)} ms without it, {milliseconds(pace.with_it)} with it"
        return f"looking ahead is off: a batch took {times}; {told}"
    if not bulks:
        return f"rows are in host memory; which of them stay was decided {window:.0f} batches ahead"
    shrunk = [policy.pace.calm_at for policy in policies if policy.pace.shrunk]
    if shrunk and len(shrunk) == len(policies) and waited < CALM * (reading + writing):
        size = max(policy.pace.wanted for policy in policies)
        told = f"from group {shrunk[0]} on less was read ahead, at last {size} batches at a time"
        return f"nothing was waited for: {told}"
    hidden = 1 - min(1.0, waited / max(1e-9, reading + writing))
    moved = f"{reading + writing:.1f} s of reading and writing in bulk"
    return f"{hidden:.0%} of {moved} were hidden behind training; {rows / groups:,.0f} rows a read"
