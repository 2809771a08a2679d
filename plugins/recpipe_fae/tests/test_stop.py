"""However training ends while the loader waits for a decision, the run ends, too."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recpipe_fae.callback import ShuffleScheduler
from recpipe_fae.schedule import Scheduler, Segment, Sizes, plan
from recpipe_fae.tests.test_resume import RECIPE

from recpipe.config.compose import compose
from recpipe.plugin.errors import PluginError
from recpipe.run import run
from recpipe.testing import train
from recpipe.training.module import RankingModule

HANGS_AFTER = 90
ONE_EPOCH = (*RECIPE, "trainer.max_epochs=1")


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """A run that hangs fails its test instead of stopping the suite."""

    hung: list[int] = []

    def hangs(number: int, _: Any) -> None:
        hung.append(number)  # a generator that is being closed would swallow the error
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANGS_AFTER)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    assert not hung, "the run hung"


@pytest.fixture
def while_the_loader_waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], list[int]]:
    """``while_the_loader_waits(act)``: ``act()`` in the step whose decision the loader waits for."""
    asked = threading.Event()
    waited_at: list[int] = []
    segment, step = Scheduler.segment, RankingModule.training_step

    def watched(self: Scheduler, number: int, start: int, sizes: Sizes) -> Segment | None:
        if number:
            asked.set()
        return segment(self, number, start, sizes)

    def arm(act: Callable[[], None]) -> list[int]:
        def acting(self: RankingModule, batch: Any, batch_idx: int) -> Any:
            # In the last step of the first cold segment; the loader's thread may be a moment late.
            if self.global_step + 1 == first_segment(self) and asked.wait(30):
                waited_at.append(self.global_step + 1)
                act()
            return step(self, batch, batch_idx)

        monkeypatch.setattr(Scheduler, "segment", watched)
        monkeypatch.setattr(RankingModule, "training_step", acting)
        return waited_at

    return arm


def first_segment(module: RankingModule) -> int:
    """Batches of the first cold segment."""
    owned = next(each for each in module.trainer.callbacks if isinstance(each, ShuffleScheduler))
    return plan([owned.scheduler.start], owned.prepared.sizes)[0][0].stop


def test_an_error_in_training(while_the_loader_waits: Any, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("of the training step")

    waited_at = while_the_loader_waits(fail)
    with pytest.raises(RuntimeError, match="of the training step"):
        train(ONE_EPOCH, tmp_path)
    assert waited_at


def test_an_error_in_the_evaluation_that_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: Any) -> float:
        raise RuntimeError("of the evaluation")

    monkeypatch.setattr(ShuffleScheduler, "slice_loss", fail)
    with pytest.raises(PluginError, match="raised RuntimeError: of the evaluation"):
        train(ONE_EPOCH, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_with_a_checkpoint(
    number: signal.Signals, while_the_loader_waits: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waited_at = while_the_loader_waits(lambda: os.kill(os.getpid(), number))
    with pytest.raises(KeyboardInterrupt):
        run(compose(ONE_EPOCH), tmp_path)
    said = f"stopped by {number.name} after step {waited_at[0]}; go on with resume="
    assert said in capsys.readouterr().out
    rest = train((*ONE_EPOCH, f"resume={tmp_path / 'checkpoints'}"), tmp_path / "rest")
    assert rest.report["plugins"]["fae"]["swaps"] > 1


def test_a_second_signal_ends_at_once(while_the_loader_waits: Any, tmp_path: Path) -> None:
    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    waited_at = while_the_loader_waits(twice)
    with pytest.raises(SystemExit):
        train(ONE_EPOCH, tmp_path)
    assert waited_at


@pytest.mark.parametrize("after", [-1, 0, 1])
def test_max_steps_around_a_decision(after: int, tmp_path: Path) -> None:
    """The last step is the one before a segment's end, its end, or the first of the next one."""
    swap = 8  # 30% of 29 cold batches, without the 3 that hold the slice
    short = train((*ONE_EPOCH, f"trainer.max_steps={swap + after}"), tmp_path)
    assert short.report["plugins"]["fae"]["swaps"] == (after >= 0)
    assert short.report["data"]["train_samples"] == 100 * (swap + after)


def test_no_sample_needs_to_be_held_out(tmp_path: Path) -> None:
    found = train((*ONE_EPOCH, "data.eval_fraction=0"), tmp_path).report["plugins"]["fae"]
    assert len(found["slice_losses"]) > 6
