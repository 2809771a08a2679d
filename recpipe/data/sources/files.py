"""Files of any format and schema: their record batches become samples, feature by feature, as the schema
says."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recpipe.data.column_types import alike, is_list, is_number, plain_type
from recpipe.data.columns import Columns
from recpipe.data.config import FilesConfig
from recpipe.data.derivations import Negatives
from recpipe.data.derived import derived_files, derived_recipe, side_table
from recpipe.data.encoding import Encoding
from recpipe.data.feature import GROWTH, HEX, Feature
from recpipe.data.features import Features
from recpipe.data.files import RowChecks
from recpipe.data.joins import JoinedFile
from recpipe.data.learned import Between, Learned, learn
from recpipe.data.preparation import Preparation, require_features
from recpipe.data.proposal.suspected import tell_of_lists, tell_of_tables, tell_of_times, tell_of_units
from recpipe.data.records import InputFile, require_columns
from recpipe.data.refusals import require_type
from recpipe.data.remote import AnyPath
from recpipe.data.row_parts import RowParts
from recpipe.data.schema import Schema
from recpipe.data.settled import settled
from recpipe.data.sources.cluster import in_order
from recpipe.data.sources.reading import Read, Reader
from recpipe.data.split import TEST, TRAIN, VALID, Parts
from recpipe.data.values import whole_text
from recpipe.errors import DataError, UserError, nearest_or_all, shown

log = logging.getLogger(__name__)
VALUES = 2
"""Rises whenever the same text comes to mean another value, so that data are prepared anew; 2: NaN as it is
written is missing, and -1.0 where -1 is declared to be."""


class FilesSource:
    """Files to prepare, read in record batches; their features, types settled by the first rows of each
    column where the recipe leaves them open."""

    def __init__(
        self, config: FilesConfig, labelled: bool = True, trained_by: Preparation | None = None
    ) -> None:
        by_part = derived_files(config, ("path", "eval_path", "test_path") if labelled else ("path",))
        _tell_of_twice(by_part)
        self._inputs = [file for files in by_part for file in files]
        self._parts = [part for part, files in enumerate(by_part) for _ in files]
        """The part of each file, unless its rows say theirs."""
        # A model's checkpoint says where it was trained, and not where it scores.
        self._cluster = config.ray if trained_by is None else None
        self._labelled, self._skip = labelled, config.on_bad_row == "skip"
        split = config.rows_split if labelled else None
        self._row_parts = None if split is None else RowParts(split)
        self.splits = split is not None or max(self._parts) > TRAIN
        self.in_order = split is None
        described = config.described()
        self._timed = {f.source for f in (*described.dense, *described.sparse) if f.kind == "timestamp"}
        self._types = self._require_columns(described)
        self._trained = {} if trained_by is None else trained_by.types
        features = settled(described, self._types, self._type_of_text, labelled)
        if self._row_parts is not None:
            for own in self._row_parts.features:
                kind, file = self._types[own.source]
                require_type(f"data.split: {file}", own.source, kind, own)
        if trained_by is not None and trained_by.features is not None and features.is_learned:
            require_features(trained_by.features, features)
        if labelled and trained_by is None:
            _tell_of_labels(features)
            tell_of_tables(features)
            if config.grouped is None and (first := self._first_rows) is not None:
                tell_of_lists(features, first)
                tell_of_times(features, first)
                tell_of_units(features, first.schema)
                _tell_of_joins(self._inputs[0], first)
        self.encoding = Encoding(features, None if trained_by is None else trained_by.learned)
        self.multi_hot, self.kept = self.encoding.multi_hot, self.encoding.kept
        self._fractions = config.eval_fraction, config.test_fraction
        self.rejected_rows = 0
        self.unseen: dict[str, int] = {}
        """How many ids the vocabularies lack, by feature."""
        names = [label.name for label in features.labels] * labelled
        names += [feature.name for feature in (*features.dense, *features.sparse)]
        self.missing = dict.fromkeys(names, 0)
        """How many samples have no value of each feature, or label, so far."""
        dense, sparse = (tuple(map(_as_prepared, own)) for own in (features.dense, features.sparse))
        prepared = replace(features, dense=dense, sparse=sparse)
        self._stated: dict[str, Any] = {
            "source": "files",
            "values": VALUES,
            "features": asdict(prepared),
            "skip": self._skip,
            "rules": asdict(config.rules()),
            "format": config.format,
        } | derived_recipe(config)
        if self.splits:
            said = split and {key: own for key, own in asdict(split).items() if key != "seed" or own}
            self._stated["split"] = [said, self._parts, config.eval_fraction]
        if self._skip:  # which rows are left out depends on them
            self._stated["rows"] = [f.rows for f in features.sparse if f.ids == "rows"]

    @property
    def recipe(self) -> dict[str, Any]:
        """All settings that samples depend on; until all is learned, from which of them that is."""
        if not self.encoding.is_complete:
            return self._stated | {"learned": self._fractions}
        learned = self.encoding.learned if self.encoding.features.is_learned else None
        return self._stated if learned is None else self._stated | {"learned": learned.to_dict()}

    @property
    def files(self) -> Sequence[AnyPath]:
        """The input files, in time order."""
        return [path for file in self._inputs for path in file.paths]

    def blocks(self) -> Iterator[tuple[Columns, float]]:
        """Samples of all files in order."""
        for columns, _, share in self.split_blocks():
            yield columns, share

    def split_blocks(self) -> Iterator[tuple[Columns, NDArray[np.uint8], float]]:
        """Samples of all files in order, the part of each, and the share of the input read so far."""
        if self._row_parts is not None:
            names = self._row_parts.split.columns
            self._row_parts.begin(block.rows for file in self._inputs for block in file.blocks(names))
        weight = np.zeros(len(self.encoding.features.labels))
        for read in self._reads():
            checks, columns = read.checks, read.columns
            parts = np.full(len(columns), self._parts[read.file], np.uint8)
            if self._row_parts is not None:
                parts = self._row_parts.of(read.of_parts, checks)
            for name, absent in read.missing.items():
                self.missing[name] += absent
            self.rejected_rows += read.left_out + checks.finish(self._skip)
            good = columns if checks.good.all() else columns.where(checks.good)
            if good.weights is not None:
                weight += good.weights.reshape(len(good), -1).sum(axis=0, dtype=np.float64)
            if self.encoding.is_complete:
                good = self.finished(good)
            yield good, parts[checks.good], (read.file + read.share) / len(self._inputs)
        if self._labelled and self.encoding.features.weighted:
            _tell_of_weights(self.encoding.features, weight)

    def _reads(self) -> Iterator[Read]:
        """What is read of all files in order, here or by the workers of a cluster."""
        of_parts = [] if self._row_parts is None else self._row_parts.split.columns
        names = self._read(self.encoding.features)
        reader = Reader(self._inputs, names, of_parts, self.encoding, self._labelled)
        if self._cluster is None:
            return chain.from_iterable(reader(file, None) for file in range(len(self._inputs)))
        pieces = [(n, groups) for n, file in enumerate(self._inputs) for groups in file.parts]
        return in_order(reader.send, Read.unpacked, pieces, self._cluster)

    def parts(self, counts: Parts) -> Parts:
        """The parts of samples of which the rows, or their files, say so many to be of each. ``DataError``
        if one has none."""
        if self._row_parts is not None:
            self._row_parts.split.require(counts, self._row_parts.seen)
            return counts
        for part, key in ((VALID, "data.eval_path"), (TEST, "data.test_path")):
            if part in self._parts and not counts[part]:
                raise DataError(f"{key}: its files have no usable row; name others, or leave it out")
        valid, test = self._fractions
        return counts.held_out(0.0 if counts.valid else valid, test)

    def finished(self, columns: Columns) -> Columns:
        """Samples of ``blocks`` that came before all was learned."""
        made = self.encoding.finish(columns)
        for name, unseen in self.encoding.unseen(made).items():
            self.unseen[name] = self.unseen.get(name, 0) + unseen
        return made

    def learn(self, between: Between, samples: int) -> None:
        """Learn from the first ``samples`` samples, which are those for training."""
        self.use(learn(self.encoding.features, between, samples))

    def use(self, learned: Learned) -> None:
        """Encode with what was ``learned`` from now on."""
        self.encoding = Encoding(self.encoding.features, learned)

    def catalog(self, rule: Negatives) -> Columns:
        """A sample for each row of the side table that is joined by the column of ``rule.feature``, of which
        all features of other columns have any value. ``UserError`` if it has not what ``rule`` names."""
        features = self.encoding.features
        of = {name: f for f in features.dense for name in f.names} | {f.name: f for f in features.sparse}
        key = of[rule.feature].source
        side = side_table(self._inputs[0], key)
        if side is None:
            raise UserError(
                f"data.negatives.source=joined: no side table of data.joins is joined by column "
                f"'{shown(key)}', that of {shown(rule.feature)}; join one, or leave source out"
            )
        for name in rule.along:
            if of[name].source not in side.names:
                raise UserError(
                    f"data.negatives.along: the side table has no column '{shown(of[name].source)}', that of "
                    f"{shown(name)}; {nearest_or_all(of[name].source, side.names)}"
                )
        found = side.rows(self._types[key][0])
        single = {f.source for f in features.sparse if f.kind == "id"}
        zeros, nulls = pa.array(np.zeros(len(found), np.int8)), pa.nulls(len(found))
        others = [name for name in dict.fromkeys(features.inputs) if name not in found.schema.names]
        filled = [zeros if name in single else nulls for name in others]
        rows = pa.record_batch([*found.columns, *filled], [*found.schema.names, *others])
        checks = RowChecks(f"the side table of {shown(key)}", 1, len(rows))
        made = self.encoding.columns(rows, checks, labelled=False).columns
        checks.finish(False)
        return made

    @property
    def schema(self) -> Schema:
        """The columns of batches."""
        return self.encoding.schema

    @property
    def preparation(self) -> Preparation:
        """How values become what batches have."""
        return Preparation.of(self.encoding.features, self.encoding.learned)

    def _read(self, features: Features) -> list[str]:
        if not self._labelled:
            return list(dict.fromkeys(features.inputs))
        of_split = [] if self._row_parts is None else self._row_parts.split.columns
        return list(dict.fromkeys([*features.columns, *of_split]))

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

    def _type_of_text(self, feature: Feature) -> str:
        """What text of ids is: what it was in training, and else, in files where all is text, whole numbers
        if the first rows are written so."""
        if then := self._trained.get(feature.name):
            return then if then in ("text", HEX) else "integer"
        is_whole = feature.separator is None and not is_list(plain_type(self._types[feature.source][0]))
        if (feature.is_bag and is_whole) or not self._inputs[0].is_all_text(feature.source):
            return "text"
        rows = self._first_rows
        if rows is None or not whole_text(rows[feature.source], feature):
            return "text"
        log.info(
            "column %s has whole numbers, which it is read as (a feature's type: text keeps other spellings)",
            shown(feature.source),
        )
        return "integer"

    @cached_property
    def _first_rows(self) -> pa.RecordBatch | None:
        """The first rows, read once however many columns have text; None without any row, or column of these.
        Numbers are what they seem to be, unless they are times, or joined."""
        names = [
            name
            for name, (kind, file) in self._types.items()
            if name in self._timed or isinstance(file, JoinedFile) or not is_number(plain_type(kind))
        ]
        return self._inputs[0].first_rows(names) if names else None


def _tell_of_twice(by_part: Sequence[Sequence[InputFile]]) -> None:
    """Warn of a file whose rows are of two parts: a model is judged on what it was trained on."""
    seen: dict[AnyPath, str] = {}
    for key, files in zip(("path", "eval_path", "test_path"), by_part, strict=False):
        for file in {path: None for each in files for path in each.paths}:
            if (other := seen.setdefault(file, key)) != key:
                log.warning("%s is in data.%s and in data.%s: its rows are in both parts", file, other, key)


def _tell_of_joins(file: InputFile, first: pa.RecordBatch) -> None:
    """Warn of side tables that no record of the ``first`` ones has a key of."""
    for side in file.sides if isinstance(file, JoinedFile) else ():
        added = [name for name in side.names if name in first.schema.names]
        if added and all(first[name].null_count == len(first) for name in added):
            log.warning(
                "column %s: none of the first %s records has a key of the side table joined by it, and none "
                "has %s; are its keys written in the same way?",
                shown(side.left),
                f"{len(first):,}",
                shown(added[0]),
            )


def _tell_of_labels(features: Features) -> None:
    """Warn of features from which a label is made: what is known only afterwards gives it away."""
    for label in features.labels:
        for feature in (*features.dense, *features.sparse):
            if feature.source in label.columns:
                log.warning(
                    "label %s is made of column %s, which feature %s gives to the model: leave the feature "
                    "out unless its value is known before the label is",
                    shown(label.name),
                    shown(feature.source),
                    shown(feature.name),
                )


def _tell_of_weights(features: Features, weight: NDArray[np.float64]) -> None:
    """Warn of labels of which nothing is learned, since no row has them with a ``weight`` [L] above 0."""
    for label, own in zip(features.labels, weight, strict=True):
        if not own:
            log.warning(
                "label %s: no row has it with a weight above 0, so that nothing is learned of it",
                shown(label.name),
            )


def _as_prepared(feature: Feature) -> Feature:
    """``feature`` without what is said of its table and its side, on which prepared data do not depend."""
    left_out = ("rows", "table", "dim", "side", *GROWTH)
    usual: dict[str, Any] = {key.name: key.default for key in fields(Feature) if key.name in left_out}
    return replace(feature, **usual)
