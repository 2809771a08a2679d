"""Hotline's promise: every parameter ends as in the run without it, and the test notices when it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recpipe_hotline.tests.rig import QUICK, TOLERANCE, Rig, Setting, difference, train
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.dataset import Dataset
from recpipe.data.select import between
from recpipe.pipeline import step
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.placed import PlacedModel
from recpipe.pipeline.step import StepTimes
from recpipe.tables.proxy import handing_out
from recpipe.tables.tiers.lookups import CpuLookups
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection, TieredRows

STEPS = 60
SETTINGS = [
    Setting(optimizer="sgd"),
    Setting(optimizer="rowwise_adagrad"),
    Setting(optimizer="sgd", model="dlrm_dcn", store="ssd"),
    Setting(optimizer="rowwise_adagrad", model="dlrm_dcn"),
    Setting(optimizer="rowwise_adagrad", store="ssd"),
]
TWINS = [
    *(
        ("synthetic", setting)
        for setting in SETTINGS
        if setting.model == "dlrm_dcn" or setting.store == "ssd"
    ),
    ("criteo", Setting(optimizer="rowwise_adagrad")),
    ("criteo", Setting(optimizer="rowwise_adagrad", model="dlrm_dcn")),
]
"""Of the same setting over the other data, or of the same data over the other store or optimizer."""
WITHOUT: dict[tuple[Any, ...], dict[str, Any]] = {}


def baseline(dataset: Dataset, setting: Setting, folder: Path) -> dict[str, Any]:
    """The run without the plugin; once for each data set, model and optimizer."""
    key = (dataset.fingerprint, setting.model, setting.optimizer)
    if key not in WITHOUT:
        WITHOUT[key] = train(dataset, replace(setting, knobs=None), folder / "without", STEPS)[1]
    return WITHOUT[key]


def hotline(dataset: Dataset, setting: Setting, folder: Path) -> tuple[Rig, dict[str, Any]]:
    """The run with it, which must really have done what Hotline does."""
    rig, parameters = train(dataset, setting, folder / "with", STEPS)
    assert len(rig.micro) == STEPS
    assert rig.split_batches > STEPS // 3
    assert rig.policy.learnings > 1
    assert rig.evicted > 0, "no learning has moved a row out"
    return rig, parameters


@pytest.mark.parametrize(
    ("source", "setting"),
    [
        pytest.param(
            source,
            setting,
            id=f"{setting.model}-{setting.optimizer}-{setting.store}-{source}",
            marks=pytest.mark.soak if (source, setting) in TWINS else [],
        )
        for source in ("criteo", "synthetic")
        for setting in SETTINGS
    ],
)
def test_equals_the_run_without_it(
    source: str, setting: Setting, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    dataset = request.getfixturevalue(source)
    _, parameters = hotline(dataset, setting, tmp_path)
    assert difference(parameters, baseline(dataset, setting, tmp_path)) <= TOLERANCE[setting.optimizer]


def test_the_shipped_knobs_are_exact(synthetic: Dataset, tmp_path: Path) -> None:
    setting = Setting(knobs={}, resident=0.9)
    rig, parameters = train(synthetic, setting, tmp_path / "with", STEPS)
    assert rig.split_batches > 0
    assert difference(parameters, baseline(synthetic, setting, tmp_path)) <= 1e-5


# -- negative controls: what goes wrong without each half of the method -------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_a_mean_loss_per_micro_batch_is_noticed(
    optimizer: str, synthetic: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scale 1/N dropped: each micro-batch with the mean over its own samples."""
    setting = Setting(optimizer=optimizer)

    train_part = PlacedModel.train_part

    def unscaled(self: PlacedModel, rows: Any, batch: Any, share: float) -> torch.Tensor:
        return train_part(self, rows, batch, 1)

    without = baseline(synthetic, setting, tmp_path)
    monkeypatch.setattr(PlacedModel, "train_part", unscaled)
    _, parameters = hotline(synthetic, setting, tmp_path)
    assert difference(parameters, without) > 100 * TOLERANCE[optimizer]


class Pooled:
    """Rows in the graph of their tables, whatever ids they are asked for by."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def rows(self, sparse: KeyedJaggedTensor) -> list[torch.Tensor]:
        return [self._rows]


def update_each_micro_batch(model: PlacedModel, staged: InFlight, times: StepTimes) -> torch.Tensor:
    """The naive step: forward, backward and so a fused update for each micro-batch."""
    (rows,), (proxy,) = staged.moving, model.bound
    (tiers,) = model.embeddings.each(TieredEmbeddingBagCollection)
    tiers.wait()
    assert isinstance(rows, TieredRows)
    found = rows.lookups
    assert isinstance(found, CpuLookups)
    low, total = 0, torch.zeros(())
    for high in staged.bounds:
        own = replace(found, resident=found.resident.permuted(torch.arange(low, high).numpy()))
        pooled, _ = tiers.layout.look_up(own, False, True, False)
        assert pooled is not None
        if high > rows.cold_first:
            slab = tiers.compute(rows, False, True)[1]
            pooled = pooled if slab is None else pooled + slab
        with handing_out({proxy: Pooled(pooled)}):
            loss, _ = model.called(between(staged.batch, low, high))
        loss = loss * (high - low) / staged.size
        loss.backward()
        total += loss.detach()
        low = high
    return total


@pytest.mark.parametrize(("optimizer", "factor"), [("sgd", 10.0), ("rowwise_adagrad", 1000.0)])
def test_an_update_per_micro_batch_is_noticed(
    optimizer: str, factor: float, synthetic: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGD is linear and goes wrong only by what the second forward sees; Adagrad goes wrong at once."""
    setting = Setting(optimizer=optimizer)
    without = baseline(synthetic, setting, tmp_path)
    monkeypatch.setattr(step, "accumulate", update_each_micro_batch)
    _, parameters = hotline(synthetic, setting, tmp_path)
    assert difference(parameters, without) > factor * TOLERANCE[optimizer]


def test_the_naive_step_is_right_where_nothing_is_split(
    synthetic: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the control: with one micro-batch the naive step is exact."""
    setting = Setting(knobs=QUICK | {"min_micro_batch": 10_000})
    monkeypatch.setattr(step, "accumulate", update_each_micro_batch)
    rig, parameters = train(synthetic, setting, tmp_path / "with", STEPS)
    assert rig.split_batches == 0
    assert difference(parameters, baseline(synthetic, setting, tmp_path)) <= 1e-5
