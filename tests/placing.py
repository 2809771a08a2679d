"""recpipe's own model, its tables and what drives them, made without a recipe: one group of tables."""

from __future__ import annotations

from typing import Any

import torch

from recpipe.data.dataset import Dataset
from recpipe.data.schema import Schema
from recpipe.model.call import Called
from recpipe.model.config import ModelConfig
from recpipe.model.dlrm import DlrmSizes, make_dlrm
from recpipe.model.loss import parse_loss
from recpipe.pipeline.placed import PlacedModel, put_proxies
from recpipe.plugin.context import Context, GroupInfo, TableInfo
from recpipe.plugin.tables import TableSet
from recpipe.tables.collection import RowCollection
from recpipe.tables.grouped import GroupedCollection
from recpipe.tables.groups import ModelTables
from recpipe.tables.inputs import Inputs

PLACE = "sparse_arch.embedding_bag_collection"
"""Of the collection in recpipe's own models."""


def inputs_of(tables: TableSet) -> Inputs:
    """The lookups that recpipe's batches make in ``tables``."""
    return Inputs(ModelTables.single(tables, PLACE), [[("sparse",)]])


def model_over(
    embeddings: RowCollection, schema: Schema, config: ModelConfig, seed: int, device: str = "cpu"
) -> PlacedModel:
    """The model of ``config`` with ``embeddings`` in its collection's place."""
    torch.manual_seed(seed)
    module = make_dlrm(DlrmSizes.of(config, schema), torch.device(device))
    called = Called(module, parse_loss("binary_cross_entropy"), low_precision=config.precision == "bfloat16")
    inputs = inputs_of(embeddings.tables)
    grouped = GroupedCollection(inputs.tables, [embeddings])
    return PlacedModel(called, put_proxies(module, inputs.tables, grouped), grouped, inputs)


def context_of(tables: TableSet, slots: int, dataset: Dataset, **more: Any) -> Context:
    """What a plugin is told of a run over ``tables`` of which ``slots`` rows can be resident."""
    names = tables.layout.tables
    given: dict[str, Any] = {
        "tables": {t.name: TableInfo(t.name, t.rows, tables.dim) for t in tables.tables},
        "device": "cpu",
        "resident_bytes": slots * tables.record_bytes,
        "groups": [GroupInfo(names, tables.record_bytes, slots)],
        "lookups": inputs_of(tables).lookups,
        "seed": 1,
        "data_fingerprint": dataset.fingerprint,
        "steps": 60,
    }
    return Context(**(given | more))
