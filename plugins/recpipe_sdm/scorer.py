"""``TieredScorer``: scores a package whose large tables are on the SSD, with the bits of all rows in DRAM."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from recpipe.kit import Lookup, LookupCall, Scorer, offsets_of
from recpipe.plugin import RowIds, UserError
from recpipe_sdm.pooled import Bags
from recpipe_sdm.rows import found
from recpipe_sdm.tables import TieredTables, Tiering, tiered_tables


class TieredLookup(Lookup):
    """One lookup, some of whose tables are on the SSD."""

    def __init__(self, found: dict[str, Any], names: list[str], tables: TieredTables) -> None:
        super().__init__(found, names, tables)
        own = [table for _, table in found["parts"]]
        groups = [tables.group_of(table) for table in own]
        bases = [tables.groups[g].base[name] if g >= 0 else 0 for name, g in zip(own, groups, strict=True)]
        self.group, self.base = np.array(groups), np.array(bases)
        """Of each part: its table's group, -1 for one in DRAM, and the number of its row 0 there."""
        self.only = groups[0] if len(set(groups)) == 1 else None
        """The group of all parts, if they have one."""
        dims = {tables.about[table]["dimension"] for table in own}
        self.width = dims.pop() if len(dims) == 1 and not self.sequence else None
        """Of each part's sums; None: they differ, or rows are not pooled."""
        mean = found["pooling"] == "mean"
        self.numbers = torch.tensor(
            [
                2 * list(tables.about).index(t) + mean if g >= 0 else -1
                for t, g in zip(own, groups, strict=True)
            ]
        )
        """Of each part: a number for its table and pooling, -1 for one in DRAM."""

    def wanted(self, ids: torch.Tensor, offsets: torch.Tensor, groups: int) -> Wanted:
        """For each group which of the ids (arranged) are of its tables, and their rows' numbers there."""
        nothing: RowIds = np.empty(0, np.int64)
        found: Wanted = [(nothing, nothing)] * groups
        if self.only == -1:
            return found
        counts = np.diff(offsets.numpy()[:: (len(offsets) - 1) // len(self.group)])
        rows = ids.numpy() + np.repeat(self.base, counts)
        if self.only is not None:
            found[self.only] = (slice(None), rows)
            return found
        group = np.repeat(self.group, counts)
        for index in range(groups):
            at = np.flatnonzero(group == index)
            found[index] = (at, rows[at])
        return found


Wanted = list[tuple[RowIds | slice, RowIds]]


class _Asked(NamedTuple):
    """What one lookup asks for: its ids arranged, their offsets, and of each group what ``wanted`` says."""

    lookup: TieredLookup
    ids: torch.Tensor
    offsets: torch.Tensor
    wanted: Wanted


class _Kept(NamedTuple):
    """The bags of a lookup whose sums may be kept, which of them are, and these sums."""

    bags: Bags
    hit: torch.Tensor
    sums: torch.Tensor


class TieredScorer(Scorer):
    """As ``Scorer``, with the same bits, for a package whose tables are kept as ``how`` says.

    One thread scores, another one may call ``ahead`` meanwhile. ``earlier``: another package's, whose rows
    become this one's while it scores; None: new tables are made.
    """

    tables: TieredTables

    def __init__(self, directory: Path, how: Tiering, earlier: TieredScorer | None = None) -> None:
        self.how, self._earlier = how, earlier
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
        """Read the rows that these lookups will miss. Nothing has to follow."""
        asked, _ = self._asked(calls)
        for group, rows in zip(self.tables.groups, self._rows(asked), strict=True):
            with suppress(UserError):  # a row that cannot be read is named when it is scored
                group.tier.ahead(rows)

    def pooled(self, calls: list[LookupCall]) -> list[torch.Tensor]:
        """What the lookups find; all rows that they miss are read together. ``StoreError`` names a row that
        cannot be read."""
        asked, kept = self._asked(calls)
        tiers = [group.tier for group in self.tables.groups]
        with found(tiers, self._rows(asked), self.tables.using) as places:
            parts = [
                torch.split(own, [len(one.wanted[index][1]) for one in asked])
                for index, own in enumerate(places)
            ]
            results = [self._pooled(one, [own[n] for own in parts]) for n, one in enumerate(asked)]
            for one, known, result in zip(asked, kept, results, strict=True):
                if known is not None:
                    self._keep(one.lookup, known, result)
        return results

    def _asked(self, calls: list[LookupCall]) -> tuple[list[_Asked], list[_Kept | None]]:
        """What the lookups ask for but sums that are kept, and these."""
        asked, kept = [], []
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
            wanted = lookup.wanted(ids, offsets, len(self.tables.groups))
            asked.append(_Asked(lookup, ids, offsets, wanted))
            kept.append(known)
        return asked, kept

    def _known(self, lookup: TieredLookup, ids: torch.Tensor, offsets: torch.Tensor) -> _Kept | None:
        if self.tables.bags is None or lookup.width is None:
            return None
        tables = lookup.numbers.repeat_interleave((len(offsets) - 1) // len(lookup.numbers))
        bags = self.tables.bags.bags(tables, ids, offsets)
        with self.tables.using:
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

    def _rows(self, asked: list[_Asked]) -> list[RowIds]:
        """For each group the rows that are asked for, int64 [N]."""
        groups = range(len(self.tables.groups))
        return [np.concatenate([one.wanted[index][1] for one in asked]) for index in groups]

    def _pooled(self, asked: _Asked, places: list[torch.Tensor]) -> torch.Tensor:
        lookup = asked.lookup
        if lookup.only is not None and lookup.only >= 0:
            return lookup.pooled(places[lookup.only], asked.offsets)
        rows = lookup.rows_of(asked.ids, asked.offsets)
        if lookup.only is None:
            rows = rows.clone()
            for (here, _), own in zip(asked.wanted, places, strict=True):
                rows[torch.from_numpy(here)] = own
        return lookup.pooled(rows, asked.offsets)

    @property
    def dram_bytes(self) -> int:
        """Rows in DRAM, indexes, sums of bags, and what reading takes."""
        kept = 0 if self.tables.bags is None else self.tables.bags.nbytes
        return self.tables.whole_bytes + kept + sum(group.tier.dram_bytes for group in self.tables.groups)

    def close(self) -> None:
        """Wait for reads, and remove the rows from the SSD: the package has them. Calling it again does
        nothing."""
        for group in self.tables.groups:
            group.tier.close()
