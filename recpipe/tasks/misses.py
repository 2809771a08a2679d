"""task=misses: the miss rates of LRU, LFU, a fixed hot set and lookahead at every budget, from a part of the
data; nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from recpipe.access.misses import POLICIES, SHARES, Curve, Followed, MissRates
from recpipe.common.console import log
from recpipe.common.meter import Meter
from recpipe.config.recipe import Recipe
from recpipe.config.task import MissesConfig
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError
from recpipe.report import missed
from recpipe.report.files import ReportFiles
from recpipe.setup.ctx import RunResult, TaskContext
from recpipe.tables.inputs import Inputs

LARGEST = 8
"""Tables that are told one by one, each as if it had a cache of its own: the largest ones."""


class Misses:
    """What caches of every size and policy would miss in the first batches of the training."""

    def run(self, context: TaskContext) -> RunResult:
        """Write misses.json and misses.html, and print the table."""
        run, task = context.joined, context.recipe.task
        assert isinstance(task, MissesConfig)
        told = measured(run.recipe, task, run.dataset, run.unplaced.inputs)
        files = ReportFiles(context.directory)
        files.write_json("misses.json", told)
        files.write("misses.html", lambda page: missed.write(told, page.parent))
        missed.show_table(told, context.directory / "misses.html")
        files.check()
        return RunResult(told)


def measured(cfg: Recipe, task: MissesConfig, dataset: Dataset, inputs: Inputs) -> dict[str, Any]:
    """What caches would miss in the first ``task.batches`` batches of training."""
    size = cfg.data.batch_size
    batches = min(task.batches, dataset.num_batches("train", size))
    if batches < 2:
        raise UserError(
            f"task=misses needs at least 2 batches of data.batch_size={size}, and there are {batches}: "
            "choose a smaller data.batch_size"
        )
    groups = follow(cfg, dataset, inputs, batches)
    log.info("reading %d batches of %s samples", batches, f"{size:,}")
    with Meter() as meter:
        for done, batch in zip(range(1, batches + 1), dataset.batches("train", size), strict=False):
            for number, group in enumerate(groups):
                group.add(inputs.bags(batch, number))
            if meter.due:
                meter.show(done / batches, f"batch {done:,} of {batches:,}")
    if not any(group.together.lru.lookups for group in groups):
        raise UserError(f"the first {batches} batches look nothing up; raise task.batches")
    return told(cfg, inputs, groups)


def follow(cfg: Recipe, dataset: Dataset, inputs: Inputs, batches: int) -> list[Followed]:
    """What is to follow so many batches' lookups in each group, at the recipe's budget and those shown."""
    tables, size = inputs.tables, cfg.data.batch_size
    own = sum(cfg.tiers.slots(tables)) / tables.total_rows
    near = min(missed.SHOWN, key=lambda share: abs(share - own))
    own = near if abs(near - own) < 0.01 * near else own  # slots are whole numbers
    shares = sorted({*missed.SHOWN, *SHARES, own})

    def read() -> Iterator[Any]:
        return dataset.batches("train", size)

    return [Followed(number, inputs, read, batches, shares, LARGEST) for number in range(len(tables.groups))]


def told(cfg: Recipe, inputs: Inputs, groups: Sequence[Followed]) -> dict[str, Any]:
    """What misses.json has, of all groups once they have followed the batches."""
    tables, together = inputs.tables, [group.together for group in groups]
    shares = groups[0].shares
    own = sum(cfg.tiers.slots(tables)) / tables.total_rows
    return {
        "batches": together[0].lru.batches,
        "batch_size": cfg.data.batch_size,
        "learnt_from": together[0].learn,
        "sampled": max(1 << cache.sample.shift for cache in together),
        "rows": tables.total_rows,
        "bytes": tables.total_bytes,
        "budget": {
            "share": min(shares, key=lambda share: abs(share - own)),
            "bytes": cfg.tiers.budget(tables),
        },
        "shares": shares,
        **_curves(together),
        "distinct": round(sum(cache.lru.rows / cache.lru.batches for cache in together), 1),
        "never": [name for group in groups for name in group.never()],
        "windows": _windows(together, [group.group.tables.record_bytes for group in groups]),
        "tables": [table for group in groups for table in _tables(group)],
    }


def _tables(followed: Followed) -> list[dict[str, Any]]:
    """The tables that are told apart."""
    layout, record = followed.group.tables.layout, followed.group.tables.record_bytes
    return [
        {
            "name": layout.tables[table],
            "rows": layout.rows[table],
            "bytes": layout.rows[table] * record,
            **_curves([rates]),
        }
        for table, rates in followed.alone.items()
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
