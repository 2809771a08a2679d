"""Parquet files of any schema: a label column, numeric dense columns, sparse columns of ids or lists of ids.

Hashed ids become 1 + mix64(key) % (rows - 1); an integer is its own key, a string's key is its BLAKE2b. A
missing scalar id (or list element) becomes row 0, a missing list an empty bag. Missing dense values become 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recpipe.data.checks import RowChecks
from recpipe.data.columns import Bags, Columns, Float32, Int32, offsets_of
from recpipe.data.config import ParquetConfig, nearest
from recpipe.data.dataset import Schema, SparseFeature
from recpipe.data.files import input_files
from recpipe.data.transforms import hash_rows, signed_log, string_keys
from recpipe.errors import DataError

SUFFIXES = (".parquet", ".pq")
BLOCK_ROWS = 32768


class ParquetSource:
    """Parquet files to be prepared, read in record batches of 32,768 rows."""

    def __init__(self, config: ParquetConfig, skip_bad_rows: bool) -> None:
        assert config.label is not None
        self.files = input_files(config.path, SUFFIXES)
        self._label, self._dense, self._sparse = config.label, config.dense, config.sparse
        self._log, self._hash, self._skip = config.dense_transform == "log", config.hash_ids, skip_bad_rows
        schema = _open(self.files[0]).schema_arrow
        for name in config.tables or {}:
            if name not in config.sparse:
                hint = nearest(name, config.sparse)
                raise DataError(f"data.tables.{name}: no such column in data.sparse; {hint}")
        for file in self.files:
            _check_columns(file, _open(file).schema_arrow, config)
            _check_lists(file, _open(file).schema_arrow, self.files[0], schema, config.sparse)
        features = tuple(SparseFeature(name, _rows(config, name)) for name in self._sparse)
        self.schema = Schema(tuple(self._dense), features)
        self.multi_hot = tuple(name for name in self._sparse if _is_list(schema.field(name).type))
        self.recipe: dict[str, Any] = {
            "source": "parquet",
            "columns": [self._label, self._dense, self._sparse],
            "rows": [feature.rows for feature in features],
            "log": self._log,
            "hash_ids": self._hash,
            "skip": skip_bad_rows,
        }
        self.rejected_rows = 0

    def blocks(self) -> Iterator[tuple[Columns, float]]:
        """Samples of all files in order."""
        columns = [self._label, *self._dense, *self._sparse]
        for index, file in enumerate(self.files):
            parquet, row = _open(file), 0
            total = parquet.metadata.num_rows
            try:
                for batch in parquet.iter_batches(BLOCK_ROWS, columns=columns, use_threads=False):
                    yield (
                        self._columns(file, row + 1, batch),
                        (index + (row + len(batch)) / total) / len(self.files),
                    )
                    row += len(batch)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{file}: damaged after row {row} ({error}); fetch the file again") from error

    def _columns(self, file: Path, first_row: int, batch: pa.RecordBatch) -> Columns:
        checks = RowChecks(file, first_row, len(batch))
        labels = _labels(checks, self._label, batch.column(self._label))
        dense = np.empty((len(batch), len(self._dense)), np.float32)
        for index, name in enumerate(self._dense):
            values = _dense(checks, name, batch.column(name))
            dense[:, index] = signed_log(values) if self._log else values
        scalars: list[Int32] = []
        bags: dict[str, Bags] = {}
        for feature in self.schema.sparse:
            array = batch.column(feature.name)
            if feature.name in self.multi_hot:
                bags[feature.name] = self._bags(checks, feature, array)
            else:
                rows, valid = self._rows(array, feature.rows)
                self._require(checks, feature, valid, array)
                scalars.append(rows)
        ids = np.stack(scalars, 1) if scalars else np.empty((len(batch), 0), np.int32)
        columns = Columns(labels, dense, ids, bags)
        self.rejected_rows += checks.finish(self._skip)
        return columns if checks.good.all() else _selected(columns, checks.good)

    def _rows(self, array: pa.Array, rows: int) -> tuple[Int32, NDArray[np.bool_]]:
        """Table rows int32 [n] of an array of ids, and which of them are usable."""
        if not self._hash:
            values = _integers(array, missing=-1)
            valid = (values >= 0) & (values < rows)
            return np.where(valid, values, 0).astype(np.int32), valid
        missing = np.asarray(array.is_null())
        present = array.drop_null()
        keys = string_keys(present) if _is_text(array.type) else _integers(present).view(np.uint64)
        result = np.zeros(len(array), np.int32)
        result[~missing] = hash_rows(keys, rows)
        return result, np.ones(len(array), bool)

    def _bags(self, checks: RowChecks, feature: SparseFeature, array: pa.Array) -> Bags:
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        offsets = offsets_of(lengths)
        values, valid = self._rows(array.flatten(), feature.rows)
        if not valid.all():
            wrong = np.bincount(
                np.searchsorted(offsets, np.flatnonzero(~valid), "right") - 1, minlength=len(array)
            )
            self._require(checks, feature, wrong == 0, array)
        return Bags(values, offsets)

    @staticmethod
    def _require(
        checks: RowChecks, feature: SparseFeature, valid: NDArray[np.bool_], array: pa.Array
    ) -> None:
        remedy = (
            f"is not in [0, {feature.rows}): raise data.tables.{feature.name} or pass data.hash_ids=true, "
            "which hashes ids into the table"
        )
        checks.require(valid, feature.name, array, remedy)


def _selected(columns: Columns, good: NDArray[np.bool_]) -> Columns:
    bags = {}
    for name, bag in columns.bags.items():
        lengths = np.diff(bag.offsets)
        bags[name] = Bags(bag.values[np.repeat(good, lengths)], offsets_of(lengths[good]))
    return Columns(columns.labels[good], columns.dense[good], columns.ids[good], bags)


def _open(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(os.fspath(file), memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: not a whole Parquet file ({str(error).splitlines()[0]})") from error


def _rows(config: ParquetConfig, name: str) -> int:
    rows = (config.tables or {}).get(name, config.table_rows)
    if rows is None:
        raise DataError(
            f"data.tables lacks column '{name}': state its rows, as in +data.tables.{name}=100000, "
            "or one size for all with data.table_rows=N"
        )
    return rows


def _check_columns(file: Path, schema: pa.Schema, config: ParquetConfig) -> None:
    """``DataError`` for a column that is not there or whose type cannot serve."""
    numeric = [str(config.label), *config.dense]
    for name in [*numeric, *config.sparse]:
        if name not in schema.names:
            raise DataError(f"{file}: no column '{name}'; {nearest(name, schema.names)}")
    for name in numeric:
        if not _is_number(schema.field(name).type):
            kind = schema.field(name).type
            raise DataError(
                f"{file}, column {name}: holds {kind}; a label or dense column must be numeric or bool"
            )
    for name in config.sparse:
        kind = schema.field(name).type
        element = kind.value_type if _is_list(kind) else kind
        if _is_text(element) and not config.hash_ids:
            raise DataError(f"{file}, column {name}: holds {kind}, which needs data.hash_ids=true")
        if not (_is_text(element) or pa.types.is_integer(element) or pa.types.is_boolean(element)):
            raise DataError(
                f"{file}, column {name}: holds {kind}; sparse ids are integers, strings or lists of them"
            )


def _check_lists(file: Path, own: pa.Schema, first: Path, schema: pa.Schema, sparse: list[str]) -> None:
    """``DataError`` for a column that holds lists in one file and single ids in another."""
    for name in sparse:
        here, there = own.field(name).type, schema.field(name).type
        if _is_list(here) != _is_list(there):
            raise DataError(f"{file}, column {name}: holds {here} here and {there} in {first}")


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _integers(array: pa.Array, missing: int = 0) -> NDArray[np.int64]:
    """Whole numbers or bools as int64; unsigned ones from 2**63 on wrap, which keeps them apart."""
    filled = pc.fill_null(array.cast(pa.int64(), safe=False), missing)
    return np.asarray(filled.to_numpy(zero_copy_only=False), np.int64)


def _labels(checks: RowChecks, name: str, array: pa.Array) -> Float32:
    values = pc.fill_null(array.cast(pa.float64()), np.nan).to_numpy(zero_copy_only=False)
    checks.require((values == 0) | (values == 1), name, array, "is neither 0 nor 1")
    return np.asarray(values, np.float32)


def _dense(checks: RowChecks, name: str, array: pa.Array) -> NDArray[np.float64]:
    values = pc.fill_null(array.cast(pa.float64(), safe=False), 0.0).to_numpy(zero_copy_only=False)
    checks.require(np.isfinite(values), name, array, "is not a finite number")
    return np.asarray(values)
