"""``TieredScorer``: scores a package whose large tables are on the SSD, with the bits of all rows in DRAM."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from recpipe_serve import Lookup, LookupCall, Scorer, offsets_of

from recpipe.plugin import UserError
from recpipe_sdm.bags import Bags
from recpipe_sdm.index import numbered
from recpipe_sdm.tables import TieredTables, Tiering, tiered_tables
from recpipe_sdm.tiers import Look


class TieredLookup(Lookup):
    """One lookup, some of whose tables are on the SSD."""

    def __init__(self, found: dict[str, Any], names: list[str], tables: TieredTables) -> None:
        super().__init__(found, names, tables)
        if self.weighted:
            raise UserError(
                "sdm keeps sums of rows that are looked up together, and this model's ids have weights: "
                "serve it without +plugin=sdm"
            )
        own = [table for _, table in found["parts"]]
        self.base = np.array([tables.bases.get(table, -1) for table in own])
        """The number of row 0 of each part's table; -1: its rows are in DRAM."""
        dims = {tables.about[table]["dimension"] for table in own}
        self.width = dims.pop() if len(dims) == 1 and not self.sequence else None
        """How many weights each part's sums have; None: they differ, or rows are not pooled."""
        mean = found["pooling"] == "mean"
        self.numbers = torch.tensor(
            [2 * list(tables.about).index(t) + mean if t in tables.bases else -1 for t in own]
        )
        """A number for each part's table and pooling, -1 for one in DRAM."""


class _Asked(NamedTuple):
    """What one lookup asks for: so many ids, and ``offsets`` of its bags, or ``where`` (see
    ``LookupCall``)."""

    lookup: TieredLookup
    ids: int
    offsets: torch.Tensor
    where: torch.Tensor | None


class _Kept(NamedTuple):
    """The bags of a lookup whose sums may be kept, which of them are, and these sums."""

    bags: Bags
    hit: torch.Tensor
    sums: torch.Tensor


class _Plan(NamedTuple):
    """What the lookups ``calls`` ask for but sums that are kept, and these, where sums are kept: ``kept``, of
    rows of this ``version``. ``look``: at all rows on the SSD."""

    calls: list[LookupCall]
    asked: list[_Asked]
    look: Look
    kept: list[_Kept | None] | None
    version: int


