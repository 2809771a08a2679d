"""The base of a run's deltas: a package of the model that the run starts with, made by another process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L

from recpipe.common.console import log
from recpipe.errors import UserError
from recpipe.setup.training import Training

_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


def make_base(trainer: L.Trainer, base: Path, training: Training, leads: bool) -> None:
    """Make the package ``base`` of the model as it is before the next step. All trainers call it; the first
    one packages a checkpoint that they write together, and removes that.

    ``UserError`` if the model cannot be packaged.
    """
    if training.run.given.model is not None:
        raise UserError(
            "trainer.publish: the model was handed over in Python, and a base is packaged by another "
            "process, which cannot make it: package a checkpoint of it (recpipe.package(..., model=MODEL)), "
            "and name that package, trainer.publish.base=PACKAGE"
        )
    folder: str | None = None
    if leads:
        folder = tempfile.mkdtemp(prefix=".base-", dir=training.run.run_dir.path)
    try:
        saved = Path(folder or training.run.run_dir.path, "start.ckpt")
        trainer.save_checkpoint(saved)
        if leads:
            log.info("making the base of what is published, %s", base)
            package_aside("trainer.publish", saved, base, "weights=last")
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    training.module.trainers.barrier()


def package_aside(key: str, checkpoint: Path, base: Path, *more: str) -> None:
    """Have another process make the package ``base`` of a checkpoint, without reference figures.
    ``UserError`` names the recipe's ``key`` that asks for it, and why it cannot be made."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_TORCHRUN)}
    words = ["package", str(checkpoint), str(base), "reference=false", *more]
    made = subprocess.run(
        [sys.executable, "-m", "recpipe", *words], env=environment, capture_output=True, text=True
    )
    if made.returncode:
        lines = [line for line in (*made.stderr.splitlines(), *made.stdout.splitlines()) if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        why = (errors or lines[-1:] or [f"status {made.returncode}"])[-1].removeprefix("error: ")
        raise UserError(f"{key}: no base can be made: {why}")
