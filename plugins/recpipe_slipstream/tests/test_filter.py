"""The method in a run: what is left out contributes nothing, what may not be left out is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from recpipe_hotline.tests.rig import Replay
from recpipe_slipstream import classifier as classifier_module
from recpipe_slipstream.classifier import BAND, SIZES, Marks, classify, in_steps
from recpipe_slipstream.tests.rig import BATCH, QUICK, Rig, Setting, equal

from recpipe.data.dataset import Dataset
from recpipe.plugin.batch import Batch
from recpipe.plugin.policy import RowSpace
from recpipe.tables.tiers.policies import HotSet

STEPS = 80
STEP = -(-BATCH // SIZES)
HOTLINE = {"learn_batches": 5, "relearn_every": 20, "sample": 1.0, "min_micro_batch": 4}
ALONE = Setting()
WITH_HOTLINE = Setting(others={"hotline": HOTLINE})
BOTH = pytest.mark.parametrize("setting", [ALONE, WITH_HOTLINE], ids=["alone", "hotline"])


@pytest.fixture(scope="module")
def runs(clicks: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Rig]]:
    """A finished run alone and one with Hotline."""
    made = {
        name: Rig(clicks, setting, tmp_path_factory.mktemp(name)).train(STEPS)
        for name, setting in (("alone", ALONE), ("hotline", WITH_HOTLINE))
    }
    yield made
    for rig in made.values():
        rig.tiers.close()


def identity(batch: Batch) -> list[bytes]:
    """Each sample's dense features: as good as a name, they are random."""
    return [row.tobytes() for row in batch.dense.numpy()]


def marks_of(rig: Rig) -> Marks:
    assert rig.slipstream.classifier.marks
    return rig.slipstream.classifier.marks[-1]


# -- what is left out ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "optimizer"),
    [
        pytest.param(ALONE, "sgd", id="sgd-alone"),
        pytest.param(ALONE, "rowwise_adagrad", id="rowwise_adagrad-alone", marks=pytest.mark.soak),
        pytest.param(WITH_HOTLINE, "sgd", id="sgd-hotline", marks=pytest.mark.soak),  # as in tests/test_pairs
        pytest.param(WITH_HOTLINE, "rowwise_adagrad", id="rowwise_adagrad-hotline"),
    ],
)
def test_a_run_of_the_kept_inputs_alone_has_the_same_bits(
    setting: Setting, optimizer: str, clicks: Dataset, tmp_path: Path
) -> None:
    rig = Rig(clicks, replace(setting, optimizer=optimizer), tmp_path / "with").train(STEPS)
    assert rig.slipstream.totals.dropped > STEPS
    expected = rig.parameters()
    hot = rig.tiers.planner.policy

    def same_rows(space: RowSpace) -> HotSet:
        assert isinstance(hot, HotSet)
        return HotSet(space, hot.target)

    without = replace(setting, knobs=None, optimizer=optimizer)
    if not setting.others:
        without = replace(without, policy=same_rows)
    kept = Rig(Replay(rig.kept, clicks), without, tmp_path / "kept").train(STEPS)
    assert equal(kept.parameters(), expected)
    # The control: with the inputs that were left out, the result is another one.
    everything = Rig(Replay(rig.read, clicks), without, tmp_path / "read").train(STEPS)
    assert not equal(everything.parameters(), expected)
    for run in (rig, kept, everything):
        run.tiers.close()


def test_real_rows_are_left_out_without_a_trace(criteo: Dataset, tmp_path: Path) -> None:
    setting = replace(WITH_HOTLINE, knobs=QUICK | {"sample": 0.02}, resident=0.8)
    rig = Rig(criteo, setting, tmp_path / "with").train(STEPS)
    totals = rig.slipstream.totals
    assert totals.dropped > STEPS
    assert totals.marked_dropped / totals.marked_hot == pytest.approx(0.3, abs=0.1)
    kept = Rig(Replay(rig.kept, criteo), replace(setting, knobs=None), tmp_path / "kept").train(STEPS)
    assert equal(kept.parameters(), rig.parameters())
    for run in (rig, kept):
        run.tiers.close()


