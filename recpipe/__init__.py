"""recpipe: published systems techniques for embedding-heavy recommenders, each one flag away.

Importing the package does not import torch.
"""

import recpipe.common.process  # noqa: F401  first of all: it notes the time
from recpipe.api import Run, evaluate, load, package, place, predict, quantize, train
from recpipe.errors import UserError
from recpipe.plugin.api import Contribution, EpochOrder, Figure, Invariant, Link, Plugin
from recpipe.plugin.context import Context, RunFigures, TableInfo
from recpipe.plugin.splitter import Split

__version__ = "0.1.0"

__all__ = [
    "Context",
    "Contribution",
    "EpochOrder",
    "Figure",
    "Invariant",
    "Link",
    "Plugin",
    "Run",
    "RunFigures",
    "Split",
    "TableInfo",
    "UserError",
    "__version__",
    "evaluate",
    "load",
    "package",
    "place",
    "predict",
    "quantize",
    "train",
]
