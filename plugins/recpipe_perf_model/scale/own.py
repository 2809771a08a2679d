"""The recipe's own model as a model on paper: its tables as they are looked up in some batches, its
layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from recpipe.data.dataset import Dataset
from recpipe.errors import UserError
from recpipe.model.config import ModelConfig, UserModel
from recpipe.tables.groups import ModelTables
from recpipe.tables.inputs import Inputs
from recpipe_perf_model.scale.model import STATES, Dense, PaperModel, Product, Table, dense_of
from recpipe_perf_model.scale.work import distinct

BATCHES = 8
"""Batches whose lookups are counted."""
STEEPEST = 2.0
"""The largest exponent of Zipf's law that is tried."""


@dataclass
class _Counted:
    lookups: int = 0
    samples: int = 0
    distinct: float = 0.0
    batches: int = 0


def own_model(
    config: ModelConfig | UserModel, module: nn.Module, inputs: Inputs, dataset: Dataset, batch_size: int
) -> PaperModel:
    """What ``task=scale`` needs of the recipe's model. Poolings, and how skewed ids are, come from the first
    ``BATCHES`` batches; of a user's model its linear layers count, once for each sample."""
    tables = inputs.tables
    optimizers = {group.tables.optimizer.name for group in tables.groups}
    (optimizer, *others) = sorted(optimizers, key=lambda name: STATES.get(name, 1))[::-1]
    made = _tables(tables, inputs, dataset, batch_size)
    if not any(table.pooling for table in made):
        raise UserError(f"the first {BATCHES} batches look nothing up; nothing is known of the tables' work")
    notes = [f"poolings and skews are those of the first {BATCHES} batches of {batch_size:,} samples"]
    if others:
        notes.append(f"all tables are counted with the state of {optimizer}")
    dense, said = _dense(config, module, made, dataset)
    title = config.name if isinstance(config, ModelConfig) else type(module).__name__
    return PaperModel(
        title,
        f"the recipe's own model, {title}",
        made,
        dense,
        optimizer,
        batch_size,
        4,
        None,
        (*notes, *said),
    )


def _tables(tables: ModelTables, inputs: Inputs, dataset: Dataset, size: int) -> tuple[Table, ...]:
    counted = {table.name: _Counted() for table in tables.tables}
    for _, batch in zip(range(BATCHES), dataset.batches("train", size), strict=False):
        for number, group in enumerate(tables.groups):
            bags, own = inputs.bags(batch, number), group.tables
            ends = bags.offsets[np.arange(len(own.features) + 1) * bags.batch_size]
            for at, name in enumerate(own.layout.tables):
                features = np.flatnonzero(own.table_of == at)
                found = [bags.indices[ends[feature] : ends[feature + 1]] for feature in features]
                ids = np.concatenate(found) if found else np.empty(0, np.int64)
                count = counted[name]
                count.lookups += len(ids)
                count.samples += bags.batch_size
                count.distinct += len(np.unique(ids))
                count.batches += 1
    made = []
    for group in tables.groups:
        layout = group.tables.layout
        for name, rows in zip(layout.tables, layout.rows, strict=True):
            count = counted[name]
            pooling = count.lookups / max(1, count.samples)
            lookups, different = count.lookups / max(1, count.batches), count.distinct / max(1, count.batches)
            skew = skew_of(rows, lookups, different)
            made.append(Table(name, rows, group.tables.dim, pooling, skew, group.tables.pooled))
    return tuple(made)


def skew_of(rows: float, lookups: float, different: float) -> float:
    """The exponent of Zipf's law under which so many lookups have so many different rows; 0 if uniform ids
    had no more."""
    low, high = 0.0, STEEPEST
    if lookups <= 1 or different >= distinct(rows, 0.0, lookups):
        return 0.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if distinct(rows, middle, lookups) > different else (low, middle)
    return round(low, 3)


def _dense(
    config: ModelConfig | UserModel, module: nn.Module, tables: Sequence[Table], dataset: Dataset
) -> tuple[Dense, list[str]]:
    """The dense part, and what is to be said of it."""
    if isinstance(config, ModelConfig):
        inputs = len(dataset.known_schema().dense)
        kind = "dot" if config.name == "dlrm" else "cross"
        bottom = [*config.bottom, config.embedding_dim] if inputs else []
        cross = config.cross_layers, config.cross_rank
        return dense_of([t.dim for t in tables], inputs, bottom, kind, cross, [*config.top, 1]), []
    layers = [each for each in module.modules() if isinstance(each, nn.Linear)]
    inputs = layers[0].in_features if layers else 0
    found = tuple(Product(each.in_features, each.out_features) for each in layers)
    return Dense(inputs, (), found), [
        f"of the model's own code its {len(layers)} linear layers are counted, once for each sample, and "
        "nothing else"
    ]
