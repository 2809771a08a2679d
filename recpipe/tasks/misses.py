"""task=misses: the miss rates of LRU, LFU, a fixed hot set and lookahead at every budget, from a part of the
data; nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recpipe.common.console import Meter, log
from recpipe.config.recipe import Recipe
from recpipe.config.task import MissesConfig
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError
from recpipe.perf.misses import POLICIES, SHARES, Curve, MissRates, Sample, most_popular
from recpipe.report import missed
from recpipe.report.files import ReportFiles
from recpipe.tables.groups import Group
from recpipe.tables.inputs import Inputs
from recpipe.tables.tiers.placement import IndexBags

LARGEST = 8
"""Tables that are told one by one, each as if it had a cache of its own: the largest ones."""


def tell_misses(
    cfg: Recipe, task: MissesConfig, dataset: Dataset, inputs: Inputs, run_dir: Path
) -> dict[str, Any]:
    """Write misses.json and misses.html, and print the table; returns what misses.json has."""
    told = measured(cfg, task, dataset, inputs)
    files = ReportFiles(run_dir)
    files.write_json("misses.json", told)
    files.write("misses.html", lambda page: missed.write(told, page.parent))
    missed.show_table(told, run_dir / "misses.html")
    files.check()
    return told


def measured(cfg: Recipe, task: MissesConfig, dataset: Dataset, inputs: Inputs) -> dict[str, Any]:
    """What caches would miss in the first ``task.batches`` batches of training."""
    size, tables = cfg.data.batch_size, inputs.tables
    batches = min(task.batches, dataset.num_batches("train", size))
    if batches < 2:
        raise UserError(
            f"task=misses needs at least 2 batches of data.batch_size={size}, and there are {batches}: "
            "choose a smaller data.batch_size"
        )
    slots = cfg.tiers.slots(tables)
    own = sum(slots) / tables.total_rows
    near = min(missed.SHOWN, key=lambda share: abs(share - own))
    own = near if abs(near - own) < 0.01 * near else own  # slots are whole numbers
    shares = sorted({*missed.SHOWN, *SHARES, own})
    groups = [_Followed.of(number, inputs, dataset, size, shares, batches) for number in range(len(slots))]
    log.info("reading %d batches of %s samples", batches, f"{size:,}")
    with Meter() as meter:
        for done, batch in zip(range(1, batches + 1), dataset.batches("train", size), strict=False):
            for group in groups:
                group.add(inputs.bags(batch, group.number))
            if meter.due:
                meter.show(done / batches, f"batch {done:,} of {batches:,}")
    if not any(group.together.lru.lookups for group in groups):
        raise UserError(f"the first {batches} batches look nothing up; raise task.batches")
    together = [group.together for group in groups]
    return {
        "batches": batches,
        "batch_size": size,
        "learnt_from": groups[0].together.learn,
        "sampled": max(1 << group.together.sample.shift for group in groups),
        "rows": tables.total_rows,
        "bytes": tables.total_bytes,
        "budget": {"share": own, "bytes": cfg.tiers.budget(tables)},
        "shares": shares,
        **_curves(together),
        "distinct": round(sum(cache.lru.rows / cache.lru.batches for cache in together), 1),
        "never": [name for group in groups for name in group.never()],
        "windows": _windows(together, [group.group.tables.record_bytes for group in groups]),
        "tables": [told for group in groups for told in group.tables()],
    }


class _Followed:
    """A group of tables as they share one cache, and its largest tables each alone."""

    def __init__(self, number: int, group: Group, together: MissRates, alone: dict[int, MissRates]) -> None:
        self.number, self.group, self.together, self.alone = number, group, together, alone
        self._seen = np.zeros(len(group.tables.layout.tables), bool)
        """For each table, whether a batch has looked it up."""

    @classmethod
    def of(
        cls, number: int, inputs: Inputs, dataset: Dataset, size: int, shares: Sequence[float], batches: int
    ) -> _Followed:
        """``shares``: of rows that have a slot."""
        group = inputs.tables.groups[number]
        layout = group.tables.layout
        popular = most_popular(
            layout.total_rows,
            lambda: (inputs.bags(batch, number).indices for batch in dataset.batches("train", size)),
        )

        def rates(first: int, rows: int) -> MissRates:
            own = popular[(popular >= first) & (popular < first + rows)] - first
            return MissRates(Sample(rows, own), [share * rows for share in shares], batches // 2)

        largest = sorted(range(len(layout.rows)), key=lambda table: -layout.rows[table])[:LARGEST]
        alone = {table: rates(int(layout.bases[table]), layout.rows[table]) for table in sorted(largest)}
        return cls(number, group, rates(0, layout.total_rows), alone)

    def add(self, bags: IndexBags) -> None:
        """Note a batch's lookups."""
        self.together.add(bags.indices)
        tables = self.group.tables
        ends = bags.offsets[np.arange(len(tables.features) + 1) * bags.batch_size]
        self._seen[tables.table_of[np.flatnonzero(np.diff(ends))]] = True
        for table, rates in self.alone.items():
            features = np.flatnonzero(tables.table_of == table)
            found = [bags.indices[ends[feature] : ends[feature + 1]] for feature in features]
            rates.add(np.concatenate(found) - tables.layout.bases[table])

    def never(self) -> list[str]:
        """Names of the tables that no batch has looked up."""
        return [self.group.tables.layout.tables[table] for table in np.flatnonzero(~self._seen)]

    def tables(self) -> list[dict[str, Any]]:
        """The tables that are told apart."""
        layout, record = self.group.tables.layout, self.group.tables.record_bytes
        return [
            {
                "name": layout.tables[table],
                "rows": layout.rows[table],
                "bytes": layout.rows[table] * record,
                **_curves([rates]),
            }
            for table, rates in self.alone.items()
        ]


