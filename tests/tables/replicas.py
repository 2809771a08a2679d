"""Two trainers in processes of their own, over tables of every kind; what each ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.select import select
from recpipe.distributed.ranks import Ranks
from recpipe.plugin.policy import RowSpace
from recpipe.tables.resident import ReplicatedCollection
from recpipe.tables.stores.holders import HoldersStore
from recpipe.tables.stores.local import HostStore
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from tests.ranks import joined
from tests.tables.reference import Kind, batches, loss_of
from tests.tables.samples import CPU, MAKERS, SLOTS, dump
from tests.tables.skippers import Skips, filter_of

SIZES = (24, 24, 7, 1, 24, 24, 24, 24)
"""Samples of the batches: shares differ in size, and one is empty."""


@dataclass(frozen=True)
class Case:
    kind: Kind
    policy: str
    """``resident``, or that of tiers."""
    optimizer: str
    summed: bool = True
    """Whether the trainers add up their gradients (no: what goes wrong without)."""
    skips: bool = False
    """Whether rows with small gradients are left out."""

    @property
    def name(self) -> str:
        more = ("" if self.summed else "-apart") + ("-skips" if self.skips else "")
        return f"{self.kind.name}-{self.policy}-{self.optimizer}{more}"


def stream() -> list[KeyedJaggedTensor]:
    """The batches that all trainers share."""
    return [batches(1, size, seed=20 + number)[0] for number, size in enumerate(SIZES)]


def collection_of(case: Case, ranks: Ranks) -> ReplicatedCollection | TieredEmbeddingBagCollection:
    tables, trainers = case.kind.tables(case.optimizer), ranks.channel(ranks.trainers)
    if not case.summed:
        trainers.ordered_sum = lambda values: values  # type: ignore[method-assign]
    if case.policy == "resident":
        return ReplicatedCollection(tables, CPU, trainers)
    slots = 0 if case.policy == "nocache" else SLOTS
    policy = MAKERS[case.policy](RowSpace(tables.layout.bases, slots))
    store = HoldersStore(tables.layout, tables.fill, ranks, HostStore)
    return TieredEmbeddingBagCollection(tables, policy, store, CPU, True, ranks, trainers)


def looked_up(
    collection: ReplicatedCollection | TieredEmbeddingBagCollection,
    whole: KeyedJaggedTensor,
    samples: np.ndarray,
) -> torch.Tensor:
    """Rows of this trainer's ``samples`` of a batch."""
    if isinstance(collection, ReplicatedCollection):
        return collection.lookup(select(whole, samples))
    rows = collection.input_dist(whole)
    rows.arrange(samples, 0)
    return collection.look_up_now(rows)


def process(rank: int, world: int, folder: str, cases: Sequence[Case]) -> None:
    """Train every case; leaves each table's records, and what the last batch looked up at last."""
    with joined(rank, world, str(Path(folder, "meet"))):
        everyone = tuple(range(world))
        ranks = Ranks(rank, world, everyone, everyone)
        for case in cases:
            collection, loss = collection_of(case, ranks), loss_of(case.kind)
            if case.skips:
                collection.filter_updates(filter_of(Skips()))
            for sparse in stream():
                own = ranks.shares(0, sparse.stride())[rank]
                samples = np.arange(own.start, own.stop)
                loss(looked_up(collection, sparse, samples), select(sparse, samples)).backward()
            np.savez(Path(folder) / f"{case.name}-{rank}.npz", **dump(collection))
            collection.close()
