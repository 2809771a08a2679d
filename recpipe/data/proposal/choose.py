"""What each column of a sample becomes: a label, a feature of some kind, or nothing; and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from recpipe.data.column_types import is_text
from recpipe.data.expressions import Expression
from recpipe.data.feature import WEIGHTED
from recpipe.data.proposal.column import Column
from recpipe.data.proposal.leaks import alone, leak
from recpipe.data.proposal.names import LABELS
from recpipe.data.proposal.reading import Read, Unread, percent, read
from recpipe.data.refusals import cast_of
from recpipe.errors import DataError, UserError, nearest_or_all, shown

LISTS = ("multi_hot", WEIGHTED, "sequence")


@dataclass(frozen=True)
class Choice:
    """What a column becomes: its ``entry`` of ``data.features``, and the ``reason``, a line. ``suspicions``:
    what the user should look at. ``alone``: its AUC by itself."""

    column: Column
    role: Literal["label", "feature", "unread"]
    entry: Mapping[str, Any]
    reason: str
    suspicions: tuple[str, ...] = ()
    alone: float | None = None


def choose(columns: Sequence[Column], labels: Mapping[str, Expression | None]) -> list[Choice]:
    """A choice for each column, in their order. ``labels``: the columns that are labels, and which of them an
    expression has made of others."""
    made_of = {name: label for label, own in labels.items() if own is not None for name in own.columns}
    by_name = {column.name: column for column in columns}
    known = {name: label_values(by_name[name]) for name in labels}
    made = []
    for column in columns:
        if column.name in known:
            made.append(_label(column, known[column.name], labels[column.name]))
            continue
        if column.name in made_of:
            reason = f"label {shown(made_of[column.name])} is made of it"
            made.append(Choice(column, "unread", {"name": column.name}, reason))
            continue
        told = _alone(column, known)
        found, best = _left_out(column, known, told) or read(column), max(told.values(), default=None)
        if isinstance(found, Read):
            entry = {"name": column.name, **found.keys}
            made.append(Choice(column, "feature", entry, found.reason, found.suspicions, best))
        else:
            suspicions = (found.reason,) if found.told else ()
            made.append(Choice(column, "unread", {"name": column.name}, found.reason, suspicions, best))
    return _sharing(_weighing(made))


def _weighing(choices: Sequence[Choice]) -> list[Choice]:
    """Lists beside which another column has as many numbers are suspected to have weights."""
    numbers = {own.column.name: own.column.lengths_of_numbers for own in choices if own.role == "unread"}
    made = []
    for choice in choices:
        own = choice.column.offered if choice.role == "feature" and not choice.column.weighted else None
        alike = [
            name
            for name, lengths in numbers.items()
            if own is not None and lengths is not None and np.array_equal(own, lengths)
        ]
        if alike:
            told = (
                f"{shown(alike[0])} has as many numbers as it has ids: if they are weights, say kind: "
                f"{WEIGHTED}, weights: {shown(alike[0])}"
            )
            choice = replace(choice, suspicions=(*choice.suspicions, told))
        made.append(choice)
    return made


def require_name(columns: Sequence[Column], key: str, name: str) -> None:
    """``UserError`` for the name of a column that is not there."""
    names = [column.name for column in columns]
    if name not in names:
        raise UserError(f"{key}={shown(name)}: no such column; {nearest_or_all(name, names)}")


def found_labels(columns: Sequence[Column], named: Sequence[str]) -> tuple[list[str], str]:
    """The labels that the user ``named``, else the likeliest column by its name, and a line that says which
    was found; none where no name fits."""
    if named:
        return list(dict.fromkeys(named)), ""
    fitting = [column for column in columns if column.content in ("bool", "whole", "number")]
    ranked = sorted(
        (column for column in fitting if column.name.lower() in LABELS),
        key=lambda column: LABELS.index(column.name.lower()),
    )
    if not ranked:
        return [], ""
    others = "".join(f", and {shown(column.name)} could be one" for column in ranked[1:3])
    return [ranked[0].name], (
        f"the label is {shown(ranked[0].name)}, found by its name{others}; label=COLUMN says otherwise"
    )


def label_values(column: Column) -> NDArray[np.float64]:
    """A label's values, float64 [n], NaN where it is missing; ``DataError`` for one that is no number."""
    if column.content not in ("bool", "whole", "number"):
        first = column.present[0].as_py() if len(column.present) else "nothing"
        raise DataError(
            f"label={shown(column.name)}: holds {column.type}, '{shown(first)}' for example; a label is "
            f"numbers or bool: make one by an expression, label={{liked: '{shown(column.name)} == \"yes\"'}}"
        )
    return column.numbers


