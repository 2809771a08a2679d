"""``Rows``: the rows that a shard holds, and what it finds for a request."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from recpipe_serve.errors import bad

from recpipe.answers.score import Lookup, PackageError, Tables, offsets_of
from recpipe.errors import UserError
from recpipe_scale_out.lookups import TableLookup, runs
from recpipe_scale_out.sealed import read_shard
from recpipe_scale_out.wire import Wanted

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
        self._operator = lru_cache(KEPT)(self._made)

    def pooled(self, wanted: Sequence[Wanted]) -> NDArray[np.float32]:
        """What these lookups find, run by run, float32 [V] (see ``wire``); ``Refused`` for lookups and ids
        that are not here."""
        own = [self._known(one) for one in wanted]
        found = []
        with torch.inference_mode():
            for run in runs(own, [one.bags for one in wanted]):
                found.append(self._run(tuple(own[run]), wanted[run]).numpy().reshape(-1))
        return np.concatenate(found) if found else np.empty(0, np.float32)

    def _known(self, wanted: Wanted) -> TableLookup:
        lookup = self.lookups.get(wanted.lookup)
        if lookup is None:
            raise bad(f"lookup {wanted.lookup} is not answered here; {sorted(self.lookups)} are")
        held = self.content["tables"][lookup.table]["rows"]
        # Taken as a number without a sign, a negative id is larger than any table.
        wrong = wanted.ids.view(np.uint64) >= held
        if wrong.any():
            row = int(wanted.ids[int(wrong.argmax())])
            raise bad(f"row {row} of '{lookup.table}' is not in [0, {held}), which are here")
        if lookup.weighted and wanted.weights is None:
            raise bad(f"ids of '{lookup.table}' have weights, which are missing")
        return lookup

    def _run(self, lookups: tuple[TableLookup, ...], wanted: Sequence[Wanted]) -> torch.Tensor:
        ids = torch.from_numpy(np.concatenate([one.ids for one in wanted]))
        if not (len(ids) if lookups[0].pooling == "none" else wanted[0].bags):
            return torch.empty(0)
        lengths = [np.ones(one.bags, np.int64) if one.lengths is None else one.lengths for one in wanted]
        offsets = offsets_of(torch.from_numpy(np.concatenate(lengths)))
        weights = None
        if lookups[0].weighted:
            weights = torch.from_numpy(np.concatenate([one.weights for one in wanted]))
        return self._operator(lookups)(ids, offsets, wanted[0].bags, None, weights)

    def _made(self, lookups: tuple[TableLookup, ...]) -> Lookup:
        # Each has ids of its own, whatever features these are of.
        names = [str(place) for place in range(len(lookups))]
        about = {
            "pooling": lookups[0].pooling,
            "weighted": lookups[0].weighted,
            "parts": [(name, lookup.table) for name, lookup in zip(names, lookups, strict=True)],
        }
        return Lookup(about, names, self.tables)
