"""task=profile: a short run end to end, how its parts add up, and what it refuses."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch._C._profiler import _ExperimentalConfig

from recpipe.common.timing import PHASES, PREFIX, watch
from recpipe.config.compose import compose
from recpipe.errors import UserError
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.step import Cores, StepTimes, accumulate
from recpipe.profiling import limits
from recpipe.profiling.trace import OVERHEAD, STEP, ProfiledStep, mean_step, profiled_steps
from recpipe.profiling.traced import tell_parts
from recpipe.report import html, profiled, run_page
from recpipe.run import run
from recpipe.tasks.profile import achieved, middle_half, stale
from tests.pipeline.samples import collection_of, model_over, random_batch

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


@pytest.mark.parametrize("recipe", [(), ("+plugin=hotline", "model=dlrm_dcn")], ids=["resident", "hotline"])
@pytest.mark.usefixtures("real_plots")
def test_a_run_leaves_phases_floors_and_a_trace(tmp_path: Path, recipe: tuple[str, ...]) -> None:
    report = run(compose([*SMALL, *recipe]), tmp_path)
    assert report == json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["task"] == "profile"
    assert report["data"]["train_samples"] > 0
    assert report["quality"] == {}
    assert not (tmp_path / "checkpoints").exists()
    found = report["profile"]
    rows = found["phases"]
    assert list(rows) == [*PHASES, OVERHEAD]
    there = {name: p for name, p in rows.items() if p["ms"] is not None}
    assert set(there) == {*PHASES, OVERHEAD}
    assert sum(p["ms"] for p in there.values()) == pytest.approx(found["step_ms"])
    assert sum(p["profiled_ms"] for p in there.values()) == pytest.approx(found["profiled_step_ms"])
    assert all(p["ms"] >= 0 for p in there.values())
    assert sum(p["floor_ms"] for p in rows.values()) == pytest.approx(found["floor"]["ms"])
    free = ("input", "dense forward", "dense backward", OVERHEAD)
    assert all(p["floor_ms"] > 0 for name, p in rows.items() if name not in free)
    assert found["floor"]["lookups"] >= found["floor"]["distinct_rows"] > 0
    assert len(found["operators"]) == 10
    assert not any(o["name"].startswith(PREFIX) for o in found["operators"])
    step_ms = report["throughput"]["step_ms"]
    assert 0 < found["step_ms"] <= step_ms["p99"]
    with gzip.open(tmp_path / found["trace"]) as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    told = {name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)}
    assert told - {"MLP backward", "interaction backward"} == {
        *(name for name in there if name not in ("MLP backward", "interaction backward", OVERHEAD)),
        "step",
    }
    assert names.count(STEP) == 6
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Where a step" in page
    assert page.count("embedding backward and update") >= 2


def test_a_floor_above_the_measured_time_is_said_to_be_stale() -> None:
    phases = {"interaction": {"ms": 1.0, "floor_ms": 2.0}, "MLP": {"ms": 3.0, "floor_ms": 1.0}}
    timing = {"step_ms": 4.0, "phases": phases}
    assert stale(timing, 3.0, "") == (
        "the floor of interaction is above the measured time, so this machine's limits are stale, or "
        "what such a phase needs stays in the caches: profile again when it is quiet"
    )
    assert "limits are stale, for they were measured while others" in (stale(timing, 3.0, "others") or "")
    phases["interaction"]["floor_ms"] = 0.5
    assert stale(timing, 3.0, "") is None
    assert "floor of step is above" in (stale(timing, 5.0, "") or "")


def test_without_a_model_of_steps_there_is_a_reason_and_the_machine_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECPIPE_BLOCK", "perf_model")
    found = run(compose([*SMALL]), tmp_path)["profile"]
    assert found["predicted"] == {
        "reason": "no installed package predicts steps; recpipe's own is the performance model"
    }
    assert found["recheck"] is None
    assert found["floor"]["ms"] > 0


USERS = {
    "deepfm": (
        "model._target_=torchrec.models.deepfm.SimpleDeepFMNN",
        "model.embedding_dim=16",
        "model.hidden_layer_size=20",
        "model.deep_fm_dimension=5",
        "model.loss=binary_cross_entropy_of_probabilities",
    ),
    "ids of its own": ("model._target_=tests.model.in_parts.Shifted", "model.embedding_dim=8"),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("deepfm", "plain", marks=pytest.mark.soak),  # as the next, of one kind of kernels
        ("deepfm", "cpu"),
        ("ids of its own", "auto"),
    ],
)
def test_a_model_of_ones_own_has_phases_and_a_floor(tmp_path: Path, name: str, backend: str) -> None:
    report = run(compose([*SMALL, *USERS[name], f"trainer.backend={backend}"]), tmp_path)
    found = report["profile"]
    rows = found["phases"]
    there = {phase for phase, p in rows.items() if p["ms"] is not None}
    assert {*PHASES, OVERHEAD} - there == (
        set() if name == "deepfm" else {"interaction forward", "interaction backward"}
    )
    assert sum(p["ms"] or 0 for p in rows.values()) == pytest.approx(found["step_ms"])
    assert all(p["ms"] is None or p["ms"] >= 0 for p in rows.values())
    work = found["floor"]["work"]
    assert work["MLP backward"]["flops"] > work["MLP forward"]["flops"] > 0
    assert (work["interaction forward"]["streamed_bytes"] > 0) == (name == "deepfm")
    assert found["floor"]["lookups"] > 0
    shown = [row[0] for row in profiled.phases(found).rows]
    assert ("interaction forward" in shown) == (name == "deepfm")


def test_parts_are_told_on_every_core_and_only_while_asked(tmp_path: Path) -> None:
    """Plain modules, samples shared by two cores: the training thread's own part, and its wait."""
    collection = collection_of("resident", "sgd", tmp_path)
    model = model_over(collection)
    staged = InFlight(random_batch(np.random.default_rng(3), 64, True))
    cores = Cores(2, lambda samples: 1.0)
    before = {id(module): module.__dict__.get("forward") for module in model.modules()}

    def phases_of(told: bool) -> list[ProfiledStep]:
        end = tell_parts(model.module) if told else lambda: None
        watched = _ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(experimental_config=watched) as profiler:
            watch(True)
            with torch.profiler.record_function(STEP):
                accumulate(model, staged, StepTimes(), cores)
            watch(False)
        end()
        return profiled_steps(profiler.events())

    (step,) = phases_of(True)
    assert set(step.phases) == set(PHASES) - {"input", "dense optimizer"}
    assert sum(step.phases.values()) <= step.ms
    (untold,) = phases_of(False)
    assert set(untold.phases) == {name for name in step.phases if name.split()[0] in ("embedding", "dense")}
    assert {id(module): module.__dict__.get("forward") for module in model.modules()} == before
    cores.close()


