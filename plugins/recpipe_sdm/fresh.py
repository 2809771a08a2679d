"""A package on the SSD that follows deltas: ``recpipe serve PACKAGE +plugin=sdm follow=DIRECTORY``.

Its rows on the SSD are of one version. Those of the next one are put beside those in DRAM, and between two
batches one exchange of the index lets lookups find them there, while the other scorer, with the next
version's dense part, ids, and rows of whole tables, begins to answer. So no answer is of two versions. Then
the rows are written to the SSD, into the blocks that have some, and leave DRAM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from recpipe_serve.fresh.versions import Changing, Step, Versions

from recpipe.plugin import UserError
from recpipe_sdm.scorer import TieredLookups, TieredScorer
from recpipe_sdm.tables import TieredTables, Tiering, tiered_tables

Rows = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class FreshTieredScorer(TieredScorer, Changing):
    """One of the two scorers; ``tables``: the other one's, None: new ones are made."""

    def __init__(self, directory: Path, how: Tiering, tables: TieredTables | None = None) -> None:
        self._others = tables
        super().__init__(directory, how)
        self.begin()

    def make_tables(self) -> TieredTables:
        """The other scorer's tables, but for those that are in DRAM as a whole."""
        if self._others is not None:
            return self._others.twin()
        return tiered_tables(self.directory, self.manifest["tables"], self.how)

    def rows_of_table(self, name: str) -> torch.Tensor | None:
        """See ``Changing``."""
        return None if name in self.tables.bases else super().rows_of_table(name)


@dataclass
class TieredVersions(Versions):
    """The versions of a package whose tables are kept as ``how`` says."""

    scores_before = False
    how: Tiering | None = None

    def made_scorers(self) -> Sequence[Changing]:
        """Two, with one store."""
        assert self.how is not None
        self.first = FreshTieredScorer(self.directory, self.how)
        self.tables = self.first.tables
        return [self.first, FreshTieredScorer(self.directory, self.how, self.tables)]

    def move(self, place: int) -> None:
        """Bring the waiting scorer to the version at ``place``, and its rows beside those that answer."""
        tiers = self.tables.tiers
        tiers.settle()  # should the disk have failed before
        tiers.unstage()
        super().move(place)
        if place != self.served:
            tiers.stage(self.tables.newer(changed_by(self.path(self.served, place))))

    def before(self, step: Step) -> Step:
        """What undoes ``step``; rows on the SSD are those of the version that answers."""
        back = super().before(step)
        since = changed_by(self.path(self.served, len(self.kept) - 1))
        rows = dict(back.rows)
        for group in self.tables.groups:
            for name, base in group.base.items():
                if name in step.rows:
                    ids = step.rows[name][0]
                    held = torch.from_numpy(group.tier.values_of(ids.numpy() + base))
                    rows[name] = ids, with_changed(ids, held, since.get(name))
        return Step(rows, back.maps, back.dense)

    def swap(self) -> None:
        """See ``Versions``; no batch may be scored meanwhile."""
        super().swap()
        self.tables.tiers.swap()

    def settle(self) -> int:
        """Write what has changed to the SSD."""
        return self.tables.tiers.settle()


def changed_by(steps: Sequence[Step]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What all ``steps`` change, one after the other: by table ids int64 [n], ascending, and rows."""
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for step in steps:
        for name, (ids, rows) in step.rows.items():
            if name in found:
                before, held = found[name]
                stay = ~torch.isin(before, ids)
                ids, rows = torch.cat((before[stay], ids)), torch.cat((held[stay], rows))
                order = ids.argsort()
                ids, rows = ids[order], rows[order]
            found[name] = ids, rows
    return found


def with_changed(
    ids: torch.Tensor, rows: torch.Tensor, changed: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """``rows`` of ``ids``, those of ``changed`` ids by their rows there."""
    if changed is not None:
        own, newer = changed
        at = torch.searchsorted(own, ids).clamp_(max=len(own) - 1)
        known = own[at] == ids
        rows[known] = newer[at[known]]
    return rows


def require_one_base(made: TieredLookups | None) -> None:
    """``UserError`` if there is a package already: its rows cannot become another's while they follow."""
    if made is not None:
        raise UserError(
            "+plugin=sdm with follow= serves the package that it began with and the deltas after it: start "
            "the server again to load another one"
        )
