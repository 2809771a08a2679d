"""Where a run's metrics go: Lightning's loggers."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger


def make_logger(name: str | None, run_dir: Path) -> Logger | bool:
    """The logger of that name, or False for none."""
    if name == "csv":
        return CSVLogger(str(run_dir), name="", version="logs")
    return TensorBoardLogger(str(run_dir), name="", version="logs") if name == "tensorboard" else False
