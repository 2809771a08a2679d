"""``Rows``: the rows that a shard holds, and what it finds for a request."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from recpipe_serve.errors import bad

from recpipe.answers.score import Lookup, PackageError, Tables, numbers, offsets_of
from recpipe.errors import UserError
from recpipe_scale_out.lookups import TableLookup, runs
from recpipe_scale_out.sealed import read_shard
from recpipe_scale_out.wire import Question

KEPT = 4096
"""Sets of lookups whose operator is kept."""


class Rows:
    """The tables in the shard's ``directory``, checked, in memory: the files themselves, mapped, so that
    processes share them. ``UserError`` if they cannot be used."""

    def __init__(self, directory: Path, trust: Path | None = None) -> None:
        self.content = read_shard(directory, trust)
        try:
            self.tables = Tables(directory, {n: {**own} for n, own in self.content["tables"].items()}, True)
        except PackageError as fault:
            raise UserError(str(fault)) from fault
        self.lookups = {
            own["number"]: TableLookup(own["table"], own["pooling"], own["weighted"])
            for own in self.content["lookups"]
        }
        self.held = {name: own["rows"] for name, own in self.content["tables"].items()}
        self._operator = lru_cache(KEPT)(self._made)

    def pooled(self, asked: Question) -> NDArray[np.float32]:
        """What these lookups find, run by run, float32 [V] (see ``wire``); ``Refused`` for lookups and ids
        that are not here."""
        own = self._known(asked)
        ends, bag_ends, found = asked.ends.tolist(), asked.bag_ends.tolist(), []
        with torch.inference_mode():
            ids = torch.from_numpy(asked.ids)
            weights = None if asked.weights is None else torch.from_numpy(asked.weights)
            for run in runs(own, asked.bags.tolist()):
                low, high = ends[run.start], ends[run.stop]
                first, last = bag_ends[run.start], bag_ends[run.stop]
                if low == high if own[run.start].pooling == "none" else first == last:
                    continue
                if asked.lengths is None:
                    offsets = numbers(last - first + 1)
                else:
                    offsets = offsets_of(torch.from_numpy(asked.lengths[first:last]))
                given = weights[low:high] if weights is not None and own[run.start].weighted else None
                operator, bags = self._operator(tuple(own[run])), (last - first) // (run.stop - run.start)
                found.append(operator(ids[low:high], offsets, bags, None, given).numpy().reshape(-1))
        return np.concatenate(found) if found else np.empty(0, np.float32)

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
        return Lookup(about, names, self.tables)
