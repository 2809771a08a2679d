"""Files of any format and schema: their record batches become samples, feature by feature, as the schema
says."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recpipe.data.columns import Columns, Float32, Ids, MultiHot, bits_of
from recpipe.data.config import FilesConfig
from recpipe.data.features import Feature, Features
from recpipe.data.files import RowChecks
from recpipe.data.preparation import Preparation
from recpipe.data.records import Block, InputFile, files_of, require_columns
from recpipe.data.schema import LABEL_KINDS, IdRule, LabelKind
from recpipe.data.sources.transforms import signed_log
from recpipe.data.values import (
    alike,
    is_list,
    is_text,
    plain_type,
    read_bags,
    read_ids,
    read_numbers,
    require_type,
    whole_text,
)
from recpipe.errors import DataError, shown

log = logging.getLogger(__name__)


class FilesSource:
    """Files to prepare, read in record batches; their features, types settled by the first rows of each
    column where the recipe leaves them open."""

    def __init__(self, config: FilesConfig, labelled: bool = True) -> None:
        self._inputs = files_of(config)
        self._labelled, self._skip = labelled, config.on_bad_row == "skip"
        self._types = self._require_columns(config.described())
        self.features = self._settled(config.described())
        self.schema = self.features.schema()
        self.multi_hot = tuple(f.name for f in self.features.sparse if f.is_bag)
        self.preparation = Preparation.of(self.features)
        self.kept: tuple[IdRule, ...] = tuple(_KEPT[f.ids] for f in self.features.sparse)
        self.rejected_rows = 0
        self.missing: dict[str, int] = {f.name: 0 for f in (*self.features.dense, *self.features.sparse)}
        """How many samples have no value of each feature, so far."""
        described = replace(
            self.features, sparse=tuple(replace(f, rows=None, table=None) for f in self.features.sparse)
        )
        self.recipe: dict[str, Any] = {
            "source": "files",
            "features": asdict(described),
            "skip": self._skip,
            "rules": asdict(config.rules()),
            "format": config.format,
        }
        if self._skip:  # which rows are left out depends on them
            self.recipe["rows"] = [f.rows for f in self.features.sparse if f.ids == "rows"]

    @property
    def files(self) -> Sequence[Path]:
        """The input files, in time order."""
        return [file.path for file in self._inputs]

    def blocks(self) -> Iterator[tuple[Columns, float]]:
        """Samples of all files in order."""
        count = len(self._inputs)
        for index, file in enumerate(self._inputs):
            for block in file.blocks(self._read(self.features)):
                yield self._columns(file, block), (index + block.share) / count

    def _read(self, features: Features) -> list[str]:
        skipped = () if self._labelled else {label.source for label in features.labels}
        return [name for name in features.columns if name not in skipped]

    def _require_columns(self, features: Features) -> dict[str, tuple[pa.DataType, InputFile]]:
        """The type of each column, of the first file in which it has one; ``DataError`` where a file lacks a
        column, or holds something else there than another file."""
        found: dict[str, tuple[pa.DataType, InputFile]] = {}
        for file in self._inputs:
            names = self._read(features)
            require_columns(file, names)
            for name in names:
                kind = file.columns.field(name).type
                other, where = found.setdefault(name, (kind, file))
                if not alike(kind, other):
                    raise DataError(f"{file}, column {shown(name)}: holds {kind} here and {other} in {where}")
                if pa.types.is_null(plain_type(other)):
                    found[name] = kind, file
        return found

    def _settled(self, features: Features) -> Features:
        """``features`` whose kinds and types of text are those of their columns where they were left open."""
        settled = []
        for feature in features.sparse:
            kind = plain_type(self._types[feature.source][0])
            if feature.kind == "id" and is_list(kind):
                feature = replace(feature, kind="multi_hot")
            element = plain_type(kind.value_type) if is_list(kind) else kind
            if feature.type == "auto" and is_text(element):
                feature = replace(feature, type=self._type_of_text(feature))
            settled.append(feature)
        found = replace(features, sparse=tuple(settled))
        labels = [Feature(label.name, "dense", label.column) for label in features.labels] * self._labelled
        for feature in (*labels, *found.dense, *found.sparse):
            kind, file = self._types[feature.source]
            require_type(str(file), feature.source, kind, feature)
        return found

    def _type_of_text(self, feature: Feature) -> str:
        """What text of ids is: in files where all is text, whole numbers if the first rows are written so."""
        file = self._inputs[0]
        if feature.is_bag and feature.separator is None:
            return "text"
        if file.format != "csv" and feature.source not in file.partition:
            return "text"
        block = next(file.blocks([feature.source]), None)
        if block is None or not whole_text(block.rows.column(0), feature):
            return "text"
        log.info(
            "column %s has whole numbers, which it is read as (a feature's type: text keeps other spellings)",
            shown(feature.source),
        )
        return "integer"

    def _columns(self, file: InputFile, block: Block) -> Columns:
        rows = block.rows
        checks = RowChecks(file.path, block.first_row, len(rows))
        labels = np.zeros(len(rows), np.float32)
        if self._labelled:
            (label,) = self.features.labels
            labels = _labels(checks, label.source, rows[label.source], LABEL_KINDS[label.kind or "clicks"])
        dense = np.empty((len(rows), len(self.features.dense)), np.float32)
        for index, feature in enumerate(self.features.dense):
            dense[:, index] = self._dense(checks, feature, rows[feature.source])
        scalars: list[Ids] = []
        absent: list[NDArray[np.bool_]] = []
        bags: dict[str, MultiHot] = {}
        for feature in self.features.sparse:
            array = rows[feature.source]
            show = partial(_value, array)
            if feature.is_bag:
                found = read_bags(array, feature)
                ids, valid, empty = found.ids, found.valid(), found.empty
                bags[feature.name] = MultiHot(ids.keys, found.offsets, bits_of(ids.missing[:, None]))
            else:
                ids = read_ids(array, feature)
                valid, empty = ids.valid, ids.missing
                scalars.append(ids.keys)
                absent.append(ids.missing)
            checks.require(valid, feature.source, show, ids.remedy)
            if feature.ids == "rows":
                assert feature.rows is not None
                inside = (ids.keys >= 0) & (ids.keys < feature.rows) & ~ids.missing
                if feature.is_bag:
                    found.ids.valid = inside
                    inside = found.valid()
                remedy = (
                    f"is not in [0, {feature.rows}): raise data.tables.{shown(feature.name)} or pass "
                    "data.hash_ids=true, which hashes ids into the table"
                )
                checks.require(inside, feature.source, show, remedy)
            self.missing[feature.name] += int(empty.sum())
        ids_ = np.stack(scalars, 1) if scalars else np.empty((len(rows), 0), np.int64)
        columns = Columns(labels, dense, ids_, bags, bits_of(np.stack(absent, 1)) if absent else None)
        self.rejected_rows += checks.finish(self._skip)
        return columns if checks.good.all() else columns.where(checks.good)

    def _dense(self, checks: RowChecks, feature: Feature, array: pa.Array) -> Float32:
        """float32 values, scaled; what is missing has the feature's default."""
        found, show = read_numbers(array, feature), partial(_value, array)
        checks.require(found.valid, feature.source, show, "is not a number")
        values = found.values
        if feature.scale == "log":
            values = signed_log(values).astype(np.float64)
        elif feature.scale == "log1p":
            checks.require(values > -1, feature.source, show, "has no log1p: it must be above -1")
            values = np.log1p(np.maximum(values, -1 + 2**-53))
        scaled = checks.require_finite(values, feature.source, show)
        self.missing[feature.name] += int(found.missing.sum())
        return np.where(found.missing, np.float32(feature.default), scaled)


_KEPT: dict[str, IdRule] = {"hash": "hashed", "modulo": "modulo", "rows": "unchanged"}


def _labels(checks: RowChecks, name: str, array: pa.Array, kind: LabelKind) -> Float32:
    """float32 labels; rows with one that is not of its ``kind``, or missing, are bad."""
    found = read_numbers(array)
    values = np.where(found.missing | ~found.valid, np.nan, found.values)
    with np.errstate(over="ignore"):
        stored = values.astype(np.float32)
    valid = kind.fits(values) & np.isfinite(stored)
    checks.require(valid, name, partial(_value, array), kind.fault)
    return np.where(valid, stored, np.float32(0))


def _value(array: pa.Array, row: int) -> object:
    """The value in a row, for a message; text that is not UTF-8 is shown as bytes."""
    try:
        return array[row].as_py()
    except UnicodeDecodeError:
        kind = pa.list_(pa.binary()) if is_list(array.type) else pa.binary()
        return array.slice(row, 1).cast(kind)[0].as_py()
