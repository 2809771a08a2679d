"""recpipe on a GPU beside TorchRec's own loop: one command, resumable, figures to a JSON.

    python benchmarks/gpu.py [--json FILE] [--seconds 520] [--device cuda|cpu] [--quick] [--only WORD ...]

Jobs, in this order; each figure is samples per second over all steps of the same batches and module:

    resident/DIM/BATCH/{recpipe,by_hand}/ROUND   all rows in device memory; by hand: DistributedModelParallel
                                                 with TrainPipelineSparseDist
    tiers/DIM/BATCH/SHARE/{lru,hotline,bagpipe}  a share of the rows in device memory, the others in the
                                                 host's
    tiers/DIM/BATCH/SHARE/uvm                    FUSED_UVM_CACHING with PrefetchTrainPipelineSparseDist and
                                                 the device rows that lru had (slots and slab)
    memory                                       device memory over 2,000 steps
    overlap/{lru,hotline,bagpipe}                copies beside kernels, from a trace (the last one stays)
    sanitizer                                    compute-sanitizer's memcheck over a short run

Before the first job both loops train a few small batches, which are not counted.

Jobs that FILE already has are left out, so that the command can be given again until all are done; no job is
begun that would not be done in time. A job that fails is noted with its error, and tried again the next time.
--quick has small tables and few steps, to try the command itself (--device cpu: without what only a GPU has).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "on_gpu"))

DIMS, BATCHES, SHARES = (64, 128), {8192: 120, 65536: 30}, (0.05, 0.1, 0.25)
POLICIES = ("lru", "hotline", "bagpipe")
QUICK = {8192: (512, 24), 65536: (1024, 12)}
"""Samples and steps of a try."""
FIRST_GUESS = 25.0
"""Seconds that a job is thought to take before any has been done."""
FLAT_STEPS = 2000
ROUNDS = 3
"""How often each side trains resident tables, the sides in turn; the later rounds come last."""


@dataclass(frozen=True)
class Job:
    """One figure: its name, and what computes it from the results so far."""

    name: str
    work: Callable[[Mapping[str, Any]], dict[str, Any]]
    only_gpu: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--seconds", type=float, default=520.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="jobs whose names have one of these words")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    began = perf_counter()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    if arguments.worker:
        return _work(arguments, began)
    command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
    while True:
        left = arguments.seconds - (perf_counter() - began)
        status = subprocess.run([*command, "--seconds", f"{left:.0f}"]).returncode
        running = _read(arguments.json).get("running")
        if status == 0 or running is None or left < FIRST_GUESS:
            break
        # The process has died in the middle of a job (a GPU's context does not outlive an error).
        _note(arguments.json, running, {"error": f"the process ended with status {status}"})
    results = _read(arguments.json)
    _show(results)
    return 1 if any("error" in found for found in results.get("jobs", {}).values()) else 0


def jobs(device: Any, quick: bool, keep: Path) -> list[Job]:
    """All jobs, those that matter most first."""
    import by_hand
    import by_recpipe
    from work import Size

    def size(dim: int, batch: int) -> Size:
        samples, steps = QUICK[batch] if quick else (batch, BATCHES[batch])
        return Size(dim, samples, steps, smaller=50 if quick else 1)

    def uvm(of: Size, lru: str, found: Mapping[str, Any]) -> dict[str, Any]:
        rows = found.get(lru, {}).get("device_rows")
        if rows is None:
            raise RuntimeError(f"{lru} must be done first")
        return by_hand.train(of, device, min(1.0, rows / sum(of.tables.values())))

    made = []
    resident = []
    for number in range(1, ROUNDS + 1):
        for dim in DIMS:
            for batch in BATCHES:
                of, name = size(dim, batch), f"resident/{dim}/{batch}"
                ours = partial(by_recpipe.train, of, device, "resident")
                theirs = partial(by_hand.train, of, device)
                resident.append(Job(f"{name}/recpipe/{number}", lambda _, work=ours: work()))
                resident.append(Job(f"{name}/by_hand/{number}", lambda _, work=theirs: work()))
    first_round = len(resident) // ROUNDS
    made += resident[:first_round]
    longest = size(64, 8192)
    steps = 100 if quick else FLAT_STEPS
    made.append(Job("memory", lambda _: by_recpipe.memory(longest, device, steps)))
    short = replace(longest, steps=min(20, longest.steps))
    for policy in POLICIES:
        work = partial(by_recpipe.overlap, short, device, policy, keep)
        made.append(Job(f"overlap/{policy}", lambda _, work=work: work(), only_gpu=True))
    for share in (SHARES[1], SHARES[0], SHARES[2]):
        for batch in BATCHES:
            for dim in DIMS:
                of, name = size(dim, batch), f"tiers/{dim}/{batch}/{share}"
                for policy in POLICIES:
                    work = partial(by_recpipe.train, of, device, policy, share)
                    made.append(Job(f"{name}/{policy}", lambda _, work=work: work()))
                made.append(Job(f"{name}/uvm", partial(uvm, of, f"{name}/lru"), only_gpu=True))
    made += resident[first_round:]
    made.append(Job("sanitizer", lambda _: by_recpipe.sanitized(120), only_gpu=True))
    return made


def warm_up(device: Any) -> None:
    """Let both loops do what only the first steps of a process do."""
    import by_hand
    import by_recpipe
    from work import Size

    small = Size(64, 512, 4, smaller=100)
    by_hand.train(small, device)
    for policy in ("resident", "lru"):
        by_recpipe.train(small, device, policy, 0.5)


def _work(arguments: argparse.Namespace, began: float) -> int:
    """Do what is left, as long as there is time."""
    from recpipe.backend.allocator import tune_allocator

    tune_allocator()  # as the command line does; it serves both sides
    import torch

    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    keep = arguments.json.resolve().parent
    wanted = [
        job
        for job in jobs(device, arguments.quick, keep)
        if (not arguments.only or any(word in job.name for word in arguments.only))
        and not (job.only_gpu and device.type == "cpu")
    ]
    known = _read(arguments.json).get("jobs", {})
    _write(arguments.json, {**_read(arguments.json), "machine": _machine(torch), "running": None})
    took: list[float] = []
    if any(_is_left(known.get(job.name)) for job in wanted):
        warm_up(device)
    for job in wanted:
        if not _is_left(known.get(job.name)):
            continue
        likely = 1.3 * max(took[-6:], default=FIRST_GUESS)
        if perf_counter() - began + likely > arguments.seconds:
            print(f"no time is left for {job.name}", flush=True)
            return 0
        _write(arguments.json, {**_read(arguments.json), "running": job.name})
        started = perf_counter()
        try:
            found = job.work(_read(arguments.json).get("jobs", {}))
        except Exception as fault:
            traceback.print_exc()
            found = {"error": f"{type(fault).__name__}: {fault}"[:500]}
        seconds = perf_counter() - started
        took.append(seconds)
        _note(arguments.json, job.name, {**found, "job_seconds": seconds})
        print(f"{job.name}: {found.get('samples_per_second', found)} in {seconds:.1f} s", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    sys.stdout.flush()
    os._exit(0)  # threads of a process group may abort an orderly end


def _is_left(done: Mapping[str, Any] | None) -> bool:
    """Whether a job is to be done; one that has failed twice is not."""
    return done is None or ("error" in done and done.get("tries", 0) < 2)


def _machine(torch: Any) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = None
    return {
        "gpu": torch.cuda.get_device_name(0) if on_gpu else None,
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "command": " ".join(["python", *sys.argv]),
    }


def _note(file: Path, name: str, found: dict[str, Any]) -> None:
    content = _read(file)
    every = content.setdefault("jobs", {})
    every[name] = {**found, "tries": every.get(name, {}).get("tries", 0) + 1}
    _write(file, {**content, "running": None})


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return content


def _write(file: Path, content: dict[str, Any]) -> None:
    """Beside the file, then renamed, so that a kill leaves the file whole."""
    partial_file = file.with_name(f"{file.name}.partial")
    partial_file.write_text(json.dumps(content, indent=1))
    partial_file.replace(file)


def _show(results: Mapping[str, Any]) -> None:
    found, rounds = results.get("jobs", {}), dict[str, list[float]]()
    for name, one in found.items():
        if "samples_per_second" in one:
            whole = name.rpartition("/")[0] if name.startswith("resident") else name
            rounds.setdefault(whole, []).append(float(one["samples_per_second"]))
        elif "error" in one:
            print(f"{name}: {one['error']}")
    print("\n| work | samples/s, median of rounds | over TorchRec |\n|---|---|---|")
    for name, speeds in rounds.items():
        group = name.rpartition("/")[0]
        theirs = rounds.get(f"{group}/by_hand") or rounds.get(f"{group}/uvm")
        over = f"{median(speeds) / median(theirs):.2f}" if theirs else ""
        print(f"| {name} | {median(speeds):,.0f} | {over} |")


if __name__ == "__main__":
    sys.exit(main())
