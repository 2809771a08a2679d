"""Small tables, batches and training loops for the tests of tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.plugin.bags import RowIds
from recpipe.plugin.policy import CachePolicy, Placement, RowSpace
from recpipe.plugin.store import ColdStore
from recpipe.plugin.tables import SparseFeature, TableOptimizer, TableSet
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.stores import make_store
from recpipe.tables.tiers.policies import POLICIES, HotSet
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection, TieredRows

CPU = torch.device("cpu")
HERE = CPU
"""What ``here`` returns; ``tests/gpu`` sets it."""
FEATURES = (SparseFeature("a", 10), SparseFeature("b", 600), SparseFeature("c", 90))
DIM = 8
SLOTS = 120
Collection = ResidentCollection | TieredEmbeddingBagCollection


def table_set(optimizer: str = "rowwise_adagrad", seed: int = 3, lr: float = 0.1) -> TableSet:
    return TableSet.one_each(FEATURES, DIM, TableOptimizer(optimizer, lr), seed)


def jagged(rng: np.random.Generator, size: int, multi: bool) -> KeyedJaggedTensor:
    """Skewed ids, repeats among them; ``multi``: bags of 0 to 3 ids."""
    lengths = rng.integers(0, 4, len(FEATURES) * size) if multi else np.ones(len(FEATURES) * size, np.int64)
    values = []
    for i, feature in enumerate(FEATURES):
        count = int(lengths[i * size : (i + 1) * size].sum())
        values.append((rng.random(count) ** 3 * feature.rows).astype(np.int64))
    names = [f.name for f in FEATURES]
    return KeyedJaggedTensor(
        names, torch.from_numpy(np.concatenate(values)), lengths=torch.from_numpy(lengths)
    ).to(here())


def here() -> torch.device:
    """The device of tables and batches of the tests that a GPU passes too."""
    return HERE


def stream(count: int, multi: bool, size: int = 32, seed: int = 5) -> list[KeyedJaggedTensor]:
    rng = np.random.default_rng(seed)
    return [jagged(rng, size, multi) for _ in range(count)]


class Retargeting(HotSet):
    """Every third row is resident; from batch 12 on, the first rows of each table are, moved in chunks."""

    def __init__(self, space: RowSpace) -> None:
        super().__init__(space, np.arange(space.slots, dtype=np.int64) * 3, chunk=32)
        self.batch = 0

    def migrate(self, rows: RowIds) -> Placement:
        self.batch += 1
        if self.batch == 12:
            self.retarget(np.arange(self.space.slots, dtype=np.int64))
        return super().migrate(rows)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.batch = state["batch"]


MAKERS: dict[str, Callable[[RowSpace], CachePolicy]] = {**POLICIES, "hot": Retargeting}


def tiers(
    tables: TableSet,
    policy: str,
    folder: Path,
    store: str | ColdStore = "host",
    prefetch: bool = True,
    slots: int = SLOTS,
) -> TieredEmbeddingBagCollection:
    slots = 0 if policy == "nocache" else slots
    cold = (
        make_store(store, tables.layout, tables.fill, directory=folder) if isinstance(store, str) else store
    )
    chosen = MAKERS[policy](RowSpace(tables.layout.bases, slots))
    # On a GPU behind the slots; batches that need more make it a table of its own.
    room = 64 if here().type == "cuda" else 1
    return TieredEmbeddingBagCollection(tables, chosen, cold, here(), prefetch, slab_rows=room)


def dump(storage: Collection) -> dict[str, np.ndarray]:
    """Every table's records, weights then optimizer state: float32 [rows, width]."""
    parts: dict[str, list[np.ndarray]] = {}
    for region in storage.regions():
        parts.setdefault(region.table, []).append(np.concatenate(storage.read(region), axis=1))
    return {table: np.concatenate(chunks) for table, chunks in parts.items()}


def gradients(count: int, size: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randn((size, len(FEATURES) * DIM), generator=generator) for _ in range(count))
    return [gradient.to(here()) for gradient in drawn]


def pooled_now(collection: Collection, sparse: KeyedJaggedTensor) -> torch.Tensor:
    """What an evaluation sees between two batches."""
    collection.eval()
    with torch.no_grad():
        values = collection(sparse).values().clone()
    collection.train()
    return values


def train(
    collection: Collection,
    batches: Sequence[KeyedJaggedTensor],
    eval_every: int = 0,
    after: Callable[[int], None] = lambda index: None,
) -> list[torch.Tensor]:
    """Train as a plain module, one ``forward`` per batch; returns the evaluations made on the way."""
    seen = []
    for index, (batch, gradient) in enumerate(zip(batches, gradients(len(batches)), strict=True)):
        collection(batch).values().backward(gradient)
        if eval_every and index % eval_every == 0:
            seen.append(pooled_now(collection, batches[0]))
        after(index)
    return seen


def train_ahead(
    collection: TieredEmbeddingBagCollection,
    batches: Sequence[KeyedJaggedTensor],
    eval_every: int = 0,
    after: Callable[[int], None] = lambda index: None,
) -> list[torch.Tensor]:
    """Train as the loader does: batch b + 1 is planned (and fetched) before batch b is looked up."""

    def taken(index: int) -> TieredRows | None:
        if index == len(batches):
            return None
        rows = collection.input_dist(batches[index])
        if collection.prefetches:
            collection.prefetch(rows)
        return rows

    seen = []
    rows = taken(0)
    for index, gradient in enumerate(gradients(len(batches))):
        assert rows is not None
        collection.advance(rows)
        following = taken(index + 1)
        collection.look_up_now(rows).backward(gradient)
        if eval_every and index % eval_every == 0:
            seen.append(pooled_now(collection, batches[0]))
        after(index)
        rows = following
    return seen


def difference(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    """Largest difference of two dumps, relative to the largest value of its column kind (weight or state)."""
    worst = 0.0
    for table, mine in left.items():
        for part in (slice(0, DIM), slice(DIM, None)):
            a, b = mine[:, part], right[table][:, part]
            if a.size:
                worst = max(worst, float(np.abs(a - b).max() / max(1.0, np.abs(b).max())))
    return worst


def identical(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[t], right[t]) for t in left)
