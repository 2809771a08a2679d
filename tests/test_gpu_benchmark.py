"""What benchmarks/gpu.py reads out of a trace, and what it does again."""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def module(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS / "on_gpu"), *sys.path])
    for name in ("work", "by_recpipe", "by_hand"):  # other folders have such names too
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location(Path(path).stem, BENCHMARKS / path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, made)  # its dataclasses look there
    spec.loader.exec_module(made)
    return made


def event(kind: str, name: str, start: float, end: float, stream: int) -> dict[str, Any]:
    where = {"stream": stream}
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "args": where}


def test_copies_beside_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        event("kernel", "k", 0, 10, 7),
        event("kernel", "k", 12, 20, 7),
        event("kernel", "k", 13, 15, 8),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5, 14, 9),  # 5..10 and 12..14
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 16, 18, 7),  # on the kernels' own stream
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 0, 20, 9),
        event("cpu_op", "aten::copy_", 0, 20, 0),
        {"ph": "M", "name": "process_name"},
    ]
    found = module("on_gpu/by_recpipe.py", monkeypatch).beside(events)
    assert (found["copies"], found["copy_ms"], found["beside_kernels_ms"]) == (2, 0.011, 0.007)
    assert found["kernel_streams"] == ["7", "8"]
    assert (found["kernels"], found["busy_ms"]) == (3, 0.018)
    assert module("on_gpu/by_recpipe.py", monkeypatch).beside([])["share"] is None


def test_tiers_are_trained_and_their_device_rows_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, cpu = module("on_gpu/by_recpipe.py", monkeypatch), torch.device("cpu")
    size = bench.Size(dim=8, batch=64, steps=4, smaller=1000)
    tiered, resident = bench.train(size, cpu, "lru", 0.5), bench.train(size, cpu, "resident")
    assert tiered["steps"] == resident["steps"] == 4
    assert tiered["last_loss"] == pytest.approx(resident["last_loss"], abs=1e-6)
    whole = sum(size.tables.values())
    assert resident["device_rows"] == whole
    assert whole // 2 <= tiered["device_rows"] - 1 < whole  # slots, and a slab of one row or more


def test_what_is_done_is_not_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = module("gpu.py", monkeypatch)
    assert bench._is_left(None)
    assert bench._is_left({"error": "killed", "tries": 1})
    assert not bench._is_left({"error": "killed", "tries": 2})
    assert not bench._is_left({"samples_per_second": 1.0, "tries": 1})


def test_jobs_have_names_of_their_own_and_all_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = module("gpu.py", monkeypatch)
    names = [job.name for job in bench.jobs(None, True, Path())]
    assert len(set(names)) == len(names)
    for dim in (64, 128):
        for batch in (8192, 65536):
            for number, share in enumerate(bench.SHARES):
                mine = [name for name in names if name.startswith(f"tiers/{dim}/{batch}/{share}/")]
                assert len(mine) == ((7 if number == 0 and dim == 64 else 3) + 2) * bench.ROUNDS
            mine = [name for name in names if name.startswith(f"resident/{dim}/{batch}/")]
            assert sum("tf32" not in name for name in mine) == 3 * bench.ROUNDS
        at = {share: sum(f"/{dim}/65536/tf32/{share}/" in name for name in names) for share in bench.SHARES}
        assert list(at.values()) == ([5, 5, 5] if dim == 64 else [5, 0, 0])
    for lru in (name for name in names if name.startswith("tiers/") and name.endswith("/lru_graph")):
        for uvm in ("uvm", "uvm_large"):
            later = lru.replace("lru_graph", uvm)
            assert names.index(lru) < names.index(later), f"{uvm} takes its budget from lru"


def test_mlperfs_shape_is_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    work = module("on_gpu/work.py", monkeypatch)
    size = work.Size(128, 64, 2, smaller=100_000, mlperf=True)
    model = work.make_model(size)
    linear = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    crossed = 27 * 128
    assert [(part.in_features, part.out_features) for part in linear] == [
        *((13, 512), (512, 256), (256, 128)),
        *((crossed, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)),
    ]
    weights = sum(part.weight.numel() for part in linear) + 6 * crossed * 512
    assert size.flops == 6 * weights - 2 * 13 * 512, "no gradient of the dense inputs"
    assert size.row_bytes == sum(size.hot) * (512 + 2 * 516)
    assert sum(size.hot) == 214
    rows = sum(work.Size(128, 64, 2, mlperf=True).tables.values())
    assert rows * 8 == pytest.approx(sum(work.MLPERF_ROWS), rel=0.06)
    first, _ = work.batches(size)
    lengths = first.sparse_features.lengths().view(26, 64)
    assert lengths.tolist() == [[hot] * 64 for hot in work.MLPERF_HOT]


def test_whole_names_choose_one_job_and_words_many(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = module("gpu.py", monkeypatch)
    every = bench.jobs(None, True, Path())

    def chosen(*words: str) -> list[str]:
        return [job.name for job in bench._chosen(every, list(words))]

    assert chosen() == [job.name for job in every]
    assert chosen("tiers/64/8192/0.1/uvm") == ["tiers/64/8192/0.1/uvm"]
    of_lru = [f"overlap/64/{batch}/lru_graph" for batch in (8192, 65536)]
    assert [name for name in chosen("memory", "lru_graph") if "tiers" not in name] == [*of_lru, "memory"]
    large = chosen("64/8192/0.1/uvm_l")
    assert large == [f"tiers/64/8192/0.1/uvm_large{end}" for end in ("", "/2", "/3")]


def test_rounds_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bench = module("gpu.py", monkeypatch)
    speeds = {"uvm": 1.0, "uvm/2": 4.0, "uvm/3": 2.0, "uvm_large": 1.5, "lru_graph": 3.0}
    found = {
        f"tiers/64/8192/0.1/{name}": {"samples_per_second": 1e3 * speed, "steady_samples_per_second": 9e3}
        for name, speed in speeds.items()
    }
    bench._show({"jobs": found})
    said = capsys.readouterr().out
    assert "| tiers/64/8192/0.1/uvm | 2,000 (1,000..4,000) | 1.00 | 9,000 (9,000..9,000) | 1.00 |" in said
    assert "| tiers/64/8192/0.1/lru_graph | 3,000 | 1.50 | 9,000 | 1.00 |" in said


def test_a_run_with_a_graph_is_the_run_without_and_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    words = module("on_gpu/by_recpipe.py", monkeypatch).POLICIES
    for name in ("resident", "lru", "hotline", "bagpipe"):
        assert words[f"{name}_graph"] == (*words[name], "trainer.backend=cuda_graph")


WAITS = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("program", "limit", "said"),
    [
        ("", 60.0, None),
        ("raise SystemExit(3)", 60.0, "the process ended with status 3"),
        ("import os; os.abort()", 60.0, "the process ended with status -6"),
        (WAITS, 0.0, "not done after [01] s"),
    ],
)
def test_a_job_that_dies_or_hangs_is_ended(
    program: str, limit: float, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = module("gpu.py", monkeypatch)
    file = tmp_path / "gpu.json"
    bench._write(file, {"running": {"name": "memory", "since": time.time(), "limit": limit}})
    found = bench._watched([sys.executable, "-c", program], file, 60.0)
    assert found is None if said is None else re.fullmatch(said, found)
