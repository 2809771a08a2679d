"""What a caller in Python brings to a run beside its recipe, and what it takes away beside the report."""

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
    """Everything else is in the recipe; what is None is what the recipe says."""

    model: nn.Module | None = None
    dataset: Dataset | None = None
    screen: bool = True
    """Whether lines, bars and tables go to the terminal."""
    files: bool = True
    """Whether the run directory is somebody's: recpipe.log and report.html are for whoever looks into it."""
    keeps: bool = False
    """Whether the caller goes on with the model: then it ends the run by closing ``Outcome.kept``."""


NOTHING = Given()


@dataclass
class Outcome:
    """What a run leaves: its ``report`` (of report.json, plan or comparison); a training also the model."""

    report: dict[str, Any]
    model: nn.Module | None = None
    predict: Callable[[Any], torch.Tensor] | None = None
    """The model's prediction of a batch; None where there is no model."""
    checkpoint: Path | None = None
    """The newest checkpoint, which holds what ``model`` does; None where none was written."""
    kept: ExitStack = field(default_factory=ExitStack)
    """Closes the tiers and gives the run directory back; empty where the run has done so."""
