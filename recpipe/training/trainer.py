"""Makes Lightning's Trainer for a recipe, with its strategy and logger, and runs the training."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, ModelSummary
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy

from recpipe.checkpoint.table_io import BEST
from recpipe.common.console import log
from recpipe.common.files import unwritable
from recpipe.common.process import old_objects_kept
from recpipe.common.words import make
from recpipe.data.dataset import WaitingStopped
from recpipe.distributed.ranks import Channel
from recpipe.errors import CheckpointError, UserError, shown
from recpipe.pipeline.loader import EvalLoader, TrainLoader
from recpipe.training.config import Stopping, TrainerConfig
from recpipe.training.evaluation import EvaluationStopped
from recpipe.training.module import RankingModule
from recpipe.training.progress import Extent, Progress
from recpipe.training.recorder import LOG_EVERY, Recorder
from recpipe.training.signals import StopOnSignal


def make_trainer(
    config: TrainerConfig,
    loader: TrainLoader,
    evaluates: bool,
    checkpoint_io: CheckpointIO,
    callbacks: Sequence[L.Callback],
    logger: Logger | None,
    run_dir: Path,
    trainers: Channel,
) -> L.Trainer:
    """Make a Trainer for one device; the module exchanges gradients with the other ranks.

    ``callbacks``: the run's own and the user's, in their order. The first of the ``trainers`` shows progress
    and logs.
    """
    device, on_gpu = loader.device, loader.device.type == "cuda"
    leads = trainers.index == 0
    everything = [
        *callbacks,
        Extent(config, loader),
        *([Progress(config.steps(len(loader)), loader)] if config.progress and leads else ()),
        *_stopping(config.early_stopping),
        *_checkpointing(config, len(loader), config.checkpoints(run_dir)),
    ]
    return L.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=[device.index or 0] if on_gpu else 1,
        strategy=AgreeingStrategy(device, trainers),
        max_epochs=config.max_epochs,
        max_steps=config.max_steps or -1,
        val_check_interval=config.interval(config.eval_every, len(loader)) if evaluates else None,
        limit_val_batches=None if evaluates else 0,
        num_sanity_val_steps=0,
        inference_mode=False,  # FBGEMM's CPU lookup has no kernel for inference tensors
        log_every_n_steps=LOG_EVERY,  # for what users' callbacks log themselves
        logger=logger if logger is not None and leads else False,
        callbacks=everything,
        plugins=[checkpoint_io],
        profiler=_Unprofiled(),
        enable_progress_bar=False,  # Progress replaces Lightning's bars
        enable_model_summary=any(isinstance(callback, ModelSummary) for callback in everything),
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in everything),
        use_distributed_sampler=False,
        default_root_dir=str(run_dir),
    )


def _stopping(wanted: Stopping | None) -> list[L.Callback]:
    if wanted is None:
        return []
    stopping = EarlyStopping(
        wanted.monitor,
        wanted.min_delta,
        wanted.patience,
        mode=str(wanted.mode),
        check_finite=True,
        stopping_threshold=wanted.stopping_threshold,
        divergence_threshold=wanted.divergence_threshold,
        check_on_train_epoch_end=False,
    )
    return [stopping]


def _checkpointing(config: TrainerConfig, steps: int, directory: Path) -> list[L.Callback]:
    last, best = config.steps(steps), config.best_checkpoint
    kept: list[L.Callback] = []
    if best is not None:
        kept.append(
            ModelCheckpoint(
                dirpath=directory,
                filename=BEST,
                monitor=best.monitor,
                mode=str(best.mode),
                save_on_train_epoch_end=False,
                enable_version_counter=False,
            )
        )
    if config.checkpoint_every is None:
        return [StopOnSignal(None, 1, last), *kept]
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
        enable_version_counter=False,  # it would read files that another rank is writing
    )
    return [StopOnSignal(directory, every, last), regular, *kept]


def fit(
    trainer: L.Trainer,
    module: RankingModule,
    evaluation: EvalLoader,
    recorder: Recorder,
    resume: Path | None,
    late: list[UserError],
) -> tuple[str | None, Path | None]:
    """Train, and evaluate at the end; returns a message if a signal stopped it, and the last checkpoint (None
    if checkpoints are off).

    There is no evaluation if ``make_trainer`` was told so. Errors of writing after the last step go into
    ``late``, so that the figures are not lost.
    """
    if resume is not None:
        log.info("resuming from %s", resume)
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    stop = next(callback for callback in callbacks if isinstance(callback, StopOnSignal))
    try:
        with suppress(EvaluationStopped, WaitingStopped), old_objects_kept():
            trainer.fit(module, module.loader, evaluation, ckpt_path=resume)
    except (MisconfigurationException, ModuleNotFoundError, TrainingSpikeException) as fault:
        # What a callback misses (a logger, a package) or has found; an import that fails has a name.
        if isinstance(fault, ModuleNotFoundError) and fault.name is not None:
            raise
        remedy = "" if trainer.loggers else " (trainer.logger=csv is one)"
        raise UserError(f"trainer.callbacks: {' '.join(str(fault).split())}{remedy}") from fault
    except CheckpointError as fault:
        # With several ranks, the others wait for this one in the middle of the checkpoint.
        if module.trainers.size > 1 or trainer.global_step < stop.last_step or stop.received is not None:
            raise
        stop.teardown(trainer, module, "fit")
        late.append(fault)
    except Exception as fault:
        if not type(fault).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        raise UserError(
            f"trainer.compile: torch.compile cannot make this model ({shown(fault, 300)}): leave the key out"
        ) from fault
    if not recorder.steps:
        remedy = "to go on, raise trainer.max_steps or trainer.max_epochs"
        if module.loader.source.dataset.endless:
            remedy = "the stream has no record that is not trained, or trainer.max_steps are done"
        log.info(f"no step is left to train after step {trainer.global_step:,}; {remedy}")
    stop.agree(module.trainers)
    if stop.received is None and trainer.limit_val_batches and recorder.evaluated_at != trainer.global_step:
        with suppress(EvaluationStopped):
            trainer.validate(module, evaluation, verbose=False)
        stop.agree(module.trainers)
    late += [logger.fault for logger in trainer.loggers if isinstance(logger, CsvLogger) and logger.fault]
    if stop.received is None:
        for callback in callbacks if trainer.should_stop else ():
            if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
                log.info(
                    f"stopped early after step {trainer.global_step}: {callback.stopping_reason_message}"
                )
        return None, stop.saved
    where = (
        f"; go on with resume={stop.saved}"
        if stop.saved
        else " (no checkpoint: trainer.checkpoint_every=null)"
    )
    told = f"stopped by {signal.Signals(stop.received).name} after step {trainer.global_step}{where}"
    return told, stop.saved


class _Unprofiled(PassThroughProfiler):
    """Lightning's profiler that does nothing, without a generator around each of the 28 calls of a step."""

    def profile(self, action_name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


class AgreeingStrategy(SingleDeviceStrategy):
    """Trains on one device. The module exchanges gradients with the other ranks, this class exchanges
    decisions.

    EarlyStopping, ModelCheckpoint and Timer ask their trainer's strategy before they act.
    """

    def __init__(self, device: torch.device, trainers: Channel) -> None:
        super().__init__(device)
        self.trainers = trainers

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all trainers, or any of them, decided so; all of them call it."""
        told = np.concatenate(self.trainers.gather(np.array([decision])))
        return bool(told.all() if all else told.any())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Trainer ``src``'s ``obj``, which must be possible in JSON; all trainers call it."""
        if self.trainers.size == 1:
            return obj
        own = np.frombuffer(json.dumps(obj).encode(), np.uint8)
        return json.loads(self.trainers.gather(own)[src].tobytes())

    def teardown(self) -> None:
        """End training, and leave model and optimizer state where they are.

        Lightning moves them to the CPU; the trained model is still evaluated and asked for scores, and its
        tables stay on the GPU.
        """
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


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
        if chosen == "wandb":
            return WandbLogger(project=os.environ.get("WANDB_PROJECT", "recpipe"), save_dir=run_dir)
        if chosen == "mlflow":
            if elsewhere := os.environ.get("MLFLOW_TRACKING_URI"):
                return MLFlowLogger("recpipe", tracking_uri=elsewhere)
            # mlflow 3 no longer writes into plain folders.
            here = run_dir.absolute()
            database, artifacts = f"sqlite:///{here / 'mlflow.db'}", here / "mlruns"
            return MLFlowLogger("recpipe", tracking_uri=database, artifact_location=artifacts.as_uri())
        files = TensorBoardLogger if chosen == "tensorboard" else CsvLogger
        return files(str(run_dir), name="", version="logs")
    except ModuleNotFoundError as fault:
        raise UserError(
            f"trainer.logger={chosen} needs the package {chosen}: pip install {chosen}, "
            "or pass trainer.logger=csv"
        ) from fault
