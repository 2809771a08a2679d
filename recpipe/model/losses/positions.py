"""Queries and candidates of each position of a history, where a model is trained at every one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from recpipe.errors import UserError, nearest_or_all, shown


@dataclass(frozen=True)
class Positions:
    """What P queries and candidates of a batch are of. The positions of a sample lie one after another, and
    the candidate of the last one is the sample's own target."""

    sample: torch.Tensor
    """int64 [P]: the place in the batch."""
    ids: Mapping[str, torch.Tensor]
    """Those of the candidates, int64 [P] each, under the names of the targets' features."""

    @classmethod
    def of(cls, prediction: object) -> Positions | None:
        """What a model's output says of its queries; None: they are of a sample each."""
        if not isinstance(prediction, Mapping) or "sample" not in prediction:
            return None
        return cls(prediction["sample"], prediction["ids"])

    def judged(self, prediction: Mapping[str, Any], labels: torch.Tensor) -> tuple[dict[str, Any], Positions]:
        """Query and candidate of the positions that have a part: all of a sample of label > 0, and the last
        of one of label 0, of which the target alone did not take place."""
        last = torch.ones_like(self.sample, dtype=torch.bool)
        last[:-1] = self.sample[1:] != self.sample[:-1]
        own = (last | (labels > 0)[self.sample]).nonzero().squeeze(1)
        kept = {name: prediction[name].index_select(0, own) for name in ("query", "candidate")}
        return kept, Positions(self.sample[own], {name: ids[own] for name, ids in self.ids.items()})

    def ids_of(self, feature: str, said: str) -> torch.Tensor:
        """Those of the candidates, int64 [P]; ``UserError``, which begins with what is ``said``, if they have
        no such feature."""
        if feature not in self.ids:
            raise UserError(
                f"{said}={shown(feature)}: is none of a history's events; {nearest_or_all(feature, self.ids)}"
            )
        return self.ids[feature]

    def log_shares(self) -> torch.Tensor:
        """The logarithm of the share of candidates with the id of each, by the first feature, float32 [P]."""
        first = next(iter(self.ids.values()))
        _, which, counts = torch.unique(first, return_inverse=True, return_counts=True)
        shares: torch.Tensor = (counts[which] / len(first)).log()
        return shares
