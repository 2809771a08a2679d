"""An evaluation over all trainers: each scores its share of the batches, the first one computes the
figures."""

from __future__ import annotations

import math
from concurrent.futures import Future, wait
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from recpipe.data.parts import batch_size
from recpipe.distributed.ranks import Channel
from recpipe.errors import Interruption, UserError
from recpipe.model.metrics import BackgroundQuality, Quality
from recpipe.pipeline.placed import PlacedModel
from recpipe.tables.front import handing_out


class EvaluationStopped(Interruption):
    """Raised on all trainers if a signal came during an evaluation, which then ends."""


@dataclass
class Stop:
    """Whether training is to stop."""

    asked: bool = False
    """Whether this rank was asked to."""
    agreed: bool = False
    """Whether any rank was; all ranks know it after the same batch."""


class Evaluation:
    """Judges a ``model`` on held-out batches, time and again.

    ``trainers``: the channel between the trainers, each of which has its share of every batch.
    """

    def __init__(self, model: PlacedModel, trainers: Channel, stop: Stop) -> None:
        self.model, self.trainers, self.stop = model, trainers, stop
        self.quality = BackgroundQuality(model.called.kind)
        self.figures: Quality | None = None
        """The quality of the latest evaluation, the same on all trainers; None until it is complete."""

    def result(self) -> Quality:
        """The quality of the evaluation that ends; ``UserError`` if it has not had its last batch."""
        if self.figures is None:
            raise UserError(
                "an evaluation ended before its last batch: the model or a callback has raised StopIteration "
                "in it"
            )
        return self.figures

    def add(self, batch: Any, last: bool) -> None:
        """Keep the batch's predictions; after the ``last`` batch, ``figures`` are those of all batches.

        Raises ``EvaluationStopped`` if any trainer was asked to stop.
        """
        losses, logits, labels = self._gathered(*self._judged(batch))
        self._stop_if_agreed()
        weights = losses[:, 1].sum() if self.model.parts.sums else losses[:, 1]
        self.quality.add_loss(float((losses[:, 0] * weights).sum()), float(losses[:, 1].sum()))
        self.quality.add(logits, labels)
        # Raised here and not when the epoch ends: Lightning repeats an evaluation that stopped in a step.
        if last:
            self.figures = self._awaited(self.quality.submit())

    def _awaited(self, promised: Future[Quality]) -> Quality:
        """The first trainer's figures, on all trainers, since callbacks that monitor them must decide
        alike."""
        while not (promised.done() or self.stop.asked):
            wait([promised], timeout=0.1)
        figures = astuple(promised.result()) if promised.done() else (math.nan,) * len(fields(Quality))
        told = self.trainers.gather(np.array([[*figures, self.stop.asked]], np.float64))
        self.stop.agreed = any(bool(part[0, -1]) for part in told)
        self._stop_if_agreed()
        return Quality(*told[0][0, :-1].tolist())

    def _stop_if_agreed(self) -> None:
        if self.stop.agreed:
            raise EvaluationStopped

    def _judged(self, batch: Any) -> tuple[float, int, torch.Tensor, torch.Tensor]:
        """The loss, the number of samples, and the predictions and labels that are scored, [B] or [0]."""
        samples, none = batch_size(batch), torch.empty(0)
        # Other ranks take part in the lookups, even if this share has no samples.
        rows = self.model.look_up(batch) if self.trainers.size > 1 else {}
        if not samples:
            return 0.0, 0, none, none
        with handing_out(rows):
            loss, scored = self.model.called.judge(batch)
        logits, labels = (none, none) if scored is None else scored
        return float(loss), samples, logits, labels

    def _gathered(
        self, loss: float, samples: int, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[npt.NDArray[np.float64], torch.Tensor, torch.Tensor]:
        """Each trainer's loss and samples, [trainers, 2], and all scored predictions and labels. The same
        message tells which trainers were asked to stop."""
        if self.trainers.size == 1:
            self.stop.agreed = self.stop.asked
            return np.array([[loss, samples]]), logits, labels
        head = torch.tensor([[self.stop.asked, 0.0], [loss, samples]])
        own = torch.cat([head, torch.stack([logits.reshape(-1), labels.reshape(-1)], dim=1).cpu().float()])
        parts = self.trainers.gather(own.numpy())
        self.stop.agreed = any(bool(part[0, 0]) for part in parts)
        losses = np.array([part[1] for part in parts], np.float64)
        scored = torch.from_numpy(np.concatenate([part[2:] for part in parts]))
        return losses, scored[:, 0], scored[:, 1]
