"""What a checkpoint keeps of the run that wrote it, so that it can be scored, packaged and served by itself.

These are the recipe, the columns that the model was trained on, and how they were prepared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recpipe.checkpoint.table_io import RECIPE, naming
from recpipe.common.saved import Damaged, typed_as
from recpipe.data.dataset import Dataset
from recpipe.data.preparation import Preparation
from recpipe.data.schema import LabelColumn, Schema
from recpipe.errors import DataError, UserError
from recpipe.plugin.tables import Growth, SparseFeature


@dataclass(frozen=True)
class Columns:
    """The names of the dense columns, and the names and tables' rows of the sparse ones, in order; how the
    ids of those get rows whose tables grow. ``tables``: of features whose table has another name; ``means``:
    features whose rows are averaged; ``dims``: of features whose tables have another dimension than the
    model's; ``weighted``: features whose ids have weights; ``sequences``: the most ids of each sequence, 0:
    any number; ``ages``: of sequences, the dense inputs that say how long ago its events were."""

    dense: list[str]
    sparse: list[tuple[str, int]]
    labels: list[tuple[str, str]] = field(default_factory=list)
    """The names of the labels and their kinds; none: there is one, without a name."""
    growing: dict[str, Growth] = field(default_factory=dict)
    tables: dict[str, str] = field(default_factory=dict)
    means: list[str] = field(default_factory=list)
    dims: dict[str, int] = field(default_factory=dict)
    weighted: list[str] = field(default_factory=list)
    sequences: dict[str, int] = field(default_factory=dict)
    ages: dict[str, str] = field(default_factory=dict)
    users: list[str] = field(default_factory=list)
    items: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, schema: Schema) -> Columns:
        """The columns that the data's ``schema`` says."""
        return cls(
            list(schema.dense),
            [(feature.name, feature.rows) for feature in schema.sparse],
            [(label.name, label.kind) for label in schema.labels],
            {feature.name: feature.growth for feature in schema.sparse if feature.growth is not None},
            {feature.name: feature.table for feature in schema.sparse if feature.table is not None},
            [feature.name for feature in schema.sparse if feature.pooling == "mean"],
            {feature.name: feature.dim for feature in schema.sparse if feature.dim is not None},
            [feature.name for feature in schema.sparse if feature.weighted],
            {feature.name: feature.sequence for feature in schema.sparse if feature.sequence is not None},
            {feature.name: feature.ages for feature in schema.sparse if feature.ages is not None},
            list(schema.users),
            list(schema.items),
        )

    @property
    def schema(self) -> Schema:
        """The same as the data's schema."""
        sparse = [
            SparseFeature(
                name,
                rows,
                self.growing.get(name),
                self.tables.get(name),
                "mean" if name in self.means else "sum",
                self.dims.get(name),
                name in self.weighted,
                self.sequences.get(name),
                self.ages.get(name),
            )
            for name, rows in self.sparse
        ]
        labels = tuple(LabelColumn(*label) for label in self.labels)
        return Schema(tuple(self.dense), tuple(sparse), labels, tuple(self.users), tuple(self.items))


@dataclass(frozen=True)
class TrainedOn:
    """``values``: the recipe in plain values, as in report.json. ``columns`` None: the data did not say them;
    ``preparation`` None: it is not known."""

    values: dict[str, Any]
    columns: Columns | None
    preparation: Preparation | None

    @classmethod
    def of(cls, values: Mapping[str, Any], dataset: Dataset) -> TrainedOn:
        """Of a run with this recipe and data."""
        schema = dataset.schema
        columns = None if schema is None else Columns.of(schema)
        return cls(dict(values), columns, dataset.preparation)

    @classmethod
    def read(cls, trainer: Mapping[str, Any], directory: Path) -> TrainedOn:
        """From the ``trainer`` of the checkpoint ``directory``; ``UserError`` if it has none."""
        noted = trainer.get(RECIPE)
        if noted is None:
            raise UserError(
                f"{directory} does not carry its recipe and columns, as checkpoints of earlier versions: "
                "resume its run with this version (resume=..., a step more), which writes one that does"
            )
        with naming(directory):
            try:
                found = typed_as(cls, noted, RECIPE)
                if found.columns is not None:
                    _ = found.columns.schema  # refuses names that no table can have
            except DataError as fault:
                raise Damaged(f"{RECIPE}: {fault}") from fault
        return found

    def to_dict(self) -> dict[str, Any]:
        """Numbers, text, lists, tuples and dicts."""
        return asdict(self)
