"""Sharding planners: which rank holds each table, or each part of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import ParameterConstraints, Topology
    from torchrec.distributed.types import ShardingPlanner

    from recpipe.plugin.context import TableInfo


class Planner:
    """Decides where tables are placed. A run with a planner shards its tables, as ``tiers.sharded=true``
    does.

    All ranks call both methods; rank 0's plan is used. A plan with a type, kernel or limit that TorchRec or
    FBGEMM would ignore is refused before memory is allocated. A rank may keep the rows of its shards in
    tiers, under policies that work on a part of the rows (``Cache.by_shards``).

    A complete example, with small tables on every rank and large ones cut by rows::

        class BySize(Planner):
            def __init__(self, small: int) -> None:
                self.small = small

            def constrain(self, table: TableInfo) -> ParameterConstraints:
                small = table.rows * table.dim <= self.small
                return ParameterConstraints(sharding_types=["data_parallel" if small else "row_wise"])
    """

    def constrain(self, table: TableInfo) -> ParameterConstraints | None:
        """Limits on where and how ``table`` may be placed; None: no limits."""
        return None

    def make(
        self, topology: Topology, constraints: Mapping[str, ParameterConstraints]
    ) -> ShardingPlanner | None:
        """The planner for the tables of all collections; None: TorchRec's own, under ``constraints``.

        ``constraints`` holds the results of ``constrain`` without what this run cannot do. It and the planned
        module name a table by ``recpipe.kit.module_name(table)``. If the planner has an attribute
        ``prediction`` (a ``recpipe.kit.Prediction``, given to TorchRec's planner as its ``stats``),
        ``task=plan`` shows the milliseconds that it predicts.
        """
        return None
