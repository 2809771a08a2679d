"""The same module and the same batches through ``recpipe.train``."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from work import EPSILON, Size, batches, device_bytes, make_model, tbes

import recpipe
from recpipe.tables.proxy import CollectionProxy
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection

COMMON = (
    "optim=rowwise_adagrad",
    f"optim.tables.eps={EPSILON}",
    "optim.dense.name=Adagrad",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.checkpoint_every=null",
    "trainer.eval_every=1.0",
    "task.page=false",
)
POLICIES = {
    "resident": ("tiers.policy=resident",),
    "lru": ("tiers.policy=lru", "tiers.store=host"),
    "hotline": ("+plugin=hotline", "tiers.store=host"),
    "bagpipe": ("+plugin=bagpipe", "tiers.store=host"),
}
POLICIES |= {f"{name}_graph": (*words, "trainer.backend=cuda_graph") for name, words in POLICIES.items()}
POLICIES["resident_compiled"] = (*POLICIES["resident"], "trainer.compile=true")
POLICIES["uvm_caching"] = ("tiers.sharded=true", "tiers.kernel=uvm_caching")


def train(size: Size, device: torch.device, policy: str, share: float = 1.0, *more: str) -> dict[str, Any]:
    """Train all batches of ``size``, of whose rows a ``share`` is resident; the run's figures."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    budget = max(1, int(share * size.table_bytes))
    words = (*COMMON, *POLICIES[policy], f"tiers.resident_bytes={budget}", f"trainer.device={device.type}")
    words += (
        f"model.precision={size.precision}",
        f"optim.tables.lr={size.rate}",
        f"optim.dense.lr={size.rate}",
    )
    made = batches(size, on_gpu)
    with recpipe.train(make_model(size), made, *words, *more, quiet=True) as done:
        report = done.report
        collections = list(_collections(done.model))
        rows, held = [_device_rows(part) for part in collections], device_bytes(collections)
    speeds, io = report["throughput"], report["io"]
    return {
        "samples_per_second": speeds["samples_per_second"],
        "steady_samples_per_second": speeds["steady_samples_per_second"],
        "end_to_end_samples_per_second": speeds["end_to_end_samples_per_second"],
        "step_ms": speeds["step_ms"],
        "step_histogram": speeds["step_histogram"],
        "set_up_seconds": speeds["set_up_seconds"],
        "last_loss": report["series"]["loss"][-1],
        "steps": len(made),
        "rows_read": io["rows_read"],
        "rows_written": io["rows_written"],
        "wait_seconds": io["wait_seconds"],
        "cold_start": io["cold_start"],
        "plan_seconds": io["plan_seconds"],
        "fetch_seconds": io["fetch_seconds"],
        "write_seconds": io["write_seconds"],
        "device_rows": sum(rows),
        "table_bytes_on_device": held,
        "verdicts": {
            name: plugin["verdict"] for name, plugin in report["plugins"].items() if "verdict" in plugin
        },
        "graph_steps": speeds["graph_steps"],
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }


def _collections(model: torch.nn.Module) -> Iterator[Any]:
    """What holds the rows of each group of tables."""
    for proxy in model.modules():
        if isinstance(proxy, CollectionProxy):
            yield from proxy.collections


def _device_rows(collection: Any) -> int:
    """Rows for which it has room in device memory."""
    if isinstance(collection, TieredEmbeddingBagCollection):
        return collection.slots + len(collection.layout.slab.weights)
    cached = sum(len(tbe.lxu_cache_weights) for tbe in tbes([collection]))
    if cached:
        return cached
    return int(collection.tables.layout.total_rows)


