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
from recpipe.perf.bench.collectives import BYTES as COLLECTIVE_BYTES
from recpipe.perf.bench.collectives import FAMILY as COLLECTIVE_FAMILY
from recpipe.perf.bench.collectives import timed_collectives
from recpipe.perf.bench.lookups import SHAPES as LOOKUP_SHAPES
from recpipe.perf.bench.lookups import TABLES as LOOKUP_TABLES
from recpipe.perf.bench.lookups import Clock, timed_lookups, zipf
from recpipe.perf.bench.lookups import pools as id_pools
from recpipe.perf.ids.facts import Facts
from recpipe.perf.ids.group_facts import GroupFacts, Misses
from recpipe.perf.ids.replay import Kept as KeptLookups
from recpipe.perf.ids.replay import joined as joined_lookups
from recpipe.perf.kernels.linear import fitted, nnls
from recpipe.perf.kernels.lookup_work import LookupWork
from recpipe.perf.machine.profile import Host, SharedProfile
from recpipe.perf.tiers.ranks import busiest_part, share_of_distinct
from recpipe.pipeline.placed import PlacedModel
from recpipe.plugin.bags import Bags, IndexBags, distinct
from recpipe.plugin.batch import Batch
from recpipe.plugin.collection import TableCollection, TierFigures, TierParts, TierTimes
from recpipe.plugin.offers import moved_name
from recpipe.plugin.skipper import Mark, RowView, moved
from recpipe.plugin.store import ColdStore, IoCounters, Records, StoreLayout
from recpipe.plugin.tables import Region, SparseFeature, TableOptimizer, TableSet, Values
from recpipe.profiling.limits import Sample
from recpipe.seams import module_name
from recpipe.tables.collection import RowCollection
from recpipe.tables.rowtable import RowBags, row_bags, updated
from recpipe.tables.sharding.planning import Prediction
from recpipe.tables.sharding.wire import WIRE_PRECISIONS, wire_codecs
from recpipe.tables.stores.bulk import BulkStore
from recpipe.tables.stores.codecs import Bf16Rows, Fp16Rows, Int8Rows
from recpipe.tables.stores.holders import HeldRows, HoldersStore
from recpipe.tables.stores.ssd import SsdStore
from recpipe.tables.stores.writes import positions
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
    "COLLECTIVE_BYTES",
    "COLLECTIVE_FAMILY",
    "LOOKUP_SHAPES",
    "LOOKUP_TABLES",
    "WIRE_PRECISIONS",
    "Amount",
    "Bags",
    "Batch",
    "Bf16Rows",
    "BulkStore",
    "Channel",
    "ChosenRows",
    "Clock",
    "ColdStore",
    "Damaged",
    "DataConfig",
    "Dataset",
    "Facts",
    "Fp16Rows",
    "GivenBatches",
    "GroupFacts",
    "HeldRows",
    "HoldersStore",
    "Host",
    "HotSet",
    "IndexBags",
    "Int8Rows",
    "IoCounters",
    "KeptLookups",
    "Lfu",
    "LookupWork",
    "Lru",
    "Mark",
    "Meter",
    "Misses",
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
    "SharedProfile",
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
    "busiest_part",
    "compiled",
    "distinct",
    "distinct_slots",
    "entries",
    "fitted",
    "group_rows",
    "id_pools",
    "join",
    "joined_lookups",
    "leaves",
    "load_profile",
    "milliseconds",
    "module_name",
    "moved",
    "nnls",
    "on_device",
    "open_dataset",
    "parse_json",
    "policy_bytes",
    "positions",
    "processor",
    "readable_bytes",
    "residents",
    "row_bags",
    "select",
    "share_of_distinct",
    "table_bases",
    "tensors_in",
    "timed_collectives",
    "timed_lookups",
    "top_rows",
    "typed_as",
    "updated",
    "wire_codecs",
    "within",
    "zipf",
]


def __getattr__(name: str) -> Any:
    """A name that left this module for the package that it belongs to."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return moved_name(__name__, name)