@pytest.mark.parametrize("name", ["alone", "hotline"])
def test_kept_and_dropped_are_a_partition_by_the_marks(name: str, runs: dict[str, Rig]) -> None:
    rig = runs[name]
    marks = marks_of(rig)
    dropped = hot_samples = 0
    for number, (read, kept) in enumerate(zip(rig.read, rig.kept, strict=True)):
        hot, stale = classify(marks, rig.context.lookups(read), None)
        names = np.array(identity(read))
        left_out = in_steps(stale, STEP) & (number >= marks.first)
        assert identity(kept) == names[~left_out].tolist(), "kept inputs stay in their order"
        assert not (stale & ~hot).any()
        if number >= marks.first:
            dropped += int(left_out.sum())
            assert kept.size % STEP == 0 or kept.size == read.size
            hot_samples += int(hot.sum())
            index = torch.from_numpy(np.flatnonzero(~left_out))
            assert torch.equal(kept.labels, read.labels[index])
            assert torch.equal(kept.dense, read.dense[index])
            cold = names[~hot].tolist()
            assert set(cold) <= set(identity(kept)), "a cold input was dropped"
    totals = rig.slipstream.totals
    assert (totals.dropped, totals.hot) == (dropped, hot_samples)
    assert 0 < dropped < hot_samples < sum(batch.size for batch in rig.read)


@pytest.mark.parametrize("name", ["alone", "hotline"])
def test_no_input_of_the_window_or_before_is_dropped(name: str, runs: dict[str, Rig]) -> None:
    rig = runs[name]
    first = marks_of(rig).first
    assert first > round(QUICK["window"] * STEPS)
    assert [batch.size for batch in rig.kept[:first]] == [BATCH] * first
    assert min(batch.size for batch in rig.kept[first:]) < BATCH


def test_dropped_samples_count_as_consumed(runs: dict[str, Rig]) -> None:
    rig = runs["alone"]
    assert rig.consumed == [batch.size for batch in rig.read[:STEPS]]
    assert sum(rig.consumed) > sum(batch.size for batch in rig.kept[:STEPS])


@pytest.mark.parametrize("name", ["alone", "hotline"])
def test_the_share_that_is_dropped_is_the_wanted_one(name: str, runs: dict[str, Rig]) -> None:
    totals = runs[name].slipstream.totals
    assert totals.sampled_share == pytest.approx(0.3, abs=0.02)
    # Sampling error: three standard deviations of a share of so many inputs.
    error = 3 * np.sqrt(0.3 * 0.7 / totals.sampled_inputs)
    assert totals.marked_dropped / totals.marked_hot == pytest.approx(totals.sampled_share, abs=error + 0.02)


def test_the_authors_search_lands_in_its_band(clicks: Dataset, tmp_path: Path) -> None:
    knobs = QUICK | {"threshold": "bisection"}
    rig = Rig(clicks, replace(ALONE, knobs=knobs, optimizer="sgd"), tmp_path).train(STEPS)
    totals = rig.slipstream.totals
    assert 0.3 - BAND <= totals.sampled_share <= 0.3 + BAND
    assert totals.threshold > 0
    assert totals.dropped > 0
    rig.tiers.close()


def test_fewer_stale_rows_make_more_inputs_stale(clicks: Dataset, tmp_path: Path) -> None:
    """With alpha of 1 the same share is reached at a lower threshold, since any stale row is enough."""
    thresholds = []
    for needed in (None, 2, 1):
        rig = Rig(clicks, replace(ALONE, knobs=QUICK | {"stale_lookups": needed}), tmp_path).train(STEPS)
        assert rig.slipstream.totals.sampled_share == pytest.approx(0.3, abs=0.05)
        thresholds.append(rig.slipstream.totals.threshold)
        rig.tiers.close()
    assert thresholds == sorted(thresholds, reverse=True)
    assert thresholds[0] > thresholds[-1]


def test_a_batch_of_stale_inputs_alone_is_trained_whole(clicks: Dataset, tmp_path: Path) -> None:
    rig = Rig(clicks, ALONE, tmp_path).train(3)
    everything = np.arange(rig.tables.layout.total_rows)
    classifier = rig.slipstream.classifier
    classifier.marks = (Marks(0, everything, np.ones(len(everything), bool), len(everything)),)
    batch = next(clicks.batches("train", BATCH))
    assert classifier.keep(batch, 4) is None
    assert classifier.trained(4).dropped == 0
    rig.tiers.close()


