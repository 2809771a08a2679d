"""What becomes of the columns that sessions add to those of their events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from recpipe.data.derivations import Sessions
from recpipe.data.proposal.choose import Choice
from recpipe.data.proposal.column import Column
from recpipe.data.proposal.reading import Read, read
from recpipe.data.sessions import HISTORY, LAST, POSITIVE
from recpipe.errors import shown

OF_IDS = ("ids", "rows", "type", "missing")
"""What is said of a column's ids, and holds for those before as well."""


def with_histories(
    choices: Sequence[Choice], added: Sequence[Column], rule: Sessions, has_negatives: bool
) -> list[Choice]:
    """The ``choices`` for the columns of events, and one for each of those that sessions have ``added``. A
    list of what came before is a sequence where the column itself has ids, and shares its table."""
    of = {choice.column.name: choice for choice in choices}
    made = [_taken_place(choice, choices, rule, has_negatives) for choice in choices]
    for column in added:
        if column.name == LAST:
            reason = "whether a session has ended, which is known only afterwards: label=is_last learns it"
            made.append(_left_out(column, reason))
        else:
            made.append(_history(column, of.get(column.name.removesuffix(HISTORY)), rule))
    return made


def _taken_place(choice: Choice, choices: Sequence[Choice], rule: Sessions, has_negatives: bool) -> Choice:
    """Of the label that an event took place: without negatives there is nothing else."""
    if choice.role != "label" or choice.column.name != POSITIVE:
        return choice
    ids = [own.column for own in choices if own.role == "feature" and own.entry["kind"] == "id"]
    ids = [column for column in ids if column.name != rule.by]
    most = max(ids, key=lambda column: column.counted.distinct, default=None)
    name = "ITEM" if most is None else shown(most.name)
    told = f"is 1 in every sample: add others of label 0, 'data.negatives={{feature: {name}}}'"
    return replace(choice, suspicions=() if has_negatives else (told,))


def _history(column: Column, own: Choice | None, rule: Sessions) -> Choice:
    event = column.name.removesuffix(HISTORY)
    if event == rule.by:
        return _left_out(column, f"{shown(event)} is the same in all events of a session")
    keys = None if own is None else _ids_of(own)
    if own is None or keys is None:
        return _left_out(column, f"{shown(event)} before: only ids become sequences")
    reason = f"{shown(event)} of up to {rule.max_length} events before, the {rule.keep} ones"
    table, told = dict[str, str](), tuple[str, ...]()
    if own.role == "feature":
        table = {"table": own.entry.get("table", event)}
        reason += f"; shares the table of {shown(table['table'])}"
    else:
        told = (f"is of events before: leave it out if their {shown(event)} is not known yet by then",)
    entry = {"name": column.name, "kind": "sequence", "max_length": rule.max_length, **keys, **table}
    return Choice(column, "feature", entry, reason, told)


def _ids_of(own: Choice) -> Mapping[str, Any] | None:
    """How the ids of an event's column are read, also where the column itself is a label, or gives one away;
    None: it has none."""
    column, keys = own.column, own.entry
    if own.role != "feature":
        if column.content in ("nothing", "other", "vector", "date") or column.counted.distinct < 2:
            return None
        found = read(column)
        keys = found.keys if isinstance(found, Read) else {}
    return {key: keys[key] for key in OF_IDS if key in keys} if keys.get("kind") == "id" else None


def _left_out(column: Column, reason: str) -> Choice:
    return Choice(column, "unread", {"name": column.name}, reason)
