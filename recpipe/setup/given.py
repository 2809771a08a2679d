"""What a caller in Python passes to a run beside its recipe, and what it gets beside the report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recpipe.data.dataset import Dataset


@dataclass(frozen=True)
class Given:
    """What a caller in Python passes to a run. For what is None, the recipe counts."""

    model: nn.Module | None = None
    dataset: Dataset | None = None
    screen: bool = True
    """Whether lines, bars and tables are shown on the terminal."""
    files: bool = True
    """Whether to write recpipe.log and report.html, for a user who looks into the run directory."""
    evaluates: bool = True
    """Whether to evaluate on the held-out part."""
    keeps: bool = False
    """Whether the caller will use the model; it then ends the run by closing ``Outcome.kept``."""


NOTHING = Given()


@dataclass
class Outcome:
    """The result of a run: its ``report`` (the content of report.json, plan or comparison) and, after
    training, the model."""

    report: dict[str, Any]
    model: nn.Module | None = None
    predict: Callable[[Any], torch.Tensor] | None = None
    """Predicts a batch with the model; None if there is no model."""
    checkpoint: Path | None = None
    """The newest checkpoint, which has the same values as ``model``; None if none was written."""
    kept: ExitStack = field(default_factory=ExitStack)
    """Closes the tiers and releases the run directory; empty if the run has done so."""
