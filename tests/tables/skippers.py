"""Skippers that leave rows out of updates, and what plain TorchRec trains without these rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.plugin.calls import Owned
from recpipe.plugin.skipper import RowFilter, Skipper
from recpipe.tables.skipping import Skipping
from tests.plugin.samples import ACME
from tests.tables.reference import Kind, Records, trained_plainly

BASE = 5000
"""Number of the group's row 0 among all rows."""
LEAST = 13.0
Rule = Callable[[NDArray[np.int64], torch.Tensor], torch.Tensor]
"""Which of a group's rows stay, by their gradients."""


def small(rows: NDArray[np.int64], gradients: torch.Tensor) -> torch.Tensor:
    """Rows of small gradients are left out, and some others by their number."""
    norms = gradients.norm(dim=1)
    assert not ((norms - LEAST).abs() < 1e-3).any(), "rounding must not decide"
    return (norms >= LEAST) & torch.from_numpy(rows % 7 != 3)


def everything(rows: NDArray[np.int64], gradients: torch.Tensor) -> torch.Tensor:
    """Nothing is left out."""
    return torch.ones(len(rows), dtype=torch.bool)


class Skips(Skipper):
    """By a rule; keeps what it was asked."""

    def __init__(self, rule: Rule = small) -> None:
        self.rule = rule
        self.asked: list[NDArray[np.int64]] = []
        self.kept: list[NDArray[np.int64]] = []

    def update(self, rows: NDArray[np.int64], gradients: torch.Tensor) -> torch.Tensor:
        assert rows.dtype == np.int64
        assert gradients.dtype == torch.float32
        assert len(np.unique(rows)) == len(rows) == len(gradients)
        assert rows.min() >= BASE
        stay = self.rule(rows - BASE, gradients)
        gradients.zero_()  # it has a copy
        self.asked.append(rows - BASE)
        self.kept.append(rows[stay.numpy()] - BASE)
        return stay

    @property
    def never_updated(self) -> NDArray[np.int64]:
        """Rows that were asked about and never kept."""
        return np.setdiff1d(np.concatenate(self.asked), np.concatenate(self.kept))


def filter_of(skipper: Skipper, base: int = BASE) -> RowFilter:
    """What core makes of a skipper for a group of tables."""
    return Skipping(Owned("acme.skipper", ACME, skipper)).of_group(base)


def trained_by_hand(
    kind: Kind, optimizer: str, stream: Sequence[KeyedJaggedTensor], rule: Rule = small
) -> Records:
    """As ``reference.trained_plainly``, with gradients of zero for the rows that do not stay: torch's own
    optimizers then change neither these rows nor their state."""
    tables = kind.tables(optimizer)
    bases = dict(zip(tables.layout.tables, tables.layout.bases.tolist(), strict=False))

    def leave_out(weights: Mapping[str, nn.Parameter], sparse: KeyedJaggedTensor) -> None:
        for table in tables.tables:
            ids = np.unique(torch.cat([sparse[feature].values() for feature in table.features]).numpy())
            gradient = weights[table.name].grad
            assert gradient is not None
            stay = rule(ids + bases[table.name], gradient[torch.from_numpy(ids)])
            gradient[torch.from_numpy(ids)[~stay]] = 0.0

    return trained_plainly(kind, optimizer, stream, leave_out)