def _curves(caches: Sequence[MissRates]) -> dict[str, Any]:
    """Caches that have the same share of their rows, taken together: for each policy and share the share of
    lookups that ``missed``, and the rows ``fetched`` by a batch on average. None for LRU where a
    batch has more rows than there are slots."""
    lookups = sum(cache.lru.lookups for cache in caches)
    found: dict[str, Any] = {"lookups": round(lookups)}
    for name in POLICIES:
        curves: list[Curve] = [getattr(cache, name) for cache in caches]
        hits = sum(curve.hits for curve in curves) / max(1.0, sum(curve.lookups for curve in curves))
        found[name] = {
            "missed": _rounded(1 - hits),
            "fetched": _rounded(sum(curve.fetched() for curve in curves)),
        }
    # What LRU keeps of a batch that does not fit depends on the order of its ids.
    fits = np.all([cache.slots >= cache.lru.rows / max(1, cache.lru.batches) for cache in caches], axis=0)
    for key, values in found["lru"].items():
        found["lru"][key] = [v if fit else None for v, fit in zip(values, fits.tolist(), strict=True)]
    found["che"] = _rounded(sum(cache.che() * cache.lru.lookups for cache in caches) / max(1.0, lookups))
    return found


def _windows(caches: Sequence[MissRates], records: Sequence[int]) -> list[dict[str, Any]]:
    """Lookahead over 1, 2, 4 .. batches: the bytes of their rows, and the share of lookups whose row none of
    so many batches before had."""
    rows, missed = zip(*(cache.windows() for cache in caches), strict=True)
    held = sum(each * record for each, record in zip(rows, records, strict=True))
    share = sum(missed) / max(1.0, sum(cache.lru.lookups for cache in caches))
    sizes = [1 << power for power in range(len(held).bit_length())]
    return [
        {"batches": size, "bytes": round(held[size - 1]), "missed": float(f"{share[size - 1]:.4g}")}
        for size in sizes
        if size <= len(held)
    ]


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
