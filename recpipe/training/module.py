"""The LightningModule: one training step, one evaluation step, and what a checkpoint must carry."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import nn

from recpipe import private_api
from recpipe.backend.build import Backend
from recpipe.common.device import using_threads
from recpipe.common.timing import phase
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.errors import UserError
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.cores import Cores
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.placed import PlacedModel, saved_buffers
from recpipe.pipeline.step import StepTimes, accumulate
from recpipe.pipeline.step_graph import BEFORE, StepGraph
from recpipe.pipeline.sync import add_up
from recpipe.pipeline.update_graph import record_steps
from recpipe.tables.collection import SavesPlacement
from recpipe.tables.workers import TableWorkers
from recpipe.training.callbacks import overrides
from recpipe.training.divergence import first_bad_tensor
from recpipe.training.evaluation import Evaluation, Stop
from recpipe.training.generators import random_state, set_random_state

log = logging.getLogger(__name__)

LOOK_EVERY = 50
"""Steps between checks of the loss on a GPU, since each check waits for the GPU."""


class LossTotal(NamedTuple):
    """The ``sum`` of so many ``steps``' mean losses."""

    sum: float = 0.0
    steps: int = 0

    def mean_since(self, earlier: LossTotal) -> float:
        """Mean loss of the steps after ``earlier``; NaN if there are none."""
        steps = self.steps - earlier.steps
        return (self.sum - earlier.sum) / steps if steps else math.nan


@dataclass
class Totals:
    """What has been trained so far. An object of its own: a step changes all of it, and a module looks at
    each attribute that is set whether it is a parameter."""

    samples: int | None = 0
    """In the whole run; None if the resumed checkpoint does not have their number."""
    seconds: float = 0.0
    """From the process's start to the end of the latest step, without evaluations; of a resumed run, with
    those of the parts before it, or NaN if the checkpoint does not have them."""
    batches: int = 0
    """The number of the epoch's batch that comes next."""
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """The sum of the losses of the steps that this process has trained; it may still be on its way."""
    steps: int = 0
    """How many these are."""
    unchecked: Any = None
    """The latest batch since the losses were last checked; None: there is none."""

    def loss_so_far(self) -> LossTotal:
        """The total loss of the steps that this process has trained; waits for a GPU."""
        return LossTotal(float(self.loss), self.steps)


