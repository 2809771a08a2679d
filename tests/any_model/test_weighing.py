"""Models that compute their ids' weights, under every technique, against plain modules of TorchRec."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import recpipe
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.step import StepTimes, accumulate
from recpipe.plugin.tables import TableOptimizer
from recpipe.tables.proxy import BagProxy
from tests.any_model.by_hand import BATCHES, MORE, given, grid, in_a_loop, reference
from tests.any_model.runs import QUIET, all_on_two_ranks, furthest_left, left_by, train
from tests.any_model.weighing import WEIGHING, HandedOn, Scaled, Weighing, with_own_weights
from tests.any_model.zoo import OVERRIDES, TECHNIQUES, Events, by_hand, events, furthest, make
from tests.pipeline.samples import placed

RANKS = {
    "resident": (),
    "lru": ("tiers.policy=lru",),
    "neo": ("+plugin=neo", "plugins.neo.planner=karmarkar_karp"),
    "het": TECHNIQUES["het"],
}


@pytest.fixture(scope="module")
def batches(criteo: Dataset) -> list[Events]:
    return events(criteo, BATCHES)


@pytest.mark.parametrize(("name", "technique"), grid(WEIGHING, "positions"))
def test_a_technique_trains_a_model_as_by_hand(batches, name, technique) -> None:
    mine = train(make(name), given(name, batches), "rowwise_adagrad", *MORE[technique])
    assert furthest(mine, reference(name, batches)) < 1e-5


def test_their_weights_are_trained(batches) -> None:
    """What they are equal to is not where they began."""
    first, last = make("positions").state_dict(), reference("positions", batches).parameters
    learned = [name for name in first if "position_weight" in name]
    assert len(learned) == 2
    assert min(float((first[name] - last[name]).abs().max()) for name in learned) > 1e-2


@pytest.fixture(scope="module")
def together(batches: list[Events], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    all_on_two_ranks(folder, batches, {label: ("positions", words) for label, words in RANKS.items()})
    return folder


@pytest.mark.soak  # test_sharded.py trains on ranks, and weights are trained here
@pytest.mark.parametrize("technique", RANKS)
def test_two_ranks_train_as_by_hand(batches, together, technique) -> None:
    assert furthest_left(together / technique, reference("positions", batches)) < 1e-5


@pytest.mark.parametrize("technique", ["resident", "hotline"])
def test_a_loop_of_ones_own(batches, technique) -> None:
    mine = in_a_loop("positions", batches, technique)
    assert furthest(mine, reference("positions", batches)) < 1e-5


def test_what_was_trained_scores_as_the_plain_model(batches, tmp_path) -> None:
    words = (*QUIET, *OVERRIDES["rowwise_adagrad"], f"trainer.checkpoint_dir={tmp_path}")
    with recpipe.train(make("positions"), batches, *words, "trainer.checkpoint_every=6", quiet=True) as run:
        state, scores = run.model.state_dict(), run.predict(batches[0])
        loaded = recpipe.load(run.checkpoint, model=make("positions"))
    plain = make("positions")
    plain.load_state_dict(state, strict=True)
    for model in (plain.eval(), loaded):
        with torch.no_grad():
            torch.testing.assert_close(model(batches[0])[1], scores)


def proxy_of_user(model: Weighing) -> BagProxy:
    (proxy,) = (m for path, m in model.named_modules() if isinstance(m, BagProxy) and path.startswith("user"))
    return proxy


def test_rows_are_summed_where_they_are_if_the_batch_has_the_weights(batches) -> None:
    """And by the proxy alone if the model computes them, also from those of the batch."""
    words = (*QUIET, *OVERRIDES["rowwise_adagrad"])
    for made, sums in ((HandedOn(), False), (Scaled(), True)):
        with recpipe.train(made, with_own_weights(batches), *words, quiet=True) as run:
            assert proxy_of_user(run.model).sums == sums
            assert run.report["data"]["unplanned_calls"] == 0


def late(batches: list[Events]) -> Iterator[float]:
    """How far a model is from plain modules that was not known to compute weights."""
    for name in ("scaled", "twice"):
        rows = with_own_weights(batches)
        model = placed(make(name), rows[0], optimizer_of=lambda *_: TableOptimizer("rowwise_adagrad", 0.05))
        optimizer = torch.optim.Adagrad(list(model.dense), lr=0.05)
        for batch in rows:
            optimizer.zero_grad()
            accumulate(model, InFlight(batch), StepTimes())
            optimizer.step()
        assert model.late_calls > 0
        theirs = by_hand(make(name), rows, "rowwise_adagrad")
        yield furthest(left_by(model.module), theirs)


def test_unknown_weights_get_their_gradient_too(batches) -> None:
    assert max(late(batches)) < 1e-5


def test_weights_without_their_gradient_are_found(batches, monkeypatch) -> None:
    """The negative control."""
    from recpipe.tables import proxy

    whole = proxy.weights_in_order
    monkeypatch.setattr(proxy, "weights_in_order", lambda *given: whole(*given).detach())
    mine = train(make("positions"), batches, "rowwise_adagrad")
    assert furthest(mine, reference("positions", batches)) > 1e-3


def test_no_weights_at_all_are_refused(batches) -> None:
    with pytest.raises(
        UserError, match="collection 'user' is weighted .is_weighted=True., and is called with ids"
    ):
        train(HandedOn(), batches, "rowwise_adagrad")
