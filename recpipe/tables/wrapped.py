"""``WrappedCollection``: a collection around another one, for a plugin's ``rewrite``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe import seams
from recpipe.tables.capabilities import LOOKUPS, Placed, Planned, Rows, SavedByRanks, SendsAhead
from recpipe.tables.collection import TableCollection, TierFigures
from recpipe.tables.specs import Region, Values
from recpipe.tables.tiers.placement import TierPlan

C = TypeVar("C")


class WrappedCollection(TableCollection, Planned, Placed, SendsAhead, SavedByRanks):
    """Passes everything on to ``inner``, and can what ``inner`` can. Override what you change.

    Rows are looked up by ``forward``; where ``inner`` is planned, training looks them up by
    ``lookup_resident`` and ``lookup_slab`` instead, and where it sends ahead by ``finish``. A class that
    changes what is looked up overrides those as well; one that does not is refused.
    """

    def __init__(self, inner: TableCollection) -> None:
        super().__init__()
        self.inner = inner

    def offers(self, capability: type[C]) -> C | None:
        """``inner``'s capability, through this collection."""
        theirs = self.inner.offers(capability)
        return self if theirs is not None and isinstance(self, capability) else theirs

    def left_out(self) -> list[str]:
        """Lookups of training that this class should override and does not, as it overrides ``forward``."""
        if not self._overrides("forward"):
            return []
        needed = (names for capability, names in LOOKUPS.items() if self.inner.offers(capability))
        return [name for names in needed for name in names if not self._overrides(name)]

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(WrappedCollection, name)

    def _of(self, capability: type[C]) -> C:
        found = self.inner.offers(capability)
        assert found is not None, "asked for by offers()"
        return found

    # -- lookups -----------------------------------------------------------------------------

    def forward(self, sparse: KeyedJaggedTensor) -> Rows:
        """Rows by feature name."""
        found: Rows = self.inner(sparse)
        return found

    def pooled_with_room(self, sparse: KeyedJaggedTensor) -> torch.Tensor | None:
        """As ``inner`` has it, unless this class changes what is looked up."""
        return None if self._overrides("forward") else self.inner.pooled_with_room(sparse)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """As TorchRec's collection."""
        return self.inner.embedding_bag_configs()

    @property
    def threads(self) -> int:
        """How many threads a lookup runs in."""
        return self.inner.threads

    @property
    def collectives(self) -> Mapping[str, seams.Collective]:
        """TorchRec's collectives on this rank."""
        return self.inner.collectives

    def update(self) -> None:
        """The step of tables that their backward pass does not update; called after it."""
        self.inner.update()

    # -- rows --------------------------------------------------------------------------------

    def regions(self) -> Iterator[Region]:
        """The regions that this process owns."""
        return self.inner.regions()

    def read(self, region: Region) -> Values:
        """Current weights and optimizer state of ``region``."""
        return self.inner.read(region)

    def write(self, region: Region, values: Values) -> None:
        """Replace the weights and optimizer state of ``region``."""
        self.inner.write(region, values)

    def tier_figures(self) -> TierFigures | None:
        """What it moved between its tiers."""
        return self.inner.tier_figures()

    def serve(self) -> None:
        """On a rank that holds rows and does not train: answer the trainers until they are done."""
        self.inner.serve()

    def close(self) -> None:
        """Write back what is only here and release files and threads."""
        self.inner.close()

    # -- Planned -----------------------------------------------------------------------------

    @property
    def prefetches(self) -> bool:  # type: ignore[override]
        """Whether a plan's rows are to be fetched while the batch before it trains."""
        return self._of(Planned).prefetches

    def plan(self, sparse: KeyedJaggedTensor) -> TierPlan:
        """As ``Planned``."""
        return self._of(Planned).plan(sparse)

    def prefetch(self, plan: TierPlan) -> None:
        """As ``Planned``."""
        self._of(Planned).prefetch(plan)

    def forget(self) -> None:
        """As ``Planned``."""
        self._of(Planned).forget()

    def advance(self, plan: TierPlan) -> None:
        """As ``Planned``."""
        self._of(Planned).advance(plan)

    def arrive(self) -> None:
        """As ``Planned``."""
        self._of(Planned).arrive()

    def lookup_resident(self, plan: TierPlan) -> torch.Tensor:
        """As ``Planned``."""
        return self._of(Planned).lookup_resident(plan)

    def lookup_slab(self, plan: TierPlan) -> torch.Tensor:
        """As ``Planned``."""
        return self._of(Planned).lookup_slab(plan)

    # -- Placed, SendsAhead, SavedByRanks ----------------------------------------------------

    def placement_state(self) -> dict[str, Any]:
        """As ``Placed``."""
        return self._of(Placed).placement_state()

    def check_placement_state(self, state: Mapping[str, Any]) -> None:
        """As ``Placed``."""
        self._of(Placed).check_placement_state(state)

    def load_placement_state(self, state: dict[str, Any] | None) -> bool:
        """As ``Placed``."""
        return self._of(Placed).load_placement_state(state)

    def start(self, sparse: KeyedJaggedTensor) -> Any:
        """As ``SendsAhead``."""
        return self._of(SendsAhead).start(sparse)

    def finish(self, sent: Any) -> Rows:
        """As ``SendsAhead``."""
        return self._of(SendsAhead).finish(sent)

    def save_tables(self, directory: Path) -> None:
        """As ``SavedByRanks``."""
        self._of(SavedByRanks).save_tables(directory)

    def load_tables(self, directory: Path) -> None:
        """As ``SavedByRanks``."""
        self._of(SavedByRanks).load_tables(directory)
