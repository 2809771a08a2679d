"""The columns of a data set: their names, how the values of files became what a model sees, so that other
data can be prepared alike, and the kinds of labels that files may have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
LONGEST_NAME = 200
"""Most bytes of a sparse feature's percent-encoded name; file systems allow 255 with what is added to it."""
_RULES = {"hashed": "hashed", "modulo": "taken modulo the rows", "signed_log": "logarithms"}
_AS_THEY_ARE = "taken as they are"


@dataclass(frozen=True)
class Schema:
    """The columns of a data set, in the order in which batches hold them.

    ``DataError`` if a sparse feature's name cannot be part of a file's name: tables are kept in files named
    so.
    """

    dense: tuple[str, ...]
    sparse: tuple[SparseFeature, ...]

    def __post_init__(self) -> None:
        for feature in self.sparse:
            try:
                fits = len(quote(feature.name, safe="")) <= LONGEST_NAME
            except UnicodeEncodeError:
                fits = False
            if not fits:
                raise DataError(
                    f"the column name '{shown(feature.name)}' is not text of at most {LONGEST_NAME} bytes, "
                    "percent-encoded; rename the column"
                )


@dataclass(frozen=True)
class Preparation:
    """The rules by which columns were prepared. Missing dense values are 0."""

    ids: IdRule
    dense: DenseRule
    text: tuple[str, ...] = ()
    """Sparse columns of text, whose hashed keys are BLAKE2b of the bytes; other keys are the numbers."""
    lists: tuple[str, ...] = ()
    """Sparse columns with a list of ids for each sample."""


def require_alike(
    trained: Schema, found: Schema, trained_by: Preparation | None, found_by: Preparation | None
) -> None:
    """``DataError`` with the first difference if a model that was trained on columns like ``trained`` cannot
    be scored on columns like ``found``. A preparation that is None is not known and not compared."""
    _require_names("dense", trained.dense, found.dense)
    _require_names("sparse", [f.name for f in trained.sparse], [f.name for f in found.sparse])
    for theirs, mine in zip(trained.sparse, found.sparse, strict=True):
        if theirs.rows != mine.rows:
            raise DataError(
                f"column {shown(mine.name)}: its table has {theirs.rows:,} rows in the checkpoint and "
                f"{mine.rows:,} by the data's recipe; leave data.tables and data.table_rows as in training"
            )
    if trained_by is None or found_by is None:
        return
    for what, columns, then, now in (
        ("ids", trained.sparse, trained_by.ids, found_by.ids),
        ("dense values", trained.dense, trained_by.dense, found_by.dense),
    ):
        if columns and then != now:
            raise DataError(
                f"{what} were {_RULES.get(then, _AS_THEY_ARE)} in training and are "
                f"{_RULES.get(now, _AS_THEY_ARE)} here: the model would see other values; "
                "leave data.hash_ids and data.dense_transform as in training"
            )
    if found_by.ids == "hashed":
        _require_content("text", "numbers", trained_by.text, found_by.text)
    _require_content("lists", "single ids", trained_by.lists, found_by.lists)


def _require_names(kind: str, trained: Sequence[str], found: Sequence[str]) -> None:
    def listed(names: Sequence[str]) -> str:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return ", ".join(map(shown, names[:8])) + more

    missing = [name for name in trained if name not in found]
    extra = [name for name in found if name not in trained]
    if missing or extra:
        parts = [f"lacks {listed(missing)}"] * bool(missing) + [f"adds {listed(extra)}"] * bool(extra)
        raise DataError(
            f"the data {' and '.join(parts)}: the model was trained on {len(trained)} {kind} columns, "
            f"{listed(trained)}; name these in data.{kind}"
        )
    if list(trained) != list(found):
        raise DataError(
            f"the {kind} columns are in another order than in training: {listed(trained)}; "
            f"leave data.{kind} out"
        )


def _require_content(one: str, other: str, trained: Sequence[str], found: Sequence[str]) -> None:
    """``trained``, ``found``: the columns that hold ``one``; all others hold ``other``."""
    for name in (*trained, *found):
        if (name in trained) != (name in found):
            then, now = (one, other) if name in trained else (other, one)
            raise DataError(
                f"column {shown(name)}: held {then} in training and holds {now} here; convert the column"
            )


class LabelKind(NamedTuple):
    """What labels float64 [n] must be: ``fits`` tells for each, ``fault`` is said of one that does not. Each
    kind must be finite as float32 too."""

    fits: Callable[[NDArray[np.float64]], NDArray[np.bool_]]
    fault: str


LABEL_KINDS = {
    "clicks": LabelKind(
        lambda labels: np.isin(labels, (0, 1)),
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
