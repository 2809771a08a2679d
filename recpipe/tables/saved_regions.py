"""Rows of a table out of the files that the ranks of a sharded run saved."""

from __future__ import annotations

import numpy as np

from recpipe.common.tensor_files import TensorFiles
from recpipe.tables.specs import Region, Values, state_name, weight_name


def region_values(files: TensorFiles, region: Region, width: int) -> Values:
    """Weights and optimizer state of a region of whole rows, ``width`` floats of state a row.

    A state with a column for each of the weights', where one is wanted, is the mean over them: what
    row-wise Adagrad would have without column-wise sharding.
    """
    weights = files.rows(weight_name(region.table), region.start, region.stop)
    if not width:
        return weights, np.empty((len(weights), 0), np.float32)
    state = files.rows(state_name(region.table), region.start, region.stop)
    if width == 1 and state.shape[1] > 1:
        state = state.mean(axis=1, keepdims=True, dtype=np.float32)
    return weights, state
