"""Applies plugins' quantizers to tables: how weights are stored, and how records are encoded in the cold
tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torchrec.modules.embedding_configs import DataType

from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.plugin.calls import Owned
from recpipe.plugin.compose import Quantizing
from recpipe.plugin.errors import PluginConflict
from recpipe.plugin.quantizer import RecordLayout
from recpipe.tables.groups import ModelTables
from recpipe.tables.owners import RESIDENT, GroupOwner
from recpipe.tables.stores.codecs import COLD

STORED = {"fp32": DataType.FP32, "fp16": DataType.FP16}
"""FBGEMM's type for each name that ``Quantizer.storage`` may return."""


def quantized(tables: ModelTables, quantizing: Quantizing) -> ModelTables:
    """Split ``tables`` into groups with one storage type and one codec, and set these.

    Rows of 16 bits have the same bits in the cold tier as in their slots, unless a quantizer asks for another
    format.
    """

    def asked(table: str) -> tuple[str, int]:
        storage, cold = quantizing.storage.get(table), quantizing.cold.get(table)
        return "fp32" if storage is None else storage.part, 0 if cold is None else id(cold.part)

    groups = []
    for group in tables.split(asked).groups:
        own, first = group.tables, group.tables.layout.tables[0]
        stored, codec = quantizing.storage.get(first), quantizing.cold.get(first)
        storage = "fp32" if stored is None else stored.part
        if stored is not None and codec is None and storage != "fp32":
            codec = Owned(stored.label, stored.origin, COLD[storage](RecordLayout(own.dim, own.layout.width)))
        groups.append(replace(group, tables=replace(own, storage=STORED[storage], codec=codec)))
    return ModelTables(tuple(groups))


def check_quantized(
    quantizing: Quantizing,
    tables: ModelTables,
    owners: Sequence[GroupOwner],
    sharded: bool,
    device: torch.device,
    ranks: Ranks,
) -> None:
    """``PluginConflict``, or ``UserError`` for the recipe's own, if a request cannot be carried out or would
    have no effect."""
    for group in tables.groups:
        if not group.tables.optimizer.stochastic_rounding:
            continue
        which = f"optimizer of table '{group.tables.layout.tables[0]}': stochastic_rounding=true"
        if device.type == "cpu":
            raise UserError(
                f"{which}, but FBGEMM's CPU kernels round to the nearest value; leave it false, or train on "
                "a GPU"
            )
        if group.tables.storage is DataType.FP32:
            raise UserError(
                f"{which}, but its weights are stored in fp32 and not rounded; leave it false, or store "
                "them in 16 bits (+plugin=quantize)"
            )
    for table, stored in quantizing.storage.items():
        if stored.part != "fp32" and not sharded and len(ranks.trainers) > 1:
            raise PluginConflict(
                f"{stored}: stores table '{table}' in {stored.part}, but each of "
                f"{len(ranks.trainers)} trainers keeps replicas of rows in float32; shard the tables, "
                "tiers.sharded=true, or store them in fp32"
            )
    groups = zip(tables.groups, owners, strict=True)
    tiered = {name for g, owner in groups if owner.name != RESIDENT for name in g.tables.layout.tables}
    for origin in {owned.origin: None for owned in quantizing.cold.values()}:
        if not any(owned.origin == origin and table in tiered for table, owned in quantizing.cold.items()):
            raise PluginConflict(
                f"plugin {origin} is to quantize cold rows, but all rows of its tables are resident in this "
                "run: put them in tiers, for example by tiers.policy=lru or +plugin=[hotline,"
                f"{origin.plugin}], or set its cold rows to fp32"
            )
