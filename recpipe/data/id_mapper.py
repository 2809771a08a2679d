"""The rows of tables that ids stand for: made when a batch is read, so that what is prepared once serves
tables of any number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recpipe.common.loops import compiled
from recpipe.data.columns import Columns, MultiHot
from recpipe.data.schema import IdRule, Schema
from recpipe.errors import DataError


class BeyondTable(DataError):
    """Prepared data whose ids are rows were prepared for larger tables."""


class IdMapper:
    """Turns columns of ids, as a source with ``multi_hot`` features gives them, into columns of table rows.

    ``rule``: ``hashed``: ids are keys of 64 bits, and missing ones have a bit; ``modulo``: whole numbers of
    any sign; ``unchanged``: rows already.
    """

    def __init__(self, schema: Schema, multi_hot: Sequence[str], rule: IdRule) -> None:
        self.rule = rule
        self._rows = np.array([f.rows for f in schema.sparse if f.name not in multi_hot], np.int64)
        self._bags = {f.name: np.array([f.rows], np.int64) for f in schema.sparse if f.name in multi_hot}

    def __call__(self, columns: Columns) -> Columns:
        """The same samples with int64 rows; ``columns`` themselves if the ids are rows."""
        if self.rule == "unchanged":
            return columns  # ``require_rows`` has looked at them once
        bags = {}
        for name, rows in self._bags.items():
            own = columns.bags[name].trimmed()
            bags[name] = MultiHot(self._of(own.values[:, None], own.missing, rows)[0], own.offsets)
        ids = self._of(columns.ids, columns.missing, self._rows).T
        return Columns(columns.labels, columns.dense, ids, bags)

    def require_rows(self, columns: Columns) -> None:
        """``BeyondTable`` unless ids that are rows are in their tables."""
        if self.rule == "unchanged" and len(columns):
            bags = [(columns.bags[name].trimmed().values, rows[0]) for name, rows in self._bags.items()]
            own = [(columns.ids[:, index], rows) for index, rows in enumerate(self._rows)]
            if any(len(ids) and int(ids.max()) >= int(rows) for ids, rows in (*own, *bags)):
                raise BeyondTable("an id of the prepared data is not in its table")

    def _of(
        self, ids: NDArray[np.integer], missing: NDArray[np.uint8] | None, rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The rows int64 [F, n] of ``ids`` [n, F]."""
        out = np.empty(ids.shape[::-1], np.int64)
        if self.rule == "modulo":
            kind = np.int64 if ids.dtype.kind == "i" else np.uint64
            np.copyto(out, ids.T.astype(kind) % rows.astype(kind)[:, None])
        elif out.size:
            bits = np.empty(0, np.uint8) if missing is None else np.array(missing.reshape(-1))
            # Copies: a mapped file is read-only, for which the loop would be compiled once more.
            keys = np.array(ids.reshape(-1))
            hash_into(out.reshape(-1), keys.view(np.uint64) if keys.dtype == np.int64 else keys, bits, rows)
        return out


@compiled
def hash_into(
    out: NDArray[np.int64],
    keys: NDArray[np.int32] | NDArray[np.uint32] | NDArray[np.uint64],
    missing: NDArray[np.uint8],
    rows: NDArray[np.int64],
) -> None:
    """Write ``recpipe.data.sources.transforms.hash_rows`` of ``keys`` [n * F], by sample and then by feature,
    into ``out`` [F * n], by feature and then by sample; 0 where there is a bit in ``missing``, as packbits
    makes them of [n, F], which is empty if nothing is missing. Signed keys are reinterpreted as 64 bits.
    ``rows`` [F]: of each feature's table."""
    features = len(rows)
    samples = len(keys) // features
    width = (features + 7) // 8
    for feature in range(features):
        least = np.uint64(rows[feature] - 1)
        byte, bit = feature // 8, 7 - feature % 8
        for sample in range(samples):
            key = np.uint64(np.int64(keys[sample * features + feature]))  # with the sign, if there is one
            key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            key ^= key >> np.uint64(31)
            place = feature * samples + sample
            out[place] = np.int64(key % least) + 1
            if len(missing) and (missing[sample * width + byte] >> bit) & 1:
                out[place] = 0
