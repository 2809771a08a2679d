"""Losses over the pairs of a batch: beside loops over these pairs, in float64, and what is said of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F

import recpipe
from recpipe.errors import UserError
from recpipe.model.call import Called
from recpipe.model.config import UserModel
from recpipe.model.loss import parse_loss
from recpipe.model.losses.base import Loss
from recpipe.model.metrics import judged
from recpipe.plugin.errors import PluginError
from tests.model.objectives import FEATURES, QUIET, TwoTower, batch_of, report_of, written

ITEMS = [3, 5, 3, 7, 5, 9, 3, 1]
LABELS = torch.tensor([1.0, 1, 0, 1, 1, 0, 1, 1])
WEIGHTS = torch.tensor([1.0, 2, 1, 0, 0.5, 3, 1, 0])
LOG_Q = torch.tensor([0.3, 0.1, 0.3, 0.05, 0.1, 0.2, 0.3, 0.15]).log()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("ranking"))


def made(**chosen: Any) -> Loss:
    found = parse_loss(chosen)
    assert isinstance(found, Loss)
    return found


def towers(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    query, candidate = torch.randn(2, len(ITEMS), 3, generator=gen, dtype=torch.float64)
    return query.requires_grad_(), candidate.requires_grad_()


def softmax_by_hand(
    query: torch.Tensor,
    candidate: torch.Tensor,
    weights: torch.Tensor | None,
    temperature: float = 1.0,
    log_q: torch.Tensor | None = None,
    apart: bool = False,
    sampled: bool = False,
) -> torch.Tensor:
    """By a loop over samples and candidates."""
    total, lost = torch.zeros(()), torch.zeros(())
    own = torch.ones(len(ITEMS)) if weights is None else weights
    for i in range(len(ITEMS)):
        if own[i] == 0 or LABELS[i] == 0:
            continue
        logits = []
        for j in range(len(ITEMS)):
            left_out = own[j] == 0 or (apart and ITEMS[j] == ITEMS[i]) or (sampled and LABELS[j] == 1)
            if j == i or not left_out:
                score = query[i] @ candidate[j] / temperature
                logits.append(score if log_q is None else score - log_q[j])
        mine = query[i] @ candidate[i] / temperature - (0 if log_q is None else log_q[i])
        lost = lost + own[i] * (torch.stack(logits).exp().sum().log() - mine)
        total = total + own[i]
    return lost / total * (1 if weights is None else weights.mean())


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
@pytest.mark.parametrize(
    ("chosen", "by_hand"),
    [
        ({}, {}),
        ({"temperature": 0.2}, {"temperature": 0.2}),
        ({"candidate_ids": "item"}, {"apart": True}),
        ({"log_q": False}, {"log_q": None}),
        ({"temperature": 0.5, "candidate_ids": "item"}, {"temperature": 0.5, "apart": True, "log_q": LOG_Q}),
    ],
    ids=str,
)
def test_the_softmax_over_a_batch(
    chosen: dict[str, Any], by_hand: dict[str, Any], weights: torch.Tensor | None
) -> None:
    """With log q where the batch has it, unless the recipe says no."""
    given = LOG_Q if "log_q" in chosen or by_hand.get("log_q") is not None else None
    query, candidate = towers()
    batch = batch_of(ITEMS, LABELS, weights, given)
    found = made(name="in_batch_softmax", **chosen)((query, candidate), LABELS, weights, batch)
    wanted = softmax_by_hand(query, candidate, weights, **by_hand)
    torch.testing.assert_close(found, wanted.double(), rtol=1e-6, atol=0)
    for tensor in (query, candidate):
        slopes = [torch.autograd.grad(each, tensor, retain_graph=True)[0] for each in (found, wanted)]
        torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
@pytest.mark.parametrize("log_q", [None, LOG_Q], ids=["plain", "log_q"])
def test_the_softmax_over_sampled_negatives(weights: torch.Tensor | None, log_q: torch.Tensor | None) -> None:
    """Of label 0 alone; those that have the positive's own item are left out if the recipe says so."""
    for apart in (False, True):
        query, candidate = towers()
        chosen = {"candidate_ids": "item"} if apart else {}
        batch = batch_of(ITEMS, LABELS, weights, log_q)
        found = made(name="sampled_softmax", **chosen)((query, candidate), LABELS, weights, batch)
        wanted = softmax_by_hand(query, candidate, weights, log_q=log_q, apart=apart, sampled=True)
        torch.testing.assert_close(found, wanted.double(), rtol=1e-6, atol=0)
        slopes = [torch.autograd.grad(each, query, retain_graph=True)[0] for each in (found, wanted)]
        torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-9)
        in_batch = made(name="in_batch_softmax", **chosen)((query, candidate), LABELS, weights, batch)
        assert not torch.isclose(found, in_batch, rtol=1e-2)


