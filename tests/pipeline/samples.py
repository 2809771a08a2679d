"""A small data set in memory, a small model, and training without Lightning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from recpipe.data.dataset import Dataset, SplitName
from recpipe.data.schema import Schema
from recpipe.data.select import select
from recpipe.distributed.ranks import Ranks, part_of
from recpipe.model.call import Called
from recpipe.model.config import ModelConfig
from recpipe.model.dlrm import DlrmSizes, make_dlrm
from recpipe.model.loss import parse_loss
from recpipe.pipeline.loader import EvalLoader, TrainLoader
from recpipe.pipeline.placed import PlacedModel, put_proxies
from recpipe.pipeline.source import BatchSource, SampleFilter
from recpipe.pipeline.splitting import Splitting
from recpipe.pipeline.step import StepTimes, accumulate
from recpipe.plugin.api import Contribution
from recpipe.plugin.assembly import Assembly
from recpipe.plugin.batch import Batch, BatchShare
from recpipe.plugin.skipper import RowView
from recpipe.plugin.tables import TableOptimizer, TableSet
from recpipe.tables.collection import RowCollection
from recpipe.tables.group_rows import GroupTables
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import ModelTables, collections_of, group_tables
from recpipe.tables.inputs import Inputs
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from tests.plugin.samples import ACME, Splits, merged
from tests.tables.samples import CPU, DIM, FEATURES, dump, jagged, table_set, tiers

SIZE = 32
DENSE = 3
SCHEMA = Schema(tuple("xyz"), FEATURES)


class Listed(Dataset):
    """``count`` training batches of ``SIZE`` samples and a last one of ``last``; two for evaluation."""

    def __init__(self, count: int = 10, last: int = 7, multi: bool = True, seed: int = 4) -> None:
        rng = np.random.default_rng(seed)
        sizes = {"train": [SIZE] * (count - 1) + [last], "eval": [SIZE, 5]}
        self.lists = {name: [random_batch(rng, n, multi) for n in numbers] for name, numbers in sizes.items()}
        self.schema = SCHEMA
        self.fingerprint, self.rejected_rows = f"listed {count} {last} {multi} {seed}", 0

    def size(self, split: SplitName) -> int:
        return sum(batch.size for batch in self.lists[split])

    def batches(
        self, split: SplitName, batch_size: int, first: int = 0, part: tuple[int, int] | None = None
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


def model_config(name: str = "dlrm", precision: str = "float32", width: int = 16) -> ModelConfig:
    return ModelConfig(name, DIM, [width], [width], cross_layers=2, cross_rank=4, precision=precision)


def model_over(embeddings: RowCollection, config: ModelConfig | str = "dlrm", seed: int = 8) -> PlacedModel:
    """recpipe's own model with ``embeddings`` in its collection's place."""
    config = model_config(config) if isinstance(config, str) else config
    torch.manual_seed(seed)
    module = make_dlrm(DlrmSizes.of(config, SCHEMA), CPU)
    called = Called(module, parse_loss("binary_cross_entropy"), low_precision=config.precision == "bfloat16")
    tables = ModelTables.single(embeddings.tables, "sparse_arch.embedding_bag_collection")
    grouped = GroupedCollection(tables, [embeddings])
    return PlacedModel(called, put_proxies(module, tables, grouped), grouped, Inputs(tables, [[("sparse",)]]))


def placed(
    module: nn.Module, batch: object, collection_over=None, optimizer_of=None, lr: float = 0.1
) -> PlacedModel:
    """Any module with its collections replaced; ``collection_over`` makes the rows' of each group."""
    over = collection_over or (lambda tables: ResidentCollection(tables, CPU))
    optimizer_of = optimizer_of or (lambda name, weights: TableOptimizer("sgd", lr))
    tables = group_tables(collections_of(module), optimizer_of, 0)
    grouped = GroupedCollection(tables, [over(group.tables) for group in tables.groups])
    called = Called(module, parse_loss("binary_cross_entropy"))
    return PlacedModel(called, put_proxies(module, tables, grouped), grouped, Inputs.of(tables, batch))


def inputs_of(dataset: Dataset, embeddings: RowCollection | None = None) -> Inputs:
    """What the dataset's batches look up in a table for each feature."""
    features = dataset.known_schema().sparse
    tables = TableSet.one_each(features, DIM, TableOptimizer("sgd", 0.1), 0)
    return Inputs(ModelTables.single(tables if embeddings is None else embeddings.tables), [[("sparse",)]])


def groups_of(embeddings: RowCollection) -> Sequence[GroupTables]:
    """As the pipeline drives them."""
    return GroupedCollection(ModelTables.single(embeddings.tables), [embeddings]).groups


def collection_of(
    policy: str, optimizer: str, folder: Path
) -> ResidentCollection | TieredEmbeddingBagCollection:
    tables = table_set(optimizer)
    return ResidentCollection(tables, CPU) if policy == "resident" else tiers(tables, policy, folder)


def assembly_of(**parts: object) -> Assembly:
    if parts.get("splitter") is not None:
        parts["splitter"] = Splits(parts["splitter"])
    return merged((ACME, Contribution(**parts)))  # type: ignore[arg-type]


def loader_of(
    dataset: Dataset,
    embeddings: RowCollection | None = None,
    ranks: Ranks | None = None,
    batch_size: int = SIZE,
    view: RowView | None = None,
    device: torch.device = CPU,
    **parts: object,
) -> TrainLoader:
    inputs = inputs_of(dataset, embeddings)
    over = ResidentCollection(inputs.tables.groups[0].tables, CPU) if embeddings is None else embeddings
    return loader_over(dataset, inputs, groups_of(over), ranks, batch_size, view, device, **parts)


def loader_over(
    dataset: Dataset,
    inputs: Inputs,
    tables: Sequence[GroupTables],
    ranks: Ranks | None = None,
    batch_size: int = SIZE,
    view: RowView | None = None,
    device: torch.device = CPU,
    **parts: object,
) -> TrainLoader:
    """The loader of a run with a plugin of these ``parts``; a skipper among them is shown ``view``."""
    assembly = assembly_of(**parts)
    source = BatchSource(dataset, batch_size, assembly.feed)
    filtered = SampleFilter.of(assembly.skipper, view)  # type: ignore[arg-type]
    splitting = Splitting.of(assembly.splitter, "always", batch_size, tables, Ranks().channel())
    return TrainLoader(source, inputs, tables, device, ranks, sample_filter=filtered, splitting=splitting)


def eval_loader_of(dataset: Dataset, ranks: Ranks | None = None) -> EvalLoader:
    return EvalLoader(dataset, SIZE, inputs_of(dataset), CPU, ranks)


def parameters_after(
    policy: str, optimizer: str, folder: Path, dataset: Dataset, step=accumulate, **parts: object
) -> dict[str, np.ndarray]:
    """Train one epoch; every parameter and the tables' optimizer state."""
    embeddings = collection_of(policy, optimizer, folder)
    model = model_over(embeddings)
    dense = torch.optim.SGD(model.dense_parameters().values(), lr=0.1)
    for batch in loader_of(dataset, embeddings, **parts):
        dense.zero_grad()
        step(model, batch, StepTimes())
        dense.step()
    values = dump(embeddings)
    embeddings.close()
    return values | {n: p.detach().numpy().copy() for n, p in model.dense_parameters().items()}


def furthest(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    """Largest absolute difference of any value."""
    assert left.keys() == right.keys()
    return max(float(np.abs(left[name] - right[name]).max()) for name in left)
