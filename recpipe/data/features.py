"""All features and labels of files, and what batches hold of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated

from recpipe.common.validation import Text, one_of
from recpipe.data.expressions import Expression, parse_expression
from recpipe.data.feature import AGES, GROWTH, SIDES, WEIGHTED, Feature
from recpipe.data.schema import LABEL_KINDS, LabelColumn, Schema
from recpipe.errors import DataError, UserError, nearest_or_all, shown
from recpipe.plugin.tables import SparseFeature


@dataclass(frozen=True)
class Label:
    """What a model learns.

    - ``expression``: what it is of several columns, instead of one ``column``: ``rating >= 4``
      (``recpipe.data.expressions``); missing where one of them is.
    - ``kind`` is one of ``LABEL_KINDS``; None: what the model's loss takes.
    - ``weight``: a column of numbers >= 0, how much each sample counts for this label.
    - ``missing``: further values that are none, as text, as of a ``Feature``.
    - ``on_missing``: a sample without this label is bad (``error``), or has weight 0 for it (``mask``). None:
      ``error`` for the only label, without which the sample teaches nothing; ``mask`` for one of several.
    """

    name: Text
    column: Text | None = None
    kind: Annotated[str, one_of(*LABEL_KINDS)] | None = None
    weight: Text | None = None
    missing: tuple[Text, ...] = ()
    on_missing: Annotated[str, one_of("error", "mask")] | None = None
    expression: Text | None = None

    def __post_init__(self) -> None:
        if self.parsed is not None and self.column is not None:
            raise UserError(
                f"data.features, label {shown(self.name)}: column and expression both say what it is; "
                "state one of them"
            )

    @property
    def parsed(self) -> Expression | None:
        """Its expression, checked; ``UserError`` if it is none."""
        if self.expression is None:
            return None
        return parse_expression(self.expression, f"data.features, label {shown(self.name)}")

    @property
    def source(self) -> str:
        """The name of its column; of an expression, its own."""
        return self.name if self.column is None else self.column

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that say what it is."""
        return (self.source,) if self.parsed is None else self.parsed.columns


