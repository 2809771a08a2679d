"""The interface of every collection of tables, whatever tier its rows are in, and what core hands to the
builder of a plugin's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recpipe.errors import UserError
from recpipe.plugin.bags import Bags, RowIds, distinct
from recpipe.plugin.store import ColdStore, IoCounters
from recpipe.plugin.tables import Region, TableSet, Values
from recpipe.private_api import Collective

if TYPE_CHECKING:
    from recpipe.distributed.ranks import Ranks
    from recpipe.plugin.skipper import RowFilter

C = TypeVar("C")
Rows: TypeAlias = KeyedTensor | dict[str, JaggedTensor]
"""The result of a lookup: pooled rows, float32 [B, F * D] in the order of the keys, or by feature one row for
each id, float32 [L, D]."""


@dataclass
class TierTimes:
    """Seconds since the run began. The difference between ``fetch`` and ``wait`` was hidden behind
    training."""

    plan: float = 0.0
    fetch: float = 0.0
    write: float = 0.0
    wait: float = 0.0
    advance: float = 0.0

    def plus(self, other: TierTimes) -> TierTimes:
        """The sums of both."""
        return TierTimes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class TierFigures:
    """What a collection over tiers did during training, and the memory that it takes on this rank."""

    io: IoCounters
    times: TierTimes
    direct: bool | None
    """How its store does I/O; see ``ColdStore.direct``."""
    resident_bytes: int
    cold_bytes: int
    overhead_bytes: int
    cold_start: bool
    """Whether its cache was never full: what was measured is how it fills."""
    lookups: int | None = None
    """How many ids training has looked up; None if that and ``hits`` are not counted."""
    hits: int | None = None
    """Those whose row was resident before any row moved for their batch."""

    def plus(self, other: TierFigures) -> TierFigures:
        """The figures of both together. Seconds are summed, although both stores may have worked at the same
        time."""
        return TierFigures(
            self.io.plus(other.io),
            self.times.plus(other.times),
            self.direct if self.direct == other.direct else None,
            self.resident_bytes + other.resident_bytes,
            self.cold_bytes + other.cold_bytes,
            self.overhead_bytes + other.overhead_bytes,
            self.cold_start and other.cold_start,
            None if self.lookups is None or other.lookups is None else self.lookups + other.lookups,
            None if self.hits is None or other.hits is None else self.hits + other.hits,
        )


class TableCollection(ABC, nn.Module):
    """A module with the interface of TorchRec's ``EmbeddingBagCollection``. Every row can be read and written
    together with its optimizer state, for checkpoints, exports and comparisons.

    Training calls ``lookup``, whose result has no names and, for tables that are not pooled, one row for each
    id. Its backward pass updates the tables.

    If several ranks train, all trainers make the same calls in the same order.
    """

    whole_updates = "it does not override filter_updates()"
    """Why its updates cannot leave rows out, if they cannot."""
    threads: int = 1
    """How many threads a lookup runs in."""
    collectives: Mapping[str, Collective] = MappingProxyType({})
    """TorchRec's collectives on this rank; empty if tables are not sharded."""

    @abstractmethod
    def regions(self) -> Iterator[Region]:
        """The regions that this process owns; all ranks together own all tables."""

    @abstractmethod
    def read(self, region: Region) -> Values:
        """Current weights and optimizer state of ``region``."""

    @abstractmethod
    def write(self, region: Region, values: Values) -> None:
        """Replace the weights and optimizer state of ``region``."""

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs of its tables, in their order."""
        raise NotImplementedError(f"{type(self).__name__} looks no rows up for a model")

    def lookup(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Pooled rows float32 [B, F * D], or float32 [L, D] with one row for each id if rows are not pooled.
        ``sparse`` and the result have the features in the tables' order."""
        return self.joined(self(sparse))

    def joined(self, found: Rows) -> torch.Tensor:
        """The result of ``forward`` in the form of ``lookup``, with the features in the tables' order."""
        configs = self.embedding_bag_configs()
        names = [name for names in get_embedding_names_by_table(configs) for name in names]
        if not isinstance(found, KeyedTensor):
            return torch.cat([found[name].values() for name in names])
        values: torch.Tensor = found.values()
        if found.keys() in (names, [name for config in configs for name in config.feature_names]):
            return values
        by_name = found.to_dict()
        return torch.cat([by_name[name] for name in names], dim=1)

    def offers(self, capability: type[C]) -> C | None:
        """This collection as one with ``capability`` (see ``recpipe.tables.collection``), or None."""
        return self if isinstance(self, capability) else None

    def pooled_with_room(self, sparse: KeyedJaggedTensor) -> torch.Tensor | None:
        """Pooled rows with room for one more feature in front: float32 [B, (1 + F) * D], of which the first D
        columns are zero. None if that would take a copy."""
        return None

    def update(self) -> None:
        """Update the tables that the backward pass has not updated; called after it."""

    def filter_updates(self, rows: RowFilter) -> None:
        """From now on update only the rows that ``rows`` keeps; called once, before any lookup."""
        raise UserError(
            f"a plugin leaves rows out of updates, which {type(self).__name__} cannot do: "
            f"{self.whole_updates}. Drop that plugin, or the one that brings these tables"
        )

    def tier_figures(self) -> TierFigures | None:
        """What it moved between its tiers; None if all rows are resident."""
        return None

    def serve(self) -> None:
        """On a rank that holds rows and does not train: answer the trainers until they are done."""
        raise NotImplementedError(f"{type(self).__name__} does not run on ranks that only hold rows")

    def write_back(self) -> None:
        """Write what is only here to the cold tier, and wait until it is as durable as that can make it; the
        tables stay usable. All trainers call it."""

    def close(self) -> None:
        """Write back what is only in device memory and release files and threads. The tables cannot be used
        afterwards."""


@dataclass(frozen=True)
class TierParts:
    """Everything that a collection over tiers needs; its rows start in ``store``."""

    tables: TableSet
    slots: int
    """How many rows ``tiers.resident_bytes`` holds on each trainer."""
    store: ColdStore
    """Holds every row at first. The collection owns it and closes it in ``close``."""
    device: torch.device
    prefetch: bool
    """Whether to fetch what the next batch needs while this one trains."""
    ranks: Ranks
    """The ranks that train and that hold rows; a single process is a group of one."""
    lookups: Callable[[Any], Bags]
    """Returns a whole batch's lookups as rows of ``tables``; ``DataError`` if an id has no row."""
    group: int = 0
    """Number of the group of tables (``Context.groups``)."""
    finds: Callable[[Any], RowIds] | None = None
    """What ``distinct`` returns, found by the GPU that trains; None: a CPU trains."""

    def distinct(self, batch: Any) -> RowIds:
        """The distinct rows of ``tables`` that a whole batch looks up, sorted, int64 [U]; ``DataError`` if an
        id has no row."""
        return distinct(self.lookups(batch).rows) if self.finds is None else self.finds(batch)
