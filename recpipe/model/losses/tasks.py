"""How the losses of several labels become one: weights that are learnt, and the product of two rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from recpipe.common.validation import Text
from recpipe.data.schema import LabelColumn
from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.model.losses.base import Loss, exact, vector
from recpipe.model.losses.pointwise import BinaryCrossEntropy

UNCERTAINTY: Literal["uncertainty"] = "uncertainty"
"""The value of ``model.task_weights`` for weights that are learnt."""
LOG_VARIANCES = "recpipe.task_log_variances"
"""Their name among the dense parameters of a checkpoint. They are no part of the model."""


class Uncertainty:
    """Weights of the losses of several labels by the uncertainty of each (Kendall et al., 2018):
    c exp(-v) L + v / 2, where v is a learnt log-variance and c is 1/2 for values and 1 for all others."""

    def __init__(self, losses: Mapping[str, Loss], device: torch.device) -> None:
        self._factors = {name: 0.5 if loss.kind == "values" else 1.0 for name, loss in losses.items()}
        self.log_variances = nn.Parameter(torch.zeros(len(losses), device=device))
        """One for each label, in the order of ``losses``."""

    def __call__(self, name: str, loss: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
        """What the ``loss`` of a label is in the sum. ``weight``: the mean weight of the samples, so that
        labels that a batch does not have change nothing, and parts of a batch add up."""
        own = self.log_variances[[*self._factors].index(name)]
        return self._factors[name] * torch.exp(-own) * loss + 0.5 * own * weight

    @property
    def weights(self) -> dict[str, float]:
        """What each loss is multiplied by now."""
        precise = torch.exp(-self.log_variances.detach()).tolist()
        return {
            name: factor * own for (name, factor), own in zip(self._factors.items(), precise, strict=True)
        }


@dataclass(frozen=True)
class Esmm:
    """The rate of clicks, p_ctr, and that of conversions over all impressions, p_ctr * p_cvr (Ma et al.,
    2018): the sum of the binary cross-entropies of both, so that the rate of conversions after a click,
    p_cvr, is learnt without choosing the samples that were clicked."""

    click: Text | None = None
    """The label of clicks; null: the first one of two."""
    conversion: Text | None = None
    """The label of conversions, over all samples; null: the second one."""
    name = "esmm"

    def of(self, labels: Sequence[LabelColumn]) -> Esmm:
        """The same with both labels named; ``UserError`` if the data do not have them."""
        names = [label.name for label in labels]
        for key, own in (("click", self.click), ("conversion", self.conversion)):
            if own is not None and own not in names:
                raise UserError(f"model.loss.{key}={shown(own)}: no such label; {nearest_or_all(own, names)}")
        if len(names) != 2 and None in (self.click, self.conversion):
            raise UserError(
                f"model.loss=esmm is over two labels, and the data have {len(names)}: say which, "
                "model.loss={name: esmm, click: LABEL, conversion: LABEL}"
            )
        found = Esmm(self.click or names[0], self.conversion or names[1])
        other = next((n for n in labels if n.name in found.labels.values() and n.kind != "clicks"), None)
        if other is not None or found.click == found.conversion:
            raise UserError(
                f"model.loss=esmm: it needs two different labels of kind clicks, and has {found.click} and "
                f"{found.conversion}" + (f", of kind {other.kind}" if other else "")
            )
        return found

    @property
    def labels(self) -> dict[str, str]:
        """By each output its label."""
        assert self.click is not None
        assert self.conversion is not None, "of() names both"
        return {"ctr": self.click, "cvr": self.conversion, "ctcvr": self.conversion}

    @property
    def losses(self) -> dict[str, Loss]:
        """By each output what judges it; that of ``cvr`` is no part of the sum."""
        return dict.fromkeys(self.labels, BinaryCrossEntropy())

    def outputs(self, ctr: torch.Tensor, cvr: torch.Tensor) -> dict[str, torch.Tensor]:
        """The logits of all three rates [B], of those of two. log(1 - p_ctr p_cvr) is the logarithm of
        (1 - p_ctr) + p_ctr (1 - p_cvr), which rounding does not make 0."""
        ctr, cvr = exact(vector(ctr)), exact(vector(cvr))
        clicked = F.logsigmoid(ctr)
        missed = torch.logaddexp(F.logsigmoid(-ctr), clicked + F.logsigmoid(-cvr))
        return {"ctr": ctr, "cvr": cvr, "ctcvr": clicked + F.logsigmoid(cvr) - missed}