USERS = [0, 0, 0, 1, 1, 1, 2, 1]


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
@pytest.mark.parametrize("towered", [True, False], ids=["towers", "scores"])
@pytest.mark.parametrize(
    "chosen",
    [
        {"group": "user"},
        {},
        {"negatives": "in_batch"},
        {"negatives": "in_batch", "candidate_ids": "item", "temperature": 0.5},
    ],
    ids=str,
)
def test_bpr(chosen: dict[str, Any], towered: bool, weights: torch.Tensor | None) -> None:
    """By a loop over pairs; positives without anything to be preferred to have no part."""
    if not towered and chosen != {"group": "user"}:
        pytest.skip("scores are compared within a group")
    query, candidate = towers()
    scores = candidate.sum(1)
    batch = batch_of(ITEMS, LABELS, weights, users=USERS)
    given = (query, candidate) if towered else scores[:, None]
    found = made(name="bpr", **chosen)(given, LABELS, weights, batch)
    own, total, lost = torch.ones(8) if weights is None else weights, torch.zeros(()), torch.zeros(())
    temperature = chosen.get("temperature", 1.0)

    def score(i: int, j: int) -> torch.Tensor:
        return (query[i] @ candidate[j] if towered else scores[j]) / temperature

    for i in range(8):
        each = []
        for j in range(8):
            wanted = own[j] > 0 and (LABELS[j] == 0 if chosen.get("negatives") is None else j != i)
            wanted = wanted and (USERS[i] == USERS[j] or "group" not in chosen)
            if wanted and not ("candidate_ids" in chosen and ITEMS[i] == ITEMS[j]):
                each.append(-torch.log(torch.sigmoid(score(i, i) - score(i, j))))
        if LABELS[i] == 1 and own[i] > 0 and each:
            lost, total = lost + own[i] * torch.stack(each).mean(), total + own[i]
    wanted_loss = lost / total * (1 if weights is None else weights.mean())
    torch.testing.assert_close(found, wanted_loss.double(), rtol=1e-6, atol=0)
    slopes = [torch.autograd.grad(loss, candidate, retain_graph=True)[0] for loss in (found, wanted_loss)]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-9)


def test_bpr_of_scores_needs_to_know_whose_they_are() -> None:
    message = r"say which feature that is, model.loss=\{name: bpr, group: USER\}"
    for chosen in ({}, {"group": "user", "negatives": "in_batch"}):
        with pytest.raises(UserError, match=message):
            made(name="bpr", **chosen)(torch.zeros(8), LABELS, None, batch_of(ITEMS, LABELS))
    with pytest.raises(UserError, match="negatives=all is unknown; choose one of sampled"):
        parse_loss({"name": "bpr", "negatives": "all"})


def test_log_q_and_repeated_items_count() -> None:
    """What each option changes is not hidden by another."""
    query, candidate = towers()
    batch = batch_of(ITEMS, LABELS, None, LOG_Q)
    found = [
        made(name="in_batch_softmax", **chosen)((query, candidate), LABELS, None, batch).item()
        for chosen in ({}, {"log_q": False}, {"candidate_ids": "item"}, {"temperature": 2.0})
    ]
    assert len({round(value, 9) for value in found}) == len(found)


def test_samples_of_weight_0_have_no_part() -> None:
    """Neither as positives nor as candidates: the batch without them gives the same weighted mean."""
    query, candidate = towers()
    there = WEIGHTS > 0
    loss = made(name="in_batch_softmax")
    whole = loss((query, candidate), LABELS, WEIGHTS) / WEIGHTS.mean()
    part = loss((query[there], candidate[there]), LABELS[there], WEIGHTS[there]) / WEIGHTS[there].mean()
    torch.testing.assert_close(whole, part)
    unknown = torch.where(there, LABELS, torch.nan)
    assert torch.equal(loss((query, candidate), unknown, WEIGHTS), loss((query, candidate), LABELS, WEIGHTS))
    (slope,) = torch.autograd.grad(whole, candidate)
    assert slope[~there].abs().max() == 0
    assert slope[there].abs().min() > 0


