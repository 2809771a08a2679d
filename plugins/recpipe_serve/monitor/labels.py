"""Labels that clients send later: from a body to arrays, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recpipe.errors import shown
from recpipe.model.metrics import Kind
from recpipe_serve.errors import bad

MOST = 10_000
"""Most requests whose labels one body has."""
_ALLOWED = {
    "clicks": "0, 1 or null (not known)",
    "counts": "a number of at least 0, or null (not known)",
    "values": "a number, or null (not known)",
}


class Labels(NamedTuple):
    """The labels of one request."""

    id: str
    values: NDArray[np.float32]
    """[N, T], NaN where not known."""


def listed(body: bytes) -> list[Any]:
    """The entries of ``{"labels": [{"id": ..., "label": ...}]}``; ``Refused`` if it is not of this form."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as fault:
        raise bad(f"the body is no JSON ({shown(fault, 100)})") from fault
    entries = found.get("labels") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise bad('the body is not {"labels": [{"id": "REQUEST", "label": [0, 1]}]}')
    if len(entries) > MOST:
        raise bad(f"the body has labels of {len(entries)} requests, and {MOST} is the most")
    return entries


def read(entry: object, tasks: Mapping[str, Kind]) -> Labels:
    """One entry; ``Refused`` names the request and what is wrong with its labels."""
    if not isinstance(entry, dict):
        raise bad("an entry of labels is no JSON object")
    ident, given = entry.get("id"), entry.get("label")
    if not isinstance(ident, str):
        raise bad("an entry of labels has no id, or one that is no text")
    if isinstance(given, dict):
        if given.keys() != tasks.keys():
            raise bad(
                f"label of request '{shown(ident)}' is not given for {', '.join(tasks)}, and those alone"
            )
        lists = [given[task] for task in tasks]
    elif len(tasks) == 1:
        lists = [given]
    else:
        raise bad(f"label of request '{shown(ident)}' is no object with lists for {', '.join(tasks)}")
    columns = [_column(own, kind, ident) for own, kind in zip(lists, tasks.values(), strict=True)]
    if len({len(column) for column in columns}) > 1:
        raise bad(f"label of request '{shown(ident)}' has lists of different lengths")
    return Labels(ident, np.stack(columns, axis=1))


def _column(values: object, kind: Kind, ident: str) -> NDArray[np.float32]:
    if not isinstance(values, list):
        raise bad(f"label of request '{shown(ident)}' is no list of a label for each sample")
    known = [value for value in values if value is not None]
    if not _all_fit(known, kind):
        wrong = next(value for value in known if not _all_fit([value], kind))
        raise bad(f"label of request '{shown(ident)}' has {shown(wrong)}, not {_ALLOWED[kind]}")
    return np.array(values, np.float64).astype(np.float32)  # null becomes NaN


def _all_fit(values: Sequence[Any], kind: Kind) -> bool:
    if not set(map(type, values)) <= {int, float}:
        return False
    if kind == "clicks":
        return set(values) <= {0, 1}
    most = float(np.finfo(np.float32).max)
    low = 0.0 if kind == "counts" else -most
    return all(low <= value <= most for value in values)
