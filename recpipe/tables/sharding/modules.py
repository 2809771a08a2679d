"""Makes a model's groups of tables into modules that ``DistributedModelParallel`` can shard in place.

Each collection of the model is replaced by a module with one collection for each of its groups, because
TorchRec shards collections of one dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recpipe import private_api
from recpipe.plugin.tables import TableOptimizer, TableSet
from recpipe.private_api import module_name
from recpipe.tables.groups import ModelTables


def fused(optimizer: TableOptimizer) -> dict[str, object]:
    """FBGEMM's arguments for an optimizer fused into the backward pass."""
    return {
        "optimizer": optimizer.kind,
        "learning_rate": optimizer.lr,
        "eps": optimizer.eps,
        "stochastic_rounding": optimizer.stochastic_rounding,
    }


def module_paths(tables: ModelTables) -> list[str]:
    """The path of each group's module in a model, inside ``groups_in``."""
    return [f"{g.path}.{n}" if g.path else str(n) for n, g in enumerate(tables.groups)]


def group_module(tables: TableSet) -> nn.Module:
    """A collection of the tables on the meta device, under their ``module_name``, each with its optimizer.

    Bags are summed; means are computed from the sums later.
    """
    nowhere = torch.device("meta")
    configs = [replace(config, name=module_name(config.name)) for config in tables.configs()]
    made: nn.Module
    if tables.pooled:
        made = EmbeddingBagCollection(tables=configs, is_weighted=tables.weighted, device=nowhere)
    else:
        named = ("name", "embedding_dim", "num_embeddings", "feature_names", "data_type")
        rows = [EmbeddingConfig(**{name: getattr(config, name) for name in named}) for config in configs]
        made = EmbeddingCollection(tables=rows, device=nowhere)
    for weight in made.parameters():
        private_api.fuse(weight, fused(tables.optimizer))
    return made


def skeleton(tables: ModelTables) -> nn.Module:
    """A model with only the groups' modules at their paths, which is all that a planner needs."""
    model = nn.Module()
    for path, holder in _holders(tables).items():
        if not path:
            return holder
        *above, name = path.split(".")
        parent = model
        for step in above:
            if step not in parent._modules:
                setattr(parent, step, nn.Module())
            parent = parent.get_submodule(step)
        setattr(parent, name, holder)
    return model


@contextmanager
def groups_in(model: nn.Module, tables: ModelTables) -> Iterator[None]:
    """In the block, the groups' modules replace the collections of ``model``; afterwards these are put
    back."""
    before: dict[str, nn.Module] = {}
    try:
        for path, holder in _holders(tables).items():
            before[path] = model.get_submodule(path)
            model.set_submodule(path, holder)
        yield
    finally:
        for path, collection in before.items():
            model.set_submodule(path, collection)


def _holders(tables: ModelTables) -> dict[str, nn.Module]:
    """A module for each collection, by path."""
    found: dict[str, nn.Module] = {}
    for number, group in enumerate(tables.groups):
        holder = found.setdefault(group.path, nn.Module())
        setattr(holder, str(number), group_module(group.tables))
    return found
