"""The contract with plugins: what a plugin is, its five kinds, and the facts it is told.

Everything here is public and versioned by ``API``. Importing it does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recpipe.errors import UserError
    from recpipe.plugin.api import API, Contribution, EpochOrder, Figure, Invariant, Link, Plugin
    from recpipe.plugin.bags import RowIds, Slots
    from recpipe.plugin.context import Context, GroupInfo, RunFigures, TableInfo
    from recpipe.plugin.errors import PluginError
    from recpipe.plugin.planner import Planner
    from recpipe.plugin.policy import NOTHING, Cache, CachePolicy, Placement, Residents, RowSpace
    from recpipe.plugin.quantizer import Direction, Quantizer, RecordLayout, RowCodec
    from recpipe.plugin.skipper import Skipper
    from recpipe.plugin.splitter import Split, Splitter, micro_batch_step

_HOME = {
    "API": "recpipe.plugin.api",
    "Cache": "recpipe.plugin.policy",
    "CachePolicy": "recpipe.plugin.policy",
    "Context": "recpipe.plugin.context",
    "Contribution": "recpipe.plugin.api",
    "Direction": "recpipe.plugin.quantizer",
    "EpochOrder": "recpipe.plugin.api",
    "Figure": "recpipe.plugin.api",
    "GroupInfo": "recpipe.plugin.context",
    "Invariant": "recpipe.plugin.api",
    "Link": "recpipe.plugin.api",
    "NOTHING": "recpipe.plugin.policy",
    "Placement": "recpipe.plugin.policy",
    "Planner": "recpipe.plugin.planner",
    "Plugin": "recpipe.plugin.api",
    "PluginError": "recpipe.plugin.errors",
    "Quantizer": "recpipe.plugin.quantizer",
    "RecordLayout": "recpipe.plugin.quantizer",
    "Residents": "recpipe.plugin.policy",
    "RowCodec": "recpipe.plugin.quantizer",
    "RowIds": "recpipe.plugin.bags",
    "RowSpace": "recpipe.plugin.policy",
    "RunFigures": "recpipe.plugin.context",
    "Skipper": "recpipe.plugin.skipper",
    "Slots": "recpipe.plugin.bags",
    "Split": "recpipe.plugin.splitter",
    "Splitter": "recpipe.plugin.splitter",
    "TableInfo": "recpipe.plugin.context",
    "UserError": "recpipe.errors",
    "micro_batch_step": "recpipe.plugin.splitter",
}
"""The module that defines each name. It is imported when the name is first used: some modules need numpy."""

__all__ = [
    "API",
    "NOTHING",
    "Cache",
    "CachePolicy",
    "Context",
    "Contribution",
    "Direction",
    "EpochOrder",
    "Figure",
    "GroupInfo",
    "Invariant",
    "Link",
    "Placement",
    "Planner",
    "Plugin",
    "PluginError",
    "Quantizer",
    "RecordLayout",
    "Residents",
    "RowCodec",
    "RowIds",
    "RowSpace",
    "RunFigures",
    "Skipper",
    "Slots",
    "Split",
    "Splitter",
    "TableInfo",
    "UserError",
    "micro_batch_step",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it, or from the package that took it over."""
    if name not in _HOME:
        if not name.startswith("_"):
            from recpipe.plugin.offers import moved_name

            return moved_name(__name__, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
