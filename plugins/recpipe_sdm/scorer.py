"""``TieredScorer``: scores a package whose large tables are on the SSD, with the bits of all rows in DRAM."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from recpipe.kit import Lookup, LookupCall, Scorer, compiled, offsets_of
from recpipe.plugin import RowIds, UserError
from recpipe_sdm.index import Places
from recpipe_sdm.looks import Look
from recpipe_sdm.pooled import Bags
from recpipe_sdm.tables import TieredTables, Tiering, tiered_tables


class TieredLookup(Lookup):
    """One lookup, some of whose tables are on the SSD."""

    def __init__(self, found: dict[str, Any], names: list[str], tables: TieredTables) -> None:
        super().__init__(found, names, tables)
        own = [table for _, table in found["parts"]]
        self.base = np.array([tables.bases.get(table, -1) for table in own])
        """Of each part the number of its table's row 0; -1: its rows are in DRAM."""
        dims = {tables.about[table]["dimension"] for table in own}
        self.width = dims.pop() if len(dims) == 1 and not self.sequence else None
        """Of each part's sums; None: they differ, or rows are not pooled."""
        mean = found["pooling"] == "mean"
        self.numbers = torch.tensor(
            [2 * list(tables.about).index(t) + mean if t in tables.bases else -1 for t in own]
        )
        """Of each part: a number for its table and pooling, -1 for one in DRAM."""

    def asked(self, ids: torch.Tensor, offsets: torch.Tensor) -> _Asked:
        """What these ids (arranged) ask for."""
        if self.base.max() < 0:
            nothing = np.empty(0, np.int64)
            return _Asked(self, offsets, self.rows_of(ids, offsets), nothing, nothing)
        rows, at = _on_ssd(ids.numpy(), offsets.numpy(), self.base)
        if self.base.min() >= 0:
            return _Asked(self, offsets, None, None, rows)
        return _Asked(self, offsets, self.rows_of(ids, offsets), at, rows)


@compiled
def _on_ssd(ids: RowIds, offsets: RowIds, base: RowIds) -> tuple[RowIds, RowIds]:
    """The numbers over all tiers of those ``ids`` whose table is on the SSD, and where among ``ids`` they
    are. ``offsets``: of the bags of all parts."""
    rows, at, count = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64), 0
    samples = (len(offsets) - 1) // len(base)
    for part in range(len(base)):
        if base[part] >= 0:
            for i in range(offsets[part * samples], offsets[(part + 1) * samples]):
                rows[count], at[count] = ids[i] + base[part], i
                count += 1
    return rows[:count], at[:count]


class _Asked(NamedTuple):
    """What one lookup asks for. ``here``: of each id its row, if its table is in DRAM; ``at``: those whose
    table is on the SSD; both None: the tables of all are. ``rows``: their numbers over all tiers."""

    lookup: TieredLookup
    offsets: torch.Tensor
    here: torch.Tensor | None
    at: RowIds | None
    rows: RowIds

    def pooled(self, places: Places) -> torch.Tensor:
        """The lookup's result, where ``rows`` have these places."""
        if self.at is None or self.here is None:
            # FBGEMM takes numbers of either type, but one for both. For small arrays numpy keeps Python's
            # lock, which torch's operators leave to a server's other thread for a while.
            offsets = torch.from_numpy(self.offsets.numpy().astype(np.int32))
            return self.lookup.pooled(torch.from_numpy(places), offsets)
        if not len(self.at):
            return self.lookup.pooled(self.here, self.offsets)
        found = self.here.clone()
        found.numpy()[self.at] = places
        return self.lookup.pooled(found, self.offsets)


class _Kept(NamedTuple):
    """The bags of a lookup whose sums may be kept, which of them are, and these sums."""

    bags: Bags
    hit: torch.Tensor
    sums: torch.Tensor


