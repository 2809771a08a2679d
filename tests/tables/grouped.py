"""A model of several groups of tables: two collections of bags with tables of one name, and a sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.common.files import RunDir
from recpipe.distributed.ranks import Ranks
from recpipe.plugin.api import Contribution
from recpipe.plugin.tables import TableOptimizer
from recpipe.tables.build import Place, build_tables
from recpipe.tables.config import TierConfig
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import ModelTables, collections_of, group_tables
from recpipe.tables.inputs import Inputs
from recpipe.tables.owners import group_owners
from tests.plugin.samples import ACME, merged
from tests.tables.samples import CPU

ROWS = {"clicked": 300, "carted": 300, "few": 12, "seen": 150, "left": 90, "right": 90, "item": 500}
"""Of the table in which each feature is looked up."""
ROWWISE, SGD = TableOptimizer("rowwise_adagrad", 0.1), TableOptimizer("sgd", 0.1)
META = torch.device("meta")
Initialiser = Callable[[torch.Tensor], Any]


class Model(nn.Module):
    """``user``: dimensions 8 and 4; ``item``: a table of the same name as one of the user's; a sequence."""

    def __init__(self, device: torch.device = META, init: Initialiser | None = None) -> None:
        super().__init__()

        def table(name: str, dim: int, *features: str, **more: Any) -> EmbeddingBagConfig:
            rows = ROWS[features[0]]
            return EmbeddingBagConfig(
                name=name,
                embedding_dim=dim,
                num_embeddings=rows,
                feature_names=list(features),
                init_fn=init,
                **more,
            )

        self.user = EmbeddingBagCollection(
            [
                table("goods", 8, "clicked", "carted"),
                table("few", 4, "few", pooling=PoolingType.MEAN),
                table("seen", 8, "seen"),
            ],
            device=device,
        )
        self.item = nn.ModuleDict(
            {"bags": EmbeddingBagCollection([table("goods", 8, "item")], device=device)}
        )
        shops = EmbeddingConfig(
            name="shops",
            embedding_dim=8,
            num_embeddings=ROWS["left"],
            feature_names=["left", "right"],
            init_fn=init,
        )
        self.history = EmbeddingCollection([shops], device=device)


def optimizer_of(name: str, weights: torch.Tensor) -> TableOptimizer:
    return SGD if name == "seen" else ROWWISE


def model_tables(model: nn.Module | None = None, seed: int = 3) -> ModelTables:
    """The tables of ``model``: five groups of them."""
    return group_tables(collections_of(model or Model()), optimizer_of, seed)


def ids(size: int, seed: int, one_each: bool = False) -> KeyedJaggedTensor:
    """Bags of 0 to 3 skewed ids of every feature; or of just one."""
    rng = np.random.default_rng(seed)
    lengths = np.ones(len(ROWS) * size, np.int64) if one_each else rng.integers(0, 4, len(ROWS) * size)
    rows = np.repeat(list(ROWS.values()), lengths.reshape(len(ROWS), size).sum(1))
    values = (rng.random(len(rows)) ** 3 * rows).astype(np.int64)
    return KeyedJaggedTensor(list(ROWS), torch.from_numpy(values), lengths=torch.from_numpy(lengths))


def config(store: str = "host", policy: str = "lru", budget: str | int = "25%", **more: Any) -> TierConfig:
    return TierConfig(policy, store, budget, more.pop("dir", None), prefetch=True, sharded=False, **more)


def built(tables: ModelTables, tiers: TierConfig, run_dir: RunDir) -> GroupedCollection:
    """As a run builds them; a batch is a ``KeyedJaggedTensor`` in a dictionary."""
    inputs = Inputs(tables, [[("ids",)]] * len(tables.groups))
    owners = group_owners(tiers, merged((ACME, Contribution())), tables)
    return build_tables(inputs, owners, Place(tiers, CPU, run_dir, Ranks(), 32))


def train(grouped: GroupedCollection, steps: int, first: int = 0) -> None:
    """Each group's rows by themselves, with gradients that differ from column to column and step to step."""
    for step in range(first, first + steps):
        sparse = ids(16, seed=step)
        for group, collection in zip(grouped.tables.groups, grouped.collections, strict=True):
            names = sparse.keys()
            own = sparse.permute([names.index(name) for name in group.tables.features])
            rows = collection.lookup(own)  # type: ignore[attr-defined]
            (rows * torch.linspace(0.5, 1.5, rows.shape[1]) * (1 + step % 3)).sum().backward()


def contents(grouped: GroupedCollection) -> dict[str, np.ndarray]:
    """Each table's weights, then its state: float32 [rows, width]."""
    parts: dict[str, list[np.ndarray]] = {}
    for region in grouped.regions():
        parts.setdefault(region.table, []).append(np.concatenate(grouped.read(region), axis=1))
    return {name: np.concatenate(chunks) for name, chunks in parts.items()}


def stores(folder: Path) -> set[str]:
    """Where there are ssd stores below ``folder``."""
    return {str(state.parent.relative_to(folder)) for state in folder.rglob("store.json")}
