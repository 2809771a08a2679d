"""Models that people bring under every technique, against a loop by hand with plain modules of TorchRec."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import recpipe
from recpipe.data.dataset import Dataset
from recpipe.tables.group_rows import GroupRows
from recpipe.training.module import RankingModule
from tests.any_model.runs import QUIET, all_on_two_ranks, furthest_left, left_by, train
from tests.any_model.zoo import (
    OVERRIDES,
    TECHNIQUES,
    ZOO,
    Events,
    Trained,
    by_hand,
    events,
    furthest,
    make,
)

BATCHES = 8
BOUND = {"sgd": 1e-6, "rowwise_adagrad": 1e-5}


@pytest.fixture(scope="module")
def batches(criteo: Dataset) -> list[Events]:
    return events(criteo, BATCHES)


_by_hand: dict[tuple[str, str], Trained] = {}


def reference(name: str, batches: list[Events], optimizer: str) -> Trained:
    """The loop by hand, once for all techniques."""
    key = (name, optimizer)
    if key not in _by_hand:
        _by_hand[key] = by_hand(make(name), batches, optimizer)
    return _by_hand[key]


@pytest.fixture
def trained_on(monkeypatch: pytest.MonkeyPatch) -> list[Events]:
    """The batches as they were trained, in their order."""
    seen: list[Events] = []
    step = RankingModule.training_step

    def watched(self: RankingModule, batch, index: int) -> torch.Tensor:
        seen.append(batch.batch)
        return step(self, batch, index)

    monkeypatch.setattr(RankingModule, "training_step", watched)
    return seen


@pytest.mark.parametrize(
    ("name", "technique"),
    [
        pytest.param(name, technique, marks=[pytest.mark.soak] * twin)
        for name in ZOO
        for technique in TECHNIQUES
        for twin in [name in ("dcn", "deepfm") and technique not in ("resident", "hotline")]
    ],
)
def test_a_technique_trains_a_model_as_by_hand(batches, trained_on, name, technique) -> None:
    mine = train(make(name), batches, "rowwise_adagrad", *TECHNIQUES[technique])
    if technique == "fae":  # exact in an order of its own
        theirs = by_hand(make(name), trained_on, "rowwise_adagrad")
    else:
        theirs = reference(name, batches, "rowwise_adagrad")
    assert furthest(mine, theirs) < BOUND["rowwise_adagrad"]


# Twins have the tables of ``dlrm``.
@pytest.mark.parametrize("technique", ["resident", "hotline"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name in ("dcn", "deepfm"))) for name in ZOO]
)
def test_under_sgd(batches, name, technique) -> None:
    mine = train(make(name), batches, "sgd", *TECHNIQUES[technique])
    assert furthest(mine, reference(name, batches, "sgd")) < BOUND["sgd"]


@pytest.mark.parametrize("name", ["dcn", "two_tower", "din"])
def test_lost_gradients_are_found(batches, monkeypatch, name) -> None:
    """The negative control: without those of all but one micro-batch the tables differ."""
    whole = GroupRows._gradient

    def lossy(self: GroupRows) -> torch.Tensor:
        self._given = self._given[:1]
        return whole(self)

    monkeypatch.setattr(GroupRows, "_gradient", lossy)
    mine = train(make(name), batches, "rowwise_adagrad", *TECHNIQUES["hotline"])
    assert furthest(mine, reference(name, batches, "rowwise_adagrad")) > 1e-3


@pytest.mark.parametrize(
    ("name", "technique"),
    [
        pytest.param(name, technique, marks=[pytest.mark.soak] * twin)
        for technique in ("resident", "lru_ssd", "hotline", "slipstream_hotline")
        for name in ("deepfm", "two_tower", "din")
        # Each technique by one model, and each kind of model by two techniques.
        for twin in [name != ("two_tower" if technique in ("resident", "hotline") else "din")]
    ],
)
def test_stopping_and_resuming_is_bitwise(batches, tmp_path, name, technique) -> None:
    words = (*QUIET, *OVERRIDES["rowwise_adagrad"], *TECHNIQUES[technique], "trainer.max_epochs=1")
    saving = (*words, "trainer.checkpoint_every=3", f"trainer.checkpoint_dir={tmp_path / 'saved'}")
    with recpipe.train(make(name), batches, *saving, quiet=True) as run:
        whole = left_by(run.model)
    saved = sorted((tmp_path / "saved").glob("*.ckpt"))
    assert len(saved) > 1
    torch.manual_seed(99)
    other = ZOO[name]()  # first weights that do not matter
    with recpipe.train(other, batches, *words, f"resume='{saved[0]}'", quiet=True) as run:
        again = left_by(run.model)
    assert furthest(again, whole) == 0


@pytest.mark.parametrize("name", ZOO)
def test_what_was_trained_loads_into_plain_torchrec(batches, tmp_path, name) -> None:
    checkpoint = (f"trainer.checkpoint_dir={tmp_path}", "trainer.checkpoint_every=8")
    words = (*QUIET, *OVERRIDES["sgd"], *TECHNIQUES["lru_ssd"], *checkpoint)
    with recpipe.train(make(name), batches, *words, quiet=True) as run:
        state, scores = run.model.state_dict(), run.predict(batches[0])
        loaded = recpipe.load(run.checkpoint, model=make(name))
    plain = make(name)
    plain.load_state_dict(state, strict=True)
    for model in (plain.eval(), loaded):
        with torch.no_grad():
            if name in ("dlrm", "dcn", "deepfm"):
                logits = model(batches[0].dense_features, batches[0].sparse_features)
            else:
                logits = model(batches[0])
        logits = logits[1] if isinstance(logits, tuple) else logits
        torch.testing.assert_close(logits.reshape(-1), scores.cpu())


RANKS = {
    "bagpipe": (tuple(ZOO), TECHNIQUES["bagpipe"]),
    "neo": (tuple(ZOO), ("+plugin=neo", "plugins.neo.planner=karmarkar_karp")),
    "het": (("two_tower", "din"), TECHNIQUES["het"]),
}
TOGETHER = [(technique, name) for technique, (names, _) in RANKS.items() for name in names]
TWINS = [(technique, name) for technique, name in TOGETHER if name in ("dcn", "deepfm")]
"""Their tables are those of ``dlrm``, and the dense part's gradients are summed over ranks alike."""


def trained_together(
    batches: list[Events], folders: pytest.TempPathFactory, which: list[tuple[str, str]]
) -> Path:
    """Where two processes have left the parameters of these techniques and models."""
    folder = folders.mktemp("together")
    jobs = {f"{technique}-{name}": (name, RANKS[technique][1]) for technique, name in which}
    all_on_two_ranks(folder, batches, jobs)
    return folder


@pytest.fixture(scope="module")
def together(batches: list[Events], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_together(batches, tmp_path_factory, [job for job in TOGETHER if job not in TWINS])


@pytest.fixture(scope="module")
def twins(batches: list[Events], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_together(batches, tmp_path_factory, TWINS)


@pytest.mark.parametrize(
    ("technique", "name"),
    [pytest.param(*job, marks=pytest.mark.soak) for job in TOGETHER],  # test_sharded.py has ranks
)
def test_two_ranks_train_as_by_hand(batches, request, technique, name) -> None:
    folder = request.getfixturevalue("twins" if (technique, name) in TWINS else "together")
    assert furthest_left(folder / f"{technique}-{name}", reference(name, batches, "rowwise_adagrad")) < 1e-5