class RankingModule(L.LightningModule):
    """Trains a ``PlacedModel``: tables in their own backward pass, the dense part by ``make_optimizer``."""

    def __init__(
        self,
        model: PlacedModel,
        make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        loader: TrainLoader,
        trainers: Channel | None = None,
        backend: Backend | None = None,
        around_step: Callable[[Any], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.make_optimizer = make_optimizer
        self.loader = loader
        self.around_step = around_step
        """Makes the context of each batch's step."""
        self.trainers = trainers or Ranks().channel()
        self.stop = Stop()
        self.dense = model.dense
        self.evaluation = Evaluation(model, self.trainers, self.stop)
        self.step_times = StepTimes(loader.device)
        self.backend = backend
        self.totals = Totals()
        self.looks_each_step = loader.device.type == "cpu"
        """Whether each step's loss is checked before its update. On a GPU, which each check waits for, the
        sum of the losses is, after every ``LOOK_EVERY`` steps and before anything is made of the model."""
        self._random_state: dict[str, Any] | None = None
        self._gradients_are_seen = True
        """Whether a callback is called between the backward pass and the dense optimizer's step."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning notes here the name of each hook that it calls, some 28 times a step, and ``nn.Module``
        # would look each time whether the name is a parameter, a buffer or a module.
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    # -- training ----------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Find out what does not change between steps."""
        self._gradients_are_seen = any(map(_sees_gradients, self.trainer.callbacks))  # type: ignore[attr-defined]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The dense optimizer; ``UserError`` if everything is frozen."""
        if not self.model.trained() and self.model.embeddings.frozen:
            raise UserError(
                f"nothing to train: all tables and all parameters of {type(self.model.module).__name__} are "
                "frozen (requires_grad is false, or the rate of their table is 0): let one of them be "
                "trained, or evaluate the model (recpipe.evaluate)"
            )
        optimizer = self.make_optimizer(self.dense)
        if self.graph is not None:
            record_steps(optimizer, self.graph.make, self.graph.holds_gradients)
        return optimizer

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Do nothing: the pipeline has put the batch on the device."""
        return batch

    def on_train_batch_start(self, batch: InFlight, batch_idx: int) -> None:
        """Restore the checkpoint's random state, independent of what start-up has drawn."""
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None

    def training_step(self, batch: InFlight, batch_idx: int) -> torch.Tensor:
        """Update all parameters once; raises ``UserError`` if the loss is not finite.

        On a GPU it is raised up to ``LOOK_EVERY`` steps later.
        """
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        self._call_hook("on_before_zero_grad", getattr(optimizer, "optimizer", optimizer))
        for parameter in self.dense:
            parameter.grad = None
        with self.around_step(batch.batch):
            loss = accumulate(self.model, batch, self.step_times, self.cores, self.beside, self.graph)
            loss, self.stop.agreed = add_up(self.trainers, self.dense, loss, self.stop.asked)
            if self.looks_each_step and not math.isfinite(loss.item()):
                raise UserError(self._diverged(batch.batch))
            with phase("dense optimizer"), self._beside_tables():
                self._call_hook("on_after_backward")
                optimizer.step()
            with phase("embedding backward and update"):
                self.model.embeddings.update()
        totals = self.totals
        if totals.loss.device != loss.device:
            totals.loss = totals.loss.to(loss.device)
        totals.loss = totals.loss + loss
        totals.steps += 1
        if not self.looks_each_step:
            totals.unchecked = batch.batch
            if totals.steps % LOOK_EVERY == 1:
                self._look()
        totals.batches = batch_idx + 1
        if totals.samples is not None:
            totals.samples += batch.consumed
        return loss

    def _look(self) -> None:
        """``UserError`` if a loss since the last look was not finite; waits for a GPU."""
        batch, self.totals.unchecked = self.totals.unchecked, None
        if batch is not None and not math.isfinite(self.totals.loss.item()):
            raise UserError(self._diverged(batch))

    def on_train_end(self) -> None:
        """Check the last steps' losses, and say so if a graph was asked for and never used."""
        self._look()
        if self.graph is not None and not self.graph.trained:
            log.warning(
                "trainer.backend=cuda_graph trained no batch: at least %d whole batches in a row must have "
                "parts of the same sizes and otherwise equal values, and no hooks",
                BEFORE + 1,
            )

    def on_train_epoch_end(self) -> None:
        """Tell the loader that the epoch has ended: Lightning does not ask for a batch after the last one."""
        self.loader.end_epoch()

    def _call_hook(self, name: str, *given: Any) -> None:
        """Call a hook of callbacks that Lightning calls only where it makes the step itself."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            getattr(callback, name)(self.trainer, self, *given)

    @contextmanager
    def _beside_tables(self) -> Iterator[None]:
        """When the block ends, the tables' update is complete."""
        if self.beside is None or not self.beside.busy:
            yield
            return
        try:
            if self._gradients_are_seen:  # and maybe the tables
                self.beside.finish()
            with using_threads(max(1, torch.get_num_threads() - self.beside.busy)):
                yield
        finally:
            self.beside.finish()

    def close(self) -> None:
        """End the loader's threads, those of the cores that share a batch, and those for tables."""
        self.loader.close()
        if self.backend is not None:
            self.backend.close()

    @property
    def cores(self) -> Cores | None:
        """The cores that share a batch."""
        return None if self.backend is None else self.backend.cores

    @property
    def beside(self) -> TableWorkers | None:
        """Threads for work on tables."""
        return None if self.backend is None else self.backend.beside

    @property
    def graph(self) -> StepGraph | None:
        """What trains the dense part of whole batches."""
        return None if self.backend is None else self.backend.graph

    def _diverged(self, batch: Any) -> str:
        step = self.global_step + 1 if self.looks_each_step else self.global_step
        at = f"at step {step}" if self.looks_each_step else f"at step {step}, or in the {LOOK_EVERY} before"
        return (
            f"the loss is not finite {at}; first bad tensor: {first_bad_tensor(self.model, batch)}. "
            "Lower optim.tables.lr or optim.dense.lr, or check the data"
        )

    # -- evaluation --------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Give all trainers the first one's buffers, which are also those in checkpoints."""
        self._look()
        self.evaluation.figures = None
        if self.trainers.size > 1:
            for buffer in saved_buffers(self.model.module).values():
                first, *_ = self.trainers.gather(buffer.reshape(-1).cpu().numpy())
                buffer.copy_(torch.from_numpy(first).view(buffer.shape))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Judge a batch, which raises ``EvaluationStopped`` if any trainer was asked to stop."""
        self.evaluation.add(batch, last=batch_idx + 1 == self.trainer.num_val_batches[0])

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The state of the dense part; ``TableCheckpointIO`` saves the tables beside it."""
        return self.model.dense_state()

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the dense part; ``UserError`` if it is another model's."""
        self.model.load_dense(state_dict)
        return private_api.IncompatibleKeys([], [])

    def check_dense(self, saved: Mapping[str, torch.Tensor]) -> None:
        """``UserError`` unless ``saved`` fits this dense part, ``Damaged`` if values have another type."""
        self.model.check_dense(saved)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what Lightning does not know: data position, random state, which rows are resident.

        ``UserError`` if a loss was not finite, so that no checkpoint of such a model replaces a good one.
        """
        self._look()
        placed = self.model.embeddings.offers(SavesPlacement)
        checkpoint["recpipe"] = {
            "batches_done": self.totals.batches % len(self.loader),
            "samples": self.totals.samples,
            "seconds": self.totals.seconds,
            "made_with": self.made_with(),
            "order": self.order(),
            "dense_defaults": self._fresh_optimizer().defaults,
            "random": random_state(),
            "fingerprint": self.loader.source.dataset.fingerprint,
            "placement": None if placed is None else placed.placement_state(),
            "backend": None if self.backend is None else self.backend.state(),
        }

    def _fresh_optimizer(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.dense)

    def order(self) -> str | None:
        """The plugin that orders the samples; data positions are only valid for one order."""
        plugin = self.loader.source.ordered_by
        return None if plugin is None else f"plugin {plugin}"

    def made_with(self) -> dict[str, Any]:
        """Values on which the meaning of the data position and of the dense optimizer's state depends."""
        name = type(self._fresh_optimizer()).__name__
        return {"data.batch_size": self.loader.source.batch_size, "optim.dense.name": name}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue at the saved data position. If the tiers are the same, the same rows are already resident.

        ``recpipe.training.resume`` has checked everything before.
        """
        saved = checkpoint["recpipe"]
        # torch would take the learning rate from the checkpoint even if the recipe has a new one.
        defaults = self._fresh_optimizer().defaults
        theirs = saved["dense_defaults"]
        changed = {k: value for k, value in defaults.items() if k not in theirs or theirs[k] != value}
        for group in checkpoint["optimizer_states"][0]["param_groups"]:
            group.update(changed)
        self.loader.first = int(saved["batches_done"])
        self.loader.handed_out = int(checkpoint["global_step"])
        self.totals.samples = saved.get("samples")  # older checkpoints lack it
        self.totals.seconds = saved.get("seconds", math.nan)  # likewise
        self._random_state = saved["random"]
        if self.backend is not None and saved.get("backend") is not None:  # older checkpoints lack it
            self.backend.restore(saved["backend"])


def _sees_gradients(callback: L.Callback) -> bool:
    """Whether a callback is called between the backward pass and the dense optimizer's step."""
    return any(overrides(callback, hook) for hook in ("on_after_backward", "on_before_optimizer_step"))
