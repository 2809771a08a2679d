"""What a batch looks up in a tier, and what tiers count."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin import RowIds

Places = NDArray[np.int32]


@dataclass
class Reads:
    """What was looked up and moved since the tier was made."""

    batches: int = 0
    lookups: int = 0
    missed: int = 0
    """Lookups whose row had no slot in DRAM."""
    rows_read: int = 0
    """Rows that were read because they were missed, or were about to be."""
    rows_ahead: int = 0
    """Those of them that were read before their batch was scored."""
    admitted: int = 0
    """Rows that were given a slot since the tier was made."""
    replaced: int = 0
    """Rows that an update has changed."""


@dataclass
class Look:
    """What a batch looks up, and what the index said: ``rows`` int64 [N] with repeats, their ``places`` int32
    [N], and where among them those are that have no slot, ``cold``. ``admissions``: those until then."""

    rows: RowIds
    places: Places
    cold: RowIds
    admissions: int