def test_other_tasks_have_no_profile(tmp_path: Path) -> None:
    report = run(compose([*SMALL[3:], "trainer.max_steps=2", "trainer.logger=null"]), tmp_path)
    assert report["profile"] is None
    assert "Where a step" not in html.render(run_page.page(report))


@pytest.mark.parametrize("wrong", ["task.steps=0", "task.warmup=-1", "task.steps=many", "resume=ckpt"])
def test_wrong_settings_are_one_line(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(UserError, match=wrong.partition("=")[0]) as refused:
        run(compose([*SMALL, wrong]), tmp_path)
    assert "\n" not in str(refused.value)


# -- arithmetic ------------------------------------------------------------------------------


def event(name: str, start: float, end: float, device: str = "CPU", thread: int = 1, number: int = -1) -> Any:
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=SimpleNamespace(name=device),
        thread=thread,
        sequence_nr=number,
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


def test_a_phase_counts_without_those_inside_of_it() -> None:
    """And the backward pass of an operation is its phase's: of the last one that has its number."""
    gradient = "autograd::engine::evaluate_function: "
    events = [
        event(STEP, 0, 10_000),
        event(f"{PREFIX}dense forward", 0, 4000),
        event(f"{PREFIX}MLP forward", 1000, 3000),
        event("aten::detach", 1100, 1200, number=7),  # of no gradient: the next operation has its number
        event("aten::addmm", 1200, 2800, number=6),
        event("aten::mul", 3500, 3600, number=7),
        event("aten::rsub", 4100, 4200, number=8),  # in no phase
        event(f"{PREFIX}dense backward", 5000, 9000),
        event(f"{gradient}RsubBackward0", 5000, 5200, number=8),
        event(f"{gradient}MulBackward0", 5200, 5500, number=7),
        event(f"{gradient}AddmmBackward0", 6000, 8000, number=6),
        event(f"{gradient}AddmmBackward0", 6000, 8000, number=6, thread=2),
        event(f"{PREFIX}interaction backward", 6500, 7000),
    ]
    (step,) = profiled_steps(events)
    assert step.phases == pytest.approx(
        {
            "dense forward": 2.0,
            "MLP forward": 2.0,
            "dense backward": 2.0,
            "MLP backward": 1.5,
            "interaction backward": 0.5,
        }
    )


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


def test_the_floor_of_a_part_that_was_not_told_is_the_dense_parts() -> None:
    """On a GPU, whose backward pass is one phase."""
    step = ProfiledStep(20.0, {"MLP forward": 5.0, "dense forward": 5.0, "dense backward": 10.0})
    floors = {"MLP forward": 2.0, "MLP backward": 4.0, "interaction backward": 1.0, "dense backward": 0.5}
    found = achieved([0.020], step, floors)["phases"]
    assert {name: p["floor_ms"] for name, p in found.items() if p["floor_ms"]} == {
        "MLP forward": 2.0,
        "dense backward": 5.5,
    }
    assert sum(floors.values()) == 7.5


def test_the_table_is_80_columns_wide_and_says_how_far_the_floor_is() -> None:
    rows = {name: {"ms": 1.5, "floor_ms": 0.5, "profiled_ms": 2.0} for name in PHASES}
    rows["input"] = {"ms": None, "floor_ms": 0.0, "profiled_ms": None}
    section = {
        "step_ms": 12.0,
        "profiled_step_ms": 16.0,
        "phases": rows,
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
        "others_cpu_share": None,
        "trace": "trace.json.gz",
        "predicted": {"reason": "nobody knows"},
    }
    console = Console(file=io.StringIO(), width=80)
    profiled.print_profile(section, Path("outputs/x"), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 90
    for part in (
        "Not predicted: nobody knows.",
        "dense optimizer",
        "12.5%",
        "3.0",
        "450 GFLOP/s",
        "16.00",
        "outputs/x/trace.json.gz",
    ):
        assert part in text
