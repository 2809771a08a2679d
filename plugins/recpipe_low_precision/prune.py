"""Which rows training looked up; the others still have their first, random weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.answers.source import FloatCheckpoint
from recpipe.kit import Meter
from recpipe_low_precision.replay import Pieces, put_stubs


def used_rows(
    source: FloatCheckpoint, batches: Iterable[Any], count: int, meter: Meter
) -> dict[str, NDArray[np.bool_]]:
    """For each table, bool [rows]: the rows that ``batches``, of which there are ``count``, look up."""
    called = source.called()
    stubs = put_stubs(called, source, Pieces(0))
    used = {table: np.zeros(rows, np.bool_) for table, (rows, _) in source.shapes.items()}
    for number, batch in enumerate(batches):
        with torch.no_grad():
            called(batch)
        for stub in stubs:
            asked = stub.taken().to_dict()
            for config in stub.configs:
                for feature in config.feature_names:
                    used[stub.tables[config.name]][asked[feature].values().numpy()] = True
        if meter.due:
            meter.show((number + 1) / count, f"reading training samples: batch {number + 1:,} of {count:,}")
    return used
