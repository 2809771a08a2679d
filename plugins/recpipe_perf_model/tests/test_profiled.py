"""What task=profile tells of a predicted step beside the measured one, and of a stale machine profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recpipe_perf_model import calibrate
from recpipe_perf_model import profiled as model_profiled
from recpipe_perf_model.advise import judged as model
from recpipe_perf_model.machine import Host, MachineProfile, profile_path
from recpipe_perf_model.step.step import Estimate
from recpipe_perf_model.tests.test_advise import machine as slow_disk

from recpipe.config.compose import compose
from recpipe.profiling import limits
from recpipe.report import profiled
from recpipe.run import run

SMALL = (
    "task=profile",
    "task.warmup=2",
    "task.steps=6",
    "data.samples=500",  # 7 batches an epoch: the profile goes over the end of one
    "data.batch_size=64",
    "data.table_scale=0.01",
    "trainer.progress=false",
)


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUFFER_BYTES", 2**22)
    monkeypatch.setattr(limits, "SIZES", (128,))
    monkeypatch.setattr(limits, "LEAST_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("recipe", "waits"),
    [
        # The same step without tiers: test_resident.py predicts it.
        pytest.param((), 0.0, id="resident", marks=pytest.mark.soak),
        pytest.param(("tiers=ssd", "+plugin=hotline", "tiers.resident_bytes=5%"), 1.0, id="hotline"),
    ],
)
@pytest.mark.usefixtures("real_plots")
def test_the_step_is_predicted_beside_the_measured_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: tuple[str, ...], waits: float
) -> None:
    """By a profile of a machine whose disk takes seconds. How long reading takes is given, not measured."""
    monkeypatch.setattr(model_profiled, "own_profile", lambda host: slow_disk(ssd=10.0))
    monkeypatch.setattr(model, "reading", lambda *asked: Estimate(1e-4, 1e-4, 1e-4))
    found = run(compose([*SMALL, *recipe]), tmp_path)["profile"]
    told = found["predicted"]
    step_ms, low, high = told["step_ms"]
    assert low < step_ms < high
    assert sum(told["parts_ms"].values()) == pytest.approx(step_ms, rel=1e-6)
    assert told["parts_ms"]["input"] / step_ms == pytest.approx(waits, abs=0.1)
    assert told["parts_ms"]["backward"] > 0
    assert sum(told["measured_parts_ms"].values()) == pytest.approx(found["step_ms"])
    assert {"main", "loader"} <= {task["place"] for task in told["timeline"]}
    rows = profiled.predicted_parts(found).rows
    assert rows[-1][0] == "step"
    assert f"{step_ms:.2f} ms a step" in profiled.predicted(found)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Predicted against measured" in page
    assert "Predicted steps" in page


def test_limits_that_a_step_contradicts_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile in the cache is of a machine 10,000 times too slow, as a busy one may look."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "FAMILIES", {"limits": calibrate.limits})
    file, cpu = profile_path(Host.current()), torch.device("cpu")
    slow = tuple(replace(s, seconds=1e4 * s.seconds) for s in limits.measured((64, 256), cpu))
    MachineProfile(Host.current(), "2026-01-01", True, {"limits": slow}).save(file)
    found = run(compose([*SMALL]), tmp_path / "run")["profile"]
    assert "the profile of 2026-01-01 was stale, its limits are others now" in found["recheck"]
    assert found["floor"]["ms"] < found["step_ms"]
    kept = MachineProfile.load(file).samples["limits"]
    assert all(new.seconds < 0.1 * old.seconds for new, old in zip(kept, slow, strict=True))
    assert dict(profiled.limits(found))["checked again"] == found["recheck"]


def test_what_cannot_be_predicted_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_profiled, "own_profile", lambda host: None)
    found = run(compose([*SMALL]), tmp_path)["profile"]
    assert found["predicted"].keys() == {"reason"}
    assert "recpipe perf calibrate" in profiled.predicted(found)
    assert profiled.predicted_parts(found) is None
