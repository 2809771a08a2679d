"""What every loss has: its arguments, the shapes and labels that it takes, and how weights enter its mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from inspect import signature
from typing import Any, Literal, cast

import torch

from recpipe.errors import UserError
from recpipe.model.scores import Kind

VALUES = "for values there are model.loss=mean_squared_error, mean_absolute_error, huber and poisson"


def vector(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape [B, 1] to [B]; leave other shapes."""
    return tensor.squeeze(1) if tensor.dim() == 2 and tensor.shape[1] == 1 else tensor


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the type that losses are computed in: float64 if it is that, else float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class Loss(ABC):
    """One loss, a mean over samples. The fields of a class derived from it, a dataclass, are the arguments
    that a recipe may give it.

    Example: ``{name: focal, gamma: 1.5}`` is ``Focal(gamma=1.5)``.
    """

    name: str = ""
    """What the recipe calls it."""
    shapes: Literal["same", "classes", "any"] = "same"
    """``classes``: labels are class numbers [B], predictions [B, classes]; ``any``: the loss checks them."""
    rates: bool = False
    """Whether labels must be within [0, 1], beyond which the loss would fall without end."""
    kind: Kind = "clicks"
    """The kind of prediction, which decides the figures of quality; ``clicks``: only if labels are 0/1."""
    whole_batch: bool = False
    """Whether the loss of a sample depends on the others of its batch, so that parts of a batch cannot be
    trained one by one."""

    samples_negatives: bool = False
    """Whether it compares samples with others of label 0, so that there must be some."""
    needs: str = ""
    """What the model must return, said where it does not; empty: a tensor, which needs no saying."""

    @property
    def labels(self) -> str:
        """The kind of labels that it takes, a value of ``data.label_kind``."""
        return "classes" if self.shapes == "classes" else "clicks" if self.kind == "ranking" else self.kind

    @abstractmethod
    def __call__(
        self, prediction: Any, labels: torch.Tensor, weights: torch.Tensor | None = None, batch: object = None
    ) -> torch.Tensor:
        """The mean loss of ``prediction``, what the model gives for B samples, for ``labels`` [B] or [B, L];
        0 without samples. With ``weights`` in the labels' shape, the mean of weight * loss, in which labels
        of weight 0 have no part, whatever they are. ``batch``: what the labels are of.

        Raises ``UserError`` if they do not fit together.
        """

    def arguments(self, batch: object) -> dict[str, Any]:
        """What the report says of it: its arguments, those that depend on the data as for ``batch``."""
        return asdict(self) if is_dataclass(self) and not isinstance(self, type) else {}

    def logits(self, prediction: Any) -> torch.Tensor:
        """What the figures of quality and answers take for the prediction: logits of clicks."""
        return cast(torch.Tensor, prediction)

    def takes(self, found: object) -> bool:
        """Whether ``found``, a part of a model's output, can be its prediction."""
        return isinstance(found, torch.Tensor)


class Pointwise(Loss):
    """A loss of each label by itself, of which parts of a batch add up."""

    @abstractmethod
    def of(self, prediction: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        """The loss of each label (``reduction="none"``), in their shape, or the mean of these (``mean``)."""

    def weighted(self, prediction: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The mean of weight * loss."""
        return (self.of(prediction, labels, "none") * weights).mean()

    def __call__(
        self, prediction: Any, labels: torch.Tensor, weights: torch.Tensor | None = None, batch: object = None
    ) -> torch.Tensor:
        """``prediction`` is [B], [B, 1] or [B, n]."""
        if weights is not None:
            labels = labels.masked_fill(weights == 0, 0)
        values, wanted = vector(prediction), vector(labels)
        fits = self.shapes == "any" or values.shape == wanted.shape
        if self.shapes == "classes":
            fits = values.dim() == 2 and wanted.shape == values.shape[:1]
        if not fits:
            form = "the labels' shape, or [B, 1]" if self.shapes == "same" else "[B, classes] for labels [B]"
            raise UserError(
                f"model.loss={self.name}: the model's output is {list(prediction.shape)} and the labels are "
                f"{list(labels.shape)}; return {form}, or set model.prediction, model.labels or model.loss"
            )
        values = exact(values)
        if self.shapes != "any":
            wanted = wanted.to(values.dtype if self.shapes == "same" else torch.int64)
        if not wanted.shape[0]:
            return values.sum() * 0.0
        if self.rates and wanted.numel() and wanted.device.type == "cpu" and not wanted.requires_grad:
            # On a CPU alone: looking at a GPU's would wait for it. NumPy looks, which no trace of torch's
            # operators sees.
            given = wanted.numpy()
            if given.min() < 0 or given.max() > 1:
                raise UserError(f"model.loss={self.name}: a label is not within [0, 1]; {VALUES}")
        if weights is None:
            return self.of(values, wanted, "mean")
        return self.weighted(values, wanted, vector(weights))


class OwnLoss(Pointwise):
    """A ``function`` of the user's own, ``_target_``, of predictions and labels, which gives the mean."""

    shapes = "any"

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function

    def of(self, prediction: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        """The mean; there is none of each label."""
        return self._mean(self.function(prediction, labels))

    def weighted(self, prediction: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The function's own, if it has a parameter ``weights``."""
        if "weights" not in signature(getattr(self.function, "forward", self.function)).parameters:
            raise UserError(
                f"model.loss={self.name}: the labels have weights, which it does not take; give it a "
                "parameter 'weights', float32 in the labels' shape, or leave data.weight out"
            )
        return self._mean(self.function(prediction, labels, weights=weights))

    def _mean(self, loss: Any) -> torch.Tensor:
        if not isinstance(loss, torch.Tensor) or loss.dim():
            what = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UserError(f"model.loss={self.name} gives {what}, not a 0-dim tensor, the mean over samples")
        return loss
