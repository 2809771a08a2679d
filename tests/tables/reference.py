"""Tables with several features each, weighted bags, rows that are not pooled, and the same in plain TorchRec.

Every id of a batch comes with a number, its weight: weighted bags are summed with it, and of rows that are
not pooled it makes the gradient, so that it is cut and reordered with the ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torchrec.optim
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.plugin.tables import Table, TableOptimizer, TableSet
from recpipe.tables.collection import RowCollection
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from tests.tables.samples import CPU, DIM, here

TABLES = (
    Table("goods", 600, ("clicked", "carted", "seen")),
    Table("few", 10, ("few",)),
    Table("shops", 90, ("left", "right")),
)
FEATURES = tuple(name for table in TABLES for name in table.features)
ROWS = [table.rows for table in TABLES for _ in table.features]
SIZE = 24
BATCHES = 14
TOLERANCE = {"sgd": 1e-6, "adagrad": 1e-5, "rowwise_adagrad": 1e-5}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8),
    "rowwise_adagrad": lambda p: torchrec.optim.RowWiseAdagrad(p, lr=0.1, eps=1e-8),
}
Records = dict[str, np.ndarray]
"""Of each table, weights then optimizer state: float32 [rows, width]."""
Loss = Callable[[torch.Tensor, KeyedJaggedTensor], torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """How the tables' rows are handed out."""

    name: str
    pooled: bool = True
    weighted: bool = False

    def tables(self, optimizer: str) -> TableSet:
        return TableSet(TABLES, DIM, TableOptimizer(optimizer, 0.1), 3, self.pooled, self.weighted)


SUMS, WEIGHTED, SEQUENCES = Kind("sums"), Kind("weighted", weighted=True), Kind("sequences", pooled=False)


def batches(count: int = BATCHES, size: int = SIZE, seed: int = 5) -> list[KeyedJaggedTensor]:
    """Bags of 0 to 3 skewed ids, so that features of a table look up the same rows, with weights."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        lengths = rng.integers(0, 4, len(FEATURES) * size)
        counts = lengths.reshape(len(FEATURES), size).sum(1)
        rows = np.repeat(ROWS, counts)
        ids = (rng.random(len(rows)) ** 4 * rows).astype(np.int64)
        made.append(
            KeyedJaggedTensor(
                list(FEATURES),
                torch.from_numpy(ids),
                weights=torch.from_numpy(rng.uniform(-1.5, 1.5, len(rows)).astype(np.float32)),
                lengths=torch.from_numpy(lengths),
            ).to(here())
        )
    return made


def loss_of(kind: Kind) -> Loss:
    """A loss whose gradient differs from lookup to lookup, whatever samples of a batch it is of."""

    def loss(rows: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        if not kind.pooled:
            return (rows * sparse.weights()[:, None] * torch.linspace(0.5, 1.5, DIM).to(rows.device)).sum()
        columns = torch.linspace(0.5, 1.5, rows.shape[1]).to(rows.device)
        scale = sparse.lengths().view(len(FEATURES), -1).sum(0)[:, None].to(rows.dtype)
        return (rows * columns * (scale - 8)).sum()

    return loss


# -- plain TorchRec ------------------------------------------------------------------------------


def plain_module(tables: TableSet) -> EmbeddingBagCollection | EmbeddingCollection:
    """TorchRec's own collection, with the first values of ``tables``."""
    config = EmbeddingBagConfig if tables.pooled else EmbeddingConfig
    configs = [
        config(name=t.name, embedding_dim=DIM, num_embeddings=t.rows, feature_names=list(t.features))
        for t in tables.tables
    ]
    module = (
        EmbeddingBagCollection(configs, is_weighted=tables.weighted)
        if tables.pooled
        else EmbeddingCollection(configs)
    )
    with torch.no_grad():
        for name, weights in weights_of(module).items():
            weights.copy_(torch.from_numpy(tables.fill(name, 0, len(weights))[:, :DIM]))
    return module


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Each table's."""
    return {name.split(".")[-2]: parameter for name, parameter in module.named_parameters()}


def plain_rows(module: nn.Module, tables: TableSet, sparse: KeyedJaggedTensor) -> torch.Tensor:
    """Pooled rows [B, F * D], or a row for each id [L, D]."""
    found = module(sparse)
    if tables.pooled:
        return torch.cat([found[name] for name in tables.features], dim=1)
    return torch.cat([found[name].values() for name in tables.features])


def trained_plainly(
    kind: Kind,
    optimizer: str,
    stream: Sequence[KeyedJaggedTensor],
    between: Callable[[Mapping[str, nn.Parameter], KeyedJaggedTensor], None] = lambda weights, sparse: None,
) -> Records:
    """What torch's and TorchRec's own optimizers leave in TorchRec's own collection.

    ``between``: called with each table's weights, which have gradients, before the optimizer's step.
    """
    tables, loss = kind.tables(optimizer), loss_of(kind)
    module = plain_module(tables)
    weights = weights_of(module)
    optimizers = OPTIMIZERS[optimizer](list(weights.values()))
    for sparse in stream:
        optimizers.zero_grad()
        loss(plain_rows(module, tables, sparse), sparse).backward()
        between(weights, sparse)
        optimizers.step()
    left = {}
    for name, parameter in weights.items():
        known = optimizers.state[parameter].items()
        states = [v for k, v in known if "sum" in str(k) or "momentum" in str(k)]
        state = [v.reshape(len(parameter), -1) for v in states if isinstance(v, torch.Tensor)]
        left[name] = torch.cat([parameter.detach(), *state], dim=1).numpy()
    return left


@cache
def expected(kind: Kind, optimizer: str) -> Records:
    """What ``batches`` leave in plain TorchRec, on the CPU; not to be changed."""
    return trained_plainly(kind, optimizer, [sparse.to(CPU) for sparse in batches()])


# -- recpipe's collections -----------------------------------------------------------------------


def train(collection: RowCollection, kind: Kind, stream: Sequence[KeyedJaggedTensor]) -> None:
    """One lookup and one backward pass for each batch."""
    loss = loss_of(kind)
    for sparse in stream:
        loss(collection.lookup(sparse), sparse).backward()


def train_ahead(
    collection: TieredEmbeddingBagCollection, kind: Kind, stream: Sequence[KeyedJaggedTensor]
) -> None:
    """As the loader does: the next batch is planned, and its rows are on their way, while one trains."""
    loss = loss_of(kind)
    rows = collection.input_dist(stream[0])
    for sparse, following in zip(stream, [*stream[1:], None], strict=True):
        collection.advance(rows)
        ahead = None if following is None else collection.input_dist(following)
        if ahead is not None and collection.prefetches:
            collection.prefetch(ahead)
        loss(collection.look_up_now(rows), sparse).backward()
        if ahead is not None:
            rows = ahead


def one_feature_at_a_time(stream: Sequence[KeyedJaggedTensor]) -> list[KeyedJaggedTensor]:
    """Each batch as several, of which each has the ids of one feature: an update for each of them."""
    made = []
    for sparse in stream:
        for feature in FEATURES:
            keep = torch.tensor([name == feature for name in FEATURES]).repeat_interleave(sparse.stride())
            ids = torch.repeat_interleave(keep, sparse.lengths())
            made.append(
                KeyedJaggedTensor(
                    list(FEATURES),
                    sparse.values()[ids],
                    weights=sparse.weights()[ids],
                    lengths=sparse.lengths() * keep,
                )
            )
    return made
