"""The columns of a data set, and the kinds of labels that files may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from recpipe.errors import DataError, shown
from recpipe.plugin.tables import SparseFeature

IdRule = Literal["hashed", "modulo", "unchanged"]
"""``hashed``: 1 + mix64(key) % (rows - 1), missing row 0 (``recpipe.data.sources.transforms``); ``modulo``:
id % rows; ``unchanged``: the id is the row."""
DenseRule = Literal["signed_log", "unchanged"]
"""``signed_log``: sign(x) * log1p(|x|)."""
OF_MODULES = "(the rows of a module of your own are its num_embeddings)"
"""Said where a table has too few rows for an id."""
LONGEST_NAME = 200
"""Most bytes of a sparse feature's percent-encoded name; file systems allow 255 with what is added to it."""


@dataclass(frozen=True)
class LabelColumn:
    """One of the labels of a sample; ``kind`` is one of ``LABEL_KINDS``."""

    name: str
    kind: str = "clicks"


@dataclass(frozen=True)
class Schema:
    """The columns of a data set, in the order in which batches hold them.

    ``labels``: one for each column of a batch's labels; (): there is one, without a name.

    ``DataError`` if a sparse feature's name cannot be part of a file's name: tables are kept in files named
    so.
    """

    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]
    labels: tuple[LabelColumn, ...] = ()
    users: tuple[str, ...] = ()
    """The features, dense and sparse, that are said to be of the user, or of the request."""
    items: tuple[str, ...] = ()
    """Those that are said to be of the item."""

    def __post_init__(self) -> None:
        for name in [name for feature in self.sparse for name in filter(None, (feature.name, feature.table))]:
            try:
                fits = len(quote(name, safe="")) <= LONGEST_NAME
            except UnicodeEncodeError:
                fits = False
            if not fits:
                raise DataError(
                    f"the column name '{shown(name)}' is not text of at most {LONGEST_NAME} bytes, "
                    "percent-encoded; rename the column"
                )
        for feature in self.sparse:
            first = self.tables[feature.table or feature.name][0]
            if (first.rows, first.pooling, first.dim) != (feature.rows, feature.pooling, feature.dim):
                raise DataError(
                    f"{shown(first.name)} and {shown(feature.name)} share table "
                    f"'{shown(feature.table or feature.name)}' and have other rows, dim or pooling: "
                    "state the same"
                )

    @property
    def weighted(self) -> bool:
        """Whether the ids of batches have weights."""
        return any(feature.weighted for feature in self.sparse)

    @cached_property
    def tables(self) -> dict[str, list[SparseFeature]]:
        """The features of each table by its name, tables in the order of their first features."""
        tables: dict[str, list[SparseFeature]] = {}
        for feature in self.sparse:
            tables.setdefault(feature.table or feature.name, []).append(feature)
        return tables

    def table_of(self, feature: str) -> str:
        """The name of its table."""
        return next(name for name, own in self.tables.items() if feature in [each.name for each in own])

    def ages_of(self, feature: str) -> tuple[int, ...]:
        """The columns of dense inputs that say how long ago the latest events of a sequence were, the latest
        last; () if none do."""
        named = next(each.ages for each in self.sparse if each.name == feature)
        count = sum(name.startswith(f"{named}_") for name in self.dense)
        names = [f"{named}_{n}" for n in range(count)] if named is not None else []
        return tuple(self.dense.index(name) for name in names if name in self.dense)

    @cached_property
    def targets(self) -> dict[str, str]:
        """By each sequence, in order, the feature that shares its table and is none itself: what the ids of
        the sequence are compared with. Sequences of which there is none are left out.

        ``DataError`` if there are several.
        """
        found: dict[str, str] = {}
        for feature in self.sparse:
            if feature.sequence is None:
                continue
            table = feature.table or feature.name
            others = [other.name for other in self.tables[table] if other.sequence is None]
            if len(others) > 1:
                raise DataError(
                    f"the sequence {shown(feature.name)} could be compared with {shown(others[0])} or "
                    f"{shown(others[1])}, which share its table: give one of them a table of its own"
                )
            if others:
                found[feature.name] = others[0]
        return found


class LabelKind(NamedTuple):
    """What labels float64 [n] must be: ``fits`` tells for each, ``fault`` is said of one that does not. Each
    kind must be finite as float32 too."""

    fits: Callable[[NDArray[np.float64]], NDArray[np.bool_]]
    fault: str


LABEL_KINDS = {
    "clicks": LabelKind(
        lambda labels: (labels == 0) | (labels == 1),
        "is neither 0 nor 1 (data.label_kind=values takes any number, for a loss that does)",
    ),
    "values": LabelKind(np.isfinite, "is not a finite float32 number"),
    "counts": LabelKind(lambda labels: labels >= 0, "is not a finite float32 number of at least 0"),
    "classes": LabelKind(  # whole numbers that float32 holds exactly
        lambda labels: (labels == np.floor(labels)) & (labels >= 0) & (labels < 2**24),
        "is no class: a whole number from 0 on",
    ),
}
"""The values of ``data.label_kind``."""