def _label(column: Column, values: NDArray[np.float64], expression: Expression | None) -> Choice:
    given = values[~np.isnan(values)]
    distinct = np.unique(given)
    entry: dict[str, Any] = {"name": column.name}
    if expression is not None:
        entry["expression"] = expression.text
    suspicions = []
    if len(distinct) < 2:
        suspicions.append(f"is {distinct[0]:g} in every row of the sample: there is nothing to learn")
    if np.isin(distinct, (0, 1)).all():
        reason = f"0 and 1; {percent(given.mean())} are 1"
    else:
        entry["kind"] = "values"
        reason = f"numbers from {distinct[0]:g} to {distinct[-1]:g}, {given.mean():.3g} on average"
        suspicions.append(
            "has other values than 0 and 1, and is learned as these, by mean squared error (kind: counts and "
            "classes are others)"
        )
    if len(given) < len(values):
        reason += f"; missing in {percent(1 - len(given) / len(values))}"
        suspicions.append(
            f"the label is missing in {len(values) - len(given):,} rows: the only label must be there "
            "(on_missing: mask, or data.on_bad_row=skip), of several it has weight 0 where it is missing"
        )
    return Choice(column, "label", entry, reason, tuple(suspicions))


def _alone(column: Column, labels: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """The AUC by itself, of each label of which the sample can say it."""
    if column.content in ("nothing", "other", "vector") or column.counted.distinct < 2:
        return {}
    found = {}
    for name, label in labels.items():
        known = ~np.isnan(label)
        if known.any():
            middle = (label[known].min() + label[known].max()) / 2
            found[name] = alone(column, label > middle, known)
    return {name: value for name, value in found.items() if value is not None}


def _left_out(
    column: Column, labels: Mapping[str, NDArray[np.float64]], told: Mapping[str, float]
) -> Unread | None:
    """Why a column should not be a feature; None: it may be one."""
    name, content = shown(column.name), column.content
    if content == "nothing":
        return Unread("has no value in any row of the sample")
    if content == "other":
        return Unread(_other(column))
    for label, values in labels.items():
        if content != "vector" and (why := leak(column, shown(label), values, told.get(label))):
            return Unread(f"suspected leak: {why}", told=True)
    if content == "vector":
        return None
    if column.name.lower() in LABELS and labels and column.counted.distinct == 2:
        return Unread(f"by its name a label itself, known only afterwards: label={name} learns it", True)
    if column.counted.distinct == 1 and not column.missing.any() and column.lists is None:
        return Unread(f"is {shown(column.present[0].as_py())} in every row of the sample")
    if content == "date":
        return Unread(
            f"dates as {shown(column.present[0].as_py())}, whose day and month could be swapped: write "
            "2026-03-01",
            told=True,
        )
    if column.brackets:
        return Unread("text of lists in brackets: write it as a list, or with a separator", told=True)
    return None


def _other(column: Column) -> str:
    kind = str(column.type)
    if "binary" in kind:
        return "bytes that are no text in UTF-8: write it as text"
    return f"holds {shown(kind)}{cast_of(column.type)}"


def _sharing(choices: Sequence[Choice]) -> list[Choice]:
    """Lists whose ids are those of another column share its table."""
    made = {choice.column.name: choice for choice in choices}
    features = [choice for choice in choices if choice.role == "feature"]
    ids = [choice.column for choice in features if choice.entry["kind"] == "id"]
    tables: dict[str, list[str]] = {}
    for choice in features:
        if choice.entry["kind"] in LISTS:
            alike = {column.name: _overlap(choice.column, column) for column in ids}
            name = max(alike, key=lambda n: alike[n], default="")
            if alike.get(name, 0) >= 0.5:
                tables.setdefault(name, [name]).append(choice.column.name)
    for table, names in tables.items():
        rows = [made[name].entry.get("rows", 0) for name in names]
        size = {"rows": max(rows)} if max(rows) else {"ids": "vocabulary"}
        for name in names:
            keys = {key: value for key, value in made[name].entry.items() if key not in ("ids", "rows")}
            made[name] = replace(made[name], entry=keys | size)
            if name != table:
                reason = f"{made[name].reason}; shares the table of {shown(table)}, whose ids these are"
                made[name] = replace(made[name], entry={**made[name].entry, "table": table}, reason=reason)
    return list(made.values())


def _overlap(lists: Column, ids: Column) -> float:
    """Ids in both, as a share of those in either."""
    assert lists.lists is not None
    elements = lists.lists[0].filter(~lists.filled & (lists.codes >= 0))
    if is_text(lists.lists[0].type) != ids.is_text:
        return 0.0
    ours = pc.unique(elements.cast(ids.type, safe=False))
    theirs = pc.unique(ids.present)
    if min(len(ours), len(theirs)) < 20:
        return 0.0
    common = int(pc.sum(pc.is_in(ours, value_set=theirs)).as_py() or 0)
    return common / (len(ours) + len(theirs) - common)
