"""Labels of a model's requests, whichever of its versions answered them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from recpipe_serve.http.app import Server


async def join(own: Server, others: Sequence[Server], shadow: Server | None, body: bytes) -> dict[str, int]:
    """Join the labels in ``body``, which came to ``own``, with the scores of those versions that answered,
    ``own`` or one of the ``others``, and with those of a ``shadow``, which clients are told nothing of. How
    many were joined: see ``Monitor.labelled``. ``Refused`` for a body that cannot be used."""
    entries = _entries(body)
    if entries is None:
        return await own.label(body)  # which says what is wrong
    parts: dict[Server, list[Any]] = {own: []}
    for entry in entries:
        ident = entry["id"]
        found = (server for server in (own, *others) if server.monitor.knows(ident))
        parts.setdefault(next(found, own), []).append(entry)
    counts: dict[str, int] = {}
    for server, part in parts.items():
        told = await server.label(json.dumps({"labels": part}).encode())
        counts = {name: counts.get(name, 0) + count for name, count in told.items()}
    if shadow is not None and (known := [one for one in entries if shadow.monitor.knows(one["id"])]):
        await shadow.label(json.dumps({"labels": known}).encode())
    return counts


def _entries(body: bytes) -> list[dict[str, Any]] | None:
    """The labels in a body, each of which has an id; None if they are anything else."""
    try:
        entries = json.loads(body)["labels"]
        return entries if all(isinstance(entry["id"], str) for entry in entries) else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
