"""A trial keeps what makes steps shorter, on clocks made up here."""

from __future__ import annotations

import pytest

from recpipe.common.machine import Load
from recpipe.pipeline.splitting import BLOCK, HOLD, PAIRS, RARE, WATCHED, Trial


def run(trial: Trial, steps: int, with_it: float, without: float, saving: float) -> list[bool]:
    """Whether each of ``steps`` used the mechanism; batches are read two ahead of training."""
    used, coming = [], [False, False, trial.on]
    for _ in range(steps):
        on = coming.pop(0)
        used.append(on)
        trial.step(with_it if on else without, saving)
        coming.append(trial.on)
    return used


def test_a_decision_on_a_busy_machine_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECPIPE_BUSY", raising=False)

    def next_trial(share: float) -> tuple[int, str]:
        now = [0.0]

        def load() -> Load:
            now[0] += 1
            return Load(share * now[0], now[0], 0)

        trial = Trial(load=load)
        run(trial, WATCHED + 2 * 2 * BLOCK, with_it=0.8, without=1.0, saving=0.4)
        first = trial.decided
        while trial.decided == first:
            trial.step(0.8 if trial.on else 1.0, 0.4)
        second, said = trial.decided, trial.disturbed
        while trial.decided == second:
            trial.step(0.8 if trial.on else 1.0, 0.4)
        return trial.decided - second, said

    quiet, busy = next_trial(0.0), next_trial(0.5)
    assert (quiet[1], busy[1]) == ("", "other programs took 50% of this machine's processors")
    assert quiet[0] - busy[0] == HOLD


def test_what_cannot_save_is_never_tried() -> None:
    trial = Trial()
    assert not any(run(trial, 2000, with_it=0.5, without=1.0, saving=0.02))
    assert trial.watched > 100
    assert trial.could_save == pytest.approx(0.02)


def test_rare_delays_are_no_reason_to_try() -> None:
    """Two steps of those watched might have saved most of their time, and a third one decides."""
    for delayed, tried in ((RARE, False), (RARE + 1, True)):
        trial = Trial()
        for number in range(WATCHED):
            trial.step(1.0, 0.9 if number < delayed else 0.0)
        assert trial.compares == trial.on == tried


def test_what_makes_steps_shorter_stays_on() -> None:
    trial = Trial()
    used = run(trial, WATCHED + 200, with_it=0.8, without=1.0, saving=0.4)
    assert all(used[trial.decided + 2 :])
    assert trial.decided == WATCHED + 4 * BLOCK
    assert (trial.with_it, trial.without) == (pytest.approx(0.8), pytest.approx(1.0))


def test_what_makes_steps_longer_is_off_after_a_few() -> None:
    """It waits for rows, but the cost is larger: one pair of blocks is all that it takes."""
    trial = Trial()
    used = run(trial, HOLD, with_it=1.3, without=1.0, saving=0.4)
    assert sum(used) == BLOCK
    assert not trial.on


def test_a_small_gain_takes_all_pairs() -> None:
    trial = Trial()
    run(trial, WATCHED + 2 * PAIRS * BLOCK, with_it=0.95, without=1.0, saving=0.4)
    assert trial.on
    assert trial.decided == WATCHED + 2 * PAIRS * BLOCK


def test_it_is_tried_again_when_things_may_have_changed() -> None:
    trial = Trial()
    run(trial, HOLD, with_it=1.3, without=1.0, saving=0.4)
    used = run(trial, 2 * HOLD, with_it=0.7, without=1.0, saving=0.4)
    assert all(used[-50:])
    used = run(trial, 4 * HOLD, with_it=1.3, without=1.0, saving=0.4)
    assert not any(used[-50:])


def test_an_evaluation_between_steps_does_not_count() -> None:
    trial = Trial()
    for number in range(WATCHED + 4 * BLOCK):
        seconds = 0.8 if trial.on else 1.0
        trial.step(60.0 if number == WATCHED + 3 else seconds, 0.4)
    assert trial.with_it == pytest.approx(0.8)
    assert trial.on


def test_trainers_decide_by_the_slowest() -> None:
    """Ours would gain, another one's steps are longer with it: off."""
    theirs = iter([0.4, 1.5, 1.0])
    trial = Trial(lambda mine: max(mine, next(theirs)))
    run(trial, WATCHED + 2 * BLOCK, with_it=0.8, without=1.0, saving=0.4)
    assert not trial.on
    assert trial.with_it == 1.5
