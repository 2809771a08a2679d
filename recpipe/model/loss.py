"""Losses by name, for models that return none. Each is a mean over samples, of weight * loss if these have
weights, and converts its input to logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, cast

import torch
from torch.nn import functional as F

from recpipe.common.words import make
from recpipe.data.schema import LabelColumn
from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.model.metrics import Kind
from recpipe.plugin.conf import TARGET

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes the mean loss of a prediction and labels, a 0-dim tensor."""
Weighted = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes the mean of weight * loss of a prediction, labels and weights."""


VALUES = "for values there are model.loss=mean_squared_error, mean_absolute_error, huber and poisson"


def _weighted(function: Callable[..., torch.Tensor]) -> Weighted:
    """Of a loss of torch's, which takes ``reduction``."""
    return lambda prediction, labels, weights: (
        function(prediction, labels, reduction="none") * weights
    ).mean()


def _class_loss(
    scores: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The loss of ``scores`` [B, classes]. ``UserError`` for a label that is none of the classes."""
    try:
        if weights is not None:
            return _weighted(F.cross_entropy)(scores, labels, weights)
        return F.cross_entropy(scores, labels)
    except IndexError as fault:
        raise UserError(
            f"model.loss=cross_entropy: a label is none of the classes 0 to {scores.shape[1] - 1}, of which "
            f"the model's output has a column each ({shown(fault)}); give it more columns"
        ) from fault


def _probability_loss(
    prediction: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The loss of probabilities; not finite if a prediction is not. ``UserError`` for one that is no
    probability."""
    if bool(((prediction < 0) | (prediction > 1)).any()):
        raise UserError(
            "model.loss=binary_cross_entropy_of_probabilities: the model's output is not within [0, 1]; "
            "model.loss=binary_cross_entropy takes logits"
        )
    if not bool(prediction.isfinite().all()):
        return prediction.sum()
    return F.binary_cross_entropy(prediction, labels, weights)


@dataclass(frozen=True)
class Loss:
    """One loss: its ``name`` for messages, its ``function``, and the conversion of a prediction to logits."""

    name: str
    function: Function
    shapes: Literal["same", "classes", "any"] = "same"
    """``classes``: labels are class numbers [B], predictions [B, classes]; ``any``: the function checks."""
    logits: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Converts a prediction; None: it is one."""
    rates: bool = False
    """Whether labels must be within [0, 1], beyond which the loss would fall without end."""
    kind: Kind = "clicks"
    """The kind of prediction, which decides the figures of quality; ``clicks``: only if labels are 0/1."""
    weighted: Weighted | None = None
    """The same with weights; None: it takes none."""

    @property
    def labels(self) -> str:
        """The kind of labels that it takes, a value of ``data.label_kind``."""
        return "classes" if self.shapes == "classes" else self.kind

    def __call__(
        self, prediction: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The mean loss of ``prediction`` [B], [B, 1] or [B, n] for ``labels`` of the same number; 0 without
        samples. With ``weights`` in the labels' shape, the mean of weight * loss, in which labels of weight 0
        have no part, whatever they are.

        Raises ``UserError`` if the shapes do not fit.
        """
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
        if self.shapes != "any":
            wanted = wanted.to(torch.float32 if self.shapes == "same" else torch.int64)
        values = values.float()
        if not wanted.shape[0]:
            return values.sum() * 0.0
        if self.rates and wanted.numel() and wanted.device.type == "cpu" and not wanted.requires_grad:
            # On a CPU alone: looking at a GPU's would wait for it. NumPy looks, which no trace of torch's
            # operators sees.
            given = wanted.numpy()
            if given.min() < 0 or given.max() > 1:
                raise UserError(f"model.loss={self.name}: a label is not within [0, 1]; {VALUES}")
        if weights is None:
            loss = self.function(values, wanted)
        elif self.weighted is not None:
            loss = self.weighted(values, wanted, vector(weights))
        else:
            raise UserError(
                f"model.loss={self.name}: the labels have weights, which it does not take; give it a "
                "parameter 'weights', float32 in the labels' shape, or leave data.weight out"
            )
        if not isinstance(loss, torch.Tensor) or loss.dim():
            what = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UserError(f"model.loss={self.name} gives {what}, not a 0-dim tensor, the mean over samples")
        return loss


def vector(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape [B, 1] to [B]; leave other shapes."""
    return tensor.squeeze(1) if tensor.dim() == 2 and tensor.shape[1] == 1 else tensor


def _two_class_logit(scores: torch.Tensor) -> torch.Tensor:
    """The logit of class 1, where there are two."""
    two = scores.dim() == 2 and scores.shape[1] == 2
    return scores[:, 1] - scores[:, 0] if two else scores


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss(
            "binary_cross_entropy",
            F.binary_cross_entropy_with_logits,
            rates=True,
            weighted=F.binary_cross_entropy_with_logits,
        ),
        Loss(
            "binary_cross_entropy_of_probabilities",
            _probability_loss,
            logits=lambda prediction: torch.logit(prediction.float(), eps=torch.finfo(torch.float32).eps),
            rates=True,
            weighted=_probability_loss,
        ),
        Loss("cross_entropy", _class_loss, "classes", logits=_two_class_logit, weighted=_class_loss),
        Loss("mean_squared_error", F.mse_loss, kind="values", weighted=_weighted(F.mse_loss)),
        Loss("mean_absolute_error", F.l1_loss, kind="values", weighted=_weighted(F.l1_loss)),
        Loss("huber", F.huber_loss, kind="values", weighted=_weighted(F.huber_loss)),
        Loss("poisson", F.poisson_nll_loss, kind="counts", weighted=_weighted(F.poisson_nll_loss)),
    )
}
"""The values of ``model.loss``. The prediction of ``poisson`` is the logarithm of the rate."""


OF_KIND = {
    "clicks": "binary_cross_entropy",
    "values": "mean_squared_error",
    "counts": "poisson",
    "classes": "cross_entropy",
}
"""The loss of labels of each kind, where the recipe names none."""


def parse_loss(
    chosen: str | Mapping[str, Any] | None, labels: Sequence[LabelColumn] = ()
) -> Loss | dict[str, Loss]:
    """The loss that ``model.loss`` asks for: by name, by ``_target_``, or one for each label. Where it names
    none, the loss of the label's kind.

    ``labels``: those of the data; (): they are not known. Raises ``UserError`` for an unknown loss or label.
    """
    if isinstance(chosen, Mapping) and TARGET not in chosen:
        if not chosen:
            raise UserError("model.loss={}: name a loss, or one for each label")
        named = {str(label): _one(loss, f"model.loss.{label}") for label, loss in chosen.items()}
        names = [label.name for label in labels]
        for name in named if len(names) > 1 else ():
            if name not in names:
                raise UserError(f"model.loss.{shown(name)}: no such label; {nearest_or_all(name, names)}")
        own = {n.name: named.get(n.name, LOSSES[OF_KIND[n.kind]]) for n in labels}
        return own if len(own) > 1 else named
    found = {n.name: _one(OF_KIND[n.kind] if chosen is None else chosen, "model.loss") for n in labels}
    if len(found) > 1:
        return found
    return found[labels[0].name] if found else _one(chosen or OF_KIND["clicks"], "model.loss")


def _one(chosen: Any, key: str) -> Loss:
    if isinstance(chosen, Mapping):
        function: Callable[..., torch.Tensor] = make(cast(Any, Callable), chosen, key)
        weighted: Weighted | None = None
        if "weights" in signature(getattr(function, "forward", function)).parameters:
            weighted = lambda prediction, labels, weights: function(prediction, labels, weights=weights)  # noqa: E731
        return Loss(str(chosen[TARGET]), function, "any", weighted=weighted)
    if not isinstance(chosen, str) or chosen not in LOSSES:
        raise UserError(f"{key}={shown(chosen)}: is unknown; {nearest_or_all(str(chosen), LOSSES)}")
    return LOSSES[chosen]
