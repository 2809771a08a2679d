"""An evaluation over all trainers: each scores its share of the batches, the first one computes the
figures."""

from __future__ import annotations

import math
from concurrent.futures import wait
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
from recpipe.tables.proxy import handing_out


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
        losses, logits, labels = self._judged(batch)
        if self.stop.agreed:
            raise EvaluationStopped
        weights = losses[:, 1].sum() if self.model.parts.sums else losses[:, 1]
        self.quality.add_loss(float((losses[:, 0] * weights).sum()), float(losses[:, 1].sum()))
        self.quality.add(logits, labels)
        if not last:
            return
        # Made here and not when the epoch ends: Lightning repeats an evaluation that stopped in a step.
        promised = self.quality.submit()
        while not (promised.done() or self.stop.asked):
            wait([promised], timeout=0.1)
        figures = astuple(promised.result()) if promised.done() else (math.nan,) * len(fields(Quality))
        # The first trainer's figures, on all of them, since callbacks that monitor them must decide alike.
        told = self.trainers.gather(np.array([[*figures, self.stop.asked]], np.float64))
        self.stop.agreed = any(bool(part[0, -1]) for part in told)
        if self.stop.agreed:
            raise EvaluationStopped
        self.figures = Quality(*told[0][0, :-1].tolist())

    def _judged(self, batch: Any) -> tuple[npt.NDArray[np.float64], torch.Tensor, torch.Tensor]:
        """Each trainer's loss and samples, [trainers, 2], and all predictions and labels that are scored, [B]
        or [0]. The message that gathers them tells which trainers were asked to stop."""
        samples, loss = batch_size(batch), 0.0
        logits = labels = torch.empty(0)
        # Other ranks take part in the lookups, even if this share has no samples.
        rows = self.model.look_up(batch) if self.trainers.size > 1 else {}
        if samples:
            with handing_out(rows):
                own, scored = self.model.called.judge(batch)
            loss, (logits, labels) = float(own), scored or (logits, labels)
        if self.trainers.size == 1:
            self.stop.agreed = self.stop.asked
            return np.array([[loss, samples]]), logits, labels
        head = torch.tensor([[self.stop.asked, 0.0], [loss, samples]])
        mine = torch.cat([head, torch.stack([logits.reshape(-1), labels.reshape(-1)], dim=1).cpu().float()])
        parts = self.trainers.gather(mine.numpy())
        self.stop.agreed = any(bool(part[0, 0]) for part in parts)
        losses = np.array([part[1] for part in parts], np.float64)
        all_scored = torch.from_numpy(np.concatenate([part[2:] for part in parts]))
        return losses, all_scored[:, 0], all_scored[:, 1]
