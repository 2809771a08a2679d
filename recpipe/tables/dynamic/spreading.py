"""Keys of tables that grow as rows for what looks at batches without training, and has no rows of ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.id_mapper import MISSING_KEY
from recpipe.data.parts import with_kjts
from recpipe.data.sources.transforms import mix64
from recpipe.plugin.tables import Growth
from recpipe.tables.dynamic.loops import FIRST_ROW, MISSING_ROW

Growing = Mapping[str, Growth]
"""How the ids of each feature get rows, of those whose tables grow."""


def spread(batch: Any, growing: Growing, rows: Mapping[str, int]) -> Any:
    """``batch`` with some rows in place of keys, by their hashes: what looks at data without training has no
    maps. ``rows``: of each feature's table."""

    def changed(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if growing.keys().isdisjoint(ids.keys()):
            return ids
        values, at = ids.values().cpu().numpy().astype(np.int64), 0
        for name, count in zip(ids.keys(), ids.length_per_key(), strict=True):
            keys = values[at : at + count]
            if name in growing:
                hashed = mix64(keys.view(np.uint64)) % np.uint64(max(1, rows[name] - FIRST_ROW))
                missing = keys == MISSING_KEY
                keys[:] = hashed.astype(np.int64) + FIRST_ROW
                keys[missing] = MISSING_ROW
            at += count
        return with_values(ids, values)

    return with_kjts(batch, changed)


def with_values(ids: KeyedJaggedTensor, values: NDArray[np.int64]) -> KeyedJaggedTensor:
    """``ids`` with other ``values``, int64 [L]."""
    return KeyedJaggedTensor(
        keys=ids.keys(),
        values=torch.from_numpy(values).to(ids.device()),
        weights=ids.weights_or_none(),
        lengths=ids.lengths(),
        offsets=ids.offsets(),
        stride=ids.stride(),
        length_per_key=ids.length_per_key(),
        offset_per_key=ids.offset_per_key(),
    )
