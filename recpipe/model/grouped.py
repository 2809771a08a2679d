"""Metrics of the order of scores within groups of samples, such as those of one user."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch.nn import functional as F

from recpipe.model.scores import Scores, numbered


class OfGroups(NamedTuple):
    """A figure of each group that has one, and what it counts in their mean, float64 [G]."""

    values: torch.Tensor
    weights: torch.Tensor


class ByGroup:
    """The samples of ``scores`` that are in a group, by group and then in ascending order of their scores."""

    def __init__(self, scores: Scores) -> None:
        assert scores.groups is not None
        there = scores.groups >= 0
        names, number = numbered(scores.groups)
        blocks = scores.blocks
        order = torch.empty(0, dtype=torch.int64) if blocks is None else blocks.order
        order = order[there[order]]
        self._group, again = number[order].sort(stable=True)
        order = order[again]
        score = scores.raw[order]
        ends = (self._group[1:] != self._group[:-1]) | (score[1:] != score[:-1])
        self._count = int((names >= 0).sum())
        self._without = len(scores) - int(there.sum())
        self._clicked = scores.labels[order] > 0.5
        self._blocks = scores.in_blocks(order, ends) if len(order) else None

    @property
    def counts(self) -> dict[str, int]:
        """How many groups there are, without a positive, and of one class; and samples in none."""
        without = self._count - len(numbered(self.ranks[1])[0])
        one_class = self._count - len(self.auc.values)
        return {
            "groups": self._count,
            "without_positives": without,
            "one_class": one_class,
            "samples_without_group": self._without,
        }

    @cached_property
    def auc(self) -> OfGroups:
        """The AUC of each group that has samples of both classes, weighted by the weight of its samples."""
        if self._blocks is None:
            return OfGroups(torch.empty(0), torch.empty(0))
        group = self._group[self._blocks.ends]
        each = [part.double() for part in (self._blocks.positive, self._blocks.negative)]
        positive, negative = (torch.bincount(group, weights=part) for part in each)
        below = each[1].cumsum(0) - each[1] / 2 - (negative.cumsum(0) - negative)[group]
        right = torch.bincount(group, weights=each[0] * below)
        both = (positive > 0) & (negative > 0)
        return OfGroups((right / (positive * negative))[both], (positive + negative)[both])

    @cached_property
    def ranks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rank of each positive in its group, from 1, and the number of its group among those that have
        one: both int64 [P].

        Negatives with an equal score are before it, so that a model which scores all alike gets no credit.
        """
        if self._blocks is None:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        ends = self._blocks.ends
        positive, negative = (F.pad(those.cumsum(0), (1, 0)) for those in (self._clicked, ~self._clicked))
        at = self._clicked.nonzero().squeeze(1)
        sizes = torch.bincount(self._group)
        last = sizes.cumsum(0)[self._group[at]]
        first = F.pad(ends + 1, (1, 0))[self._blocks.each[at]]
        ranks = 1 + negative[last] - negative[first] + positive[last] - positive[at + 1]
        return ranks, numbered(self._group[at])[1]


def ranking_at_k(ranks: torch.Tensor, queries: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    """``recall``, ``ndcg``, ``hr`` and ``mrr`` at ``k`` of each of Q queries, float64 [Q].

    ``ranks``: of the relevant items among those that were scored for their query, from 1, int64 [P];
    ``queries``: whose they are, int64 [P], each of 0 to Q - 1 at least once. Gains are 0 or 1; the ideal DCG
    is that of min(k, relevant items) hits at the top.
    """
    relevant, hit = torch.bincount(queries), (ranks <= k).double()
    hits = torch.bincount(queries, weights=hit)
    gained = torch.bincount(queries, weights=hit / (ranks + 1).double().log2())
    ideal = (1 / torch.arange(2, k + 2).double().log2()).cumsum(0)[relevant.clamp(max=k) - 1]
    first = torch.full_like(relevant, torch.iinfo(torch.int64).max).scatter_reduce(0, queries, ranks, "amin")
    return {
        "recall": hits / relevant,
        "ndcg": gained / ideal,
        "hr": (hits > 0).double(),
        "mrr": torch.where(first <= k, 1 / first.double(), 0.0),
    }
