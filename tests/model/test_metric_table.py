"""Each metric of the table against a plain loop, and its interval against derivatives and a bootstrap."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from recpipe.model.config import MetricsConfig
from recpipe.model.grouped import ranking_at_k
from recpipe.model.metrics import METRICS, Interval, Metric, judge, judged, named, ordered
from recpipe.model.ranked import auc_influence
from recpipe.model.scores import OfBlocks, Scores

RNG = np.random.default_rng(3)
SIZE = 400
USERS = torch.from_numpy(RNG.integers(-1, 30, SIZE))
SCORES = torch.from_numpy(RNG.normal(size=SIZE).round(1).astype(np.float32))  # with ties
LABELS = (torch.from_numpy(RNG.random(SIZE).astype(np.float32)) < SCORES.sigmoid()).float()
WEIGHTS = torch.from_numpy(RNG.integers(0, 4, SIZE).astype(np.float32))
FRACTIONS = torch.from_numpy(RNG.random(SIZE).astype(np.float32))


def asked(**changes) -> MetricsConfig:
    return MetricsConfig(**changes)


# -- values ----------------------------------------------------------------------------------------


def precision_by_hand(labels, scores, weights) -> float:
    """Over each positive, the precision among all that are not below it."""
    found = 0.0
    for label, score, weight in zip(labels, scores, weights, strict=True):
        if label:
            there = scores >= score
            found += weight * (weights * labels)[there].sum() / weights[there].sum()
    return float(found / (weights * labels).sum())


@pytest.mark.parametrize("weights", [torch.ones(SIZE), WEIGHTS, FRACTIONS], ids=["none", "whole", "parts"])
def test_pr_auc(weights: torch.Tensor) -> None:
    there = weights > 0
    parts = [part[there].double().numpy() for part in (LABELS, SCORES, weights)]
    found = judged("clicks", LABELS, SCORES, weights)["pr_auc"]
    assert found == pytest.approx(precision_by_hand(*parts), rel=1e-12)
    sklearn = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    theirs = sklearn.average_precision_score(parts[0], parts[1], sample_weight=parts[2])
    assert found == pytest.approx(theirs, rel=1e-12)
    area = sklearn.roc_auc_score(parts[0], parts[1], sample_weight=parts[2])
    assert judged("clicks", LABELS, SCORES, weights)["auc"] == pytest.approx(area, rel=1e-12)


def test_the_error_of_calibration_is_that_of_its_bins() -> None:
    """By hand, over bins that hold each distinct prediction alone."""
    raw = torch.tensor([-1.0, 0, 2]).repeat_interleave(torch.tensor([50, 30, 20]))
    labels = torch.from_numpy(RNG.integers(0, 2, 100).astype(np.float32))
    weights = torch.from_numpy(RNG.random(100).astype(np.float32)).double()
    wanted = 0.0
    for value in (-1.0, 0, 2):
        own = raw == value
        rate = (labels[own] * weights[own]).sum() / weights[own].sum()
        wanted += float(weights[own].sum() * abs(1 / (1 + math.exp(-value)) - rate) / weights.sum())
    assert judged("clicks", labels, raw, weights.float())["ece"] == pytest.approx(wanted, rel=1e-6)


def test_the_ece_of_a_model_that_is_right_is_what_noise_alone_makes() -> None:
    """What docs/guide/figures.md says of it; a model that is wrong is told apart."""
    rng, count = np.random.default_rng(0), 2000
    right, wrong = [], []
    for _ in range(20):
        logits = rng.normal(-1.5, 1, count).astype(np.float32)
        rates = 1 / (1 + np.exp(-logits))
        labels = torch.from_numpy((rng.random(count) < rates).astype(np.float32))
        right.append(judged("clicks", labels, torch.from_numpy(logits))["ece"])
        wrong.append(judged("clicks", labels, torch.from_numpy(logits + 1))["ece"])
    noise = 0.8 * (10 * rates.mean() * (1 - rates.mean()) / count) ** 0.5
    assert np.mean(right) == pytest.approx(noise, rel=0.2)
    assert min(wrong) > 5 * noise


def groups_by_hand(weights: torch.Tensor, k: int) -> dict[str, float]:
    """The ranking figures by a loop over users; of equal scores negatives come first."""
    areas, shares, at = [], [], {name: [] for name in ("recall", "ndcg", "hr", "mrr")}
    for user in range(30):
        own = (user == USERS) & (weights > 0)
        labels, scores, weight = (part[own].double() for part in (LABELS, SCORES, weights))
        pairs = right = 0.0
        for a in range(len(labels)):
            for b in range(len(labels)):
                if labels[a] and not labels[b]:
                    pair = float(weight[a] * weight[b])
                    pairs += pair
                    right += pair * (float(scores[a] > scores[b]) + 0.5 * float(scores[a] == scores[b]))
        if pairs:
            areas.append(right / pairs)
            shares.append(float(weight.sum()))
        if labels.sum():
            order = sorted(range(len(labels)), key=lambda n: (-scores[n], labels[n]))
            gains = [float(labels[n]) for n in order]
            ideal = sorted(gains, reverse=True)
            dcg, best = (
                sum(gain / math.log2(place + 2) for place, gain in enumerate(values[:k]))
                for values in (gains, ideal)
            )
            first = gains.index(1.0) + 1
            for name, value in (
                ("recall", sum(gains[:k]) / sum(gains)),
                ("ndcg", dcg / best),
                ("hr", float(first <= k)),
                ("mrr", 1 / first if first <= k else 0.0),
            ):
                at[name].append(value)
    figures = {f"{name}@{k}": float(np.mean(values)) for name, values in at.items()}
    return {"gauc": float(np.average(areas, weights=shares)), **figures}


@pytest.mark.parametrize("weights", [torch.ones(SIZE), WEIGHTS], ids=["none", "weights"])
@pytest.mark.parametrize("kind", ["clicks", "ranking"])
def test_figures_of_groups(kind, weights: torch.Tensor) -> None:
    found = judge(Scores(kind, LABELS, SCORES, weights, USERS), asked(k=[1, 3]))
    for k in (1, 3):
        for name, value in groups_by_hand(weights, k).items():
            assert found.quality[name] == pytest.approx(value, rel=1e-12), name
    users = [(user == USERS) & (weights > 0) for user in range(30)]
    there = [own for own in users if own.any()]
    assert found.groups == {
        "groups": len(there),
        "without_positives": sum(not LABELS[own].any() for own in there),
        "one_class": sum(len(LABELS[own].unique()) == 1 for own in there),
        "samples_without_group": int(((USERS < 0) & (weights > 0)).sum()),
    }
    assert ("auc" in found.quality) == (kind == "clicks"), "a ranking is not judged beside all others"
    assert not {name for name in judged(kind, LABELS, SCORES) if "@" in name or name == "gauc"}


def test_a_score_alike_for_all_gets_no_credit() -> None:
    found = judge(Scores("ranking", LABELS, torch.zeros(SIZE), groups=USERS), asked(k=[1])).quality
    assert found["gauc"] == 0.5
    alone = [LABELS[user == USERS].min() for user in range(30) if LABELS[user == USERS].any()]
    assert found["hr@1"] == pytest.approx(np.mean(alone)), "where there are positives alone"


def test_groups_of_one_class_and_none() -> None:
    user = torch.zeros(4, dtype=torch.int64)
    for labels in (torch.ones(4), torch.zeros(4)):
        found = judge(Scores("clicks", labels, torch.arange(4.0), groups=user))
        assert math.isnan(found.quality["gauc"])
        assert found.groups is not None
        assert found.groups["one_class"] == 1
    nobody = judge(Scores("clicks", LABELS, SCORES, groups=torch.full((SIZE,), -1)))
    assert math.isnan(nobody.quality["gauc"])
    assert math.isnan(nobody.quality["ndcg@10"])
    nan = judge(Scores("clicks", LABELS, torch.full((SIZE,), math.nan), groups=USERS)).quality
    assert math.isnan(nan["gauc"])


def test_ranking_by_the_rank_of_one_item_each() -> None:
    """As retrieval over all items has it: one relevant item for each query."""
    found = ranking_at_k(torch.tensor([1, 3, 11]), torch.arange(3), 10)
    assert found["recall"].tolist() == found["hr"].tolist() == [1, 1, 0]
    assert found["ndcg"].tolist() == pytest.approx([1, 0.5, 0])
    assert found["mrr"].tolist() == pytest.approx([1, 1 / 3, 0])


@pytest.mark.parametrize("how", ["platt", "isotonic"])
@pytest.mark.parametrize("weighted", [False, True])
def test_recalibrated(how: str, weighted: bool) -> None:
    """Predictions that are off by a shift and a factor are right after it, on samples that it has not
    seen."""
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=20_000).astype(np.float32))
    labels = (torch.from_numpy(rng.random(20_000).astype(np.float32)) < logits.sigmoid()).float()
    weights = torch.from_numpy(rng.random(20_000).astype(np.float32)) if weighted else None
    right = judged("clicks", labels, logits, weights)
    found = judge(Scores("clicks", labels, 3 * logits + 2, weights), asked(recalibrate=how)).quality
    assert found["calibration"] > 1.3
    assert found["calibration_recalibrated"] == pytest.approx(1, abs=0.03)
    assert found["ne"] > 1.2
    assert found["ne_recalibrated"] == pytest.approx(right["ne"], abs=0.01)
    one = judge(Scores("clicks", torch.ones(10), torch.arange(10.0)), asked(recalibrate=how)).quality
    assert math.isnan(one["ne_recalibrated"])


# -- intervals -------------------------------------------------------------------------------------

WITH_INFLUENCE = [
    (metric, kind)
    for metric in METRICS
    if isinstance(metric, Metric) and metric.influence is not None and not metric.recalibrated
    for kind in metric.kinds
]


@pytest.mark.parametrize(("metric", "kind"), WITH_INFLUENCE, ids=lambda each: getattr(each, "name", each))
def test_an_influence_is_the_derivative_by_a_samples_weight(metric: Metric, kind) -> None:
    labels, raw = LABELS[:60], SCORES[:60]
    weights = FRACTIONS[:60].double() + 0.5
    scores = Scores(kind, labels, raw, weights)
    value = metric.value(scores)
    assert metric.influence is not None
    found = metric.influence(scores, value)
    if isinstance(found, OfBlocks):
        found = found.of_samples(scores)
    if metric.name == "auc":  # without the n - 1 of a sample's variance
        clicks = int(labels.sum())
        found = found / torch.where(
            labels > 0, math.sqrt(clicks / (clicks - 1)), math.sqrt((60 - clicks) / (59 - clicks))
        )
    assert float((found * weights).sum()) == pytest.approx(0, abs=1e-9)
    step = 1e-5
    for sample in range(0, 60, 7):
        each = []
        for sign in (-1, 1):
            moved = weights.clone()
            moved[sample] += sign * step
            each.append(metric.value(Scores(kind, labels, raw, moved)))
        derivative = (each[1] - each[0]) / (2 * step) * float(weights.sum())
        assert float(found[sample]) == pytest.approx(derivative, rel=1e-4, abs=1e-6)


def test_aucs_variance_is_delongs() -> None:
    positive, negative = (SCORES[label == LABELS].double() for label in (1, 0))
    wins = (positive[:, None] > negative).double() + 0.5 * (positive[:, None] == negative).double()
    wanted = float(wins.mean(1).var() / len(positive) + wins.mean(0).var() / len(negative))
    scores = Scores("clicks", LABELS, SCORES)
    found = auc_influence(scores, float(wins.mean()))
    assert found.squares(scores) / SIZE**2 == pytest.approx(wanted, rel=1e-12)
    assert float(found.of_samples(scores).square().sum()) / SIZE**2 == pytest.approx(wanted, rel=1e-12)


def spread(found: Interval) -> float:
    """The standard error that a 95% interval was made of."""
    return (found.high - found.low) / (2 * 1.959964)


@pytest.mark.parametrize("clustered", [False, True])
def test_intervals_are_those_of_a_bootstrap(clustered: bool) -> None:
    """Of samples, or of users, whose predictions are off together; the control is the interval of the
    other."""
    rng = np.random.default_rng(5)
    users = torch.from_numpy(np.repeat(np.arange(150), 6))
    own = torch.from_numpy(np.repeat(rng.normal(size=150), 6).astype(np.float32))
    raw = torch.from_numpy(rng.normal(size=900).astype(np.float32))
    labels = (torch.from_numpy(rng.random(900).astype(np.float32)) < (raw + 2 * own).sigmoid()).float()
    exact = judge(Scores("clicks", labels, raw, groups=users if clustered else None)).figures
    other = judge(Scores("clicks", labels, raw, groups=None if clustered else users)).figures
    drawn: dict[str, list[float]] = {}
    each = [torch.arange(6 * user, 6 * user + 6) for user in range(150)] if clustered else torch.arange(900)
    for _ in range(150):
        chosen = rng.integers(0, len(each), len(each))
        rows = torch.cat([each[n] for n in chosen]) if clustered else torch.from_numpy(chosen)
        again = torch.from_numpy(np.repeat(np.arange(150), 6)) if clustered else None
        scores = Scores("clicks", labels[rows], raw[rows], groups=again)
        for name, value in judge(scores, asked(intervals=None)).quality.items():
            drawn.setdefault(name, []).append(value)
    for name, values in drawn.items():
        if name != "ece":
            assert spread(exact[name]) == pytest.approx(np.std(values), rel=0.25), name
    assert not 0.8 < spread(other["calibration"]) / spread(exact["calibration"]) < 1.25, "the control"


def test_the_level_and_the_ends() -> None:
    scores = Scores("clicks", LABELS, SCORES, groups=USERS)
    wide, narrow = (judge(scores, asked(intervals=level, k=[2])).figures for level in (0.99, 0.5))
    for name in wide.keys() - {"ece"}:
        assert wide[name].value == narrow[name].value
        assert spread(wide[name]) > 2 * spread(narrow[name]), name
    none = judge(scores, asked(intervals=None)).figures
    assert all(math.isnan(found.low) for found in none.values())
    sure = judge(Scores("clicks", torch.tensor([0.0, 0, 1, 1]), torch.tensor([-9.0, -9, 9, 9]))).figures
    assert sure["auc"] == Interval(1.0, 1.0, 1.0)
    assert sure["logloss"].low >= 0


@pytest.mark.soak
def test_intervals_over_groups_hold_the_truth() -> None:
    """Of 300 draws of users whose predictions are off together, at least 90% of 95%; intervals of single
    samples hold it less often."""

    def drawn(users: int, seed: int, grouped: bool = True) -> Scores:
        rng = np.random.default_rng(seed)
        own = np.repeat(rng.normal(size=users), 8).astype(np.float32)
        raw = torch.from_numpy(rng.normal(size=8 * users).astype(np.float32))
        rate = (raw + 1.5 * torch.from_numpy(own) - 0.5).sigmoid()
        labels = (torch.from_numpy(rng.random(8 * users).astype(np.float32)) < rate).float()
        groups = torch.arange(users).repeat_interleave(8)
        return Scores("clicks", labels, raw, groups=groups if grouped else None)

    truth = judge(drawn(100_000, 0), asked(k=[2])).quality
    names = truth.keys() - {"ece"}
    within, alone = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for seed in range(1, 301):
        for count, grouped in ((within, True), (alone, False)):
            found = judge(drawn(120, seed, grouped), asked(k=[2])).figures
            for name in names & found.keys():
                count[name] += found[name].low <= truth[name] <= found[name].high
    assert min(within.values()) >= 270, within
    assert alone["calibration"] < 240 < within["calibration"], (alone, within)


# -- names -----------------------------------------------------------------------------------------


def test_names_of_figures() -> None:
    assert named("auc") is METRICS[0]
    assert [named(name) for name in ("loss", "auc@3", "ndcg", "ndcg@", "ndcg@x", "ndcg@3_difference")] == [
        None
    ] * 6
    names = ["ece", "hr@10", "ndcg@10", "loss", "ndcg@5", "auc", "seconds"]
    assert ordered(names) == ["auc", "ndcg@5", "ndcg@10", "hr@10", "ece"]
    assert len({metric.name for metric in METRICS}) == len(METRICS)
