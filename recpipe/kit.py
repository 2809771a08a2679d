"""Building blocks for plugins, public and versioned with ``recpipe.plugin.API``: batches, rows, stores,
ranks.

A plugin may import from core what is here, in ``recpipe.plugin`` (the contract) and in ``recpipe.testing``.
"""

from typing import Any

from recpipe.access.counts import group_rows, load_profile, table_bases
from recpipe.access.popularity import top_rows
from recpipe.backend.choices import processor
from recpipe.common.loops import compiled
from recpipe.common.meter import Meter
from recpipe.common.saved import Damaged, entries, parse_json, residents, typed_as, within
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
from recpipe.plugin.bags import Bags, IndexBags, distinct
from recpipe.plugin.batch import Batch
from recpipe.plugin.collection import TableCollection, TierFigures, TierParts, TierTimes
from recpipe.plugin.offers import moved_name
from recpipe.plugin.skipper import Mark, RowView, moved
from recpipe.plugin.store import ColdStore, IoCounters, Records, StoreLayout
from recpipe.plugin.tables import Region, SparseFeature, TableOptimizer, TableSet, Values
from recpipe.private_api import module_name
from recpipe.profiling.limits import Sample
from recpipe.tables.collection import RowCollection
from recpipe.tables.rowtable import RowBags, row_bags, updated
from recpipe.tables.sharding.planning import Prediction
from recpipe.tables.sharding.wire import WIRE_PRECISIONS, wire_codecs
from recpipe.tables.stores.codecs import Bf16Rows, Fp16Rows, Int8Rows
from recpipe.tables.stores.holders import HeldRows, HoldersStore
from recpipe.tables.stores.ssd import SsdStore
from recpipe.tables.tiers.lru import Lru
from recpipe.tables.tiers.policies import (
    ChosenRows,
    HotSet,
    Lfu,
    add_lookups,
    distinct_slots,
    policy_bytes,
)

__all__ = [
    "WIRE_PRECISIONS",
    "Amount",
    "Bags",
    "Batch",
    "Bf16Rows",
    "Channel",
    "ChosenRows",
    "ColdStore",
    "Damaged",
    "DataConfig",
    "Dataset",
    "Fp16Rows",
    "GivenBatches",
    "HeldRows",
    "HoldersStore",
    "HotSet",
    "IndexBags",
    "Int8Rows",
    "IoCounters",
    "Lfu",
    "Lru",
    "Mark",
    "Meter",
    "NumberedDataset",
    "PlacedModel",
    "Prediction",
    "Ranks",
    "Recipe",
    "Records",
    "Region",
    "RowBags",
    "RowCollection",
    "RowView",
    "Sample",
    "SamplesConfig",
    "Schema",
    "SparseFeature",
    "SsdStore",
    "StoreLayout",
    "TableCollection",
    "TableOptimizer",
    "TableSet",
    "TierFigures",
    "TierParts",
    "TierTimes",
    "Values",
    "add_lookups",
    "batch_size",
    "compiled",
    "distinct",
    "distinct_slots",
    "entries",
    "group_rows",
    "join",
    "leaves",
    "load_profile",
    "milliseconds",
    "module_name",
    "moved",
    "on_device",
    "open_dataset",
    "parse_json",
    "policy_bytes",
    "processor",
    "readable_bytes",
    "residents",
    "row_bags",
    "select",
    "table_bases",
    "tensors_in",
    "top_rows",
    "typed_as",
    "updated",
    "wire_codecs",
    "within",
]


def __getattr__(name: str) -> Any:
    """A name that left this module for the package that it belongs to."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return moved_name(__name__, name)
