"""Predictions of one label beside the labels, and what metrics need of the two, each made once."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

Values = torch.Tensor | npt.NDArray[np.float32]
Kind = Literal["clicks", "values", "counts", "ranking"]
"""The kinds of predictions: the logit of a 0/1 label, a value, the logarithm of a count's rate, or a score
that has a meaning beside other scores alone."""

BINS = 10
_EDGE_SAMPLE = 1 << 16
"""From how many predictions the bins' edges are taken; to sort all of them would take as long as the AUC."""


class Blocks(NamedTuple):
    """Samples in ascending order, equal ones together in a block. Weights are float64, or counts int64."""

    order: torch.Tensor
    """The numbers of the samples, int64 [N]."""
    ends: torch.Tensor
    """The place of each block's last sample, int64 [blocks]."""
    positive: torch.Tensor
    """The weight of its samples with label 1, [blocks]."""
    negative: torch.Tensor
    """That of the others."""

    @property
    def each(self) -> torch.Tensor:
        """The block of each sample, in their order here: int64 [N]."""
        return torch.arange(len(self.ends)).repeat_interleave(apart(self.ends + 1))


class Bins(NamedTuple):
    """Bins of samples by their predictions, lowest first."""

    samples: torch.Tensor
    """How many, int64 [bins]."""
    weight: torch.Tensor
    """Of the samples, float64 [bins]."""
    expected: torch.Tensor
    """The mean of what is predicted, float64 [bins]."""
    observed: torch.Tensor
    """The mean label, float64 [bins]."""


