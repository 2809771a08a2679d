"""Building blocks for plugins, public and versioned with ``recpipe.plugin.API``: data, policies, stores,
ranks.

A plugin may import from core what is here, in ``recpipe.plugin`` (the contract) and in ``recpipe.testing``.
"""

import warnings
from importlib import import_module
from typing import Any

from recpipe.access.counts import group_rows, load_profile, table_bases, top_rows
from recpipe.common.loops import compiled
from recpipe.common.meter import Meter
from recpipe.common.saved import Damaged, entries, within
from recpipe.common.timing import milliseconds
from recpipe.common.words import Amount, readable_bytes
from recpipe.config.recipe import Recipe
from recpipe.data.config import DataConfig, SamplesConfig
from recpipe.data.dataset import Dataset, NumberedDataset
from recpipe.data.given import GivenBatches
from recpipe.data.make import open_dataset
from recpipe.data.parts import batch_size, leaves, on_device, tensors_in
from recpipe.data.schema import Schema
from recpipe.data.select import join, select
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.pipeline.placed import PlacedModel
from recpipe.plugin.offers import moved_name
from recpipe.plugin.tables import SparseFeature
from recpipe.private_api import module_name
from recpipe.tables.collection import RowCollection
from recpipe.tables.rows import RowBags, evaluated, row_bags, updated
from recpipe.tables.sharding.claims import wire_codecs
from recpipe.tables.sharding.planning import Prediction
from recpipe.tables.stores.codecs import Bf16Rows, Fp16Rows, Int8Rows
from recpipe.tables.stores.holders import HeldRows, HoldersStore
from recpipe.tables.stores.ssd import SsdStore
from recpipe.tables.tiers.policies import (
    ChosenRows,
    HotSet,
    Lfu,
    Lru,
    add_lookups,
    distinct_slots,
    policy_bytes,
)

__all__ = [
    "Amount",
    "Bf16Rows",
    "Channel",
    "ChosenRows",
    "Damaged",
    "DataConfig",
    "Dataset",
    "Fp16Rows",
    "GivenBatches",
    "HeldRows",
    "HoldersStore",
    "HotSet",
    "Int8Rows",
    "Lfu",
    "Lru",
    "Meter",
    "NumberedDataset",
    "PlacedModel",
    "Prediction",
    "Ranks",
    "Recipe",
    "RowBags",
    "RowCollection",
    "SamplesConfig",
    "Schema",
    "SparseFeature",
    "SsdStore",
    "add_lookups",
    "batch_size",
    "compiled",
    "distinct_slots",
    "entries",
    "evaluated",
    "group_rows",
    "join",
    "leaves",
    "load_profile",
    "milliseconds",
    "module_name",
    "on_device",
    "open_dataset",
    "policy_bytes",
    "readable_bytes",
    "row_bags",
    "select",
    "table_bases",
    "tensors_in",
    "top_rows",
    "updated",
    "wire_codecs",
    "within",
]

_TO_THE_CONTRACT = (
    *("Bags", "Batch", "ColdStore", "IndexBags", "IoCounters", "Mark", "Records", "Region", "RowView"),
    *("StoreLayout", "TableCollection", "TableOptimizer", "TableSet", "TierFigures", "TierParts"),
    *("TierTimes", "Values", "distinct", "moved"),
)
MOVED = {
    **dict.fromkeys(_TO_THE_CONTRACT, "recpipe.plugin"),
    **dict.fromkeys(("parse_json", "residents", "typed_as"), "recpipe.common.saved"),
    "Sample": "recpipe.profiling.limits",
    "WIRE_PRECISIONS": "recpipe.tables.sharding.claims",
    "processor": "recpipe.backend.choices",
}
"""Names that left this module for one of core's own; packages written for API 2 import on."""


def __getattr__(name: str) -> Any:
    """A name that left this module, for the contract or for the package that it belongs to."""
    if name in MOVED:
        warnings.warn(f"recpipe.kit.{name} is {MOVED[name]}.{name} now", DeprecationWarning, stacklevel=2)
        return getattr(import_module(MOVED[name]), name)
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return moved_name(__name__, name)
