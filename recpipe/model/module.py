"""The LightningModule: one training step, one evaluation step, and what a checkpoint must carry."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import nn

from recpipe.data.batch import Batch
from recpipe.embedding.tiered import TieredEmbeddingBagCollection
from recpipe.errors import UserError
from recpipe.metrics import BackgroundQuality
from recpipe.model.ranker import Ranker
from recpipe.phases import phase
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.step import StagedBatch, StepTimes, accumulate
from recpipe.pipeline.sync import add_up
from recpipe.pipeline.two_cores import TwoCores, own_share
from recpipe.plugin.assembly import Assembly
from recpipe.ranks import Channel, Ranks

LOG_EVERY = 50
"""Steps between log lines: Lightning's logging costs more than a small model's step would allow."""


class RankingModule(L.LightningModule):
    """Trains a ``Ranker``: the tables in their own backward pass, the dense part by ``make_optimizer``."""

    def __init__(
        self,
        ranker: Ranker,
        make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        assembly: Assembly,
        loader: TrainLoader,
        trainers: Channel | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.ranker = ranker
        self.make_optimizer = make_optimizer
        self.assembly = assembly
        self.loader = loader
        self.trainers = trainers or Ranks().channel()
        self.stop_asked = False
        """Whether this rank was asked to stop ..."""
        self.stop_agreed = False
        """... and whether any rank was, as all of them know after the same step."""
        self.dense = list(ranker.dense_parameters().values())
        self.quality = BackgroundQuality()
        self.step_times = StepTimes()
        self.two_cores = TwoCores()
        self.loss_sum = torch.zeros((), dtype=torch.float64)
        """Sum of the steps' mean losses since ``take_mean_loss``."""
        self._losses = 0
        self.samples: int | None = 0
        """Samples trained so far in the whole run; None: the checkpoint it goes on from does not tell."""
        self._batches_done = 0
        self._random_state: dict[str, Any] | None = None

    # -- training ----------------------------------------------------------------------------

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The dense optimizer."""
        return self.make_optimizer(self.dense)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The pipeline has put it there."""
        return batch

    def on_train_batch_start(self, batch: StagedBatch, batch_idx: int) -> None:
        """Random numbers go on where the checkpoint stopped, whatever start-up has drawn."""
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None

    def training_step(self, batch: StagedBatch, batch_idx: int) -> torch.Tensor:
        """One update of all parameters; raises ``UserError`` on a loss that is not finite."""
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        for parameter in self.dense:
            parameter.grad = None
        with self.assembly.around_step(batch.batch):
            loss, _ = self._accumulate(batch)
            loss, self.stop_agreed = add_up(self.trainers, self.dense, loss, self.stop_asked)
            looked_at = loss.device.type == "cpu" or batch_idx % LOG_EVERY == 0
            if looked_at and not math.isfinite(loss.item()):
                raise UserError(self._diverged(batch.batch))
            with phase("dense optimizer"):
                optimizer.step()
            with phase("embedding backward and update"):
                self.ranker.embeddings.update()
        self.loss_sum = self.loss_sum.to(loss.device) + loss
        self._losses += 1
        self._batches_done = batch_idx + 1
        if self.samples is not None:
            self.samples += batch.consumed
        if batch_idx % LOG_EVERY == 0:
            self.log("loss", loss, prog_bar=True, batch_size=batch.batch.size)
        return loss

    def _accumulate(self, batch: StagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        share = own_share(self.ranker, batch)
        if share:
            return self.two_cores.accumulate(self.ranker, self.dense, batch, share)
        return accumulate(self.ranker, batch, self.step_times)

    def take_mean_loss(self) -> float:
        """Mean training loss since the last call; NaN without steps."""
        mean = float(self.loss_sum) / self._losses if self._losses else float("nan")
        self.loss_sum, self._losses = torch.zeros((), dtype=torch.float64), 0
        return mean

    def _diverged(self, batch: Batch) -> str:
        """Which tensor was the first to hold a value that is not finite."""
        named = [("the batch's dense features", batch.dense), ("the batch's labels", batch.labels)]
        named += [(f"parameter {name}", p) for name, p in self.ranker.dense_parameters().items()]
        with torch.no_grad():
            was_training = self.ranker.training
            self.ranker.eval()
            named.append(("the pooled embeddings", self.ranker.pooled(batch.sparse)))
            self.ranker.train(was_training)
        bad = next(
            (name for name, t in named if not torch.isfinite(t).all()), "the logits (all inputs are finite)"
        )
        return (
            f"the loss is not finite at step {self.global_step + 1}; first bad tensor: {bad}. "
            "Lower optim.tables.lr or optim.dense.lr, or check the data"
        )

    # -- evaluation --------------------------------------------------------------------------

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Keep the batch's predictions; the figures are computed in a thread of their own."""
        logits, labels = self.ranker(batch) if batch.size else self._no_logits(batch), batch.labels
        if self.trainers.size > 1:
            logits, labels = self._gathered(logits), self._gathered(labels)
        self.quality.add(logits, labels)

    def _no_logits(self, batch: Batch) -> torch.Tensor:
        """Of a share without samples; its lookups are made, since other ranks take part in them."""
        self.ranker.pooled(batch.sparse)
        return batch.labels.new_zeros(0)

    def _gathered(self, values: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(self.trainers.gather(values.cpu().numpy())))

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The dense part alone: ``TableCheckpointIO`` saves the tables beside it."""
        return {name: p.detach() for name, p in self.ranker.dense_parameters().items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """The dense part alone."""
        own = self.ranker.dense_parameters()
        if own.keys() != state_dict.keys():
            raise UserError(
                "the checkpoint is of another model: its dense parameters have other names; use its recipe"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                if parameter.shape != state_dict[name].shape:
                    raise UserError(
                        f"the checkpoint is of another model: {name} is {tuple(state_dict[name].shape)} "
                        f"there and {tuple(parameter.shape)} here; use its recipe"
                    )
                parameter.copy_(state_dict[name])
        return nn.modules.module._IncompatibleKeys([], [])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what Lightning does not know: data position, random state, which rows are resident."""
        done = self._batches_done % len(self.loader)
        embeddings = self.ranker.embeddings
        placement = None
        if isinstance(embeddings, TieredEmbeddingBagCollection):
            placement = embeddings.placement_state()
        checkpoint["recpipe"] = {
            "batches_done": done,
            "samples": self.samples,
            "made_with": self._made_with(),
            "order": self._order(),
            "dense_defaults": self._fresh_optimizer().defaults,
            "random": random_state(),
            "fingerprint": self.loader.dataset.fingerprint,
            "placement": placement,
        }

    def _fresh_optimizer(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.dense)

    def _order(self) -> str | None:
        """The plugin that orders the samples: data positions of one order mean nothing in another."""
        return None if self.assembly.order is None else f"plugin {self.assembly.order.origin.plugin}"

    def _made_with(self) -> dict[str, Any]:
        """Values without which neither the data position nor the dense optimizer's state mean anything."""
        name = type(self._fresh_optimizer()).__name__
        return {"data.batch_size": self.loader.batch_size, "optim.dense.name": name}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue at the saved data position, with the same rows resident when the tiers are the same."""
        saved = checkpoint["recpipe"]
        if saved["fingerprint"] != self.loader.dataset.fingerprint:
            raise UserError(
                "the checkpoint was made on other data (or another recipe for it); resume with the same data"
            )
        for key, value in self._made_with().items():
            theirs = saved["made_with"][key]
            if theirs != value:
                raise UserError(
                    f"the checkpoint was made with {key}={theirs}, not {value}: resume with {key}={theirs}"
                )
        mine, theirs = self._order(), saved["order"]
        if mine != theirs:
            raise UserError(
                f"the checkpoint counts batches in the order of {theirs or 'the data'}, this run in that of "
                f"{mine or 'the data'}: resume with the same plugin, or start anew"
            )
        # torch would take the learning rate from the checkpoint even where the recipe has a new one.
        defaults = self._fresh_optimizer().defaults
        changed = {k: value for k, value in defaults.items() if saved["dense_defaults"][k] != value}
        for group in checkpoint["optimizer_states"][0]["param_groups"]:
            group.update(changed)
        self.loader.first = int(saved["batches_done"])
        self.samples = saved.get("samples")  # older checkpoints lack it
        self._random_state = saved["random"]
        embeddings = self.ranker.embeddings
        if isinstance(embeddings, TieredEmbeddingBagCollection):
            embeddings.load_placement_state(saved["placement"])


def random_state() -> dict[str, Any]:
    """The state of every random number generator, as tensors and plain values."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
        },
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore ``random_state()``'s result."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), gauss))
    key = state["numpy"]["key"].numpy().astype(np.uint32)
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    numpy_state["state"] = {"key": key, "pos": state["numpy"]["pos"]}
    np.random.set_state(numpy_state)
