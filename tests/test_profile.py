"""task=profile: a short run end to end, how its parts add up, and what it refuses."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from recpipe.config import compose
from recpipe.errors import UserError
from recpipe.floor import machine
from recpipe.floor.trace import OVERHEAD, STEP, ProfiledStep, mean_step, profiled_steps
from recpipe.phases import PHASES, PREFIX
from recpipe.report import html, profile
from recpipe.run import run
from recpipe.tasks.profile import achieved, middle_half

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
    monkeypatch.setattr(machine, "BUFFER_BYTES", 2**22)
    monkeypatch.setattr(machine, "SIZES", (128,))
    monkeypatch.setattr(machine, "LEAST_SECONDS", 0.0)


@pytest.mark.parametrize("recipe", [(), ("+plugin=hotline", "model=dlrm_dcn")], ids=["resident", "hotline"])
@pytest.mark.usefixtures("real_plots")
def test_a_run_leaves_phases_floors_and_a_trace(tmp_path: Path, recipe: tuple[str, ...]) -> None:
    # Of the dense part only what is converted tells its phases; auto converts what is faster here and now.
    report = run(compose([*SMALL, *recipe, "trainer.backend=cpu"]), tmp_path)
    assert report == json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["task"] == "profile"
    assert report["data"]["train_samples"] > 0
    assert report["quality"]["auc"] is None
    assert not (tmp_path / "checkpoints").exists()
    found = report["profile"]
    phases = found["phases"]
    assert list(phases) == [*PHASES, OVERHEAD]
    there = {name: p for name, p in phases.items() if p["ms"] is not None}
    assert set(there) == {*PHASES, OVERHEAD}
    assert sum(p["ms"] for p in there.values()) == pytest.approx(found["step_ms"])
    assert sum(p["profiled_ms"] for p in there.values()) == pytest.approx(found["profiled_step_ms"])
    assert all(p["ms"] >= 0 for p in there.values())
    assert sum(p["floor_ms"] for p in phases.values()) == pytest.approx(found["floor"]["ms"])
    assert all(p["floor_ms"] > 0 for name, p in phases.items() if name not in ("input", OVERHEAD))
    assert found["floor"]["lookups"] >= found["floor"]["distinct_rows"] > 0
    assert len(found["operators"]) == 10
    assert not any(o["name"].startswith(PREFIX) for o in found["operators"])
    step_ms = report["throughput"]["step_ms"]
    assert 0 < found["step_ms"] <= step_ms["p99"]
    with gzip.open(tmp_path / found["trace"]) as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert {name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)} == {
        *there,
        "step",
    } - {OVERHEAD}
    assert names.count(STEP) == 6
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Where a step" in page
    assert page.count("embedding backward and update") >= 2


def test_other_tasks_have_no_profile(tmp_path: Path) -> None:
    report = run(compose([*SMALL[3:], "trainer.max_steps=2", "trainer.logger=null"]), tmp_path)
    assert report["profile"] is None
    assert "Where a step" not in html.render(report)


@pytest.mark.parametrize("wrong", ["task.steps=0", "task.warmup=-1", "task.steps=many", "resume=ckpt"])
def test_wrong_settings_are_one_line(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(UserError, match=wrong.partition("=")[0]) as refused:
        run(compose([*SMALL, wrong]), tmp_path)
    assert "\n" not in str(refused.value)


# -- arithmetic ------------------------------------------------------------------------------


def event(name: str, start: float, end: float, device: str = "CPU", thread: int = 1) -> Any:
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(
        name=name, time_range=span, device_type=SimpleNamespace(name=device), thread=thread
    )


def test_phases_belong_to_their_steps() -> None:
    """Parts of a phase add up; operators, other threads and a GPU's view of the ranges are left out."""
    events = [
        event(STEP, 1000, 5000),
        event(f"{PREFIX}MLP forward", 1000, 1500),
        event(f"{PREFIX}MLP forward", 2000, 2250),
        event(f"{PREFIX}MLP forward", 2000, 9000, "CUDA"),
        event(f"{PREFIX}MLP forward", 2000, 2900, thread=2),
        event("aten::mm", 2000, 2200),
        event(STEP, 5000, 7000),
        event(f"{PREFIX}input", 5000, 5100),
    ]
    assert profiled_steps(events) == [
        ProfiledStep(4.0, {"MLP forward": 0.75}),
        ProfiledStep(2.0, {"input": 0.1}),
    ]
    mean = mean_step(profiled_steps(events))
    assert mean.ms == 3.0
    assert mean.phases == pytest.approx({"input": 0.05, "MLP forward": 0.375, OVERHEAD: 2.575})


def test_the_middle_half_of_the_steps_counts() -> None:
    assert middle_half([9, 1, 4, 2, 3, 5, 0, 6], key=float) == [2, 3, 4, 5]
    assert middle_half([1, 1, 1], key=float) == [1, 1, 1]


def test_shares_of_the_profiled_step_are_of_the_unprofiled_one() -> None:
    step = ProfiledStep(20.0, {"MLP forward": 15.0, OVERHEAD: 5.0})
    found = achieved([0.010, 0.010, 0.010, 0.010, 9.0, 0.001], step, {"MLP forward": 2.0, "input": 0.0})
    assert found["step_ms"] == pytest.approx(10.0)
    assert found["profiled_step_ms"] == 20.0
    assert found["phases"]["MLP forward"] == pytest.approx({"ms": 7.5, "floor_ms": 2.0, "profiled_ms": 15.0})
    assert found["phases"][OVERHEAD]["ms"] == pytest.approx(2.5)
    assert found["phases"]["input"]["ms"] is None


def test_the_table_is_80_columns_wide_and_says_how_far_the_floor_is() -> None:
    phases = {name: {"ms": 1.5, "floor_ms": 0.5, "profiled_ms": 2.0} for name in PHASES}
    phases["input"] = {"ms": None, "floor_ms": 0.0, "profiled_ms": None}
    section = {
        "step_ms": 12.0,
        "profiled_step_ms": 16.0,
        "phases": phases,
        "floor": {"ms": 3.5, "samples": 2048.0, "lookups": 53248.0, "distinct_rows": 100.0, "flops": 5.87e9},
        "machine": {
            "threads": 1,
            "gemm_flops_per_s": {"float32": 4.5e11, "bfloat16": 999.9},
            "copy_bytes_per_s": 8e10,
            "read_bytes_per_s": 9e10,
            "row_bytes": 64,
            "gather_bytes_per_s": 2e10,
            "gather_bytes_per_s_one_thread": 1e10,
        },
        "trace": "trace.json.gz",
    }
    console = Console(file=io.StringIO(), width=80)
    profile.print_profile(section, Path("outputs/x"), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 90
    for part in ("dense optimizer", "12.5%", "3.0", "450 GFLOP/s", "16.00", "outputs/x/trace.json.gz"):
        assert part in text
