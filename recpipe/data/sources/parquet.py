"""Parquet files of any schema: a label column, numeric dense columns, sparse columns of ids or lists of ids.

Hashed ids become 1 + mix64(key) % (rows - 1); an integer is its own key, a string's key is its BLAKE2b. A
missing scalar id (or list element) becomes row 0, a missing list an empty bag. Missing dense values become 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recpipe.data.columns import Columns, Float32, Ids, MultiHot, bits_of, offsets_of
from recpipe.data.config import ParquetConfig
from recpipe.data.files import RowChecks, input_files
from recpipe.data.schema import LABEL_KINDS, IdRule, LabelKind, Preparation, Schema
from recpipe.data.sources.transforms import signed_log, string_keys
from recpipe.errors import DataError, nearest_or_all, shown
from recpipe.plugin.tables import SparseFeature

SUFFIXES = (".parquet", ".pq")
BLOCK_ROWS = 32768
READ_FAULTS = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)
"""The errors that pyarrow raises for damaged files, including damaged names and sizes."""


class ParquetSource:
    """Parquet files to prepare, read in record batches of 32,768 rows."""

    def __init__(self, config: ParquetConfig, skip_bad_rows: bool, labelled: bool = True) -> None:
        assert config.label is not None
        self._labelled = labelled
        self.files = input_files(config.path, SUFFIXES)
        self._label, self._dense, self._sparse = config.label, config.dense, config.sparse
        self._label_kind = config.label_kind or "clicks"
        self._log, self._hash, self._skip = config.dense_transform == "log", config.hash_ids, skip_bad_rows
        schema = _open(self.files[0]).schema_arrow
        for name in config.tables or {}:
            if name not in config.sparse:
                hint = nearest_or_all(name, config.sparse)
                raise DataError(f"data.tables.{name}: no such column in data.sparse; {hint}")
        for file in self.files:
            _check_columns(file, _open(file).schema_arrow, config, labelled)
            _check_lists(file, _open(file).schema_arrow, self.files[0], schema, config.sparse)
        features = tuple(SparseFeature(name, _rows(config, name)) for name in self._sparse)
        self.schema = Schema(tuple(self._dense), features)
        self.multi_hot = tuple(name for name in self._sparse if _is_list(schema.field(name).type))
        self.preparation = Preparation(
            "hashed" if self._hash else "unchanged",
            "signed_log" if self._log else "unchanged",
            tuple(name for name in self._sparse if _is_text(_element(schema.field(name).type))),
            self.multi_hot,
        )
        self.kept: IdRule = self.preparation.ids
        self.recipe: dict[str, Any] = {
            "source": "parquet",
            "columns": [self._label, self._dense, self._sparse],
            "log": self._log,
            "hash_ids": self._hash,
            "skip": skip_bad_rows,
        }
        if not self._hash and skip_bad_rows:  # which rows are left out depends on them
            self.recipe["rows"] = [feature.rows for feature in features]
        if self._label_kind != "clicks":  # what older versions prepared is of clicks, without this key
            self.recipe["labels"] = self._label_kind
        self.rejected_rows = 0

    def blocks(self) -> Iterator[tuple[Columns, float]]:
        """Samples of all files in order."""
        columns = [self._label] * self._labelled + self._dense + self._sparse
        for index, file in enumerate(self.files):
            for first, batch, share in record_batches(file, columns):
                yield self._columns(file, first, batch), (index + share) / len(self.files)

    def _columns(self, file: Path, first_row: int, batch: pa.RecordBatch) -> Columns:
        checks = RowChecks(file, first_row, len(batch))
        labels = np.zeros(len(batch), np.float32)
        if self._labelled:
            labels = _labels(checks, self._label, batch.column(self._label), LABEL_KINDS[self._label_kind])
        dense = np.empty((len(batch), len(self._dense)), np.float32)
        for index, name in enumerate(self._dense):
            dense[:, index] = _dense(checks, name, batch.column(name), self._log)
        scalars: list[Ids] = []
        absent: list[NDArray[np.bool_]] = []
        bags: dict[str, MultiHot] = {}
        for feature in self.schema.sparse:
            array = batch.column(feature.name)
            if pa.types.is_dictionary(array.type):  # which could hold nulls and repeats
                array = array.dictionary_decode()
            if feature.name in self.multi_hot:
                bags[feature.name] = self._bags(checks, feature, array)
            else:
                ids, missing, valid = self._ids(array, feature.rows)
                self._require(checks, feature, valid, array)
                scalars.append(ids)
                absent.append(missing)
        ids = np.stack(scalars, 1) if scalars else np.empty((len(batch), 0), np.int32)
        columns = Columns(labels, dense, ids, bags, bits_of(np.stack(absent, 1)) if absent else None)
        self.rejected_rows += checks.finish(self._skip)
        return columns if checks.good.all() else columns.where(checks.good)

    def _ids(self, array: pa.Array, rows: int) -> tuple[Ids, NDArray[np.bool_], NDArray[np.bool_]]:
        """The keys int64 [n] of an array of ids, or int32 rows if they are not hashed; which of the ids are
        missing, and which are valid."""
        if not self._hash:
            values = _integers(array, missing=-1)
            valid = (values >= 0) & (values < rows)
            return np.where(valid, values, 0).astype(np.int32), np.zeros(len(array), bool), valid
        missing = np.asarray(array.is_null())
        present = array.drop_null()
        result, valid = np.zeros(len(array), np.int64), np.ones(len(array), bool)
        if _is_text(array.type):
            keys, valid[~missing] = string_keys(present)
            result[~missing] = keys.view(np.int64)
        else:
            result[~missing] = _integers(present)
        return result, missing, valid

    def _bags(self, checks: RowChecks, feature: SparseFeature, array: pa.Array) -> MultiHot:
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        offsets = offsets_of(lengths)
        values, missing, valid = self._ids(array.flatten(), feature.rows)
        if not valid.all():
            wrong = np.bincount(
                np.searchsorted(offsets, np.flatnonzero(~valid), "right") - 1, minlength=len(array)
            )
            self._require(checks, feature, wrong == 0, array)
        return MultiHot(values, offsets, bits_of(missing[:, None]))

    def _require(
        self, checks: RowChecks, feature: SparseFeature, valid: NDArray[np.bool_], array: pa.Array
    ) -> None:
        remedy = (
            f"is not in [0, {feature.rows}): raise data.tables.{shown(feature.name)} or pass "
            "data.hash_ids=true, which hashes ids into the table"
        )
        if self._hash:
            remedy = "is not UTF-8, which text must be: write it as text, or the column as binary"
        checks.require(valid, feature.name, partial(_value, array), remedy)


def file_schema(file: Path) -> pa.Schema:
    """The columns of a Parquet file; ``DataError`` if it is not a whole one."""
    return _open(file).schema_arrow


def _open(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(os.fspath(file), memory_map=True, page_checksum_verification=True)
    except READ_FAULTS as error:
        text = any(kind in {".csv", ".tsv", ".txt"} for kind in file.suffixes)
        remedy = ". Text with a header becomes parquet with pyarrow: see docs/guide/data.md" if text else ""
        raise DataError(f"{file}: not a whole Parquet file ({shown(error, 200)}){remedy}") from error


def record_batches(file: Path, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch, float]]:
    """Record batches of ``columns``: the number of the first row (from 1), the rows, and the share read so
    far."""
    parquet, row = _open(file), 0
    total = parquet.metadata.num_rows
    reader = parquet.iter_batches(BLOCK_ROWS, columns=columns, use_threads=False)
    while True:
        try:
            batch = next(reader, None)
        except READ_FAULTS as error:
            why = shown(error, 200)
            raise DataError(f"{file}: damaged after row {row} ({why}); fetch the file again") from error
        if batch is None:
            break
        yield row + 1, batch, (row + len(batch)) / max(1, total)
        row += len(batch)
    if row != total:
        raise DataError(f"{file}: damaged, {row} rows instead of {total}; fetch the file again")


def _rows(config: ParquetConfig, name: str) -> int:
    rows = (config.tables or {}).get(name, config.table_rows)
    if rows is None:
        # A dot in the name must not become a level of Hydra's key.
        dotted = f"'data.tables={{{name}: 100000}}'"
        override = dotted if "." in name else f"+data.tables.{shown(name)}=100000"
        raise DataError(
            f"data.tables lacks column '{shown(name)}': state its rows, as in {override}, "
            "or one size for all with data.table_rows=N"
        )
    return rows


def _check_columns(file: Path, schema: pa.Schema, config: ParquetConfig, labelled: bool = True) -> None:
    """``DataError`` for a column that is missing or has an unsuitable type."""
    numeric = [str(config.label)] * labelled + config.dense
    for name in [*numeric, *config.sparse]:
        found = schema.names.count(name)
        if not found:
            raise DataError(f"{file}: no column '{shown(name)}'; {nearest_or_all(name, schema.names)}")
        if found > 1:
            raise DataError(f"{file}: {found} columns are called '{shown(name)}'; rename all but one")
    for name in numeric:
        kind = schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise DataError(
                f"{file}, column {shown(name)}: holds {kind}; a label or dense column must be numeric or bool"
            )
    for name in config.sparse:
        kind = schema.field(name).type
        element = _element(kind)
        if _is_text(element) and not config.hash_ids:
            raise DataError(f"{file}, column {shown(name)}: holds {kind}, which needs data.hash_ids=true")
        if not (_is_text(element) or pa.types.is_integer(element) or pa.types.is_boolean(element)):
            raise DataError(
                f"{file}, column {shown(name)}: holds {kind}; "
                "sparse ids are integers, strings or lists of them"
            )


def _check_lists(file: Path, own: pa.Schema, first: Path, schema: pa.Schema, sparse: list[str]) -> None:
    """``DataError`` for a column that holds lists or text in one file and not in another."""
    for name in sparse:
        here, there = own.field(name).type, schema.field(name).type
        texts = _is_text(_element(here)), _is_text(_element(there))
        if _is_list(here) != _is_list(there) or texts[0] != texts[1]:  # text has other keys than numbers
            raise DataError(f"{file}, column {shown(name)}: holds {here} here and {there} in {first}")


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _element(kind: pa.DataType) -> pa.DataType:
    """The type of a column's ids, which may be in lists."""
    return kind.value_type if _is_list(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests)


