"""The contract with plugins: what a plugin is, its five kinds, and the facts it is told.

Everything here is public and versioned by ``API``. Importing it does not import torch.
"""

from recpipe.errors import UserError
from recpipe.plugin.api import (
    API,
    Context,
    Contribution,
    EpochOrder,
    Figure,
    GroupInfo,
    Invariant,
    Link,
    Plugin,
    RunFigures,
    TableInfo,
)
from recpipe.plugin.errors import PluginError
from recpipe.plugin.planner import Planner
from recpipe.plugin.policy import (
    NOTHING,
    Cache,
    CachePolicy,
    Placement,
    Residents,
    RowIds,
    RowSpace,
    Slots,
)
from recpipe.plugin.quantizer import Direction, Quantizer, RecordLayout, RowCodec
from recpipe.plugin.skipper import Skipper
from recpipe.plugin.splitter import Split, Splitter, micro_batch_step

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
