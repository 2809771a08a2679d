"""How skewed are the lookups? The share that the most popular rows of each table take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from recpipe import Context, Contribution, Figure, Link, Plugin, RunFigures, TableInfo, UserError

if TYPE_CHECKING:
    import torch

    from recpipe.plugin import Batch


class Hello(Plugin):
    """Reports which share of the lookups the most popular rows take (changes nothing)."""

    api = (2, 0)

    def __init__(self, *, top: float = 0.01) -> None:
        if not 0 < top <= 1:
            raise UserError(f"plugins.hello.top={top}: must be in (0, 1], for example 0.01")
        self.top = top

    def contribute(self, ctx: Context) -> Contribution:
        counter = LookupCounter(ctx.tables, self.top)
        return Contribution(step=[Link(counter.observe)], report=[counter.figures])


class LookupCounter:
    """Counts how often each feature looks up each row; int64 [rows], made when it is first seen."""

    def __init__(self, tables: Mapping[str, TableInfo], top: float) -> None:
        self.rows = {f: info.rows for name, info in tables.items() for f in info.features or (name,)}
        """How many rows the table of each feature has."""
        self.top = top
        self.counts: dict[str, torch.Tensor] = {}

    @contextmanager
    def observe(self, batch: Batch) -> Iterator[None]:
        """Count the ids of ``batch`` once its optimizer step is done."""
        yield
        for name, bags in batch.sparse.to_dict().items():
            ids = bags.values().long()
            if name not in self.counts:
                self.counts[name] = ids.new_zeros(self.rows[name])
            self.counts[name].scatter_add_(0, ids, ids.new_ones(len(ids)))

    def figures(self, run: RunFigures) -> dict[str, Figure]:
        """Over all tables: distinct rows, and the share of the lookups that the top rows take."""
        popular = sum(int(c.topk(max(1, int(len(c) * self.top))).values.sum()) for c in self.counts.values())
        return {
            "distinct_rows": sum(int((c > 0).sum()) for c in self.counts.values()),
            "top_share": popular / max(1, run.lookups),
        }
