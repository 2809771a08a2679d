"""Ctrl-C and SIGTERM wherever a run may stand: it ends soon, with a checkpoint that goes on bitwise."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recpipe.checkpoint.table_io import TableCheckpointIO, newest
from recpipe.model import background, metrics
from recpipe.model.call import Judgement, Scored
from recpipe.training.evaluation import Evaluation, EvaluationStopped, Stop
from recpipe.training.module import RankingModule
from tests.training.test_trainer import EPOCH, KINDS, identical, trained  # noqa: F401

PLATEAU = (
    "trainer.callbacks=[{_target_: recpipe.training.plateau.ReduceLROnPlateau, patience: 0, factor: 0.5, "
    "threshold: 10, threshold_mode: abs}]"
)
"""The dense rate falls after every evaluation but the first: one more or fewer changes what is trained."""
RECIPE = (*KINDS["lru"], PLATEAU, "trainer.max_epochs=2", "trainer.checkpoint_every=1.0")
MIDDLE = 13
"""The step of the first evaluation: half an epoch."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """``sent(step, number, times)``: a signal comes in the second batch of the evaluation after ``step``.

    The list fills with the steps at which batches were evaluated.
    """

    def send(step: int, number: int = signal.SIGTERM, times: int = 1) -> list[int]:
        evaluated: list[int] = []
        original = RankingModule.validation_step

        def validation_step(self, batch, index) -> None:
            evaluated.append(self.global_step)
            if self.global_step == step and index == 1:
                monkeypatch.setattr(RankingModule, "validation_step", original)
                for _ in range(times):
                    os.kill(os.getpid(), number)
            original(self, batch, index)

        monkeypatch.setattr(RankingModule, "validation_step", validation_step)
        return evaluated

    return send


@pytest.mark.parametrize(
    ("step", "recipe"),
    [
        # As at its end, where there are two things to do.
        pytest.param(MIDDLE, (), marks=pytest.mark.soak),
        (EPOCH, ("trainer.eval_every=5", "trainer.checkpoint_every=24")),
        (20, ("trainer.max_steps=20", "trainer.eval_every=13")),
    ],
    ids=["middle of the epoch", "its end", "after training"],
)
def test_an_evaluation_stops_at_the_next_batch(trained, sent, tmp_path, capsys, step, recipe) -> None:  # noqa: F811
    whole = trained("whole", *RECIPE, *recipe)
    evaluated = sent(step)
    with pytest.raises(KeyboardInterrupt):
        trained("stopped", *RECIPE, *recipe)
    assert evaluated.count(step) == 2, "of 7 batches"
    found = newest(tmp_path / "stopped")
    assert found.name == f"step-{step:08d}.ckpt"
    assert f"stopped by SIGTERM after step {step}; go on with resume={found}\n" in capsys.readouterr().out
    assert identical(trained("rest", *RECIPE, *recipe, f"resume={found}"), whole)
    assert f"step {step:>6}" in capsys.readouterr().out, "the evaluation that was stopped is made"


def test_an_evaluation_that_a_kill_cut_off_is_made_on_resuming(trained, tmp_path, monkeypatch) -> None:  # noqa: F811
    """At the end of an epoch, which Lightning must not take for ended."""
    recipe = (*RECIPE, "trainer.eval_every=5", f"trainer.checkpoint_every={EPOCH}")
    step = RankingModule.validation_step

    def killed(self, batch, index) -> None:
        step(self, batch, index if self.global_step < EPOCH else 1 / 0)

    whole = trained("whole", *recipe)
    with monkeypatch.context() as patch:
        patch.setattr(RankingModule, "validation_step", killed)
        with pytest.raises(ZeroDivisionError):
            trained("killed", *recipe)
    assert newest(tmp_path / "killed").name == f"step-{EPOCH:08d}.ckpt"
    assert identical(trained("rest", *recipe, f"resume={tmp_path}/killed"), whole)


def test_the_second_signal_ends_at_once(trained, sent) -> None:  # noqa: F811
    sent(MIDDLE, signal.SIGINT, times=2)
    with pytest.raises(SystemExit, match="130"):
        trained("stopped", *RECIPE)


def test_a_signal_is_heard_while_the_figures_are_computed(trained, tmp_path, monkeypatch) -> None:  # noqa: F811
    done = threading.Event()

    def endless(*_) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        done.wait(60)

    monkeypatch.setattr(background, "judge", endless)
    with pytest.raises(KeyboardInterrupt):
        trained("stopped", *RECIPE)
    assert newest(tmp_path / "stopped").name == f"step-{MIDDLE:08d}.ckpt"
    assert not done.is_set()
    done.set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_the_first_step_there_is_nothing_to_save(trained, tmp_path, monkeypatch, number) -> None:  # noqa: F811
    before = signal.getsignal(number)

    def slowly(*_, **__) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("not heard")

    monkeypatch.setattr("recpipe.setup.ctx.open_dataset", slowly)
    with pytest.raises(KeyboardInterrupt):
        trained("stopped")
    assert signal.getsignal(number) is before
    assert not (tmp_path / "stopped" / "checkpoints").exists()


def test_while_a_checkpoint_is_loaded(trained, tmp_path, monkeypatch) -> None:  # noqa: F811
    trained("part", "trainer.max_steps=4", "trainer.checkpoint_every=4")
    interrupted = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    monkeypatch.setattr(TableCheckpointIO, "load_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained("rest", f"resume={tmp_path}/part")


class Pair:
    """A channel of two trainers of which this one is the first; the other answers with ``others``."""

    size = 2

    def __init__(self, *others: np.ndarray) -> None:
        self.others = list(others)

    def gather(self, part: np.ndarray) -> list[np.ndarray]:
        return [part, self.others.pop(0).astype(part.dtype)]


BATCH = [torch.ones(1)]


def told(stop: int, loss: float, *scored: tuple[float, float]) -> np.ndarray:
    """What the other trainer says: whether it was asked to stop, the sums of its losses and of its weights,
    and predictions and labels."""
    losses = np.array([loss, len(scored)], np.float64).view(np.float32)
    rows = [value for prediction, label in scored for value in (prediction, label, 1)]
    return np.concatenate(
        [np.array([stop, len(scored)], np.float32), losses, np.array([*rows, 0], np.float32)]
    )


QUIET = told(0, 3, (0.5, 1), (-2, 0))


def evaluation_over(trainers: Any) -> Evaluation:
    """Of a model with a loss of 2, which predicts 7 for a label of 1."""
    scored = Scored(torch.tensor([7.0]), torch.tensor([1.0]), None)
    judgement = Judgement(torch.tensor([[2.0, 1.0]], dtype=torch.float64), {"score": scored})
    task = SimpleNamespace(kind="clicks")
    called = SimpleNamespace(
        judged={"score": task}, judge=lambda batch: judgement, weighs=lambda batch: False
    )
    model: Any = SimpleNamespace(called=called, look_up=lambda batch: {}, parts=SimpleNamespace(sums=False))
    return Evaluation(model, trainers, Stop())


def test_a_signal_to_any_trainer_stops_the_evaluation_of_all() -> None:
    evaluation = evaluation_over(Pair(QUIET, told(1, 0.5, (3, 1))))
    evaluation.add(BATCH, last=False)
    assert not evaluation.stop.agreed
    kept = evaluation.quality["score"].submit().result()
    assert kept.pop("loss") == (2 + 2 * 1.5) / 3
    assert kept == metrics.judged("clicks", torch.tensor([1.0, 1, 0]), torch.tensor([7, 0.5, -2]))
    with pytest.raises(EvaluationStopped):
        evaluation.add(BATCH, last=False)
    assert evaluation.stop.agreed


def test_all_trainers_have_the_first_ones_figures() -> None:
    known = metrics.judged("clicks", torch.tensor([1.0, 0]), torch.tensor([1.0, 0]))
    theirs = [0.1] * (len(known) + 1)
    evaluation = evaluation_over(Pair(QUIET, np.array([*theirs, 0]), QUIET, np.array([*theirs, 1])))
    evaluation.add(BATCH, last=True)
    assert evaluation.result()["loss"] == (2 + 2 * 1.5) / 3
    with pytest.raises(EvaluationStopped):
        evaluation.add(BATCH, last=True)
