"""Sharding planners: on which rank each table lies, whole or cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import ParameterConstraints, Topology
    from torchrec.distributed.types import ShardingPlanner

    from recpipe.plugin.api import TableInfo


class Planner(ABC):
    """Brings a planner of TorchRec's kind; a run that has one shards its tables, as ``tiers.sharded=true``
    does.

    All ranks call both methods; the plan is rank 0's. What a plan could not carry out (a type, kernel or
    limit that TorchRec or FBGEMM would ignore) is refused before memory is taken.

    Every table whole, on the rank that holds the fewest bytes, by TorchRec's own parts::

        class Spread(Planner):
            def constrain(self, table: TableInfo) -> ParameterConstraints:
                return ParameterConstraints(sharding_types=["table_wise"])

            def make(
                self, topology: Topology, constraints: Mapping[str, ParameterConstraints]
            ) -> ShardingPlanner:
                return EmbeddingShardingPlanner(topology=topology, constraints=dict(constraints))
    """

    def constrain(self, table: TableInfo) -> ParameterConstraints | None:
        """Limits for where and how ``table`` may lie; None: no limits."""
        return None

    @abstractmethod
    def make(self, topology: Topology, constraints: Mapping[str, ParameterConstraints]) -> ShardingPlanner:
        """The planner of the tables of all collections.

        ``constraints``, and the module that is planned, name a table by ``recpipe.kit.module_name(table)``.
        Where the planner has an attribute ``prediction`` (a ``recpipe.kit.Prediction``, handed to TorchRec's
        planner as its ``stats``), ``task=plan`` shows the milliseconds that it predicts.
        """