class _Plan(NamedTuple):
    """What the lookups ``calls`` ask for but sums that are kept, and these. ``look``: at all rows on the
    SSD. ``version``: of the rows when it was made."""

    calls: list[LookupCall]
    version: int
    asked: list[_Asked]
    kept: list[_Kept | None]
    look: Look

    def is_of(self, calls: list[LookupCall], version: int) -> bool:
        """Whether it is for these lookups, and for rows of this version, where sums are kept."""
        if any(known is not None for known in self.kept) and version != self.version:
            return False
        return self.calls is calls


class TieredScorer(Scorer):
    """As ``Scorer``, with the same bits, for a package whose tables are kept as ``how`` says.

    One thread scores and calls ``ahead``. ``earlier``: another package's, whose rows
    become this one's while it scores; None: new tables are made.
    """

    tables: TieredTables

    def __init__(self, directory: Path, how: Tiering, earlier: TieredScorer | None = None) -> None:
        self.how, self._earlier = how, earlier
        self._next: _Plan | None = None
        """Of the batch that was read ahead."""
        super().__init__(directory)

    def make_tables(self) -> TieredTables:
        """Tables in DRAM and on the SSD."""
        earlier, self._earlier = self._earlier, None
        if earlier is None:
            return tiered_tables(self.directory, self.manifest["tables"], self.how)
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

    def ahead(self, calls: list[LookupCall]) -> None:
        """Begin to read the rows that these lookups will miss, and return. Nothing has to follow."""
        self._next = self._planned(calls)
        with suppress(UserError):  # a row that cannot be read is named when it is scored
            self.tables.tiers.ahead(self._next.look)

    def at_hand(self, calls: list[LookupCall]) -> bool:
        """Whether these lookups, which come next, find all of their rows in DRAM."""
        if self._next is None or not self._next.is_of(calls, self.tables.version):
            self._next = self._planned(calls)
        return self.tables.tiers.at_hand(self._next.look)

    def pooled(self, calls: list[LookupCall]) -> list[torch.Tensor]:
        """What the lookups find; all rows that they miss are read together. ``StoreError`` names a row that
        cannot be read."""
        plan, self._next = self._next, None
        if plan is None or not plan.is_of(calls, self.tables.version):
            plan = self._planned(calls)
        with self.tables.tiers.found(plan.look) as places:
            results, start = [], 0
            for one in plan.asked:
                end = start + len(one.rows)
                results.append(one.pooled(places[start:end]))
                start = end
            for one, known, result in zip(plan.asked, plan.kept, results, strict=True):
                if known is not None:
                    self._keep(one.lookup, known, result)
        return results

    def _planned(self, calls: list[LookupCall]) -> _Plan:
        version, asked, rows, kept = self.tables.version, [], [], []
        for lookup, ids, offsets, samples in calls:
            assert isinstance(lookup, TieredLookup)
            ids, offsets = lookup.arranged(ids, offsets, samples)
            known = self._known(lookup, ids, offsets)
            if known is not None:
                lengths = offsets.diff()
                others = torch.ones(len(lengths), dtype=torch.bool)
                others[known.bags.at[known.hit]] = False
                ids = ids[others.repeat_interleave(lengths)]
                offsets = offsets_of(lengths * others)
            asked.append(lookup.asked(ids, offsets))
            rows.append(asked[-1].rows)
            kept.append(known)
        filled = [own for own in rows if len(own)]
        look = self.tables.tiers.look(filled[0] if len(filled) == 1 else np.concatenate(rows))
        return _Plan(calls, version, asked, kept, look)

    def _known(self, lookup: TieredLookup, ids: torch.Tensor, offsets: torch.Tensor) -> _Kept | None:
        if self.tables.bags is None or lookup.width is None:
            return None
        tables = lookup.numbers.repeat_interleave((len(offsets) - 1) // len(lookup.numbers))
        bags = self.tables.bags.bags(tables, ids, offsets)
        with self.tables.tiers.shared.using:
            return _Kept(bags, *self.tables.bags.sums(bags, self.tables.version))

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
