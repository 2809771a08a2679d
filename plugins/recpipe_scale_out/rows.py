"""``Rows``: the rows that a shard holds, and what it finds for a request."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recpipe_serve import LookupCall
from recpipe_serve.errors import bad
from recpipe_serve.row_server import LooksUp

from recpipe.answers.score import Lookup, PackageError, Tables, numbers, offsets_of, tensors
from recpipe.errors import UserError
from recpipe_scale_out.lookups import TableLookup, runs, together
from recpipe_scale_out.sealed import read_shard
from recpipe_scale_out.wire import TYPES, Array, Question, sent

KEPT = 4096
"""Sets of lookups whose operator is kept."""


class InMemory:
    """``tables`` of a manifest whose files are in ``directory``, mapped, so that processes share them. See
    ``LooksUp``."""

    def __init__(self, directory: Path, tables: dict[str, Any]) -> None:
        self.tables = Tables(directory, tables, True)

    def lookup(self, found: dict[str, Any], features: list[str]) -> Lookup:
        """See ``LooksUp``."""
        return Lookup(found, features, self.tables)

    def pooled(self, calls: list[LookupCall]) -> list[torch.Tensor]:
        """See ``LooksUp``."""
        return [call.lookup(*call[1:]) for call in calls]


class Rows:
    """The tables in the shard's ``directory``, checked, and kept as ``keep`` does. ``UserError`` if they
    cannot be used."""

    def __init__(
        self,
        directory: Path,
        trust: Path | None = None,
        keep: Callable[[Path, dict[str, Any]], LooksUp] = InMemory,
    ) -> None:
        self.content = read_shard(directory, trust)
        try:
            kept = keep(directory, {n: {**own} for n, own in self.content["tables"].items()})
        except PackageError as fault:
            raise UserError(str(fault)) from fault
        self.lookups = {
            own["number"]: TableLookup(own["table"], own["pooling"], own["weighted"])
            for own in self.content["lookups"]
        }
        self.held = {name: own["rows"] for name, own in self.content["tables"].items()}
        self.keep_as(kept)
        for lookup in self.lookups.values():  # what cannot be looked up is said now
            self._operator((lookup,))

    def keep_as(self, kept: LooksUp) -> None:
        """Look rows up by ``kept``, which has all of them."""
        self.kept, self._operator = kept, lru_cache(KEPT)(self._made)

    def pooled(self, asked: Question, kind: str = "FP32") -> Array:
        """What these lookups find, run by run, [V] of this ``kind`` (see ``wire``); ``Refused`` for lookups
        and ids that are not here."""
        own, bags = self._known(asked), asked.bags.tolist()
        ends, bag_ends, found = asked.ends.tolist(), asked.bag_ends.tolist(), list[Array]()
        calls: list[LookupCall] = []
        pooled = [lookup.pooling != "none" for lookup in own]
        # Of rows that are not pooled there are as many as ids.
        groups = [g for g in together(own) if (max(bags[g]) if pooled[g.start] else np.diff(ends)[g.start])]
        with torch.inference_mode():
            ids = torch.from_numpy(asked.ids)
            weights = None if asked.weights is None else torch.from_numpy(asked.weights)
            for group in groups:
                low, high = ends[group.start], ends[group.stop]
                first, last = bag_ends[group.start], bag_ends[group.stop]
                lengths = None if asked.lengths is None else asked.lengths[first:last]
                given = weights[low:high] if weights is not None and own[group.start].weighted else None
                offsets = _offsets(asked.bags[group], lengths)
                operator, most = self._operator(tuple(own[group])), max(bags[group])
                calls.append(LookupCall(operator, ids[low:high], offsets, most, None, given))
            values = self.kept.pooled(calls)
        for group, matrix in zip(groups, values, strict=True):
            dims = [self.content["tables"][lookup.table]["dimension"] for lookup in own[group]]
            columns = [0, *accumulate(dims)]
            for run in runs(own[group], bags[group]):
                rows = bags[group][run.start] if pooled[group.start] else len(matrix)
                of_run = matrix.numpy()[:rows, columns[run.start] : columns[run.stop]]
                found.append(sent(of_run, dims[run], kind))
        return np.concatenate(found) if found else np.empty(0, TYPES[kind])

    def _known(self, asked: Question) -> list[TableLookup]:
        """The lookups, all of whose rows are here."""
        unknown = next((number for number in asked.lookups if number not in self.lookups), None)
        if unknown is not None:
            raise bad(f"lookup {unknown} is not answered here; {sorted(self.lookups)} are")
        own = [self.lookups[number] for number in asked.lookups]
        held = np.array([self.held[lookup.table] for lookup in own], np.uint64)
        counts = np.diff(asked.ends)
        # Taken as a number without a sign, a negative id is larger than any table.
        wrong = asked.ids.view(np.uint64) >= np.repeat(held, counts)
        if wrong.any():
            at = int(wrong.argmax())
            table = own[int(np.searchsorted(asked.ends, at, "right")) - 1].table
            raise bad(
                f"row {int(asked.ids[at])} of '{table}' is not in [0, {self.held[table]}), which are here"
            )
        lacking = next((lookup for lookup in own if lookup.weighted and asked.weights is None), None)
        if lacking is not None:
            raise bad(f"ids of '{lacking.table}' have weights, which are missing")
        return own

    def _made(self, lookups: tuple[TableLookup, ...]) -> Lookup:
        # Each has ids of its own, whatever features these are of.
        names = [str(place) for place in range(len(lookups))]
        about = {
            "pooling": lookups[0].pooling,
            "weighted": lookups[0].weighted,
            "parts": [(name, lookup.table) for name, lookup in zip(names, lookups, strict=True)],
        }
        return self.kept.lookup(about, names)


def _offsets(bags: Array, lengths: Array | None) -> torch.Tensor:
    """Where each bag begins, and where the last one ends, int64, as if each lookup had as many bags as the
    one with the most of these ``bags`` int64 [L]: one operator takes all, and the others' last bags are
    empty."""
    most = int(bags.max())
    if (bags == most).all():
        return numbers(len(bags) * most + 1) if lengths is None else offsets_of(torch.from_numpy(lengths))
    every = np.zeros((len(bags), most), np.int64)
    every[np.arange(most) < bags[:, None]] = 1 if lengths is None else lengths
    return offsets_of(torch.from_numpy(every.reshape(-1)))


class HotRows(Rows):
    """Rows of tables that shards hold, those looked up most: copies at the main server."""

    def __init__(self, directory: Path, keep: type[InMemory] = InMemory) -> None:
        super().__init__(directory, None, keep)
        files = {name: directory / own["file"] for name, own in self.content["tables"].items()}
        self.ids = {name: tensors(file)["ids"].numpy() for name, file in files.items()}
        """Of each table the numbers of the rows that are here, int64, ascending."""

    def places(self, table: str, ids: Array) -> Array:
        """Where the rows ``ids`` int64 [n] of ``table`` are among those here, int64 [n]; -1: not here."""
        own = self.ids[table]
        at = np.searchsorted(own, ids)
        at[at == len(own)] = 0
        return np.where(own[at] == ids, at, -1)
