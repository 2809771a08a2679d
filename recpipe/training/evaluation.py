"""An evaluation over all trainers: each scores its share of the batches, the first one computes the
figures."""

from __future__ import annotations

import math
from concurrent.futures import wait
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch

from recpipe.data.dataset import Dataset
from recpipe.data.parts import batch_size
from recpipe.distributed.ranks import Channel
from recpipe.errors import Interruption, UserError
from recpipe.model.background import BackgroundQuality
from recpipe.model.config import MetricsConfig
from recpipe.model.metrics import LOSS, Quality
from recpipe.model.sides import Sides
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

    ``trainers``: the channel between the trainers, each of which has its share of every batch; ``asked``:
    what is told beside the figures that every evaluation has, of batches of ``dataset``.
    """

    def __init__(
        self,
        model: PlacedModel,
        trainers: Channel,
        stop: Stop,
        asked: MetricsConfig | None = None,
        dataset: Dataset | None = None,
    ) -> None:
        self.model, self.trainers, self.stop = model, trainers, stop
        self.asked = asked or MetricsConfig()
        self.sides = Sides.of_metrics(self.asked, dataset)
        kinds = {name: task.kind for name, task in model.called.judged.items()}
        self.quality = {name: BackgroundQuality(kind, self.asked, self.sides) for name, kind in kinds.items()}
        """Of each label, by name."""
        self.figures: dict[str, Quality] | None = None
        """The quality of the latest evaluation by label, the same on all trainers; None until it is complete.
        The losses of several labels are those that are added up."""

    def result(self) -> Quality:
        """The quality of the evaluation that ends, of the first label, with the loss of all; ``UserError`` if
        it has not had its last batch."""
        if self.figures is None:
            raise UserError(
                "an evaluation ended before its last batch: the model or a callback has raised StopIteration "
                "in it"
            )
        first, *others = self.figures.values()
        known = [each[LOSS] for each in (first, *others) if not math.isnan(each[LOSS])]
        return {**first, LOSS: sum(known)} if others and known else first

    def by_label(self) -> dict[str, Quality]:
        """The quality of each label, if there are several."""
        figures = self.figures or {}
        return figures if len(figures) > 1 else {}

    def judged(self) -> dict[str, dict[str, Any]]:
        """Of each label, what is told of the latest evaluation beside ``figures``, for report.json."""
        return {
            name: {**quality.judged.to_dict(), "slices": quality.slices}
            for name, quality in self.quality.items()
            if quality.judged is not None and quality.judged.figures
        }

    def write_to(self, folder: Path) -> None:
        """Write the predictions of each evaluation there: of the first label, and of others in a folder of
        their name."""
        for number, (name, quality) in enumerate(self.quality.items()):
            quality.folder = folder / quote(name, safe="") if number else folder

    def add(self, batch: Any, last: bool) -> None:
        """Keep the batch's predictions; after the ``last`` batch, ``figures`` are those of all batches.

        Raises ``EvaluationStopped`` if any trainer was asked to stop.
        """
        losses, scored, values = self._judged(batch)
        if self.stop.agreed:
            raise EvaluationStopped
        for number, (name, quality) in enumerate(self.quality.items()):
            loss, total = losses[:, number].T
            if self.model.parts.sums:  # each share's sum is one of losses already, not a mean
                loss = loss / np.maximum(total, 1) * total.sum()
            quality.add_loss(float(loss.sum()), float(total.sum()))
            if name in scored:
                columns = scored[name].unbind(1)
                weights = columns[2] if len(columns) > 2 else None
                quality.add(columns[0], columns[1], weights, values)
        if not last:
            return
        # Made here and not when the epoch ends: Lightning repeats an evaluation that stopped in a step.
        promised = [quality.submit() for quality in self.quality.values()]
        while not (all(each.done() for each in promised) or self.stop.asked):
            wait(promised, timeout=0.1)
        own = [each.result() if each.done() else {} for each in promised]
        # The first trainer's figures, on all of them, since callbacks that monitor them must decide alike.
        # Their names are the same on all, which have judged the same predictions.
        found = chain.from_iterable(each.values() for each in own)
        told = self.trainers.gather(np.array([*found, self.stop.asked], np.float64))
        self.stop.agreed = any(bool(part[-1]) for part in told)
        if self.stop.agreed:
            raise EvaluationStopped
        first = iter(told[0].tolist())
        self.figures = {
            label: {name: next(first) for name in each} for label, each in zip(self.quality, own, strict=True)
        }

    def _judged(
        self, batch: Any
    ) -> tuple[npt.NDArray[np.float64], dict[str, torch.Tensor], torch.Tensor | None]:
        """Of each trainer and label the sums of losses and of weights, [trainers, labels, 2]; of those that
        are scored the predictions, labels and, if there are any, weights of all trainers, [B, 2] or [B, 3];
        and their values of ``sides``. The message that gathers them tells which trainers were asked to
        stop."""
        samples, names = batch_size(batch), list(self.quality)
        losses, found = torch.zeros((len(names), 2), dtype=torch.float64), dict[str, torch.Tensor]()
        width = 3 if self.model.called.weighs(batch) else 2
        wide = len(self.sides.columns)
        values = torch.empty((0, wide), dtype=torch.int64)
        # Other ranks take part in the lookups, even if this share has no samples.
        rows = self.model.look_up(batch) if self.trainers.size > 1 else {}
        if samples:
            with handing_out(rows):
                judgement = self.model.called.judge(batch)
            losses[: len(judgement.losses)] = judgement.losses  # one alone if the module gives its own
            scored = {name: each for name, each in judgement.tasks.items() if each is not None}
            found = {name: each.side_by_side() for name, each in scored.items()}
            if wide:
                values = self.sides.of(batch)
        if self.trainers.size == 1:
            self.stop.agreed = self.stop.asked
            scores = {name: own[:, :width] for name, own in found.items()}
            return losses[None].numpy(), scores, values if wide else None
        sizes = torch.tensor([float(self.stop.asked), *(len(found.get(name, ())) for name in names)])
        own = [losses, values, *found.values()]
        told = [sizes, *(part.reshape(-1).view(torch.float32) for part in own)]
        parts = self.trainers.gather(torch.cat([*told, torch.tensor([float(len(values))])]).numpy())
        self.stop.agreed = any(bool(part[0]) for part in parts)
        first, rest = 1 + len(names), 1 + 5 * len(names)
        all_losses = np.stack([part[first:rest].view(np.float64).reshape(-1, 2) for part in parts])
        ends = [rest + 2 * wide * int(part[-1]) for part in parts]
        every = [
            np.split(part[end:-1].reshape(-1, 3), np.cumsum(part[1:first].astype(np.int64))[:-1])
            for part, end in zip(parts, ends, strict=True)
        ]
        joined = {name: np.concatenate([own[n] for own in every]) for n, name in enumerate(names)}
        scores = {name: torch.from_numpy(own[:, :width]) for name, own in joined.items()}
        if not wide:
            return all_losses, scores, None
        sides = [part[rest:end].view(np.int64) for part, end in zip(parts, ends, strict=True)]
        return all_losses, scores, torch.from_numpy(np.concatenate(sides).reshape(-1, wide))