class TieredLookups:
    """Looks up rows of ``tables``, with the bits of all rows in DRAM; one thread does, and calls
    ``ahead``."""

    _next: _Plan | None = None
    """What the batch that was read ahead looks up."""

    def __init__(self, tables: TieredTables) -> None:
        self.tables = tables

    def lookup(self, found: dict[str, Any], features: list[str]) -> TieredLookup:
        """See ``LooksUp``."""
        return TieredLookup(found, features, self.tables)

    def ahead(self, calls: list[LookupCall]) -> None:
        """Begin to read the rows that these lookups will miss, and return. Nothing has to follow."""
        self._next = self._planned(calls)
        with suppress(UserError):  # a row that cannot be read is named when it is scored
            self.tables.tiers.ahead(self._next.look)

    def at_hand(self, calls: list[LookupCall]) -> bool:
        """Whether these lookups, which come next, find all of their rows in DRAM."""
        self._next = plan = self._plan_of(calls)
        return self.tables.tiers.at_hand(plan.look)

    def pooled(self, calls: list[LookupCall]) -> list[torch.Tensor]:
        """What the lookups find; all rows that they miss are read together. ``StoreError`` names a row that
        cannot be read."""
        plan, self._next = self._plan_of(calls), None
        with self.tables.tiers.found(plan.look) as places:
            results, start = [], 0
            for one in plan.asked:
                own = places[start : start + one.ids]
                start += one.ids
                if one.where is None:
                    results.append(one.lookup.pooled(torch.from_numpy(own), one.offsets))
                else:
                    # For small arrays numpy keeps Python's lock, which torch's operators leave to a server's
                    # other thread for a while.
                    results.append(one.lookup.pooled(torch.from_numpy(own[one.where.numpy()])))
            if plan.kept is not None:
                for one, known, result in zip(plan.asked, plan.kept, results, strict=True):
                    if known is not None:
                        self._keep(one.lookup, known, result)
        return results

    def _plan_of(self, calls: list[LookupCall]) -> _Plan:
        """The plan that was made ahead, or a new one."""
        plan = self._next
        if plan is None or plan.calls is not calls:
            return self._planned(calls)
        if plan.kept is not None and plan.version != self.tables.version:
            return self._planned(calls)
        return plan

    def _planned(self, calls: list[LookupCall]) -> _Plan:
        kept: list[_Kept | None] | None = None if self.tables.bags is None else []
        version = 0 if kept is None else self.tables.version
        asked, rows, lookups = [], [], 0
        for lookup, ids, offsets, samples, where, _ in calls:
            assert isinstance(lookup, TieredLookup)
            if where is None:
                ids, offsets = lookup.arranged(ids, offsets, samples)
            if kept is not None:
                kept.append(None)
                if self.tables.bags is not None and lookup.width is not None and where is None:
                    each = (len(offsets) - 1) // len(lookup.numbers)
                    bags = self.tables.bags.bags(lookup.numbers.repeat_interleave(each), ids, offsets)
                    with self.tables.tiers.shared.using:
                        known = kept[-1] = _Kept(bags, *self.tables.bags.sums(bags, self.tables.version))
                    lengths = offsets.diff()
                    others = torch.ones(len(lengths), dtype=torch.bool)
                    others[known.bags.at[known.hit]] = False
                    ids = ids[others.repeat_interleave(lengths)]
                    offsets = offsets_of(lengths * others)
            # The number of each of these ids over all tiers, or ``elsewhere`` of its row if it is in DRAM.
            places = lookup.rows_of(ids, offsets).numpy()
            each = samples if where is None else 1
            own, on_ssd = numbered(places, offsets.numpy(), each, lookup.base)
            rows.append(own)
            lookups += on_ssd
            asked.append(_Asked(lookup, len(own), offsets, where))
        look = self.tables.tiers.look(rows[0] if len(rows) == 1 else np.concatenate(rows), lookups)
        return _Plan(calls, asked, look, kept, version)

    def _keep(self, lookup: TieredLookup, known: _Kept, result: torch.Tensor) -> None:
        """Put the sums that were kept into ``result``, and keep the others."""
        assert self.tables.bags is not None
        assert lookup.width is not None
        samples = len(result)
        view = result.view(samples, -1, lookup.width)
        part, sample = known.bags.at // samples, known.bags.at % samples
        hit, new = known.hit, ~known.hit
        view[sample[hit], part[hit]] = known.sums[:, : lookup.width]
        others = Bags(*(each[new] for each in known.bags))
        self.tables.bags.keep(others, view[sample[new], part[new]], self.tables.version)
        self.tables.bags.asked += len(hit)
        self.tables.bags.found += int(hit.count_nonzero())

    @property
    def dram_bytes(self) -> int:
        """Rows in DRAM, indexes, sums of bags, and what reading takes."""
        kept = 0 if self.tables.bags is None else self.tables.bags.nbytes
        return self.tables.whole_bytes + kept + self.tables.tiers.dram_bytes

    def close(self) -> None:
        """Wait for reads, and remove the rows from the SSD: the package has them. Calling it again does
        nothing."""
        self.tables.tiers.close()


class TieredScorer(TieredLookups, Scorer):
    """A ``Scorer``, with the same bits, of a package whose tables are kept as ``how`` says.

    ``earlier``: another package's, whose rows become this one's while it scores; None: new tables are made.
    """

    tables: TieredTables

    def __init__(self, directory: Path, how: Tiering, earlier: TieredScorer | None = None) -> None:
        self.how, self._earlier = how, earlier
        Scorer.__init__(self, directory)

    def make_tables(self) -> TieredTables:
        """Tables in DRAM and on the SSD."""
        earlier, self._earlier = self._earlier, None
        if earlier is None:
            return tiered_tables(self.directory, self.manifest["tables"], self.how)
        if "maps" in self.manifest:
            raise UserError(
                f"{self.directory}: its rows are of other ids than those that are served (rows: dynamic), "
                "and are put in their places one after the other: restart the server"
            )
        for what in ("dense", "sparse", "lookups", "outputs", "sequences"):
            if self.manifest.get(what) != earlier.manifest.get(what):
                raise UserError(
                    f"{self.directory}: its manifest's '{what}' is not as in the package that is served; "
                    "restart the server"
                )
        earlier.tables.become(self.directory, self.manifest["tables"])
        return earlier.tables

    def lookup(self, found: dict[str, Any], features: list[str] | None = None) -> TieredLookup:
        """See ``Scorer``."""
        names = [feature["name"] for feature in self.manifest["sparse"]]
        return TieredLookup(found, names if features is None else features, self.tables)
