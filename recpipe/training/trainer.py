"""Lightning's Trainer as a recipe asks for it, and a whole training by it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO

from recpipe.errors import CheckpointError, UserError
from recpipe.model.module import LOG_EVERY, RankingModule
from recpipe.pipeline.loader import EvalLoader, TrainLoader
from recpipe.training.config import TrainerConfig
from recpipe.training.loggers import CsvLogger, make_logger
from recpipe.training.progress import progress_bar
from recpipe.training.recorder import Recorder
from recpipe.training.signals import StopOnSignal


def make_trainer(
    config: TrainerConfig,
    loader: TrainLoader,
    evaluates: bool,
    checkpoint_io: CheckpointIO,
    callbacks: Sequence[L.Callback],
    run_dir: Path,
    leads: bool,
) -> L.Trainer:
    """A Trainer for one device; the other ranks' gradients come in through the module."""
    accelerator, devices = _accelerator(config.device)
    return L.Trainer(
        accelerator=accelerator,
        devices=devices,
        max_epochs=config.max_epochs,
        max_steps=config.max_steps or -1,
        val_check_interval=config.interval(config.eval_every, len(loader)) if evaluates else None,
        limit_val_batches=None if evaluates else 0,
        num_sanity_val_steps=0,
        inference_mode=False,  # FBGEMM's CPU lookup has no kernel for inference tensors
        log_every_n_steps=LOG_EVERY,
        logger=make_logger(config.logger, run_dir) if leads else False,
        callbacks=[
            *callbacks,
            *(progress_bar(config) if leads else ()),
            *_checkpointing(config, len(loader), config.checkpoints(run_dir)),
        ],
        plugins=[checkpoint_io],
        enable_progress_bar=config.progress and leads,
        enable_model_summary=False,
        enable_checkpointing=config.checkpoint_every is not None,
        use_distributed_sampler=False,
        default_root_dir=str(run_dir),
    )


def _accelerator(device: str) -> tuple[str, Any]:
    kind, _, index = device.partition(":")
    return ("gpu", [int(index or 0)]) if kind == "cuda" else ("cpu", 1)


def _checkpointing(config: TrainerConfig, steps: int, directory: Path) -> list[L.Callback]:
    last = config.steps(steps)
    if config.checkpoint_every is None:
        return [StopOnSignal(None, 1, last)]
    every = config.interval(config.checkpoint_every, steps)
    regular = ModelCheckpoint(
        dirpath=directory,
        filename="step-{step:08d}",
        auto_insert_metric_name=False,
        every_n_train_steps=every,
        save_top_k=config.keep_checkpoints,
        monitor="step",
        mode="max",
        save_on_train_epoch_end=False,
        enable_version_counter=False,  # it would look at files that another rank is writing
    )
    return [StopOnSignal(directory, every, last), regular]


def fit(
    trainer: L.Trainer,
    module: RankingModule,
    loader: TrainLoader,
    evaluation: EvalLoader,
    recorder: Recorder,
    resume: Path | None,
    late: list[UserError],
) -> str | None:
    """Train, evaluate at the end, and wait for the figures; what to say when a signal stopped it.

    No evaluation where ``make_trainer`` was told that there is none. What could not be written when all
    was trained goes into ``late``: it must not cost the figures.
    """
    if resume is not None:
        print(f"resuming from {resume}")
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    stop = next(c for c in callbacks if isinstance(c, StopOnSignal))
    try:
        trainer.fit(module, loader, evaluation, ckpt_path=resume)
    except CheckpointError as fault:
        # Of several ranks the others wait for this one in the middle of the checkpoint.
        if module.trainers.size > 1 or trainer.global_step < stop.last_step or stop.received is not None:
            raise
        stop.teardown(trainer, module, "fit")
        late.append(fault)
    late += [logger.fault for logger in trainer.loggers if isinstance(logger, CsvLogger) and logger.fault]
    stop.agree(module.trainers)
    if stop.received is None and trainer.limit_val_batches and recorder.evaluated_at != trainer.global_step:
        trainer.validate(module, evaluation, verbose=False)
    recorder.finish(trainer)
    module.quality.close()
    module.two_cores.close()
    if not recorder.step_seconds:
        print(f"no step was left to train after {trainer.global_step}; raise trainer.max_steps or max_epochs")
    if stop.received is None:
        return None
    where = (
        f"; go on with resume={stop.saved}"
        if stop.saved
        else " (no checkpoint: trainer.checkpoint_every=null)"
    )
    return f"stopped by {signal.Signals(stop.received).name} after step {trainer.global_step}{where}"
