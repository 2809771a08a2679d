"""``conf/trainer``, typed and checked."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recpipe.errors import UserError

LOGGERS = ("csv", "tensorboard", "wandb", "mlflow")


@dataclass(frozen=True)
class TrainerConfig:
    """``conf/trainer``; ``eval_every`` and ``checkpoint_every`` are whole steps or a share of an epoch."""

    max_epochs: int
    max_steps: int | None
    device: str
    eval_every: int | float
    checkpoint_every: int | float | None
    keep_checkpoints: int
    checkpoint_dir: str | None
    logger: str | dict[str, Any] | None
    """A name, or what ``recpipe.targets`` makes a Lightning logger of."""
    callbacks: list[dict[str, Any]]
    """Of which it makes Lightning callbacks."""
    progress: bool

    def __post_init__(self) -> None:
        if self.max_epochs < 1 or (self.max_steps is not None and self.max_steps < 1):
            raise UserError(
                f"trainer.max_epochs={self.max_epochs}, max_steps={self.max_steps}: train at least one"
            )
        for name in ("eval_every", "checkpoint_every"):
            every = getattr(self, name)
            if every is not None and (not every > 0 or (isinstance(every, float) and every > 1)):
                raise UserError(
                    f"trainer.{name}={every}: give a whole number of steps, or a share of an epoch (0.25)"
                )
        if isinstance(self.logger, str) and self.logger not in LOGGERS:
            raise UserError(
                f"trainer.logger={self.logger} is unknown; choose {', '.join(LOGGERS)}, null, or any "
                "Lightning logger: {_target_: package.Class, ...}"
            )

    def interval(self, every: int | float, steps_per_epoch: int) -> int:
        """``every`` as a number of steps, at most an epoch's; shares are of the run when that is shorter."""
        steps = (
            every
            if isinstance(every, int)
            else every * min(steps_per_epoch, self.max_steps or steps_per_epoch)
        )
        return max(1, min(math.ceil(steps), steps_per_epoch))

    def checkpoints(self, run_dir: Path) -> Path:
        """Where checkpoints go."""
        return Path(self.checkpoint_dir).expanduser() if self.checkpoint_dir else run_dir / "checkpoints"

    def steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run."""
        return min(self.max_steps or sys.maxsize, self.max_epochs * steps_per_epoch)