@dataclass(frozen=True)
class Features:
    """All features in the order in which batches hold them: dense ones, and those with ids."""

    labels: tuple[Label, ...]
    dense: tuple[Feature, ...] = ()
    sparse: tuple[Feature, ...] = ()
    unread: tuple[str, ...] = field(default=(), compare=False)
    """Columns that are left out on purpose."""
    weight: Text | None = None
    """A column of numbers >= 0, how much each sample counts, for all labels."""

    def __post_init__(self) -> None:
        if not self.labels:
            raise UserError("data.features: name at least one label, as in labels: [click]")
        names = [label.name for label in self.labels] + [name for f in self.dense for name in f.names]
        names += [feature.name for feature in self.sparse]
        for name in names:
            if names.count(name) > 1:
                raise UserError(
                    f"data.features: '{shown(name)}' is named twice; names are of one feature each"
                )
        timed = [feature.name for feature in self.dense if feature.kind == AGES]
        for feature in self.sparse:
            if feature.ages is not None and feature.ages not in timed:
                hint = nearest_or_all(feature.ages, timed) if timed else "there is none"
                raise UserError(
                    f"data.features, {shown(feature.name)}: ages names '{shown(feature.ages)}', no feature "
                    f"of kind {AGES}; {hint}"
                )
        crossed = [f.name for f in self.sparse if f.kind in ("id", "timestamp") or f.edges]
        tables: dict[str, Feature] = {}
        for feature in self.sparse:
            for name in feature.of:
                if name not in crossed:
                    raise UserError(
                        f"data.features, {shown(feature.name)}: of names '{shown(name)}', no feature "
                        f"of kind id, or with edges, or part of a time; {nearest_or_all(name, crossed)}"
                    )
            table = feature.table_name
            other = tables.setdefault(table, feature)
            keys = ("rows", "own_rows", "ids", "min_count", "dim", *GROWTH)
            if any(getattr(other, key) != getattr(feature, key) for key in keys):
                raise UserError(
                    f"data.features: {shown(other.name)} and {shown(feature.name)} share table "
                    f"'{shown(table)}' and state different rows, dim, ids or min_count for it; state "
                    "the same for both"
                )

    @property
    def _pooling(self) -> dict[str, str]:
        """Of the tables that bags look up: single ids are the same by a sum as by a mean."""
        pooling: dict[str, str] = {}
        for feature in self.sparse:
            table = feature.table_name
            if feature.is_bag and pooling.setdefault(table, feature.pooling) != feature.pooling:
                raise UserError(
                    f"data.features, {shown(feature.name)}: another feature of table '{shown(table)}' is "
                    f"pooled by {pooling[table]}; state the same for both"
                )
        return pooling

    @property
    def columns(self) -> list[str]:
        """The columns that are read, each once."""
        return list(dict.fromkeys([*self.of_labels, *self.inputs]))

    @property
    def inputs(self) -> list[str]:
        """The columns of features."""
        own = [feature.source for feature in (*self.dense, *self.sparse) if feature.kind != "cross"]
        return own + self.beside

    @property
    def beside(self) -> list[str]:
        """The columns that say more of other features' columns: weights of ids, and times until which."""
        own = [feature.weights or feature.until for feature in (*self.sparse, *self.dense)]
        return [*filter(None, own)]

    @property
    def of_labels(self) -> list[str]:
        """The columns of labels and of weights."""
        return [*chain.from_iterable(label.columns for label in self.labels), *self.weights]

    @property
    def weights(self) -> list[str]:
        """The columns of weights."""
        return [*filter(None, [self.weight, *(label.weight for label in self.labels)])]

    def masks(self, label: Label) -> bool:
        """Whether a sample without ``label`` has weight 0 for it."""
        return label.on_missing == "mask" or (label.on_missing is None and len(self.labels) > 1)

    @property
    def weighted(self) -> bool:
        """Whether batches have weights."""
        own = any(label.weight is not None or self.masks(label) for label in self.labels)
        return own or self.weight is not None

    @property
    def is_learned(self) -> bool:
        """Whether some of it is learned from the training part of the data."""
        learned = [f.scale == "standard" or (f.is_exact and f.now is None) for f in self.dense]
        return any(learned + [f.buckets is not None or f.ids == "vocabulary" for f in self.sparse])

    def schema(self, learned: Mapping[str, int]) -> Schema:
        """The columns of batches; ``learned``: rows of tables with a vocabulary, of which those without rows
        have as many. ``DataError`` for another table without rows."""
        found = []
        for feature in self.sparse:
            rows = feature.own_rows or feature.rows or learned.get(feature.table_name)
            if not isinstance(rows, int):
                dotted = "'data.tables={" + feature.name + ": 100000}'"
                override = dotted if "." in feature.name else f"+data.tables.{shown(feature.name)}=100000"
                raise DataError(
                    f"data.tables lacks column '{shown(feature.name)}': state its rows, as in {override}, "
                    "or one size for all with data.table_rows=N"
                )
            table = None if feature.table == feature.name else feature.table
            pooling = self._pooling.get(table or feature.name, "sum")
            found.append(
                SparseFeature(
                    feature.name,
                    rows,
                    feature.growth,
                    table,
                    pooling,
                    feature.dim,
                    feature.kind == WEIGHTED,
                    feature.max_length or 0 if feature.kind == "sequence" else None,
                    feature.ages,
                )
            )
        labels = tuple(LabelColumn(label.name, label.kind or "clicks") for label in self.labels)
        dense = tuple(name for feature in self.dense for name in feature.names)
        return Schema(dense, tuple(found), labels, *(self.of_side(side) for side in SIDES))

    def of_side(self, side: str) -> tuple[str, ...]:
        """The inputs of a model that are said to be of this ``side``."""
        dense = (name for feature in self.dense if feature.side == side for name in feature.names)
        return (*dense, *(feature.name for feature in self.sparse if feature.side == side))

    def columns_of(self, feature: Feature) -> set[str]:
        """The columns that say what ``feature`` is, those of the features among them that it is made of."""
        own = {feature.weights, feature.until, None if feature.of else feature.source} - {None}
        parts = [each for each in (*self.dense, *self.sparse) if each.name in (*feature.of, feature.ages)]
        return {str(name) for name in own}.union(*(self.columns_of(each) for each in parts))

    def alone(self, names: Collection[str]) -> Features:
        """These features, with those that they are made of, and no others."""
        asked = [each for each in (*self.dense, *self.sparse) if each.name in names]
        needed = {*names, *(name for each in asked for name in (*each.of, each.ages))}
        dense, sparse = ([f for f in own if f.name in needed] for own in (self.dense, self.sparse))
        return replace(self, dense=tuple(dense), sparse=tuple(sparse))

    def with_rows(self, tables: Mapping[str, int], rows: int | None) -> Features:
        """The same, with the rows that ``data.tables`` and ``data.table_rows`` state; ``DataError`` for a
        table of no feature."""
        names = [feature.table_name for feature in self.sparse]
        for name in tables:
            if name not in names:
                hint = nearest_or_all(name, names)
                raise DataError(f"data.tables.{name}: no such column in data.sparse; {hint}")
            if own := self.sparse[names.index(name)].own_rows:
                what = "capacity makes" if self.sparse[names.index(name)].capacity else "buckets make"
                raise DataError(f"data.tables.{name}: its {what} a table of {own} rows; leave it out")
        stated = [
            feature if feature.own_rows else replace(feature, rows=tables.get(name, feature.rows or rows))
            for feature, name in zip(self.sparse, names, strict=True)
        ]
        return replace(self, sparse=tuple(stated))
