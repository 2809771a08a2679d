"""Makes Lightning's loggers for a run's figures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from recpipe.common.files import unwritable
from recpipe.common.words import make
from recpipe.errors import UserError


class CsvLogger(CSVLogger):
    """Lightning's CSV logger, for a disk that may be full: it keeps the ``fault``, and training goes on."""

    fault: UserError | None = None

    def save(self) -> None:
        """Write new figures."""
        try:
            super().save()
        except OSError as fault:
            self.fault = unwritable(self.log_dir, fault)


def make_logger(chosen: str | Mapping[str, Any] | None, run_dir: Path) -> Logger | None:
    """Make the logger with that name, or the one that ``_target_`` names; None for no logger.

    Raises ``UserError`` if its package is not installed.
    """
    if chosen is None:
        return None
    if isinstance(chosen, Mapping):
        return make(Logger, chosen, "trainer.logger")
    try:
        return _named(chosen, run_dir)
    except ModuleNotFoundError as fault:
        raise UserError(
            f"trainer.logger={chosen} needs the package {chosen}: pip install {chosen}, "
            "or pass trainer.logger=csv"
        ) from fault


def _named(name: str, run_dir: Path) -> Logger:
    if name == "wandb":
        return WandbLogger(project=os.environ.get("WANDB_PROJECT", "recpipe"), save_dir=run_dir)
    if name == "mlflow":
        if elsewhere := os.environ.get("MLFLOW_TRACKING_URI"):
            return MLFlowLogger("recpipe", tracking_uri=elsewhere)
        # mlflow 3 no longer writes into plain folders.
        database, artifacts = f"sqlite:///{run_dir.absolute() / 'mlflow.db'}", run_dir.absolute() / "mlruns"
        return MLFlowLogger("recpipe", tracking_uri=database, artifact_location=artifacts.as_uri())
    files = TensorBoardLogger if name == "tensorboard" else CsvLogger
    return files(str(run_dir), name="", version="logs")
