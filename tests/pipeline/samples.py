"""A small data set in memory, a small model, and training without Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from recpipe.data.batch import Batch, BatchShare
from recpipe.data.dataset import Dataset, Schema, Split
from recpipe.embedding.resident import ResidentCollection
from recpipe.embedding.tiered import TieredEmbeddingBagCollection
from recpipe.model.ranker import ModelConfig, Ranker
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.select import select
from recpipe.pipeline.step import StepTimes, accumulate
from recpipe.plugin.api import Contribution
from recpipe.plugin.assembly import Assembly
from recpipe.ranks import Ranks, part_of
from tests.embedding.samples import CPU, DIM, FEATURES, dump, jagged, table_set, tiers
from tests.plugin.samples import ACME, merged

SIZE = 32
DENSE = 3


class Listed(Dataset):
    """``count`` training batches of ``SIZE`` samples and a last one of ``last``; two for evaluation."""

    def __init__(self, count: int = 10, last: int = 7, multi: bool = True, seed: int = 4) -> None:
        rng = np.random.default_rng(seed)
        sizes = {"train": [SIZE] * (count - 1) + [last], "eval": [SIZE, 5]}
        self.lists = {name: [random_batch(rng, n, multi) for n in numbers] for name, numbers in sizes.items()}
        self.schema = Schema(tuple("xyz"), FEATURES)
        self.fingerprint, self.rejected_rows = f"listed {count} {last} {multi} {seed}", 0

    def size(self, split: Split) -> int:
        return sum(batch.size for batch in self.lists[split])

    def batches(
        self, split: Split, batch_size: int, first: int = 0, part: tuple[int, int] | None = None
    ) -> Iterator[Batch]:
        assert batch_size == SIZE
        for batch in self.lists[split][first:]:
            if part is None:
                yield batch
            else:
                own = part_of(0, batch.size, part)
                yield BatchShare.of(select(batch, np.arange(own.start, own.stop)), batch.size)


def random_batch(rng: np.random.Generator, size: int, multi: bool) -> Batch:
    dense = torch.from_numpy(rng.standard_normal((size, DENSE), np.float32))
    return Batch(
        dense, jagged(rng, size, multi), torch.from_numpy((rng.random(size) < 0.3).astype(np.float32))
    )


def ranker_over(embeddings: nn.Module, name: str = "dlrm", seed: int = 8) -> Ranker:
    torch.manual_seed(seed)
    return Ranker(ModelConfig(name, DIM, [16], [16], cross_layers=2, cross_rank=4), embeddings, DENSE, CPU)


def collection_of(
    policy: str, optimizer: str, folder: Path
) -> ResidentCollection | TieredEmbeddingBagCollection:
    tables = table_set(optimizer)
    return ResidentCollection(tables, CPU) if policy == "resident" else tiers(tables, policy, folder)


def assembly_of(**parts: object) -> Assembly:
    return merged((ACME, Contribution(**parts)))  # type: ignore[arg-type]


def loader_of(
    dataset: Dataset,
    embeddings: nn.Module | None = None,
    ranks: Ranks | None = None,
    batch_size: int = SIZE,
    **parts: object,
) -> TrainLoader:
    tiered = embeddings if isinstance(embeddings, TieredEmbeddingBagCollection) else None
    return TrainLoader(dataset, batch_size, assembly_of(**parts), tiered, CPU, ranks)


def parameters_after(
    policy: str, optimizer: str, folder: Path, dataset: Dataset, step=accumulate, **parts: object
) -> dict[str, np.ndarray]:
    """Train one epoch; every parameter and the tables' optimizer state."""
    embeddings = collection_of(policy, optimizer, folder)
    ranker = ranker_over(embeddings)
    dense = torch.optim.SGD(ranker.dense_parameters().values(), lr=0.1)
    for staged in loader_of(dataset, embeddings, **parts):
        dense.zero_grad()
        step(ranker, staged, StepTimes())
        dense.step()
    values = dump(embeddings)
    if isinstance(embeddings, TieredEmbeddingBagCollection):
        embeddings.close()
    return values | {n: p.detach().numpy().copy() for n, p in ranker.dense_parameters().items()}


def furthest(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    """Largest absolute difference of any value."""
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)
