"""Losses that compare the candidates of a batch with each other: they judge an order, not a probability."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, cast

import torch
from annotated_types import Gt
from torch.nn import functional as F

from recpipe.common.validation import Text, one_of
from recpipe.data.parts import kjts_in
from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.model.losses.base import Loss, exact, vector
from recpipe.model.losses.positions import Positions

TOWERS = "query", "candidate"
"""The parts of a two-tower model's output, [B, D] each, under TorchRec's names."""


class Compared:
    """The scores of every query of a batch for every candidate of it, and which of them take part.

    A sample of label > 0 is a positive. One of weight 0 has no part, neither as a positive nor as a
    candidate.
    """

    def __init__(
        self,
        scores: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None,
        same: torch.Tensor | None,
        positions: Positions | None = None,
    ) -> None:
        size = len(scores)
        there = torch.ones(size, dtype=torch.bool, device=scores.device)
        if weights is not None:
            there = weights > 0
        self.scores = scores
        """[B, B]: of the query of sample i for the candidate of sample j."""
        self.positive = there & (labels > 0)
        """bool [B]."""
        self.negative = there & ~(labels > 0)
        """bool [B]: samples of label 0."""
        self.own = torch.eye(size, dtype=torch.bool, device=scores.device)
        """bool [B, B]: which candidates are the sample's own."""
        self.others = there[None, :] & ~self.own
        """bool [B, B]: which candidates a sample's own is compared with; ``same`` [B, B] are left out."""
        if same is not None:
            self.others = self.others & ~same
        self.positions = positions
        """What the queries and candidates are of; None: one of each sample."""
        self._weights = weights

    def mean(self, each: torch.Tensor, judged: torch.Tensor) -> torch.Tensor:
        """The weighted mean of ``each`` [B] over the samples that are ``judged`` [B]; 0 if none is. Times the
        mean weight, so that shares of a batch enter its sum by their weights."""
        own = judged.to(each.dtype)
        if self._weights is None:
            return (each * own).sum() / own.sum().clamp_min(1)
        own = own * self._weights
        found = (each * own).sum() / own.sum().clamp_min(torch.finfo(torch.float32).tiny)
        return found * self._weights.to(each.dtype).mean()


