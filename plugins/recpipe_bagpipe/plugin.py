"""BagPipe as a plugin: the lookahead policy of a single trainer, or the replicas of several; figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from recpipe.kit import Batch, BulkStore, ColdStore, TableCollection, TierParts
from recpipe.plugin import (
    Cache,
    CachePolicy,
    Context,
    Contribution,
    Figure,
    Invariant,
    Link,
    Plugin,
    PluginError,
    RowSpace,
    RunFigures,
)
from recpipe_bagpipe.policy import Lookahead
from recpipe_bagpipe.replicas import Replicas, replicas


class BagPipe(Plugin):
    """Reads batches ahead: rows that they need arrive in time, others are written back in bulk (SOSP 2023).

    Exact: every batch sees every earlier update.
    """

    api = (2, 0)
    relies_on = frozenset({Invariant.TABLE_LAYOUT, Invariant.ID_SPACE})

    def __init__(self, *, lookahead: int, cleanup: int | float, increase: int, decrease: int) -> None:
        for name, value, least in (
            ("lookahead", lookahead, 1),
            ("increase", increase, 1),
            ("decrease", decrease, 2),
        ):
            if value < least:
                raise PluginError(f"plugins.bagpipe.{name}={value}: must be at least {least}")
        if not cleanup > 0 or (isinstance(cleanup, float) and cleanup > 1):
            raise PluginError(
                f"plugins.bagpipe.cleanup={cleanup}: give a whole number of batches, or a share of the "
                "lookahead above 0, up to 1"
            )
        self.lookahead, self.increase, self.decrease = lookahead, increase, decrease
        self.cleanup = cleanup if isinstance(cleanup, int) else max(1, int(cleanup * lookahead))
        if self.cleanup > lookahead:
            raise PluginError(
                f"plugins.bagpipe.cleanup={cleanup}: rows would expire in rounds further apart than "
                f"plugins.bagpipe.lookahead={lookahead}; lower it"
            )

    def contribute(self, ctx: Context) -> Contribution:
        """The cache of all tables, the stream it looks ahead in, and the report."""
        tables = PlannedTables(self, ctx.trainers)
        return Contribution(
            # Plugins that drop or reorder whole batches must do so before they are planned.
            stream=[Link(tables.stream)],
            cache=[tables],
            report=[tables.figures],
        )


class PlannedTables(Cache):
    """Makes the policy of a single trainer or the collection of several, and keeps it for the report."""

    def __init__(self, knobs: BagPipe, trainers: int) -> None:
        self.knobs, self.trainers = knobs, trainers
        # For each group of tables:
        self.policies: list[Lookahead] = []
        self.replicas: list[Replicas] = []
        self._parts: list[TierParts] = []
        self._bulk: list[BulkStore] = []

    def store(self, store: ColdStore) -> ColdStore:
        """The store in bulk for a single trainer; several trainers make their own rounds."""
        if self.trainers > 1:
            return store
        self._bulk.append(BulkStore(store, write_rows=max(65_536, store.layout.total_rows // 80)))
        return self._bulk[-1]

    def collection(self, parts: TierParts) -> TableCollection | None:
        """Replicas if several ranks train."""
        self._parts.append(parts)
        if self.trainers == 1:
            return None
        made = replicas(
            parts,
            lookahead=self.knobs.lookahead,
            cleanup=self.knobs.cleanup,
            increase=self.knobs.increase,
            decrease=self.knobs.decrease,
        )
        if made is not None:
            self.replicas.append(made)
        return made

    def policy(self, space: RowSpace) -> CachePolicy:
        """The policy of a single trainer."""
        parts, bulk = self._parts[-1], self._bulk[-1]  # store() and collection() of the group came first
        knobs = self.knobs
        policy = Lookahead(
            space, parts.lookups, bulk, knobs.lookahead, knobs.cleanup, knobs.increase, knobs.decrease
        )
        self.policies.append(policy)
        return policy

    def stream(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Read and plan ahead; the stream of each group of tables reads from that of the previous one."""
        planners: Sequence[Replicas | Lookahead] = self.replicas or self.policies
        assert planners, "tables are built before batches are read"
        for number, planner in enumerate(planners, 1):
            batches = planner.stream(batches, around=len(planners) - number)
        return batches

    def figures(self, run: RunFigures) -> dict[str, Figure]:
        """The rows that were moved, and how far ahead."""
        if self.replicas:
            return _summed([tables.figures() for tables in self.replicas])
        policies, bulks = self.policies, self._bulk
        window = sum(p.window_sum for p in policies) / max(1, sum(p.step for p in policies))
        cold = f"its window of {window:.0f} batches is longer than the run's {run.steps}"
        return {
            **({"cold_start": cold} if window >= run.steps else {}),
            "rows_fetched": sum(p.announced_rows for p in policies),
            "rows_expired": sum(p.evicted for p in policies),
            "rows_written": run.io.rows_written,
            "fetch_groups": sum(b.announced for b in bulks),
            # Rows that training read itself, beside the bulk reads.
            "critical_misses": run.io.rows_read - sum(b.background().rows_read for b in bulks),
            "lookahead_mean": window,
            "lookahead_least": min(p.window_least for p in policies),
            "lookahead_bytes": sum(p.peak_bytes for p in policies),
            "buffer_bytes": sum(b.peak_bytes for b in bulks),
            "wait_seconds": sum(b.waited for b in bulks),
        }


def _summed(groups: Sequence[Mapping[str, int]]) -> dict[str, Figure]:
    """The sum over all groups of tables; their number of replicas is the same."""
    total: dict[str, Figure] = {name: sum(group[name] for group in groups) for name in groups[0]}
    return total | {"replicas": groups[0]["replicas"]}
