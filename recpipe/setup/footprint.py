"""Computes the least memory that a run needs from its recipe and the data's schema, before it allocates
any."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from recpipe.common import machine
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.distributed.ranks import Ranks
from recpipe.model.config import ModelConfig
from recpipe.tables.config import HOLDERS
from recpipe.tables.groups import ModelTables
from recpipe.tables.owners import NOCACHE, RESIDENT

FLOAT_BYTES = 4
REMEDIES = {
    "tables": "lower model.embedding_dim or the rows (data.tables, data.table_scale, data.table_rows), or "
    "keep them on disk: tiers=ssd tiers.policy=lru",
    "cache": "lower tiers.resident_bytes",
    "row maps": "lower the rows (data.tables, data.table_scale, data.table_rows): those of a tier take host "
    "memory for maps and policy wherever they are kept",
    "dense part": "lower model.bottom and model.top (and model.cross_rank, model.cross_layers)",
    "batches": "lower data.batch_size or data.read_ahead (and data.pooling)",
}
"""The remedy for each part, if it is the largest."""


def require_inputs(cfg: Recipe, dataset: Dataset, ranks: Ranks, device: torch.device) -> None:
    """``UserError`` if a batch, or the dense part of one of recpipe's own models, does not fit; called before
    either is made."""
    if not ranks.trains:
        return
    needs = {"batches": batch_bytes(cfg, dataset, len(ranks.trainers))}
    if isinstance(cfg.model, ModelConfig):
        needs["dense part"] = dense_bytes(
            cfg.model, len(dataset.known_schema().dense), len(dataset.known_schema().sparse)
        )
    machine.require(needs, device, REMEDIES[max(needs, key=lambda what: needs[what])])


def require_memory(
    cfg: Recipe,
    dataset: Dataset,
    tables: ModelTables,
    module: nn.Module,
    described: Mapping[str, Any],
    ranks: Ranks,
    device: torch.device,
) -> None:
    """``UserError`` if this rank does not have the memory that the run needs; ``described``: the result of
    ``plan.describe``.

    It is a lower bound, since what a step needs beside its inputs depends on its ids and on plugins.
    """
    on_device, on_host = _tables(cfg, tables, described, ranks)
    if ranks.trains:
        on_device["dense part"] = sum(p.nbytes for p in module.parameters() if not p.is_meta)  # gradients
        on_device["batches"] = batch_bytes(cfg, dataset, len(ranks.trainers))
    cpu = torch.device("cpu")
    pools = [(device, on_device), (cpu, on_host)]
    if device.type == "cpu":
        both = {**on_device, **on_host}
        pools = [(cpu, {what: on_device.get(what, 0) + on_host.get(what, 0) for what in both})]
    for where, needs in pools:
        if needs:
            machine.require(needs, where, REMEDIES[max(needs, key=lambda what: needs[what])])


def _tables(
    cfg: Recipe, tables: ModelTables, described: Mapping[str, Any], ranks: Ranks
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of rows, optimizer state included, that this rank keeps on the device and in host memory, and of
    the maps of tiers there."""
    mapped = described["tiers"]["map_bytes"]
    if described["shards"] is not None:
        mine = described["shards"]["ranks"][ranks.rank]
        tiered = mine["tiered_bytes"]
        here = {"tables": mine["bytes"] - tiered}
        if tiered:
            cached = 0 if cfg.tiers.policy == NOCACHE else cfg.tiers.budget(tables)
            here["cache"] = tiered * cached // tables.total_bytes
            every = sum(rank["tiered_bytes"] for rank in described["shards"]["ranks"])
            maps = {"row maps": mapped * tiered // every}
            return here, maps | ({"tables": tiered} if cfg.tiers.store == "host" else {})
        return (here, {}) if cfg.tiers.kernel == "fused" else ({}, here)
    groups = zip(tables.groups, described["tiers"]["groups"], strict=True)
    resident = sum(g.tables.total_bytes for g, told in groups if told["cache"] == RESIDENT)
    tiered = described["tiers"]["cold_bytes"]
    if not tiered:
        return {"tables": resident}, {}
    kept = cfg.tiers.holder_store if cfg.tiers.store == HOLDERS else cfg.tiers.store
    cold = tiered // len(ranks.holders) if kept == "host" and ranks.holds else 0
    cache = described["tiers"]["resident_bytes"] if ranks.trains else 0
    return {"cache": cache}, {"tables": cold, "row maps": mapped if ranks.trains else 0}


def dense_bytes(model: ModelConfig, dense_features: int, sparse_features: int) -> int:
    """Bytes of the weights of the MLPs and the cross layers, and of their gradients."""
    dim, vectors = model.embedding_dim, sparse_features + 1
    crossed = vectors * dim
    cross = 2 * crossed * model.cross_rank * model.cross_layers
    if model.name == "dlrm":
        crossed, cross = dim + vectors * (vectors - 1) // 2, 0
    bottom = pairwise([dense_features, *model.bottom, dim])
    top = pairwise([crossed, *model.top, 1])
    return 2 * FLOAT_BYTES * (cross + sum(i * o for i, o in [*bottom, *top]))


def batch_bytes(cfg: Recipe, dataset: Dataset, trainers: int) -> int:
    """Bytes of a trainer's share of a batch (ids, dense features, pooled rows) and of the batches read ahead;
    0 if the columns are not known."""
    if dataset.schema is None:  # ready-made batches
        return 0
    size = min(cfg.data.batch_size, dataset.size("train")) // trainers
    pooling = getattr(cfg.data, "pooling", 1)
    features = len(dataset.schema.sparse)
    ids = sum(pooling) if isinstance(pooling, list) else pooling * features
    read = FLOAT_BYTES * (len(dataset.schema.dense) + ids)
    ahead = min(cfg.data.read_ahead, dataset.num_batches("train", cfg.data.batch_size))
    return size * ((1 + ahead) * read + FLOAT_BYTES * features * (cfg.model.embedding_dim or 0))
