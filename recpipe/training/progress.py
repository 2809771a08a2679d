"""A run's extent, said and checked, and its progress while it trains."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import lightning as L
import torch

from recpipe.common.console import log
from recpipe.common.meter import Meter
from recpipe.errors import UserError
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.loader import TrainLoader
from recpipe.training.config import TrainerConfig
from recpipe.training.module import RankingModule


class Extent(L.Callback):
    """Prints the steps, counted over the whole run, at which training begins and will end, and checks that it
    comes so far: Lightning takes a StopIteration from anywhere in a step for the end of the epoch."""

    def __init__(self, config: TrainerConfig, loader: TrainLoader) -> None:
        self.config = config
        self.loader = loader

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Let a checkpoint of more epochs than the recipe asks for load: then no step is left, which is not
        an error.

        Lightning raises an error if ``max_epochs`` is less than the checkpoint's epoch.
        """
        trainer.fit_loop.max_epochs = max(self.config.max_epochs, int(checkpoint["epoch"]))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print a line or two, after a checkpoint has been loaded."""
        assert isinstance(pl_module, RankingModule)
        done, epoch = trainer.global_step, len(self.loader)
        if done:
            samples = pl_module.totals.samples
            before = "an unknown number of" if samples is None else f"{samples:,}"
            of_epoch = f": epoch {done // epoch + 1}, batch {done % epoch + 1:,} of {epoch:,}"
            of_epoch = "" if self.loader.source.dataset.endless else of_epoch
            log.info(f"going on after step {done:,} and {before} samples{of_epoch}")
        if self.loader.source.dataset.endless:
            last_step, size = self.config.max_steps, self.loader.source.batch_size
            until = "until the stream ends" if last_step is None else f"to {last_step:,} at most"
            log.info(f"training: steps from {done + 1:,} {until}, {size:,} samples each")
            return
        last = self.config.steps(epoch)
        epochs = f" ({last / epoch:.3g} epochs of {epoch:,})" if last != epoch else ""
        size = self.loader.source.batch_size
        log.info(f"training: steps {done + 1:,} to {last:,}{epochs}, {size:,} samples each")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """``UserError`` if the epoch has ended although batches are left and nothing asked it to end."""
        steps = len(self.loader)
        if trainer.should_stop or trainer.global_step >= self.config.steps(steps):
            return
        if self.loader.left and not self.loader.source.exhausted:
            raise UserError(
                f"epoch {trainer.current_epoch + 1} ended with {self.loader.left:,} of its {steps:,} batches "
                f"untrained, after step {trainer.global_step:,}: the model, a callback or the optimizer has "
                "raised StopIteration in a step, or has changed the trainer's limits"
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """``UserError`` if training has ended before its last epoch and nothing asked it to end."""
        last, epochs = self.config.steps(len(self.loader)), self.config.max_epochs
        if trainer.should_stop or trainer.global_step >= last or trainer.current_epoch >= epochs:
            return
        raise UserError(
            f"training ended after {trainer.current_epoch:,} of {epochs:,} epochs, at step "
            f"{trainer.global_step:,} of {last:,}: a callback has changed the trainer's limits"
        )


class Progress(L.Callback):
    """Shows steps, samples/s and loss of training, and the progress of a long evaluation.

    Samples/s and the mean loss cover the time since they were last shown. Only then is the loss fetched from
    a GPU.
    """

    def __init__(self, last_step: int, loader: TrainLoader) -> None:
        self.last_step, self.loader = last_step, loader
        self._training: Meter | None = None
        self._evaluating: Meter | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the meter."""
        self._training = Meter(self._share(trainer.global_step))
        self._restart()

    def _share(self, step: int) -> float:
        """Which share of the steps are done; 0 of a stream of which nobody has said where it ends."""
        unknown = self.loader.source.dataset.endless and self.last_step >= len(self.loader)
        return 0.0 if unknown else step / self.last_step

    def _restart(self) -> None:
        self._since = perf_counter()
        self._steps = self._samples = 0
        self._loss: float | torch.Tensor = 0.0

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: InFlight,
        batch_idx: int,
    ) -> None:
        """Count the step, and show it when it is time."""
        self._steps += 1
        self._samples += batch.consumed
        self._loss = self._loss + outputs["loss"]
        assert self._training is not None
        if self._training.due:
            step, epochs = trainer.global_step, -(-self.last_step // len(self.loader))
            share = self._share(step)
            epoch = f"  epoch {trainer.current_epoch + 1}/{epochs}" if epochs > 1 else ""
            loss = float(self._loss) / self._steps  # waits for a GPU, before the clock is read
            speed = self._samples / (perf_counter() - self._since)
            of = f"/{self.last_step:,}" if share else ""
            text = f"step {step:,}{of}{epoch}  {speed:,.0f} samples/s  loss {loss:.4f}"
            self._training.show(share, text)
            self._restart()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open a meter for the evaluation."""
        self._evaluating = Meter()

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show the progress when it is time."""
        assert self._evaluating is not None
        if self._evaluating.due:
            done, of = batch_idx + 1, int(trainer.num_val_batches[0])
            self._evaluating.show(done / of, f"evaluating  batch {done:,}/{of:,}")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the meter; training's speed leaves this time out, and is shown when it covers some steps."""
        if self._evaluating is not None:
            self._evaluating.close()
        if self._training is not None:
            self._training.pause()
        self._restart()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Clean up as at the end."""
        self.teardown(trainer, pl_module, "")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Remove the bars."""
        for meter in (self._training, self._evaluating):
            if meter is not None:
                meter.close()