def test_a_batch_without_positives_or_samples_costs_nothing() -> None:
    query, candidate = towers()
    loss = made(name="in_batch_softmax")
    for labels, weights in ((LABELS * 0, None), (LABELS, LABELS * 0)):
        found = loss((query, candidate), labels, weights)
        found.backward()
        assert found == 0
    nothing = loss((query[:0], candidate[:0]), LABELS[:0])
    nothing.backward()
    assert nothing == 0
    assert query.grad is not None
    assert query.grad.abs().max() == 0


def test_halves_of_a_batch_are_not_the_batch() -> None:
    """Which is why the loss says so."""
    query, candidate = towers()
    loss = made(name="in_batch_softmax")
    halves = [loss((query[s], candidate[s]), LABELS[s]) for s in (slice(0, 4), slice(4, 8))]
    assert not torch.isclose(sum(halves) / 2, loss((query, candidate), LABELS), rtol=1e-2)
    assert loss.whole_batch


@pytest.mark.parametrize("names", [True, False])
def test_a_two_tower_model_is_called_and_scored(names: bool) -> None:
    """As a mapping or a tuple, whose score is that of the sample's own candidate."""
    model = TwoTower(names)
    called = Called.of(model, UserModel(target="a.B", loss={"name": "in_batch_softmax", "temperature": 0.5}))
    batch = batch_of(ITEMS, LABELS)
    loss, output = called(batch)
    query, candidate = (output["query"], output["candidate"]) if names else output
    scores = query @ candidate.T / 0.5
    each = F.cross_entropy(scores, torch.arange(len(ITEMS)), reduction="none")
    torch.testing.assert_close(loss, each[LABELS == 1].mean())
    torch.testing.assert_close(called.prediction(output), scores.diagonal())
    torch.testing.assert_close(called.predict(batch), scores.diagonal())
    assert called.kind == "ranking"
    assert called.judge(batch).losses.tolist() == [[pytest.approx(float(loss) * 8), 8]]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: x.sum(1), "the model returns a Tensor; return a mapping of query and candidate"),
        (lambda x: {"query": x}, "the model returns a mapping of query; return a mapping of query and cand"),
        (lambda x: (x, x, x), "the model returns 3 values; return a mapping of query and candidate"),
        (lambda x: (x, x[:, :1]), r"query is \[8, 3\] and its candidate \[8, 1\]; return \[B, D\] of both"),
    ],
)
def test_other_outputs_are_one_line(output: Any, message: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, batch: Any) -> Any:
            return output(torch.ones(8, 3))

    called = Called.of(Model(), UserModel(target="a.B", loss="in_batch_softmax"))
    with pytest.raises(UserError, match=message) as refused:
        called(batch_of(ITEMS, LABELS))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"candidate_ids": "itm"}, "candidate_ids=itm: no such feature; did you mean item"),
        ({"log_q": True}, "log_q is true, and the data have none; set data.negatives"),
    ],
)
def test_what_the_batch_lacks_is_one_line(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(name="in_batch_softmax", **chosen)(towers(), LABELS, None, batch_of(ITEMS, LABELS))


def test_a_ranking_has_no_figures_of_clicks() -> None:
    assert judged("ranking", LABELS, torch.randn(8)) == {}
    assert not math.isnan(judged("clicks", LABELS, torch.randn(8))["auc"])


IN_BATCH = "data.negatives={feature: item, sampling: in_batch}"


def test_a_run_learns_and_reports_its_loss_alone(file: Path) -> None:
    """No AUC, NE or logloss against labels that are never judged; binary cross-entropy of the same model's
    scores has them."""
    words = (IN_BATCH, "trainer.max_epochs=8", "optim.tables.lr=8", "optim.dense.lr=0.3")
    quality = report_of(file, TwoTower(), "model.loss=in_batch_softmax", *words)["quality"]
    assert {name for name, value in quality.items() if value is not None} == {"loss"}
    still = ("optim.dense.lr=1e-9", "optim.tables.lr=1e-9", "trainer.max_steps=1")
    untrained = report_of(file, TwoTower(), "model.loss=in_batch_softmax", IN_BATCH, *still)["quality"]
    assert quality["loss"] < untrained["loss"] - 0.3


def test_rows_may_lie_in_tiers(file: Path) -> None:
    """A cache of 60% of the bytes: the same batches, and the same losses."""
    loss = "model.loss={name: in_batch_softmax, candidate_ids: item}"
    words = (loss, IN_BATCH, "optim.tables.lr=8", "optim.dense.lr=0.3")
    resident = report_of(file, TwoTower(), *words)
    tiered = report_of(file, TwoTower(), *words, "tiers.policy=lru", "tiers.resident_bytes=60%")
    assert tiered["io"]["bytes_written"] > 0
    assert tiered["quality"]["loss"] == pytest.approx(resident["quality"]["loss"], rel=1e-6)


@pytest.mark.parametrize("loss", ["sampled_softmax", pytest.param("bpr", marks=pytest.mark.soak)])
def test_sampled_negatives_are_learnt_from(file: Path, loss: str) -> None:
    """The report says how, and that data without any teach nothing."""
    words = (f"model.loss={loss}", "trainer.max_epochs=3", "optim.tables.lr=4", "optim.dense.lr=0.1")
    drawn = "data.negatives={feature: item, ratio: 3, sampling: popularity}"
    report = report_of(file, TwoTower(), drawn, *words)
    first = report_of(file, TwoTower(), drawn, *words[:1], "trainer.max_steps=1")
    assert {name for name, value in report["quality"].items() if value is not None} == {"loss"}
    assert report["quality"]["loss"] < first["quality"]["loss"] - 0.02
    told = report["objective"]["score"]
    assert (told["loss"], told["kind"], told["weight"]) == (loss, "ranking", 1.0)
    assert told["arguments"]["temperature"] == 1.0
    assert told["arguments"].get("log_q") is (True if loss == "sampled_softmax" else None)
    with pytest.raises(UserError, match=f"{loss}: no sample of the first batch has label 0.*data.negativ"):
        report_of(file, TwoTower(), *words)


def test_a_model_with_a_score_learns_pairs_of_a_user(file: Path) -> None:
    """Recpipe's own, too."""
    drawn = "data.negatives={feature: item, ratio: 3, sampling: uniform}"
    words = (
        "model.loss={name: bpr, group: user}",
        "model.bottom=[8]",
        "model.top=[8]",
        "model.embedding_dim=4",
    )
    report = report_of(file, None, drawn, *words, "optim.tables.lr=2", "optim.dense.lr=0.2")
    assert {name for name, value in report["quality"].items() if value is not None} == {"loss"}
    assert 0 < report["quality"]["loss"] < 0.7


def test_parts_of_a_batch_are_refused(file: Path) -> None:
    """By accumulation and by a plugin that cuts batches, in one line each."""
    loss = "model.loss=in_batch_softmax"
    why = "model.loss=in_batch_softmax compares all samples of a batch with each other"
    with pytest.raises(UserError, match=f"accumulate_grad_batches trains a step in parts.*{why}") as refused:
        report_of(file, TwoTower(), loss, "trainer.accumulate_grad_batches=2")
    assert "\n" not in str(refused.value)
    with pytest.raises(PluginError, match=f"hotline.*cannot be trained in parts: {why}") as refused:
        report_of(file, TwoTower(), loss, "+plugin=hotline", "tiers=ssd", "tiers.resident_bytes=60%")
    assert "\n" not in str(refused.value)


def test_a_trained_two_tower_is_evaluated_and_predicts_scores(file: Path, tmp_path: Path) -> None:
    """By its products, and evaluated by its loss."""
    features = f"data.features={{labels: [click], features: {FEATURES}}}"
    model = (
        "model._target_=tests.model.objectives.TwoTower",
        "model.loss=in_batch_softmax",
    )
    with recpipe.train(None, file, *QUIET, features, *model, output=tmp_path / "out", quiet=True) as run:
        loss = run.report["quality"]["loss"]
    found = recpipe.evaluate(tmp_path / "out", None, "split=eval", quiet=True)
    told = found["tasks"]["score"]
    assert (told["kind"], told["samples"], told["positives"], told["figures"]) == ("ranking", 64, None, {})
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    scores = recpipe.predict(tmp_path / "out", file, quiet=True)
    tower = recpipe.load(tmp_path / "out", TwoTower())
    rows = pq.read_table(file).to_pydict()
    with torch.no_grad():
        query = tower.project(tower.rows.embedding_bags["user"].weight[rows["user"]])
        wanted = (query * tower.rows.embedding_bags["item"].weight[rows["item"]]).sum(1)
    torch.testing.assert_close(torch.from_numpy(scores), wanted, rtol=1e-5, atol=1e-6)
