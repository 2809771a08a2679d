"""``conf/trainer``, typed and checked."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt
from pydantic import AfterValidator, BeforeValidator

from recpipe.common.validation import FilePath, Positive, one_of


def _device(value: Any) -> Any:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", str(value)):
        raise ValueError("is unknown; choose auto, cpu, cuda or cuda:N")
    return value


def _every(value: int | float) -> int | float:
    if not 0 < value < 2**63 or (isinstance(value, float) and value > 1):
        raise ValueError("give a whole number of steps, or a share of an epoch (0.25)")
    return value


Every = Annotated[int | float, AfterValidator(_every)]
"""An interval: whole steps, or a share of an epoch."""


def _evaluates(value: object) -> object:
    if value is None:
        raise ValueError("a run always evaluates; 1.0 does so only at the end of each epoch and of the run")
    return value


LOGGERS = ("csv", "tensorboard", "wandb", "mlflow")


def _logger(value: str) -> str:
    if value not in LOGGERS:
        raise ValueError(
            f"is unknown; choose {', '.join(LOGGERS)}, null, or any Lightning logger: "
            "{_target_: package.Class, ...}"
        )
    return value


@dataclass(frozen=True)
class TrainerConfig:
    """``conf/trainer``; ``eval_every`` and ``checkpoint_every`` are whole steps or a share of an epoch."""

    max_epochs: Positive
    max_steps: Positive | None
    device: Annotated[str, BeforeValidator(_device)]
    eval_every: Annotated[Every, BeforeValidator(_evaluates)]
    checkpoint_every: Every | None
    keep_checkpoints: Positive
    checkpoint_dir: FilePath | None
    logger: Annotated[str, AfterValidator(_logger)] | dict[str, Any] | None
    """A name, or the ``_target_`` of a Lightning logger with its arguments."""
    callbacks: list[dict[str, Any]]
    """The ``_target_`` of Lightning callbacks with their arguments."""
    progress: bool
    backend: Annotated[str, one_of("auto", "plain", "cpu", "cuda_graph")] = "auto"
    """Who computes the model's dense part: its modules, ``recpipe.backend`` on a CPU, or a CUDA graph."""
    split: Annotated[str, one_of("auto", "always", "never")] = "auto"
    """Whether batches are cut into micro-batches by a plugin's splitter."""
    accumulate_grad_batches: Positive = 1
    """How many batches make one optimizer step, of the dense part and of the tables."""
    gradient_clip_val: Annotated[float, Gt(0)] | None = None
    """The limit of the dense gradients' norm, or of each of their values; None: there is none."""
    gradient_clip_algorithm: Annotated[str, one_of("norm", "value")] = "norm"
    gradient_clip_over: Annotated[str, one_of("dense", "all")] = "dense"
    """Whether the norm is that of the dense part, or of dense part and tables."""
    deterministic: bool = False
    """Whether a GPU uses only algorithms that give the same bits each time."""

    def interval(self, every: int | float, steps_per_epoch: int) -> int:
        """``every`` as a number of steps, at most an epoch's. A share refers to an epoch, or to the run if it
        is shorter."""
        steps = (
            every
            if isinstance(every, int)
            else every * min(steps_per_epoch, self.max_steps or steps_per_epoch)
        )
        return max(1, min(math.ceil(steps), steps_per_epoch))

    def checkpoints(self, run_dir: Path) -> Path:
        """The directory of checkpoints."""
        return Path(self.checkpoint_dir).expanduser() if self.checkpoint_dir else run_dir / "checkpoints"

    def steps(self, steps_per_epoch: int) -> int:
        """The number of optimizer steps of the whole run."""
        return min(self.max_steps or sys.maxsize, self.max_epochs * steps_per_epoch)
