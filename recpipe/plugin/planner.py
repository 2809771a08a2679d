"""Sharding planners: on which rank each table lies, whole or cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import ParameterConstraints, Topology
    from torchrec.distributed.types import ShardingPlanner

    from recpipe.plugin.api import TableInfo


class Planner:
    """Says where tables lie; a run that has one shards its tables, as ``tiers.sharded=true`` does.

    All ranks call both methods; the plan is rank 0's. What a plan could not carry out (a type, kernel or
    limit that TorchRec or FBGEMM would ignore) is refused before memory is taken. The rows of a rank's shards
    may lie in tiers, under policies that decide from what they are shown (``Cache.by_shards``).

    Small tables on every rank, large ones cut by rows, whole::

        class BySize(Planner):
            def __init__(self, small: int) -> None:
                self.small = small

            def constrain(self, table: TableInfo) -> ParameterConstraints:
                small = table.rows * table.dim <= self.small
                return ParameterConstraints(sharding_types=["data_parallel" if small else "row_wise"])
    """

    def constrain(self, table: TableInfo) -> ParameterConstraints | None:
        """Limits for where and how ``table`` may lie; None: no limits."""
        return None

    def make(
        self, topology: Topology, constraints: Mapping[str, ParameterConstraints]
    ) -> ShardingPlanner | None:
        """The planner of the tables of all collections; None: TorchRec's own, under ``constraints``.

        ``constraints`` (those of ``constrain``, with what this run cannot do left out), and the module that
        is planned, name a table by ``recpipe.kit.module_name(table)``. Where the planner has an attribute
        ``prediction`` (a ``recpipe.kit.Prediction``, handed to TorchRec's planner as its ``stats``),
        ``task=plan`` shows the milliseconds that it predicts.
        """
        return None
