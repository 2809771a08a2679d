"""Files of any format and schema: their record batches become samples, feature by feature, as the schema
says."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from recpipe.data.columns import Columns
from recpipe.data.config import FilesConfig
from recpipe.data.encoding import Encoding, element_of
from recpipe.data.features import Feature, Features
from recpipe.data.files import RowChecks
from recpipe.data.preparation import Preparation
from recpipe.data.records import InputFile, files_of, require_columns
from recpipe.data.values import (
    alike,
    is_list,
    plain_type,
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
        features = self._settled(config.described())
        self.encoding = Encoding(features)
        self.schema, self.multi_hot, self.kept = (
            self.encoding.schema,
            self.encoding.multi_hot,
            self.encoding.kept,
        )
        self.preparation = Preparation.of(features)
        self.rejected_rows = 0
        self.missing: dict[str, int] = {f.name: 0 for f in (*features.dense, *features.sparse)}
        """How many samples have no value of each feature, so far."""
        described = replace(
            features, sparse=tuple(replace(f, rows=None, table=None) for f in features.sparse)
        )
        self.recipe: dict[str, Any] = {
            "source": "files",
            "features": asdict(described),
            "skip": self._skip,
            "rules": asdict(config.rules()),
            "format": config.format,
        }
        if self._skip:  # which rows are left out depends on them
            self.recipe["rows"] = [f.rows for f in features.sparse if f.ids == "rows"]

    @property
    def files(self) -> Sequence[Path]:
        """The input files, in time order."""
        return [file.path for file in self._inputs]

    def blocks(self) -> Iterator[tuple[Columns, float]]:
        """Samples of all files in order."""
        count = len(self._inputs)
        for index, file in enumerate(self._inputs):
            for block in file.blocks(self._read(self.encoding.features)):
                checks = RowChecks(file.path, block.first_row, len(block.rows))
                columns, missing = self.encoding.columns(block.rows, checks, self._labelled)
                for name, absent in missing.items():
                    self.missing[name] += absent
                self.rejected_rows += checks.finish(self._skip)
                good = columns if checks.good.all() else columns.where(checks.good)
                yield good, (index + block.share) / count

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
            held = element_of(kind)
            if feature.type == "auto" and held == "text":
                feature = replace(feature, type=self._type_of_text(feature))
            elif held == "numbers":  # a type is of text
                feature = replace(feature, type="auto")
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