class Scores:
    """``predictions`` [N] of ``labels`` [N], with ``weights`` [N] if they do not count alike; samples of
    weight 0 are left out.

    ``groups``: int64 [N], which samples belong together, such as those of one user; below 0: to none.
    """

    def __init__(
        self,
        kind: Kind,
        labels: Values,
        predictions: Values,
        weights: Values | None = None,
        groups: torch.Tensor | None = None,
    ) -> None:
        label, raw = vectors(labels, predictions)
        self.weights: torch.Tensor | None = None
        """float64 [N]; None: all count alike."""
        if weights is not None:
            own = torch.as_tensor(weights)
            there = own > 0
            label, raw, own = label[there], raw[there], own[there]
            groups = None if groups is None else groups[there]
            self.weights = None if bool((own == 1).all()) else own.double()
        self.kind, self.labels, self.raw, self.groups = kind, label, raw, groups

    def __len__(self) -> int:
        return self.labels.numel()

    @cached_property
    def binary(self) -> bool:
        """Whether all labels are 0 or 1."""
        return bool(((self.labels == 0) | (self.labels == 1)).all())

    @cached_property
    def observed(self) -> torch.Tensor:
        """The labels, float64 [N]."""
        return self.labels.double()

    @cached_property
    def expected(self) -> torch.Tensor:
        """What the predictions say of the labels: probabilities, rates or values, float64 [N]."""
        raw = self.raw.double()
        return raw.sigmoid() if self.kind == "clicks" else raw.exp() if self.kind == "counts" else raw

    @cached_property
    def losses(self) -> torch.Tensor:
        """The binary cross-entropy of each sample in nats, float64 [N]."""
        return F.binary_cross_entropy_with_logits(self.raw.double(), self.observed, reduction="none")

    @cached_property
    def total(self) -> float:
        """The sum of the weights."""
        return float(len(self)) if self.weights is None else float(self.weights.sum())

    def mean(self, values: torch.Tensor) -> float:
        """sum(weight * value) / sum(weight) of ``values`` [N]; NaN without samples."""
        if not len(values):
            return math.nan
        return float(values.mean() if self.weights is None else (values * self.weights).sum() / self.total)

    @cached_property
    def rate(self) -> float:
        """The mean label."""
        return self.mean(self.observed)

    @cached_property
    def blocks(self) -> Blocks | None:
        """Samples by their scores; None without any, or if one is NaN."""
        ordered, order = torch.sort(self.raw)
        if not len(self) or bool(ordered[-1].isnan()):
            return None
        return self.in_blocks(order, ordered[1:] != ordered[:-1])

    def in_blocks(self, order: torch.Tensor, ends: torch.Tensor) -> Blocks:
        """The blocks of samples in this ``order``, with an end where ``ends`` [N - 1] says so, and the
        last."""
        places = torch.cat([ends, torch.ones(1, dtype=torch.bool)]).nonzero().squeeze(1)
        clicked = (self.labels > 0.5)[order]
        if self.weights is None:
            if len(places) == len(order):  # no two are equal
                return Blocks(order, places, clicked.long(), (~clicked).long())
            positive = clicked.cumsum(0)[places]
            return Blocks(order, places, apart(positive), apart(places + 1 - positive))
        own = self.weights[order]
        sums = [(own * those).cumsum(0)[places] for those in (clicked, ~clicked)]
        return Blocks(order, places, *map(apart, sums))

    @cached_property
    def clusters(self) -> torch.Tensor | None:
        """The groups numbered from 0, int64 [N], each sample without one in a cluster of its own; None if
        samples are in no groups."""
        if self.groups is None:
            return None
        own = torch.where(self.groups < 0, -1 - torch.arange(len(self)), self.groups)
        return numbered(own)[1]

    @cached_property
    def bins(self) -> Bins | None:
        """At most ``BINS`` bins of about equally many samples, equal predictions in one bin; None without
        samples, and if a prediction is NaN."""
        if not len(self) or bool(self.raw.isnan().any()):
            return None
        some = self.raw[:: -(-len(self) // _EDGE_SAMPLE)].sort().values
        deciles = torch.arange(1, BINS) * some.numel() // BINS
        number = torch.bucketize(self.raw.contiguous(), torch.unique(some[deciles]), right=True)
        samples = torch.bincount(number)
        used = samples > 0
        counted = torch.ones_like(self.expected) if self.weights is None else self.weights
        weight, expected, observed = (
            torch.bincount(number, weights=values * counted)[used]
            for values in (torch.ones_like(counted), self.expected, self.observed)
        )
        return Bins(samples[used], weight, expected / weight, observed / weight)


class OfBlocks(NamedTuple):
    """The influence on a figure of a block's samples with label 1, and of its others, float64 [blocks]."""

    positive: torch.Tensor
    negative: torch.Tensor

    def of_samples(self, scores: Scores) -> torch.Tensor:
        """Of each sample, float64 [N]."""
        blocks = scores.blocks
        assert blocks is not None
        found, at = torch.empty(len(scores), dtype=torch.float64), blocks.each
        clicked = scores.labels[blocks.order] > 0.5
        found[blocks.order] = torch.where(clicked, self.positive[at], self.negative[at])
        return found

    def squares(self, scores: Scores) -> float:
        """The sum of squares over samples that count alike."""
        blocks = scores.blocks
        assert blocks is not None
        sides = zip((blocks.positive, blocks.negative), self, strict=True)
        return sum(float((weight * moved * moved).sum()) for weight, moved in sides)


def apart(ends: torch.Tensor) -> torch.Tensor:
    """The difference of each of a running sum's values [n] to the one before."""
    found = ends.clone()
    found[1:] -= ends[:-1]
    return found


def numbered(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct values of ``groups`` [N], ascending, and the number of each sample's among them, int64
    [N]."""
    names, numbers = torch.unique(groups, return_inverse=True)
    return names, numbers


def vectors(labels: Values, scores: Values) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as tensors [N]; ``ValueError`` if one is longer."""
    label = torch.as_tensor(labels).detach().reshape(-1)
    score = torch.as_tensor(scores).detach().reshape(-1)
    if label.shape != score.shape:
        raise ValueError(f"{label.numel()} labels, but {score.numel()} scores")
    return label, score
