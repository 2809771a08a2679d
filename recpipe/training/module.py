"""The LightningModule: one training step, one evaluation step, and what a checkpoint must carry."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import nn

from recpipe import private_api
from recpipe.backend.build import Backend
from recpipe.common.device import using_threads
from recpipe.common.timing import phase
from recpipe.data.parts import batch_size, tensors_of
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.errors import UserError
from recpipe.model.config import MetricsConfig
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.cuda_graph import record_steps
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.placed import PlacedModel, saved_buffers
from recpipe.pipeline.step import StepTimes, accumulate, add_up
from recpipe.pipeline.step_graph import BEFORE
from recpipe.tables.collection import SavesPlacement
from recpipe.tables.group_rows import Scale
from recpipe.tables.proxy import handing_out
from recpipe.training.callbacks import overrides
from recpipe.training.clipping import Clipping, scale
from recpipe.training.dense import name_of
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
        clipping: Clipping | None = None,
        metrics: MetricsConfig | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.make_optimizer = make_optimizer
        self.loader = loader
        self.around_step = around_step
        """Makes the context of each batch's step."""
        self.clipping = clipping
        self.trainers = trainers or Ranks().channel()
        self._several = self.trainers.size > 1
        self.stop = Stop()
        self.dense = model.dense
        self.evaluation = Evaluation(model, self.trainers, self.stop, metrics, loader.source.dataset)
        self.step_times = StepTimes(loader.device)
        self.backend = backend or Backend("plain", model, {})
        self.totals = Totals()
        self.looks_each_step = loader.device.type == "cpu"
        """Whether each step's loss is checked before its update. On a GPU, which each check waits for, the
        sum of the losses is, after every ``LOOK_EVERY`` steps and before anything is made of the model."""
        self._random_state: dict[str, Any] | None = None
        """The checkpoint's, until the first step."""
        self._hooks: dict[str, list[Callable[..., object]]] = {}
        """Those of callbacks that Lightning calls only where it makes the step itself."""
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

    def on_train_start(self) -> None:
        """Find out what does not change between steps."""
        callbacks: list[L.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        self._hooks = {
            name: [getattr(callback, name) for callback in callbacks if overrides(callback, name)]
            for name in ("on_before_zero_grad", "on_after_backward", "on_before_optimizer_step")
        }
        self._gradients_are_seen = any(
            self._hooks[name] for name in ("on_after_backward", "on_before_optimizer_step")
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The dense optimizer; ``UserError`` if everything is frozen."""
        if not self.model.trained() and self.model.embeddings.frozen:
            raise UserError(
                f"nothing to train: all tables and all parameters of {type(self.model.module).__name__} are "
                "frozen (requires_grad is false, or the rate of their table is 0): let one of them be "
                "trained, or evaluate the model (recpipe.evaluate)"
            )
        optimizer = self.make_optimizer(self.dense)
        graph = self.backend.graph
        if graph is not None:
            record_steps(optimizer, graph.make, graph.holds_gradients)
        return optimizer

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Do nothing: the pipeline has put the batch on the device."""
        return batch

    def training_step(self, batch: InFlight, batch_idx: int) -> torch.Tensor:
        """Update all parameters once; raises ``UserError`` if the loss is not finite.

        On a GPU it is raised up to ``LOOK_EVERY`` steps later.
        """
        if self._random_state is not None:  # restored here, independent of what start-up has drawn
            set_random_state(self._random_state)
            self._random_state = None
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        for hook in self._hooks["on_before_zero_grad"]:
            hook(self.trainer, self, getattr(optimizer, "optimizer", optimizer))
        for parameter in self.dense:
            parameter.grad = None
        backend, workers = self.backend, self.backend.beside
        with self.around_step(batch.batch):
            over_all = self.clipping is not None and self.clipping.over_all
            loss = accumulate(
                self.model,
                batch,
                self.step_times,
                backend.cores,
                workers,
                None if over_all else backend.graph,
                self._clip_all if over_all else None,
            )
            if not over_all:
                loss = self._add_up(loss)
            if self.looks_each_step and not math.isfinite(loss.item()):
                raise UserError(self._diverged(batch.batch))
            with phase("dense optimizer"):
                if workers is not None and self._gradients_are_seen:  # and maybe the tables
                    workers.finish()
                busy = 0 if workers is None else workers.busy
                try:
                    with using_threads(max(1, torch.get_num_threads() - busy)) if busy else nullcontext():
                        for hook in self._hooks["on_after_backward"]:
                            hook(self.trainer, self)
                        optimizer.step()
                finally:
                    if workers is not None:
                        workers.finish()
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

    def _add_up(self, loss: torch.Tensor) -> torch.Tensor:
        """Give the dense part the gradients of all ranks; returns the loss of all."""
        self.stop.agreed = self.stop.asked
        if self._several:
            loss, self.stop.agreed = add_up(self.trainers, self.dense, loss, self.stop.asked)
        return loss

    def _clip_all(self, batch: InFlight, loss: torch.Tensor) -> tuple[torch.Tensor, Scale]:
        """Clip the dense gradients of all ranks; returns the loss of all, and the tables' share."""
        assert self.clipping is not None, "it is asked for"
        loss = self._add_up(loss)
        share = self.clipping.of_all(
            self.dense, [rows for rows in batch.rows if not rows.frozen], self.trainers
        )
        scale(self.dense, share)
        return loss, share if share.is_cuda else share.item()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the dense gradients, after all callbacks have seen them."""
        if self.clipping is not None and not self.clipping.over_all:
            self.clipping.dense(self.dense)

    def _look(self) -> None:
        """``UserError`` if a loss since the last look was not finite; waits for a GPU."""
        batch, self.totals.unchecked = self.totals.unchecked, None
        if batch is not None and not math.isfinite(self.totals.loss.item()):
            raise UserError(self._diverged(batch))

    def on_train_end(self) -> None:
        """Check the last steps' losses, and say so if a graph was asked for and never used."""
        self._look()
        if self.backend.graph is not None and not self.backend.graph.trained:
            log.warning(
                "trainer.backend=cuda_graph trained no batch: at least %d whole batches in a row must have "
                "parts of the same sizes and otherwise equal values, and no hooks",
                BEFORE + 1,
            )

    def on_train_epoch_end(self) -> None:
        """Tell the loader that the epoch has ended: Lightning does not ask for a batch after the last one."""
        self.loader.end_epoch()

    def close(self) -> None:
        """End the loader's threads, those of the cores that share a batch, and those for tables."""
        self.loader.close()
        self.backend.close()

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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what Lightning does not know: data position, random state, which rows are resident.

        ``UserError`` if a loss was not finite, so that no checkpoint of such a model replaces a good one.
        """
        self._look()
        placed = self.model.embeddings.offers(SavesPlacement)
        checkpoint["recpipe"] = {
            "batches_done": self.totals.batches % len(self.loader),
            "epoch": self.loader.epoch,
            "samples": self.totals.samples,
            "seconds": self.totals.seconds,
            "made_with": self.made_with(),
            "table_optimizers": self.table_optimizers(),
            "order": self.order(),
            "dense_defaults": self.make_optimizer(self.dense).defaults,
            "dense_groups": self.dense_groups(),
            "random": random_state(),
            "fingerprint": self.loader.source.dataset.fingerprint,
            "position": self.loader.source.dataset.position_after(self.totals.batches),
            "counts": self.loader.source.dataset.counts_after(self.totals.batches),
            "placement": None if placed is None else placed.placement_state(),
            "backend": self.backend.state(),
        }

    def order(self) -> str | None:
        """The plugin that orders the samples; data positions are only valid for one order."""
        plugin = self.loader.source.ordered_by
        return None if plugin is None else f"plugin {plugin}"

    def made_with(self) -> dict[str, Any]:
        """Values on which the meaning of the data position and of the dense optimizer's state depends."""
        name = name_of(self.make_optimizer(self.dense))
        return {"data.batch_size": self.loader.source.batch_size, "optim.dense.name": name}

    def dense_groups(self) -> list[dict[str, Any]]:
        """The dense optimizer's groups with their values as the recipe has them, and in place of parameters
        their numbers in the model; empty if there is one."""
        number = {id(parameter): n for n, parameter in enumerate(self.dense)}
        groups = self.make_optimizer(self.dense).param_groups
        made = [{**group, "params": [number[id(p)] for p in group["params"]]} for group in groups]
        return made if len(made) > 1 else []

    def table_optimizers(self) -> dict[str, str]:
        """The optimizer's name of each table with state, on which the meaning of its state depends."""
        groups = [group.tables for group in self.model.embeddings.tables.groups]
        return {t.name: g.optimizer.name for g in groups if g.layout.width > g.dim for t in g.tables}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue at the saved data position. If the tiers are the same, the same rows are already resident.

        ``recpipe.training.resume`` has checked everything before.
        """
        saved = checkpoint["recpipe"]
        # torch would take the learning rate from the checkpoint even if the recipe has a new one.
        mine = self.dense_groups() or [self.make_optimizer(self.dense).defaults]
        theirs = saved.get("dense_groups") or [saved["dense_defaults"]]
        groups = checkpoint["optimizer_states"][0]["param_groups"]
        for group, own, their in zip(groups, mine, theirs, strict=True):
            group |= {k: v for k, v in own.items() if k != "params" and (k not in their or their[k] != v)}
        self.loader.first = self.totals.batches = int(saved["batches_done"])
        if self.loader.source.dataset.endless:
            self.loader.source.dataset.resume_at(self.loader.first, saved["position"], saved["counts"])
        self.loader.begun = int(saved.get("epoch", 0))  # older checkpoints, whose epochs are alike, lack it
        self.loader.handed_out = int(checkpoint["global_step"])
        self.totals.samples = saved.get("samples")  # older checkpoints lack it
        self.totals.seconds = saved.get("seconds", math.nan)  # likewise
        self._random_state = saved["random"]
        if saved.get("backend") is not None:  # older checkpoints lack it
            self.backend.restore(saved["backend"])


# Lightning asks for it at each step, and Python would make it anew from the code.
RankingModule.training_step.__signature__ = signature(RankingModule.training_step)  # type: ignore[attr-defined]


def first_bad_tensor(model: PlacedModel, batch: Any) -> str:
    """The name of the first tensor with a value that is not finite: of ``batch``, of the dense part, of the
    rows, of the model's outputs. All ranks look together if rows are shared."""
    named = [(f"the batch's {name}", tensor) for name, tensor in tensors_of(batch)]
    named += [(f"parameter {name}", p) for name, p in model.dense_parameters().items()]
    with torch.no_grad():
        was_training = model.training
        model.eval()
        rows = model.look_up(batch)
        named += [("the rows of its ids", found) for handed in rows.values() for found in handed.found]
        if batch_size(batch):
            with handing_out(rows):
                output = model.called(batch)[1]
            named += [(f"the model's {name}", tensor) for name, tensor in tensors_of(output, "output")]
        model.train(was_training)
    bad = (name for name, tensor in named if not torch.isfinite(tensor).all())
    return next(bad, "the loss (all inputs are finite)")
