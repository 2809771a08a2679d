"""How a source turned the values of its files into what a model sees, so that other data can be prepared
alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from recpipe.errors import DataError, shown

if TYPE_CHECKING:
    from recpipe.data.dataset import Schema

IdRule = Literal["hashed", "modulo", "unchanged"]
"""``hashed``: 1 + mix64(key) % (rows - 1), missing row 0 (``recpipe.data.sources.transforms``); ``modulo``:
id % rows; ``unchanged``: the id is the row."""
DenseRule = Literal["signed_log", "unchanged"]
"""``signed_log``: sign(x) * log1p(|x|)."""


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
    _require_rule("ids", trained.sparse, trained_by.ids, found_by.ids)
    _require_rule("dense values", trained.dense, trained_by.dense, found_by.dense)
    if found_by.ids == "hashed":
        _require_kind("text", "numbers", trained_by.text, found_by.text)
    _require_kind("lists", "single ids", trained_by.lists, found_by.lists)


def _require_rule(
    what: str, columns: Sequence[object], trained: IdRule | DenseRule, found: IdRule | DenseRule
) -> None:
    if columns and trained != found:
        raise DataError(
            f"{what} were {_said(trained)} in training and are {_said(found)} here: the model would see "
            "other values; leave data.hash_ids and data.dense_transform as in training"
        )


def _said(rule: IdRule | DenseRule) -> str:
    words = {"hashed": "hashed", "modulo": "taken modulo the rows", "signed_log": "logarithms"}
    return words.get(rule, "taken as they are")


def _require_names(kind: str, trained: Sequence[str], found: Sequence[str]) -> None:
    missing = [name for name in trained if name not in found]
    extra = [name for name in found if name not in trained]
    if missing or extra:
        parts = [f"lacks {_listed(missing)}"] * bool(missing) + [f"adds {_listed(extra)}"] * bool(extra)
        raise DataError(
            f"the data {' and '.join(parts)}: the model was trained on {len(trained)} {kind} columns, "
            f"{_listed(list(trained))}; name these in data.{kind}"
        )
    if list(trained) != list(found):
        raise DataError(
            f"the {kind} columns are in another order than in training: {_listed(list(trained))}; "
            f"leave data.{kind} out"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(map(shown, names[:8])) + more


def _require_kind(one: str, other: str, trained: tuple[str, ...], found: tuple[str, ...]) -> None:
    for name in (*trained, *found):
        if (name in trained) != (name in found):
            there, here = (one, other) if name in trained else (other, one)
            raise DataError(
                f"column {shown(name)}: held {there} in training and holds {here} here; convert the column"
            )
