"""recpipe's published models over a small schema, made from their recipes, and batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.schema import LabelColumn, Schema
from recpipe.model.config import UserModel
from recpipe.model.dlrm import DlrmSizes, make_dlrm
from recpipe.model.make import make_model
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import SparseFeature
from tests.any_model import runs
from tests.any_model.zoo import OTHERS

DIM, HISTORY = 8, 5
FEATURES = (
    SparseFeature("user", 40),
    SparseFeature("item", 50, table="goods", pooling="mean"),
    SparseFeature("category", 12, dim=4),
    SparseFeature("liked", 50, table="goods", pooling="mean"),
    SparseFeature("tags", 20),
)
"""One id each, but for the lists ``liked`` and ``tags``."""
LISTS = ("liked", "tags", "items", "kinds")
SCHEMA = Schema(("price", "age"), FEATURES)
EVENTS = (
    SparseFeature("user", 40),
    SparseFeature("item", 50, table="goods"),
    SparseFeature("kind", 12),
    SparseFeature("items", 50, table="goods", sequence=HISTORY),
    SparseFeature("kinds", 12, table="kind", sequence=HISTORY),
    SparseFeature("tags", 20, dim=4),
)
"""Of models that compare a history with a target."""
COMPARING = ("din", "dien", "bst", "tbsm", "sasrec", "hstu")
AGES = tuple(f"ago_{n}" for n in range(HISTORY))
TIMED = Schema(
    ("price", *AGES, "age"),
    tuple(replace(f, ages="ago") if f.name == "items" else f for f in EVENTS),
)
"""The same, with the ages of events."""
MODELS: dict[str, tuple[str, ...]] = {
    "wide_deep": ("model.hidden=[16,8]", "model.wide=[user,category]"),
    "deepfm": ("model.hidden=[16,8]",),
    "dcnv2": ("model.hidden=[16,8]", "model.layers=2", "model.rank=3"),
    "autoint": ("model.layers=2", "model.width=4", "model.hidden=[8]"),
    "finalmlp": (
        "model.left=[16,8]",
        "model.right=[12]",
        "model.gate=[8]",
        "model.left_gate=[user]",
        "model.right_gate=[item,price]",
    ),
    "masknet": ("model.blocks=[12,8]", "model.reduction_ratio=0.5"),
    "din": ("model.hidden=[16,8]", "model.attention=[8]"),
    "bst": ("model.hidden=[16,8]", "model.heads=2", "model.place_dim=4"),
    "tbsm": (
        "model.bottom=[8]",
        "model.top=[16]",
        "model.vector=12",
        "model.weighting=[6]",
        "model.hidden=[8]",
    ),
    "wukong": ("model.hidden=[16]", "model.products=3", "model.mixtures=2", "model.products_hidden=[8]"),
    "xdeepfm": ("model.hidden=[16,8]", "model.layers=[4,3]"),
    "shared_bottom": ("model.bottom=[16,8]", "model.tower=[5]"),
    "mmoe": ("model.experts=3", "model.expert=[8,6]", "model.tower=[5]"),
    "ple": ("model.own_experts=2", "model.shared_experts=1", "model.expert=[8,6]", "model.tower=[5]"),
    "dien": ("model.hidden=[16,8]", "model.auxiliary=0"),
    "sasrec": ("model.heads=2",),
    "hstu": ("model.hidden=[16,8]", "model.width=12"),
}
"""Their keys here."""


def schema_of(name: str, labels: int = 1) -> Schema:
    """The columns that the model ``name`` is tried with."""
    sparse = EVENTS if name in COMPARING else SCHEMA.sparse
    return Schema(SCHEMA.dense, sparse, tuple(LabelColumn(f"label_{n}") for n in range(labels)))


def made(name: str, *words: str, schema: Schema | None = None) -> nn.Module:
    """The model of the recipe, its tables with values, the same at every call."""
    config = Recipe.of(
        compose([f"model={name}", f"model.embedding_dim={DIM}", *MODELS.get(name, ()), *words])
    ).model
    torch.manual_seed(7)
    schema = schema or schema_of(name)
    if isinstance(config, UserModel):
        model = make_model(config, schema, torch.device("cpu"))
    else:
        model = make_dlrm(DlrmSizes.of(config, schema), torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            for weight in module.to_empty(device=torch.device("cpu")).parameters():
                nn.init.uniform_(weight, -0.5, 0.5)
    return model


def batches(schema: Schema, count: int, size: int = 32) -> list[Batch]:
    """Made-up samples; sequences are as long as each other, none to ``HISTORY`` ids."""
    drawn = torch.Generator().manual_seed(3)
    labels = max(1, len(schema.labels))
    found = []
    for _ in range(count):
        lengths, ids = [], []
        history = torch.randint(0, HISTORY + 1, (size,), generator=drawn)
        for feature in schema.sparse:
            own = torch.ones(size, dtype=torch.long)
            if feature.sequence is not None:
                own = history
            elif feature.name in LISTS:
                own = torch.randint(0, 4, (size,), generator=drawn)
            lengths.append(own)
            ids.append(torch.randint(0, feature.rows, (int(own.sum()),), generator=drawn))
        names = [feature.name for feature in schema.sparse]
        sparse = KeyedJaggedTensor(names, torch.cat(ids), lengths=torch.cat(lengths))
        dense = torch.randn(size, len(schema.dense), generator=drawn)
        if AGES[0] in schema.dense:
            passed = (10 ** (7 * torch.rand(size, HISTORY, generator=drawn))).floor()
            there = torch.arange(HISTORY) >= HISTORY - history.unsqueeze(1)
            place = schema.dense.index(AGES[0])
            dense[:, place : place + HISTORY] = torch.where(there, passed.sort(1, descending=True)[0], -1)
        clicks = torch.randint(0, 2, (size, labels), generator=drawn).float()
        found.append(Batch(dense, sparse, clicks[:, 0] if labels == 1 else clicks))
    return found


@contextmanager
def in_float64(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Model and batch from now on; tensors that are made in the block, too. Rows, of which TorchRec's
    collections make float32, stay float64."""
    model.double()
    batch.dense = batch.dense.double()
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


OTHERS |= {f"model={name}": partial(made, name) for name in MODELS}


def rank(*arguments: object) -> None:
    """A process of ``all_on_two_ranks`` that knows these models."""
    runs._rank(*arguments)  # type: ignore[arg-type]