def test_the_hot_set_of_its_own_holds_the_rows_looked_up_most(clicks: Dataset, tmp_path: Path) -> None:
    rig = Rig(clicks, replace(ALONE, resident=0.02), tmp_path).train(STEPS)
    policy = rig.tiers.planner.policy
    assert isinstance(policy, HotSet)
    assert len(policy.target) == policy.space.slots == 51
    looked_up = np.concatenate([rig.context.lookups(batch).rows for batch in rig.read])
    counts = np.bincount(looked_up, minlength=policy.space.rows)
    best = np.sort(counts)[-51:].sum()
    assert counts[policy.target].sum() > 0.9 * best
    again = Rig(clicks, replace(ALONE, resident=0.02), tmp_path / "again")
    assert isinstance(again.tiers.planner.policy, HotSet)
    assert again.tiers.planner.policy.target.tolist() == policy.target.tolist()
    rig.tiers.close()
    again.tiers.close()


# -- off -------------------------------------------------------------------------------------


@BOTH
def test_off_or_a_threshold_of_zero_alters_nothing(setting: Setting, clicks: Dataset, tmp_path: Path) -> None:
    """Adagrad's first steps move rows out of the bisection's range: it fails, and nothing is dropped."""
    failing = QUICK | {"threshold": "bisection"}
    expected = Rig(clicks, replace(setting, knobs={"drop": 0.0}), tmp_path / "off").train(STEPS)
    found = Rig(clicks, replace(setting, knobs=failing), tmp_path / "zero").train(STEPS)
    totals = found.slipstream.totals
    assert (totals.snapshots, totals.threshold, totals.dropped) == (1, 0.0, 0)
    assert equal(found.parameters(), expected.parameters())
    if setting.others:
        without = Rig(clicks, replace(setting, knobs=None), tmp_path / "without").train(STEPS)
        assert equal(without.parameters(), expected.parameters())
        without.tiers.close()
    expected.tiers.close()
    found.tiers.close()


