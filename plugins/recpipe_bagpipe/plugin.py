"""BagPipe as a plugin: one trainer's lookahead policy, or the replicas of several; figures."""

from __future__ import annotations

from collections.abc import Iterator

from recpipe.data.batch import Batch
from recpipe.embedding.collection import TableCollection
from recpipe.embedding.parts import TierParts
from recpipe.embedding.policies import CachePolicy, RowSpace
from recpipe.embedding.stores.base import ColdStore
from recpipe.embedding.stores.bulk import BulkStore
from recpipe.embedding.tables import TableSet
from recpipe.plugin.api import (
    Context,
    Contribution,
    Figure,
    Invariant,
    Link,
    Plugin,
    RunFigures,
    TableClaim,
    TablePolicy,
)
from recpipe.plugin.errors import PluginError
from recpipe_bagpipe.policy import Lookahead
from recpipe_bagpipe.replicas import Replicas, replicas


class BagPipe(Plugin):
    """Reads batches ahead: rows that they need are there in time, others go back in bulk (SOSP 2023).

    Exact: every batch sees every earlier update.
    """

    api = (1, 1)
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
            # Whatever drops or reorders whole batches must have done so before they are planned.
            stream=[Link(tables.stream)],
            tables=[TableClaim("*", frozenset({"cache"}), tables)],
            report=[tables.figures],
        )


class PlannedTables(TablePolicy):
    """Brings the policy of one trainer or the collection of several, and keeps it for the report."""

    def __init__(self, knobs: BagPipe, trainers: int) -> None:
        self.knobs, self.trainers = knobs, trainers
        self.policy: Lookahead | None = None
        self.replicas: Replicas | None = None
        self._tables: TableSet | None = None
        self._bulk: BulkStore | None = None

    def store(self, store: ColdStore) -> ColdStore:
        """One trainer moves rows in bulk; several make rounds of their own."""
        if self.trainers > 1:
            return store

        self._bulk = BulkStore(store, write_rows=max(65_536, store.layout.total_rows // 80))
        return self._bulk

    def collection(self, parts: TierParts) -> TableCollection | None:
        """Replicas where several ranks train."""
        self._tables = parts.tables
        if self.trainers > 1:
            self.replicas = replicas(
                parts,
                lookahead=self.knobs.lookahead,
                cleanup=self.knobs.cleanup,
                increase=self.knobs.increase,
                decrease=self.knobs.decrease,
            )
        return self.replicas

    def cache(self, space: RowSpace) -> CachePolicy:
        """The policy of a single trainer."""
        assert self._tables is not None, "collection() is called first"
        assert self._bulk is not None, "store() is called first"
        knobs = self.knobs
        self.policy = Lookahead(
            space, self._tables, self._bulk, knobs.lookahead, knobs.cleanup, knobs.increase, knobs.decrease
        )
        return self.policy

    def stream(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Read and plan ahead."""
        planner = self.replicas or self.policy
        assert planner is not None, "tables are built before batches are read"
        return planner.stream(batches)

    def figures(self, run: RunFigures) -> dict[str, Figure]:
        """What was moved and how far ahead."""
        if self.replicas is not None:
            return dict(self.replicas.figures())
        policy, bulk = self.policy, self._bulk
        assert policy is not None
        assert bulk is not None
        return {
            "rows_fetched": policy.announced_rows,
            "rows_expired": policy.evicted,
            "rows_written": run.io.rows_written,
            "fetch_groups": bulk.announced,
            # What training read itself, beside the bulk reads.
            "critical_misses": run.io.rows_read - bulk.background().rows_read,
            "lookahead_mean": policy.window_sum / max(1, policy.step),
            "lookahead_least": policy.window_least,
            "lookahead_bytes": policy.peak_bytes,
            "buffer_bytes": bulk.peak_bytes,
            "wait_seconds": bulk.waited,
        }
