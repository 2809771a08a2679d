"""The contract with plugins: what a plugin is, its five kinds, and the facts it is told.

Everything here is public and versioned by ``API``. Importing it does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recpipe.errors import UserError
    from recpipe.plugin.api import API, Contribution, EpochOrder, Figure, Invariant, Link, Plugin
    from recpipe.plugin.bags import Bags, IndexBags, RowIds, Slots, distinct
    from recpipe.plugin.batch import Batch
    from recpipe.plugin.collection import TableCollection, TierFigures, TierParts, TierTimes
    from recpipe.plugin.context import Context, GroupInfo, RunFigures, TableInfo
    from recpipe.plugin.errors import PluginError
    from recpipe.plugin.planner import Planner
    from recpipe.plugin.policy import NOTHING, Cache, CachePolicy, Placement, RowSpace
    from recpipe.plugin.quantizer import Direction, Quantizer, RecordLayout, RowCodec
    from recpipe.plugin.residents import Notes, Residents
    from recpipe.plugin.skipper import Mark, RowView, Skipper, moved
    from recpipe.plugin.splitter import Split, Splitter, micro_batch_step
    from recpipe.plugin.store import ColdStore, IoCounters, Records, StoreLayout
    from recpipe.plugin.tables import Region, TableOptimizer, TableSet, Values

_HOME = {
    name: f"recpipe.plugin.{module}"
    for module, names in {
        "api": ("API", "Contribution", "EpochOrder", "Figure", "Invariant", "Link", "Plugin"),
        "bags": ("Bags", "IndexBags", "RowIds", "Slots", "distinct"),
        "batch": ("Batch",),
        "collection": ("TableCollection", "TierFigures", "TierParts", "TierTimes"),
        "context": ("Context", "GroupInfo", "RunFigures", "TableInfo"),
        "errors": ("PluginError",),
        "planner": ("Planner",),
        "policy": ("Cache", "CachePolicy", "NOTHING", "Placement", "RowSpace"),
        "quantizer": ("Direction", "Quantizer", "RecordLayout", "RowCodec"),
        "residents": ("Notes", "Residents"),
        "skipper": ("Mark", "RowView", "Skipper", "moved"),
        "splitter": ("Split", "Splitter", "micro_batch_step"),
        "store": ("ColdStore", "IoCounters", "Records", "StoreLayout"),
        "tables": ("Region", "TableOptimizer", "TableSet", "Values"),
    }.items()
    for name in names
} | {"UserError": "recpipe.errors"}
"""The module that defines each name. It is imported when the name is first used: some modules need numpy."""

__all__ = [
    "API",
    "NOTHING",
    "Bags",
    "Batch",
    "Cache",
    "CachePolicy",
    "ColdStore",
    "Context",
    "Contribution",
    "Direction",
    "EpochOrder",
    "Figure",
    "GroupInfo",
    "IndexBags",
    "Invariant",
    "IoCounters",
    "Link",
    "Mark",
    "Notes",
    "Placement",
    "Planner",
    "Plugin",
    "PluginError",
    "Quantizer",
    "RecordLayout",
    "Records",
    "Region",
    "Residents",
    "RowCodec",
    "RowIds",
    "RowSpace",
    "RowView",
    "RunFigures",
    "Skipper",
    "Slots",
    "Split",
    "Splitter",
    "StoreLayout",
    "TableCollection",
    "TableInfo",
    "TableOptimizer",
    "TableSet",
    "TierFigures",
    "TierParts",
    "TierTimes",
    "UserError",
    "Values",
    "distinct",
    "micro_batch_step",
    "moved",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it, or from the package that took it over."""
    if name not in _HOME:
        if not name.startswith("_"):
            from recpipe.plugin.offers import moved_name

            return moved_name(__name__, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