# -- rows ------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("filters", [True, False], ids=["", "control"])
def test_a_row_that_only_dropped_inputs_look_up_keeps_its_bits(
    setting: Setting, filters: bool, clicks: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control marks rows but lets every input through: then these rows change."""
    rig = Rig(clicks, setting, tmp_path)
    if not filters:
        monkeypatch.setattr(
            classifier_module, "classify", lambda marks, bags, needed: (np.zeros(BATCH, bool),) * 2
        )
    before = np.empty(0)
    for number in rig.steps(STEPS):
        marks = rig.slipstream.classifier.marks
        if marks and number == marks[0].first - 1:
            before = rig.records()
    first = marks_of(rig).first
    dropped_rows, kept_rows = [], []
    for read in rig.read[first:STEPS]:
        bags = rig.context.lookups(read)
        left_out = in_steps(classify(marks_of(rig), bags, None)[1], STEP)
        dropped_rows.append(bags.permuted(np.flatnonzero(left_out)).rows)
        kept_rows.append(bags.permuted(np.flatnonzero(~left_out)).rows)
    only_dropped = np.setdiff1d(np.concatenate(dropped_rows), np.concatenate(kept_rows))
    assert len(only_dropped), "the test needs a row that no kept input looks up"
    after = rig.records()
    assert np.array_equal(after[only_dropped], before[only_dropped]) == filters
    rig.tiers.close()


def stale_rows_changed(rig: Rig, steps: int) -> tuple[int, int]:
    """(stale rows, those of them that ever changed while their mark was in force), looked at every batch."""
    callback = rig.slipstream
    current: Marks | None = None
    held: NDArray[np.float32] = np.empty(0, np.float32)
    changed: set[int] = set()
    stale: set[int] = set()
    for number in rig.steps(steps):
        records = rig.records()
        if current is not None:
            moved = (records[current.stale_rows] != held).any(axis=1)
            changed |= set(current.stale_rows[moved].tolist())
        following = callback.classifier.in_force(number + 1)
        if following is not current:
            current = following
            if current is not None:
                held = records[current.stale_rows]
                stale |= set(current.stale_rows.tolist())
    return len(stale), len(changed)


@pytest.mark.parametrize(
    ("others", "prefetch"),
    [
        pytest.param({}, True, id="alone-True"),
        pytest.param({}, False, id="alone-False", marks=pytest.mark.soak),
        pytest.param({"hotline": HOTLINE}, True, id="hotline-True"),
        # Hotline without fetching ahead: its own test_tiers.py.
        pytest.param({"hotline": HOTLINE}, False, id="hotline-False", marks=pytest.mark.soak),
    ],
)
def test_a_frozen_row_keeps_its_bits_while_marked(
    others: dict[str, dict[str, float]], prefetch: bool, clicks: Dataset, tmp_path: Path
) -> None:
    """Also over windows, new marks, and rows that leave their slots: Hotline replaces residents meanwhile."""
    knobs = QUICK | {"freeze_stale_rows": True, "snapshot_every": 25}
    rig = Rig(clicks, Setting(knobs=knobs, others=others, prefetch=prefetch), tmp_path)
    stale, changed = stale_rows_changed(rig, STEPS)
    assert stale > 50
    assert changed == 0
    assert rig.slipstream.totals.snapshots == 3
    rig.tiers.close()


def test_without_freezing_kept_inputs_change_stale_rows(clicks: Dataset, tmp_path: Path) -> None:
    """What the authors' code does; and the control of the test above."""
    rig = Rig(clicks, ALONE, tmp_path)
    stale, changed = stale_rows_changed(rig, STEPS)
    assert changed > stale / 2
    rig.tiers.close()


def test_snapshots_do_not_alias_the_rows(clicks: Dataset, tmp_path: Path) -> None:
    rig = Rig(clicks, ALONE, tmp_path)
    for _ in rig.steps(10):
        pass
    taken = rig.view.mark()
    copy = taken.weights.copy()
    with rig.tiers.quiesced():
        records = rig.tiers.read_rows(taken.rows).numpy()
        np.testing.assert_array_equal(records[:, :8], taken.weights)
        rig.tiers.write_rows(taken.rows, records + 1)
    np.testing.assert_array_equal(taken.weights, copy)
    assert not np.array_equal(rig.view.mark().weights, copy)
    rig.tiers.close()


# -- when ------------------------------------------------------------------------------------


def test_snapshots_frame_the_window(clicks: Dataset, tmp_path: Path) -> None:
    """S0 before the window's first update, S1 after its last, touches of its batches and no others."""
    rig = Rig(clicks, replace(ALONE, knobs=QUICK | {"start": 12}), tmp_path)
    tables, records = rig.tables, {-1: np.empty(0)}
    touches = before = None
    for number in rig.steps(40):
        records[number] = rig.records()[:, : tables.dim]
        if rig.slipstream.before is not None:
            before, touches = rig.slipstream.before, rig.slipstream.touches.copy()
        if marks := rig.slipstream.classifier.marks:
            break
    assert marks[0].first == 12 + 8 + 1, "decided after batch b, in force from b + 2 on"
    assert before is not None
    assert touches is not None
    np.testing.assert_array_equal(before.weights, records[11][before.rows])
    # ``touches`` was read last before the final batch of the window.
    counted = np.concatenate([rig.context.lookups(batch).rows for batch in rig.read[12:19]])
    assert touches.tolist() == [int((counted == row).sum()) for row in before.rows]
    everything = np.concatenate([counted, rig.context.lookups(rig.read[19]).rows])
    moved = np.abs(records[19][marks[0].rows] - records[11][marks[0].rows]).max(axis=1)
    threshold = np.float32(rig.slipstream.totals.threshold)
    expected = (moved < threshold) & np.isin(marks[0].rows, everything)
    np.testing.assert_array_equal(marks[0].stale, expected)
    rig.tiers.close()


def test_marks_are_made_anew(clicks: Dataset, tmp_path: Path) -> None:
    rig = Rig(clicks, replace(ALONE, knobs=QUICK | {"snapshot_every": 20}), tmp_path)
    seen: dict[int, Marks] = {}
    for _ in rig.steps(STEPS):
        seen |= {marks.first: marks for marks in rig.slipstream.classifier.marks}
    firsts = sorted(seen)
    assert np.diff(firsts).tolist() == [20] * 3
    assert any((seen[firsts[0]].stale_rows.tolist() != seen[f].stale_rows.tolist()) for f in firsts[1:])
    for first in firsts[1:]:
        sizes = [batch.size for batch in rig.kept]
        assert sizes[first - 9 : first - 1] == [BATCH] * 8, "the window's inputs are all trained"
        assert sizes[first - 1] < BATCH, "one batch more by the old marks"
    rig.tiers.close()


def test_a_window_in_which_the_hot_set_is_replaced_is_repeated(clicks: Dataset, tmp_path: Path) -> None:
    rig = Rig(clicks, ALONE, tmp_path)
    rows = rig.tables.layout.total_rows
    policy = rig.tiers.planner.policy
    assert isinstance(policy, HotSet)
    for number in rig.steps(50):
        if number == 5:
            policy.retarget(np.setdiff1d(np.arange(rows), policy.target)[: policy.space.slots])
        if number == 12:
            assert not rig.slipstream.classifier.marks
    assert rig.slipstream.totals.snapshots == 1
    rig.tiers.close()
