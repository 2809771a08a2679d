"""The same promise on a GPU: cold rows in page-locked host memory, copies on a stream of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recpipe_hotline.tests.rig import Rig, Setting, difference, train

from recpipe.data.dataset import Dataset
from recpipe.tables.stores import HostStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
STEPS = 60


@pytest.mark.parametrize(("optimizer", "tolerance"), [("sgd", 1e-6), ("rowwise_adagrad", 1e-5)])
@pytest.mark.parametrize("model", ["dlrm", "dlrm_dcn"])
@pytest.mark.parametrize("store", ["host", "ssd"])
def test_equals_the_run_without_it(
    optimizer: str, tolerance: float, model: str, store: str, synthetic: Dataset, tmp_path: Path
) -> None:
    setting = Setting(optimizer=optimizer, model=model, store=store, device="cuda:0")
    without = train(synthetic, replace(setting, knobs=None), tmp_path / "without", STEPS)[1]
    rig, parameters = train(synthetic, setting, tmp_path / "with", STEPS)
    assert rig.split_batches > STEPS // 3
    assert difference(parameters, without) <= tolerance


def test_prefetch_changes_nothing(synthetic: Dataset, tmp_path: Path) -> None:
    setting = Setting(device="cuda:0")
    on = train(synthetic, setting, tmp_path / "on", STEPS)[1]
    off = train(synthetic, replace(setting, prefetch=False), tmp_path / "off", STEPS)[1]
    assert difference(on, off) <= 1e-6


def test_cold_rows_are_page_locked(synthetic: Dataset, tmp_path: Path) -> None:
    rig = Rig(synthetic, Setting(device="cuda:0"), tmp_path)
    try:
        assert isinstance(rig.tiers.store, HostStore)
        assert rig.tiers.store.records.is_pinned()
    finally:
        rig.close()
