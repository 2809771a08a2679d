"""Where nothing is to be had, it takes no snapshots; where steps do not become shorter, it stops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recpipe_slipstream.tests.rig import QUICK, Rig, Setting
from recpipe_slipstream.verdict import TRIAL, Steps, Totals, sentence

from recpipe.data.dataset import Dataset

AUTO = Setting(knobs=QUICK | {"skip": "auto"})
STEPS = 70


def timed(rig: Rig, after: float, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """``rig`` trained, with steps of 10 ms before marks and of ``after`` ms under them."""
    clock = [0.0]
    monkeypatch.setattr("recpipe_slipstream.verdict.perf_counter", lambda: clock[0])
    count = rig.slipstream.after_batch

    def after_batch(*more: Any) -> None:
        marked = rig.slipstream.classifier.in_force(rig.slipstream.done) is not None
        clock[0] += 0.001 * (after if marked else 10)
        count(*more)

    monkeypatch.setattr(rig.slipstream, "after_batch", after_batch)
    return rig.train(STEPS)


def test_shorter_steps_go_on(clicks: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = timed(Rig(clicks, AUTO, tmp_path), 8, monkeypatch)
    always = Rig(clicks, Setting(), tmp_path / "always").train(STEPS)
    assert rig.slipstream.classifier.stopped_at is None
    assert rig.slipstream.totals.dropped == always.slipstream.totals.dropped > 0
    rig.tiers.close()
    always.tiers.close()


def test_steps_that_stay_as_long_end_it(
    clicks: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = timed(Rig(clicks, AUTO, tmp_path), 10, monkeypatch)
    stopped = rig.slipstream.classifier.stopped_at
    first = rig.slipstream.classifier.marks[-1].first
    assert stopped == first + TRIAL + 1, "one batch was classified already"
    kept = [batch.size for batch in rig.kept]
    assert min(kept[first:stopped]) < max(kept)
    assert len(set(kept[stopped:])) == 1, "nothing is left out any more"
    assert rig.slipstream.totals.marked_batches == stopped - first
    saved = rig.slipstream.state_dict()
    rig.slipstream.check_state(saved)
    assert saved["stopped_at"] == stopped
    rig.tiers.close()


def test_no_snapshot_where_few_inputs_are_hot(clicks: Dataset, tmp_path: Path) -> None:
    rig = Rig(clicks, replace(AUTO, resident=0.01), tmp_path).train(40)
    totals = rig.slipstream.totals
    assert totals.snapshots == 0
    assert totals.refused == "hot"
    assert totals.offered_share < 0.05
    assert rig.slipstream.classifier.marks == ()
    assert totals.classify_seconds == 0, "no batch's rows are looked at"
    rig.tiers.close()


def test_the_share_of_hot_inputs_is_that_of_the_sample(clicks: Dataset, tmp_path: Path) -> None:
    rig = Rig(clicks, replace(AUTO, knobs=QUICK | {"skip": "auto", "sample": 1.0}), tmp_path).train(30)
    resident = rig.view.resident()
    hot = [
        np.isin(rig.context.lookups(batch).rows.reshape(3, -1), resident).all(0)
        for batch in rig.context.batches(rig.slipstream.classifier.marks[-1].first - 1)
    ]
    assert rig.slipstream.totals.offered_share == pytest.approx(np.concatenate(hot).mean(), abs=0.01)
    rig.tiers.close()


def test_the_sentence() -> None:
    steps = Steps()
    assert "before a window did" in sentence(Totals(), steps, 0.3, None)
    few = sentence(Totals(refused="hot", offered_share=0.05), steps, 0.3, None)
    assert few.endswith("5.0% of the inputs are hot, so that at most 1.5% could be")
    totals = Totals(snapshots=1, samples=1000, hot=600, dropped=200, classified=1000, marked_batches=200)
    totals.snapshot_seconds = 0.4  # and 0.01 s a step, of 4/5 of the samples, save 0.5 s at most
    assert "too few steps" in sentence(totals, steps, 0.3, None)
    steps.before.extend([0.02] * TRIAL)
    steps.after.extend([0.01] * TRIAL)
    assert sentence(totals, steps, 0.3, None).startswith(
        "can have paid: left out 20.0% of all inputs, 33.3% of the hot"
    )
    totals.snapshot_seconds = 1.5
    assert sentence(totals, steps, 0.3, None).startswith("did not pay")
    assert "stopped before batch 90" in sentence(totals, steps, 0.3, 90)
