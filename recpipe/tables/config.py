"""``conf/tiers``, typed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
from pydantic import AfterValidator
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from recpipe.common.validation import FilePath, one_of
from recpipe.common.words import Amount
from recpipe.distributed.ranks import Emulation, Ranks
from recpipe.tables.groups import ModelTables
from recpipe.tables.stores import KINDS
from recpipe.tables.tiers.policies import POLICIES

KERNELS = {
    "fused": EmbeddingComputeKernel.FUSED.value,
    "uvm": EmbeddingComputeKernel.FUSED_UVM.value,
    "uvm_caching": EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
}
"""``tiers.kernel``: rows in device memory, in host memory that a GPU reads directly, or in host memory behind
a cache in device memory."""
HOLDERS = "holders"
"""The ``tiers.store`` that partitions rows over the ranks that hold rows."""
AUTO = "auto"
"""The ``tiers.store`` that depends on the device, see ``TierConfig.on``."""
SCRATCH = "tiers"
"""The folder in the run directory for an ssd store without ``tiers.dir``; it is removed when the run ends."""


def _tbes(value: int | str) -> int | str:
    if value != "auto" and (isinstance(value, str) or value < 1):
        raise ValueError("must be auto or a whole number of at least 1")
    return value


def _renamed(store: str) -> str:
    """Translate the earlier name: ``sharded`` used to mean rows on holders, and still means tables cut by
    TorchRec's planner."""
    return HOLDERS if store == "sharded" else store


@dataclass(frozen=True)
class TierConfig:
    """``conf/tiers``: where rows are kept. ``resident_bytes`` counts weights and optimizer state."""

    policy: Annotated[str, one_of("resident", *POLICIES)]
    store: Annotated[str, AfterValidator(_renamed), one_of(*KINDS, HOLDERS, AUTO)]
    resident_bytes: int | float | str
    dir: FilePath | None
    prefetch: bool
    sharded: bool
    holder_store: Annotated[str, one_of(*KINDS)] = "host"
    emulate: Emulation = field(default_factory=Emulation)
    plan: FilePath | None = None
    kernel: Annotated[str, one_of(*KERNELS)] = "fused"
    split_rows: bool = False
    tbes: Annotated[int | str, AfterValidator(_tbes)] = "auto"

    def __post_init__(self) -> None:
        _ = self._resident  # refuses what is no amount

    def on(self, device: torch.device) -> TierConfig:
        """With the store that ``auto`` means: host memory beside a GPU; on a CPU, where the resident tier is
        host memory itself, the SSD."""
        if self.store != AUTO:
            return self
        return replace(self, store="ssd" if device.type == "cpu" else "host")

    @cached_property
    def _resident(self) -> Amount:
        return Amount.parsed(self.resident_bytes, "tiers.resident_bytes")

    def described_store(self, ranks: Ranks) -> str:
        """The cold store in words: its kind and, over ranks, the kind of each holder's own store."""
        if self.store != HOLDERS and ranks.world == 1:
            return self.store
        return f"{HOLDERS} ({self.holder_store if self.store == HOLDERS else self.store})"

    def directory(self, run_dir: Path) -> Path:
        """The directory of ssd stores; each of several ranks has its own ``rank-N`` in it."""
        return Path(self.dir).expanduser() if self.dir else run_dir / SCRATCH

    def budget(self, tables: ModelTables) -> int:
        """``tiers.resident_bytes`` in bytes, at most those of all tables."""
        return min(self._resident.of(tables.total_bytes), tables.total_bytes)

    def shares(self, tables: ModelTables) -> list[int]:
        """Each group's share of the budget, in bytes, in proportion to the bytes of its tables."""
        budget, total = self.budget(tables), tables.total_bytes
        return [budget * group.tables.total_bytes // total for group in tables.groups]

    def slots(self, tables: ModelTables) -> list[int]:
        """How many rows of each group its share of the budget holds."""
        sizes = [group.tables.record_bytes for group in tables.groups]
        return [share // size for share, size in zip(self.shares(tables), sizes, strict=True)]
