"""Metrics of the order of scores: AUC and average precision, with the influence of each sample on them."""

from __future__ import annotations

import math

import torch

from recpipe.model.scores import Blocks, OfBlocks, Scores


def auc(scores: Scores) -> float:
    """Exact area under the ROC curve: P(score of a positive > score of a negative) + P(equal) / 2.

    Counted in integers, O(N log N); with weights, a pair counts as their product, summed in float64. NaN when
    there is only one class or a score is NaN. torchmetrics is not used here: it maps logits through a float32
    sigmoid, which ties all logits above 17, and returns 0 for a single class.
    """
    blocks = _of_both_classes(scores)
    if blocks is None:
        return math.nan
    positive, negative = blocks.positive, blocks.negative
    below = negative.cumsum(0) - negative
    pairs = positive.sum().item() * negative.sum().item()
    return float((positive * (2 * below + negative)).sum().item() / (2 * pairs))


def auc_influence(scores: Scores, value: float) -> OfBlocks:
    """Its variance is DeLong's (Biometrics 1988): the share of negatives below each positive,
    and of positives above each negative. The n - 1 of his sample variances is in them."""
    blocks = scores.blocks
    assert blocks is not None
    positive, negative = blocks.positive.double(), blocks.negative.double()
    below, above = negative.cumsum(0) - negative / 2, positive.sum() - positive.cumsum(0) + positive / 2
    clicked = int((scores.labels > 0.5).sum())
    sides = []
    for share, own, others, count in (
        (below, positive.sum(), negative.sum(), clicked),
        (above, negative.sum(), positive.sum(), len(scores) - clicked),
    ):
        unbiased = math.sqrt(count / (count - 1)) if count > 1 else math.nan
        sides.append((share / others - value) * (scores.total / own * unbiased))
    return OfBlocks(*sides)


def average_precision(scores: Scores) -> float:
    """The area under the curve of precision over recall as a sum over thresholds, not interpolated: the mean
    over positives of the precision at their score. Equal scores are one threshold. NaN for one class."""
    blocks = _of_both_classes(scores)
    if blocks is None:
        return math.nan
    hits, _, precision = _at_thresholds(blocks)
    return float((blocks.positive * precision).sum() / hits[0])


def average_precision_influence(scores: Scores, value: float) -> OfBlocks:
    """What one sample's weight changes, in its own term and in the precision at every positive
    that it is not below of."""
    blocks = scores.blocks
    assert blocks is not None
    hits, every, precision = _at_thresholds(blocks)
    own = (blocks.positive / every).cumsum(0)
    wrong = (blocks.positive * precision / every).cumsum(0)
    scale = scores.total / hits[0]
    return OfBlocks((precision - value + own - wrong) * scale, -wrong * scale)


def _at_thresholds(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weight of positives, and of all samples, that are not below each block, and the precision there,
    float64 [blocks]."""
    hits, every = (
        part.double().flip(0).cumsum(0).flip(0)
        for part in (blocks.positive, blocks.positive + blocks.negative)
    )
    return hits, every, hits / every


def _of_both_classes(scores: Scores) -> Blocks | None:
    blocks = scores.blocks
    if blocks is None or not float(blocks.positive.sum()) or not float(blocks.negative.sum()):
        return None
    return blocks
