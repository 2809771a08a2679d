"""Rows with small gradients are not updated: what does it cost, and how many updates does it save?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recpipe.plugin import (
    Context,
    Contribution,
    Figure,
    Invariant,
    Plugin,
    RowIds,
    RunFigures,
    Skipper,
    UserError,
)

if TYPE_CHECKING:
    import torch


class SkipSmallGradients(Plugin):
    """Does not update rows whose gradients are small."""

    api = (2, 0)
    alters = frozenset({Invariant.EXACT_GRADIENT})

    def __init__(self, *, least: float) -> None:
        if not least >= 0:
            raise UserError(f"plugins.skip_small.least={least}: must be at least 0, for example 1e-4")
        self.least = least
        if least == 0:
            self.alters = frozenset()

    def contribute(self, ctx: Context) -> Contribution:
        skipper = SkipSmall(self.least)
        return Contribution(skipper=skipper if self.least else None, report=[skipper.figures])


class SkipSmall(Skipper):
    """Leaves rows out by the norm of their gradients, and counts."""

    def __init__(self, least: float) -> None:
        self.least = least
        self.rows = self.skipped = 0

    def update(self, rows: RowIds, gradients: torch.Tensor) -> torch.Tensor:
        stay: torch.Tensor = gradients.norm(dim=1) >= self.least
        self.rows += len(rows)
        self.skipped += len(rows) - int(stay.sum())
        return stay

    def figures(self, run: RunFigures) -> dict[str, Figure]:
        return {"row_updates": self.rows, "skipped_share": self.skipped / max(1, self.rows)}