def memory(size: Size, device: torch.device, steps: int) -> dict[str, Any]:
    """Device memory in use over ``steps`` steps under LRU, on a GPU with the graph, sampled all the time:
    growth from the second quarter of the samples to the last."""
    policy = "lru_graph" if device.type == "cuda" else "lru"
    words = (f"trainer.max_epochs={-(-steps // size.steps)}", f"trainer.max_steps={steps}")
    with _sampled(_allocated(device)) as seen:
        found = train(size, device, policy, 0.1, *words)
    trained = [value for value in seen if value > max(seen) / 2]
    quarter = max(1, len(trained) // 4)
    before, after = max(trained[quarter : 2 * quarter] or trained), max(trained[-quarter:])
    return found | {"steps": steps, "samples": len(trained), "before": before, "after": after}


def _allocated(device: torch.device) -> Callable[[], int]:
    if device.type == "cuda":
        return torch.cuda.memory_allocated
    return lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@contextmanager
def _sampled(value: Callable[[], int]) -> Iterator[list[int]]:
    """Call ``value`` every 50 ms during the block."""
    seen, stop = [value()], threading.Event()

    def sample() -> None:
        while not stop.wait(0.05):
            seen.append(value())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def overlap(size: Size, device: torch.device, policy: str, keep: Path) -> dict[str, Any]:
    """How much of the copies' time lies beside kernels, from a trace of the whole run; that of the latest
    run stays in ``keep``."""
    # Without the CPU's operators, whose events would be most of the file.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        train(size, device, policy, 0.1)
    trace = keep / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    with trace.open("rb") as source, gzip.open(f"{trace}.gz", "wb") as target:
        shutil.copyfileobj(source, target)
    trace.unlink()
    return beside(events) | {"steps": size.steps}


def beside(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a trace's events: the copies between host and device, the part of their time in which a kernel runs
    on another stream, and the time in which any kernel runs."""
    spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy")]
    kernels = sorted(
        (e["ts"], e["ts"] + e["dur"], e["args"]["stream"]) for e in spans if e["cat"] == "kernel"
    )
    moved = [e for e in spans if e["cat"] == "gpu_memcpy" and ("HtoD" in e["name"] or "DtoH" in e["name"])]
    total = hidden = 0.0
    first = 0
    for copy in sorted(moved, key=lambda e: e["ts"]):
        low, high, stream = copy["ts"], copy["ts"] + copy["dur"], copy["args"]["stream"]
        total += high - low
        while first < len(kernels) and kernels[first][1] <= low:
            first += 1
        covered, at = 0.0, low
        for start, end, other in kernels[first:]:
            if start >= high:
                break
            if other != stream and end > at:
                covered += min(end, high) - max(start, at)
                at = max(at, min(end, high))
        hidden += covered
    busy, end = 0.0, 0.0
    for low, high, _ in kernels:
        busy += max(0.0, high - max(low, end))
        end = max(end, high)
    return {
        "copies": len(moved),
        "copy_ms": total / 1e3,
        "beside_kernels_ms": hidden / 1e3,
        "share": hidden / total if total else None,
        "kernels": len(kernels),
        "busy_ms": busy / 1e3,
        "copy_streams": sorted({str(e["args"]["stream"]) for e in moved}),
        "kernel_streams": sorted({str(stream) for _, _, stream in kernels}),
    }


def sanitized(seconds: float) -> dict[str, Any]:
    """compute-sanitizer's memcheck over a short run in tiers; its errors."""
    installed = (str(path) for path in sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer")))
    tool = shutil.which("compute-sanitizer") or next(installed, None)
    if tool is None:
        why = (
            "compute-sanitizer is not installed: it comes with the CUDA toolkit, and pip has no package of it"
        )
        return {"ran": False, "why": why}
    words = (
        *("data.samples=600", "data.batch_size=64", "data.table_scale=0.001", "model.embedding_dim=16"),
        *("tiers.policy=lru", "tiers.store=host", "trainer.progress=false", "trainer.logger=null"),
        *("trainer.checkpoint_every=null", "task.page=false", "trainer.max_steps=4"),
    )
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "recpipe", *words]
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"ran": False, "why": f"not done within {seconds:.0f} s"}
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("=========")]
    return {"ran": True, "status": done.returncode, "said": said[-20:]}