@dataclass(frozen=True)
class Ranking(Loss):
    """A loss over pairs of the batch's queries and candidates: s_ij = <query_i, candidate_j> /
    ``temperature``."""

    temperature: Annotated[float, Gt(0)] = 1.0
    candidate_ids: Text | None = None
    """The feature that says which item a candidate is: candidates with the id of a sample's own are not
    compared with it."""
    shapes = "any"
    kind = "ranking"
    whole_batch = True
    needs = "return a mapping of query and candidate, [B, D] each, or the two as a tuple"

    def takes(self, found: object) -> bool:
        """Whether it has a query and a candidate for each sample."""
        return _towers(found) is not None

    def logits(self, prediction: Any) -> torch.Tensor:
        """The score of each sample's own candidate, [B]."""
        query, candidate = self.towers(prediction)
        return (query * candidate).sum(1) / self.temperature

    def towers(self, prediction: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and candidate [B, D]; ``UserError`` if their shapes do not fit."""
        found = _towers(prediction)
        assert found is not None, "takes() has said so"
        query, candidate = map(exact, found)
        if query.dim() != 2 or query.shape != candidate.shape:
            raise UserError(
                f"model.loss={self.name}: the model's query is {list(query.shape)} and its candidate "
                f"{list(candidate.shape)}; return [B, D] of both"
            )
        return query, candidate

    def scores(self, prediction: Any) -> torch.Tensor:
        """Of each query for each candidate, [B, B]."""
        query, candidate = self.towers(prediction)
        return query @ candidate.T / self.temperature

    def __call__(
        self, prediction: Any, labels: torch.Tensor, weights: torch.Tensor | None = None, batch: object = None
    ) -> torch.Tensor:
        """The mean loss over positives; 0 without any. ``UserError`` if shapes do not fit."""
        labels, own = vector(labels), None if weights is None else vector(weights)
        if (positions := Positions.of(prediction)) is not None:
            prediction, positions = positions.judged(prediction, labels)
            labels = labels[positions.sample]
            own = None if own is None else own[positions.sample]
        scores = self.scores(prediction)
        if labels.shape != scores.shape[:1]:
            raise UserError(
                f"model.loss={self.name}: the model gives {len(scores)} samples and the labels are "
                f"{list(labels.shape)}; there must be one for each sample: say which, "
                f"model.loss={{LABEL: {self.name}}}"
            )
        if not len(scores):
            return scores.sum() * 0.0
        same = None if self.candidate_ids is None else self.equal(batch, "candidate_ids", positions)
        return self.compared(Compared(scores, labels, own, same, positions), batch)

    def equal(self, batch: object, argument: str, positions: Positions | None = None) -> torch.Tensor:
        """Which samples have the same id of the feature that an argument names, bool [B, B]."""
        feature, said = getattr(self, argument), f"model.loss={self.name}: {argument}"
        if positions is None:
            ids = ids_of(batch, feature, said)
        elif argument == "candidate_ids":
            ids = positions.ids_of(feature, said)
        else:
            ids = ids_of(batch, feature, said)[positions.sample]
        return ids[:, None] == ids[None, :]

    @abstractmethod
    def compared(self, pairs: Compared, batch: object) -> torch.Tensor:
        """The loss of what is compared."""


@dataclass(frozen=True)
class InBatchSoftmax(Ranking):
    """-log of the softmax of s_i - log q at each positive's own candidate, over all candidates of the batch
    (Yi et al., 2019), where q_j is how likely candidate j is to be in a batch."""

    log_q: bool | None = None
    """Whether log q, ``Batch.log_q``, is subtracted; null: where the data have it."""
    name = "in_batch_softmax"

    def compared(self, pairs: Compared, batch: object) -> torch.Tensor:
        """The mean over positives."""
        return self.softmax(pairs, pairs.others, batch)

    def arguments(self, batch: object) -> dict[str, Any]:
        """Whether log q is subtracted, too."""
        return {**super().arguments(batch), "log_q": self._log_q(batch) is not None}

    def softmax(self, pairs: Compared, others: torch.Tensor, batch: object) -> torch.Tensor:
        """That of each sample's own candidate and ``others`` bool [B, B]."""
        scores = pairs.scores
        log_q = self._log_q(batch)
        if log_q is not None and pairs.positions is not None:
            log_q = self.log_q_at(pairs.positions, log_q)
        if log_q is not None:
            scores = scores - log_q
        scores = scores.masked_fill(~(others | pairs.own), -torch.inf)
        places = torch.arange(len(scores), device=scores.device)
        return pairs.mean(F.cross_entropy(scores, places, reduction="none"), pairs.positive)

    def log_q_at(self, positions: Positions, log_q: torch.Tensor) -> torch.Tensor | None:
        """The same of each position's candidate, float32 [P]: as often as it is in the batch. The data's
        ``log_q`` is of samples, [B]."""
        return positions.log_shares().to(log_q.dtype)

    def _log_q(self, batch: object) -> torch.Tensor | None:
        found = getattr(batch, "log_q", None) if self.log_q is not False else None
        if found is None and self.log_q:
            raise UserError(
                f"model.loss={self.name}: log_q is true, and the data have none; set data.negatives="
                "'{feature: ITEM, sampling: in_batch}', or leave it out"
            )
        return found if isinstance(found, torch.Tensor) else None


@dataclass(frozen=True)
class SampledSoftmax(InBatchSoftmax):
    """``InBatchSoftmax`` over each positive's own candidate and those of the batch's samples of label 0,
    which ``data.negatives`` draws (Bengio and Senecal, 2003; Jean et al., 2015), where q_j is how likely
    candidate j is to be drawn."""

    name = "sampled_softmax"
    samples_negatives = True

    def compared(self, pairs: Compared, batch: object) -> torch.Tensor:
        """The mean over positives."""
        return self.softmax(pairs, pairs.others & pairs.negative, batch)

    def log_q_at(self, positions: Positions, log_q: torch.Tensor) -> torch.Tensor | None:
        """None: a constant changes nothing, and nothing else is known of a history's events; ``UserError`` if
        ids are not drawn alike."""
        if bool((log_q != log_q[:1]).any()):
            raise UserError(
                f"model.loss={self.name}: how likely the events of a history are to be drawn is not known, "
                "which model.autoregressive=true needs: set data.negatives' sampling to uniform, or log_q to "
                "false"
            )
        return None


@dataclass(frozen=True)
class Bpr(Ranking):
    """-log sigmoid(s_ii - s_ij), the mean over the candidates j that a positive i is preferred to (Rendle et
    al., 2009). For a model with a score for each sample s_ij is that of sample j."""

    negatives: Annotated[str, one_of("sampled", "in_batch")] = "sampled"
    """``sampled``: candidates of label 0; ``in_batch``: all others of the batch."""
    group: Text | None = None
    """The feature, that of the user, by whose ids samples are compared with each other alone."""
    name = "bpr"
    needs = "return scores [B] or [B, 1], for the argument group, or a mapping of query and candidate, [B, D]"

    def takes(self, found: object) -> bool:
        """Scores too."""
        return isinstance(found, torch.Tensor) or super().takes(found)

    def logits(self, prediction: Any) -> torch.Tensor:
        """The score of each sample, [B]."""
        if isinstance(prediction, torch.Tensor):
            return vector(prediction) / self.temperature
        return super().logits(prediction)

    def scores(self, prediction: Any) -> torch.Tensor:
        """[B, B]; ``UserError`` for scores [B] that nothing says how to compare."""
        if not isinstance(prediction, torch.Tensor):
            return super().scores(prediction)
        own = exact(self.logits(prediction))
        if own.dim() != 1:
            raise UserError(f"model.loss=bpr: the model's output is {list(prediction.shape)}; {self.needs}")
        if self.group is None or self.negatives == "in_batch":
            raise UserError(
                "model.loss=bpr: the model returns a score for each sample, that of its own user: say which "
                "feature that is, model.loss={name: bpr, group: USER}, with negatives: sampled"
            )
        return own.expand(len(own), len(own))

    def compared(self, pairs: Compared, batch: object) -> torch.Tensor:
        """The mean over positives that there is something to prefer to."""
        others = pairs.others
        if self.negatives == "sampled":
            others = others & pairs.negative
        if self.group is not None:
            others = others & self.equal(batch, "group", pairs.positions)
        apart = pairs.scores.diagonal()[:, None] - pairs.scores
        each = (F.softplus(-apart) * others).sum(1) / others.sum(1).clamp_min(1)
        return pairs.mean(each, pairs.positive & others.any(1))

    @property
    def samples_negatives(self) -> bool:  # type: ignore[override]
        """As the argument says."""
        return self.negatives == "sampled"


def ids_of(batch: object, feature: str, said: str) -> torch.Tensor:
    """The one id of each sample, int64 [B]; ``UserError``, which begins with what is ``said``, if the batch
    has none or several."""
    known = {key: ids for ids in kjts_in(batch) for key in cast(list[str], ids.keys())}
    if feature not in known:
        raise UserError(f"{said}={shown(feature)}: no such feature; {nearest_or_all(feature, known)}")
    own = known[feature][feature]
    values, lengths = cast(torch.Tensor, own.values()), own.lengths()
    if values.numel() != lengths.numel() or (lengths.device.type == "cpu" and not bool((lengths == 1).all())):
        raise UserError(f"{said}={shown(feature)}: has not one id for each sample; name a feature that has")
    return values


def _towers(found: object) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Query and candidate in a mapping of these names, or a pair; None if ``found`` is neither."""
    if isinstance(found, Mapping):
        found = tuple(found.get(name) for name in TOWERS)
    if not isinstance(found, tuple | list) or len(found) != len(TOWERS):
        return None
    query, candidate = found
    both = isinstance(query, torch.Tensor) and isinstance(candidate, torch.Tensor)
    return (query, candidate) if both else None
