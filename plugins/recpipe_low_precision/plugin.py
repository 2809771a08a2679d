"""Low precision for a finished model: ``recpipe quantize CHECKPOINT +plugin=low_precision``."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated, Any, Never

import numpy as np
from annotated_types import Gt, Interval
from numpy.typing import NDArray

from recpipe.kit import (
    ROW_TYPES,
    FloatCheckpoint,
    Meter,
    auc,
    fits,
    open_quantized,
    parts_of,
    room_for,
    show,
    table_bytes,
    write_quantized,
)
from recpipe.plugin import Context, Contribution, FinishedModel, ModelQuantizer, Plugin, PluginError, UserError
from recpipe_low_precision import lookups, report
from recpipe_low_precision.bootstrap import PairedBootstrap
from recpipe_low_precision.choices import FLOAT, Assignment, Choice
from recpipe_low_precision.judge import Judge
from recpipe_low_precision.prune import used_rows
from recpipe_low_precision.search import Found, Search
from recpipe_low_precision.slices import Slice
