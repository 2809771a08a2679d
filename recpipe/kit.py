"""Building blocks for plugins, public and versioned with ``recpipe.plugin.API``: batches, rows, stores,
ranks.

A plugin may import from core what is here, in ``recpipe.plugin`` (the contract) and in ``recpipe.testing``.
"""

from typing import Any

from recpipe.access.counts import group_rows, load_profile, table_bases
from recpipe.access.popularity import top_rows
from recpipe.answers.layers import (
    EIGHT_BITS,
    SEVEN_BITS,
    Layer,
    LowPrecisionLinear,
    bfloat16_has_units,
    is_linear,
)
from recpipe.answers.lookup import LowPrecisionBags, LowPrecisionRows, LowPrecisionTables, RowType, bag_keys
from recpipe.answers.modules import replace_module
from recpipe.answers.popularity import read_lookups
from recpipe.answers.quantized import put_rows, write_quantized
from recpipe.answers.quantized_manifest import table_bytes
from recpipe.answers.rows import BITS, ROW_TYPES, decode_rows, encode_rows, fits, row_bytes, row_scales
from recpipe.answers.score import ALIGNMENT, Lookup, PackageError, Scorer, Tables, offsets_of, tensors
from recpipe.answers.score import Call as LookupCall
from recpipe.answers.source import FloatCheckpoint
from recpipe.answers.stored import FewRows, put_rows_of
from recpipe.backend.choices import processor
from recpipe.common.device import keep_to_one_core, one_thread
from recpipe.common.loops import compiled
from recpipe.common.machine import free_memory
from recpipe.common.meter import Meter
from recpipe.common.saved import Damaged, entries, parse_json, residents, typed_as, within
from recpipe.common.timing import median_seconds, milliseconds, seconds_by_round
from recpipe.common.words import Amount, readable_bytes
from recpipe.config.recipe import Recipe
from recpipe.data.checks import require_ids
from recpipe.data.config import DataConfig, SamplesConfig
from recpipe.data.dataset import Dataset, NumberedDataset
from recpipe.data.given import GivenBatches
from recpipe.data.make import open_dataset
from recpipe.data.parts import batch_size, leaves, on_device, tensors_in
from recpipe.data.schema import Schema
from recpipe.data.select import join, select
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.model.call import Called
from recpipe.model.metrics import auc
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
from recpipe.seams.int8 import LARGEST as LARGEST_WEIGHT_CODE
from recpipe.seams.int8 import int8_adds_up
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
    "ALIGNMENT",
    "BITS",
    "COLLECTIVE_BYTES",
    "COLLECTIVE_FAMILY",
    "EIGHT_BITS",
    "LARGEST_WEIGHT_CODE",
    "LOOKUP_SHAPES",
    "LOOKUP_TABLES",
    "ROW_TYPES",
    "SEVEN_BITS",
    "WIRE_PRECISIONS",
    "Amount",
    "Bags",
    "Batch",
    "Bf16Rows",
    "BulkStore",
    "Called",
    "Channel",
    "ChosenRows",
    "Clock",
    "ColdStore",
    "Damaged",
    "DataConfig",
    "Dataset",
    "Facts",
    "FewRows",
    "FloatCheckpoint",
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
    "Layer",
    "Lfu",
    "Lookup",
    "LookupCall",
    "LookupWork",
    "LowPrecisionBags",
    "LowPrecisionLinear",
    "LowPrecisionRows",
    "LowPrecisionTables",
    "Lru",
    "Mark",
    "Meter",
    "Misses",
    "NumberedDataset",
    "PackageError",
    "PlacedModel",
    "Prediction",
    "Ranks",
    "Recipe",
    "Records",
    "Region",
    "RowBags",
    "RowCollection",
    "RowType",
    "RowView",
    "Sample",
    "SamplesConfig",
    "Schema",
    "Scorer",
    "SharedProfile",
    "SparseFeature",
    "SsdStore",
    "StoreLayout",
    "TableCollection",
    "TableOptimizer",
    "TableSet",
    "Tables",
    "TierFigures",
    "TierParts",
    "TierTimes",
    "Values",
    "add_lookups",
    "auc",
    "bag_keys",
    "batch_size",
    "bfloat16_has_units",
    "busiest_part",
    "compiled",
    "decode_rows",
    "distinct",
    "distinct_slots",
    "encode_rows",
    "entries",
    "fits",
    "fitted",
    "free_memory",
    "group_rows",
    "id_pools",
    "int8_adds_up",
    "is_linear",
    "join",
    "joined_lookups",
    "keep_to_one_core",
    "leaves",
    "load_profile",
    "median_seconds",
    "milliseconds",
    "module_name",
    "moved",
    "nnls",
    "offsets_of",
    "on_device",
    "one_thread",
    "open_dataset",
    "parse_json",
    "policy_bytes",
    "positions",
    "processor",
    "put_rows",
    "put_rows_of",
    "read_lookups",
    "readable_bytes",
    "replace_module",
    "require_ids",
    "residents",
    "row_bags",
    "row_bytes",
    "row_scales",
    "seconds_by_round",
    "select",
    "share_of_distinct",
    "table_bases",
    "table_bytes",
    "tensors",
    "tensors_in",
    "timed_collectives",
    "timed_lookups",
    "top_rows",
    "typed_as",
    "updated",
    "wire_codecs",
    "within",
    "write_quantized",
    "zipf",
]


def __getattr__(name: str) -> Any:
    """A name that left this module for the package that it belongs to."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return moved_name(__name__, name)
