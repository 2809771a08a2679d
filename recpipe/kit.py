"""Building blocks for plugins, public and versioned with ``recpipe.plugin.API``: batches, rows, stores,
ranks.

A plugin may import from core what is here, in ``recpipe.plugin`` (the contract) and in ``recpipe.testing``.
"""

from recpipe.backend.host import processor
from recpipe.common.saved import Damaged, entries, parse_json, residents, typed_as, within
from recpipe.config.recipe import Recipe
from recpipe.data.batch import Batch
from recpipe.data.config import DataConfig, SamplesConfig
from recpipe.data.dataset import Dataset, NumberedDataset, Schema, SparseFeature
from recpipe.data.given import GivenBatches
from recpipe.data.make import open_dataset
from recpipe.data.parts import batch_size, leaves, tensors_in
from recpipe.data.select import join, select
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.pipeline.loader import on_device
from recpipe.pipeline.placed import PlacedModel
from recpipe.seams import module_name
from recpipe.tables.collection import RowCollection, TableCollection, TierFigures
from recpipe.tables.rowtable import RowBags, distinct, row_bags, updated
from recpipe.tables.sharding.planning import Prediction
from recpipe.tables.sharding.wire import WIRE_PRECISIONS, wire_codecs
from recpipe.tables.specs import Region, TableOptimizer, TableSet, Values
from recpipe.tables.stores.base import ColdStore, IoCounters, Records, StoreLayout
from recpipe.tables.stores.bulk import BulkStore
from recpipe.tables.stores.codecs import Bf16Rows, Fp16Rows, Int8Rows
from recpipe.tables.stores.holders import HeldRows, HoldersStore
from recpipe.tables.stores.ssd import SsdStore
from recpipe.tables.stores.writes import positions
from recpipe.tables.tiers.access_counts import group_rows, load_profile, table_bases
from recpipe.tables.tiers.parts import TierParts
from recpipe.tables.tiers.placement import Bags, IndexBags
from recpipe.tables.tiers.policies import ChosenRows, HotSet, Lfu, Lru, distinct_slots, policy_bytes
from recpipe.tables.tiers.popularity import top_rows
from recpipe.tables.tiers.store_thread import TierTimes
from recpipe.tables.view import Mark, RowView, moved

__all__ = [
    "WIRE_PRECISIONS",
    "Bags",
    "Batch",
    "Bf16Rows",
    "BulkStore",
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
    "batch_size",
    "distinct",
    "distinct_slots",
    "entries",
    "group_rows",
    "join",
    "leaves",
    "load_profile",
    "module_name",
    "moved",
    "on_device",
    "open_dataset",
    "parse_json",
    "policy_bytes",
    "positions",
    "processor",
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
