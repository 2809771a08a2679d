"""Learning from the scores of a trained model, beside the labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Gt, Interval
from torch.nn import functional as F

from recpipe.common.validation import FilePath, Text, one_of
from recpipe.errors import UserError
from recpipe.model.losses.base import Loss, exact, vector
from recpipe.model.losses.pointwise import BinaryCrossEntropy, MeanSquaredError
from recpipe.model.scores import Kind

OF_LABELS = {loss.name: loss for loss in (BinaryCrossEntropy(), MeanSquaredError())}


@dataclass
class Distillation(Loss):
    """(1 - w) times the loss of the label plus w times that of the teacher's prediction z (Hinton et al.,
    2015): T^2 times the binary cross-entropy of x / T for sigmoid(z / T), or (x - z)^2 of values."""

    teacher: FilePath | None = None
    """A checkpoint of recpipe's, or a run's directory."""
    output: Text | None = None
    """The teacher's output; null: its only one, or that of the same label."""
    temperature: Annotated[float, Gt(0)] = 1.0
    weight: Annotated[float, Interval(ge=0, le=1)] = 0.5
    of_label: Annotated[str, one_of(*OF_LABELS)] = "binary_cross_entropy"
    name = "distillation"
    shapes = "any"
    asks: Callable[[Any], torch.Tensor] | None = field(default=None, init=False, repr=False, compare=False)
    """Gives the teacher's prediction of a batch, [B], without gradient; None: it has not been loaded."""

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """That of the label's loss."""
        return OF_LABELS[self.of_label].kind

    def arguments(self, batch: object) -> dict[str, Any]:
        """Those that the recipe gives."""
        own = ("teacher", "output", "temperature", "weight", "of_label")
        return {name: getattr(self, name) for name in own}

    def __call__(
        self, prediction: Any, labels: torch.Tensor, weights: torch.Tensor | None = None, batch: object = None
    ) -> torch.Tensor:
        """The mean over samples; not a number without the teacher, as where a checkpoint is evaluated."""
        known = OF_LABELS[self.of_label](prediction, labels, weights)
        if not len(labels):
            return known
        x = exact(vector(prediction))
        if self.asks is None:
            return known * torch.nan
        with torch.no_grad():
            told = vector(self.asks(batch)).to(x)
        if told.shape != x.shape:
            raise UserError(
                f"model.loss=distillation: the teacher gives {list(told.shape)} and the model {list(x.shape)}"
            )
        if self.of_label == "mean_squared_error":
            each = F.mse_loss(x, told, reduction="none")
        else:
            soft = torch.sigmoid(told / self.temperature)
            each = self.temperature**2 * F.binary_cross_entropy_with_logits(
                x / self.temperature, soft, reduction="none"
            )
        taught = each.mean() if weights is None else (each * vector(weights)).mean()
        return (1 - self.weight) * known + self.weight * taught
