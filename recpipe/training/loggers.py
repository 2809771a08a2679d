"""Where a run's metrics go: Lightning's loggers."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from recpipe.errors import UserError
from recpipe.run_dir import unwritable


class CsvLogger(CSVLogger):
    """Lightning's, for a disk that may be full: it keeps the ``fault``, and the training goes on."""

    fault: UserError | None = None

    def save(self) -> None:
        """Write what is new."""
        try:
            super().save()
        except OSError as fault:
            self.fault = unwritable(self.log_dir, fault)


def make_logger(name: str | None, run_dir: Path) -> Logger | bool:
    """The logger of that name, or False for none."""
    if name == "csv":
        return CsvLogger(str(run_dir), name="", version="logs")
    return TensorBoardLogger(str(run_dir), name="", version="logs") if name == "tensorboard" else False