def _integers(array: pa.Array, missing: int = 0) -> NDArray[np.int64]:
    """Whole numbers or bools as int64. Unsigned ones from 2**63 on wrap, so that they stay distinct."""
    filled = pc.fill_null(array.cast(pa.int64(), safe=False), missing)
    return np.asarray(filled.to_numpy(zero_copy_only=False), np.int64)


def _labels(checks: RowChecks, name: str, array: pa.Array, kind: LabelKind) -> Float32:
    """float32 labels; rows with one that is not of its ``kind``, or missing, are bad."""
    values = pc.fill_null(array.cast(pa.float64(), safe=False), np.nan).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        stored = values.astype(np.float32)
    valid = kind.fits(values) & np.isfinite(stored)
    checks.require(valid, name, partial(_value, array), kind.fault)
    return np.where(valid, stored, np.float32(0))


def _dense(checks: RowChecks, name: str, array: pa.Array, log: bool) -> Float32:
    """float32 values, transformed by the logarithm if ``log``; its results always fit into float32."""
    values = pc.fill_null(array.cast(pa.float64(), safe=False), 0.0).to_numpy(zero_copy_only=False)
    return checks.require_finite(signed_log(values) if log else values, name, partial(_value, array))


def _value(array: pa.Array, row: int) -> object:
    """The value in a row, for a message; text that is not UTF-8 is shown as bytes."""
    try:
        return array[row].as_py()
    except UnicodeDecodeError:
        kind = pa.list_(pa.binary()) if _is_list(array.type) else pa.binary()
        return array.slice(row, 1).cast(kind)[0].as_py()
