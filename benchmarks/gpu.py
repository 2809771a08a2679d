"""recpipe on a GPU beside TorchRec's own loop: one command, resumable, figures to a JSON.

    python benchmarks/gpu.py [--json FILE] [--seconds 520] [--device cuda|cpu] [--quick] [--only WORD ...]

Jobs, in this order; each figure is samples per second over all steps of the same batches and module:

    resident/DIM/BATCH/{recpipe,recpipe_graph,by_hand}/ROUND
                                                 all rows in device memory; by hand: DistributedModelParallel
                                                 with TrainPipelineSparseDist
    overlap/DIM/BATCH/{lru,hotline,bagpipe}_graph
                                                 copies beside kernels, from a trace (the last one stays)
    memory                                       device memory over 2,000 steps
    tiers/DIM/BATCH/SHARE/{lru,hotline,bagpipe}  a share of the rows in device memory, the others in the
                                                 host's; later rounds end in /2 and /3
    tiers/DIM/BATCH/SHARE/uvm                    FUSED_UVM_CACHING with PrefetchTrainPipelineSparseDist and
                                                 the device rows that lru had (slots and slab)
    tiers/DIM/BATCH/SHARE/uvm_large              the same rows, of which the tables under 20,000 rows have
                                                 theirs as a whole, uncached
    tiers/64/BATCH/0.1/uvm_caching               that cache in recpipe: tiers.kernel=uvm_caching
    .._graph                                     with trainer.backend=cuda_graph; at dimension 128, and of the
                                                 smaller and the larger share, with it alone
    {resident,tiers}/DIM/65536/tf32/..           all sides with float32 products by the matrix units (TF32)
    mlperf/128/BATCH[/PRECISION]/{recpipe,recpipe_graph,recpipe_compiled,by_hand,by_hand_compiled}/ROUND
                                                 MLPerf Training's DLRM-DCNv2, its multi-hot ids, tables cut
                                                 to what one of eight GPUs holds; compiled: by torch.compile
    sanitizer                                    compute-sanitizer's memcheck over a short run

Jobs run in a child process, one after the other. Before the first job of a kind, width and batch size, all of
that kind train three such batches on small tables, which are not counted.

Jobs that FILE already has are left out, so that the command can be given again until all are done; no job is
begun that would not be done in time. A job that fails, ends the process or takes longer than its limit is
noted with its error; a new process goes on with the others, and tries it once more after them.
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
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "on_gpu"))

DIMS, BATCHES, SHARES = (64, 128), {8192: 200, 65536: 60}, (0.1, 0.05, 0.25)
POLICIES = ("lru", "hotline", "bagpipe")
GRAPH = "_graph"
"""Ends the names of runs with a CUDA graph."""
QUICK = {8192: (512, 24), 65536: (1024, 12)}
"""Samples and steps of a try."""
FIRST_GUESS = 20.0
"""Seconds that a job is thought to take before any has been done."""
LIMIT = 90.0
"""Seconds after which a job is ended, if it names no other limit."""
START = 60.0
"""Seconds, beyond a job's own, for what a new process does first."""
WHOLE_BELOW = 20_000
"""Rows under which uvm_large keeps a table in device memory as a whole."""
FLAT_STEPS = 2000
ROUNDS = 3
"""How often each side trains, the sides in turn; the later rounds come last."""


@dataclass(frozen=True)
class Setting:
    """Width of rows, samples of a batch, and the precision of products."""

    dim: int
    batch: int
    precision: str = "float32"
    mlperf: bool = False

    @property
    def name(self) -> str:
        """In the names of jobs."""
        return f"{self.dim}/{self.batch}" + (f"/{self.precision}" if self.precision != "float32" else "")

    def size(self, quick: bool) -> Any:
        """What is trained of it; in a try, few samples and small tables."""
        from work import Size

        samples, steps = QUICK[self.batch] if quick else (self.batch, BATCHES[self.batch])
        if self.mlperf and not quick:
            steps //= 3  # a batch has eight times as many ids
        return Size(self.dim, samples, steps, 50 if quick else 1, self.precision, self.mlperf)


PLAIN = [Setting(dim, batch) for batch in BATCHES for dim in DIMS]
TF32 = [Setting(dim, 65536, "tf32") for dim in DIMS]
"""Only where products take most of a step: at 8,192 the host does."""
MLPERF = [
    Setting(128, batch, precision, True) for precision in ("bfloat16", "tf32", "float32") for batch in BATCHES
]
PUBLISHED = 1_720_000
"""Samples a second of an H100 in MLPerf Training v4.1 (HugeCTR, 8 of them), evaluations included."""


@dataclass(frozen=True)
class Job:
    """One figure: its name, and what computes it from the results so far."""

    name: str
    work: Callable[[Mapping[str, Any]], dict[str, Any]]
    only_gpu: bool = False
    group: tuple[str, Setting] | None = None
    """Kind and setting, of which the process must have trained something before."""
    limit: float = LIMIT
    """Seconds after which it is ended."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/gpu.json"))
    parser.add_argument("--seconds", type=float, default=520.0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="jobs whose names have one of these words; a job's whole name is that job's alone",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    began = perf_counter()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    if arguments.worker:
        return _work(arguments, began)
    command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
    while (left := arguments.seconds - (perf_counter() - began)) > FIRST_GUESS:
        said = _watched([*command, "--seconds", f"{left:.0f}"], arguments.json, left)
        if said is None:
            break
        running = (_read(arguments.json).get("running") or {}).get("name")
        if running is not None:
            _note(arguments.json, running, {"error": said})
        elif said != FAILED:
            print(f"ended between two jobs: {said}", flush=True)
            break
    results = _read(arguments.json)
    _show(results)
    return 1 if any("error" in found for found in results.get("jobs", {}).values()) else 0


FAILED = "the process ended with status 3"
"""What is said of a process that has noted its job's error itself and ended: a GPU's context does not outlive
an error."""


def _watched(command: list[str], file: Path, seconds: float) -> str | None:
    """Run ``command`` until it ends or the job that ``file`` names is over its limit; what went wrong. None:
    nothing did, or ``seconds`` and some more have passed, which is no fault of a job's."""
    began = idle = time.time()
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            time.sleep(0.5)
            now, running = time.time(), _read(file).get("running")
            if running:
                idle = now
            since, limit = (running["since"], running["limit"]) if running else (idle, 2 * START)
            if now - began > seconds + 10:
                process.kill()
                return None
            if now - since > limit:
                process.kill()
                return f"not done after {now - since:.0f} s"
        status = process.returncode
    return None if status == 0 else f"the process ended with status {status}"


def jobs(device: Any, quick: bool, keep: Path) -> list[Job]:
    """All jobs, those that matter most first."""
    import by_hand
    import by_recpipe
    from work import Size

    def uvm(of: Size, lru: str, whole_below: int, found: Mapping[str, Any]) -> dict[str, Any]:
        rows = (found.get(lru, {}) | found.get(f"{lru}{GRAPH}", {})).get("device_rows")
        if rows is None:
            raise RuntimeError(f"{lru} must be done first")
        return by_hand.train(of, device, rows, whole_below // of.smaller)

    def resident(setting: Setting, number: int) -> list[Job]:
        of, group = setting.size(quick), ("resident", setting)
        sides = {
            "by_hand": partial(by_hand.train, of, device),
            "recpipe": partial(by_recpipe.train, of, device, "resident"),
            f"recpipe{GRAPH}": partial(by_recpipe.train, of, device, f"resident{GRAPH}"),
        }
        return [
            Job(
                f"resident/{setting.name}/{side}/{number}",
                partial(_alone, work),
                side.endswith(GRAPH) or setting in TF32,
                group,
            )
            for side, work in sorted(sides.items(), reverse=number % 2 == 0)
        ]

    def mlperf(setting: Setting, number: int) -> list[Job]:
        of, group = setting.size(quick), ("mlperf", setting)
        sides = {
            "by_hand": partial(by_hand.train, of, device),
            "by_hand_compiled": partial(by_hand.train, of, device, compiled=True),
            "recpipe": partial(by_recpipe.train, of, device, "resident"),
            f"recpipe{GRAPH}": partial(by_recpipe.train, of, device, f"resident{GRAPH}"),
            "recpipe_compiled": partial(by_recpipe.train, of, device, "resident_compiled"),
        }
        told = {"flops_per_sample": of.flops, "row_bytes_per_sample": of.row_bytes}
        return [
            Job(
                f"mlperf/{setting.name}/{side}/{number}",
                lambda _, work=work: work() | told,  # type: ignore[misc]
                side.endswith(GRAPH) or setting.precision == "tf32",
                group,
                limit=150,
            )
            for side, work in sorted(sides.items(), reverse=number % 2 == 0)
        ]

    def tiers(setting: Setting, share: float, number: int = 1) -> list[Job]:
        of, group, name = setting.size(quick), ("tiers", setting), f"tiers/{setting.name}/{share}"
        both = share == SHARES[0] and setting.dim == DIMS[0] and setting in PLAIN
        end = "" if number == 1 else f"/{number}"
        mine = []
        for policy in (f"{policy}{graph}" for graph in ("", GRAPH)[not both :] for policy in POLICIES):
            work = partial(by_recpipe.train, of, device, policy, share)
            mine.append(Job(f"{name}/{policy}{end}", partial(_alone, work), policy.endswith(GRAPH), group))
        if both:
            work = partial(by_recpipe.train, of, device, "uvm_caching", share)
            mine.append(Job(f"{name}/uvm_caching{end}", partial(_alone, work), only_gpu=True, group=group))
        for kind, below in (("uvm", 0), ("uvm_large", WHOLE_BELOW)):
            work = partial(uvm, of, f"{name}/lru", below)
            mine.append(Job(f"{name}/{kind}{end}", work, only_gpu=True, group=group))
        return mine if number % 2 else mine[::-1]

    rounds = [[job for of in PLAIN for job in resident(of, number)] for number in range(1, ROUNDS + 1)]
    for number in range(2, ROUNDS + 1):
        rounds[number - 1] += [job for share in SHARES for of in PLAIN for job in tiers(of, share, number)]
    first, second, third = ([job for of in PLAIN for job in tiers(of, share)] for share in SHARES)
    of_mlperf = [job for of in MLPERF for job in mlperf(of, 1)]
    of_mlperf += [job for number in (2, 3) for of in MLPERF[: len(BATCHES)] for job in mlperf(of, number)]
    tf32 = [job for of in TF32 for job in (*resident(of, 1), *tiers(of, SHARES[0]))]
    tf32 += [job for share in SHARES[1:] for job in tiers(TF32[0], share)]
    others = []
    for traced in (setting for setting in PLAIN if setting.dim == DIMS[0]):
        size = traced.size(quick)
        for policy in (f"{policy}{GRAPH}" for policy in POLICIES):
            work = partial(by_recpipe.overlap, replace(size, steps=min(20, size.steps)), device, policy, keep)
            name, group = f"overlap/{traced.name}/{policy}", ("tiers", traced)
            others.append(Job(name, partial(_alone, work), only_gpu=True, group=group, limit=120))
    flat = partial(by_recpipe.memory, PLAIN[0].size(quick), device, 100 if quick else FLAT_STEPS)
    others.append(Job("memory", partial(_alone, flat), group=("tiers", PLAIN[0]), limit=180))
    check = partial(by_recpipe.sanitized, 150)
    sanitizer = Job("sanitizer", partial(_alone, check), only_gpu=True, limit=170)
    return [
        *of_mlperf,
        *rounds[0],
        *others,
        *first,
        *tf32,
        *second,
        *third,
        *rounds[1],
        sanitizer,
        *rounds[2],
    ]


def _alone(work: Callable[[], dict[str, Any]], _: Mapping[str, Any]) -> dict[str, Any]:
    return work()


def warm_up(device: Any, group: tuple[str, Setting], quick: bool) -> None:
    """Let all of a kind load their kernels and choose those for this setting, which a process does once."""
    import by_hand
    import by_recpipe

    kind, setting = group
    small = replace(setting.size(quick), steps=3, smaller=100)
    rows = sum(small.tables.values()) // 2
    if kind in ("resident", "mlperf"):
        by_recpipe.train(small, device, "resident")
        by_hand.train(small, device)
        return
    for policy in POLICIES:
        by_recpipe.train(small, device, policy, 0.5)
    if device.type == "cuda":
        for below in (0, WHOLE_BELOW // small.smaller):
            by_hand.train(small, device, rows, below)


def _work(arguments: argparse.Namespace, began: float) -> int:
    """Do what is left, as long as there is time."""
    from recpipe.backend.allocator import tune_allocator

    tune_allocator()  # as the command line does; it serves both sides
    import torch

    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    every = jobs(device, arguments.quick, arguments.json.resolve().parent)
    wanted = [job for job in _chosen(every, arguments.only) if not (job.only_gpu and device.type == "cpu")]
    known = _read(arguments.json).get("jobs", {})
    wanted = [job for job in wanted if _is_left(known.get(job.name))]
    wanted.sort(key=lambda job: known.get(job.name, {}).get("tries", 0))
    _write(arguments.json, {**_read(arguments.json), "machine": _machine(torch), "running": None})
    took, warm = list[float](), set[Any]()
    for job in wanted:
        likely = max(1.3 * max(took[-6:], default=FIRST_GUESS), job.limit / 2 if job.limit > LIMIT else 0.0)
        if perf_counter() - began + likely > arguments.seconds:
            print(f"no time is left for {job.name}", flush=True)
            continue
        limit = job.limit if job.group in warm else job.limit + START
        running = {"name": job.name, "since": time.time(), "limit": limit}
        _write(arguments.json, {**_read(arguments.json), "running": running})
        started = perf_counter()
        try:
            if job.group is not None and job.group not in warm:
                warm_up(device, job.group, arguments.quick)
                warm.add(job.group)
            _clean(torch, device)
            warmed = perf_counter() - started
            found = job.work(_read(arguments.json).get("jobs", {}))
        except Exception as fault:
            traceback.print_exc()
            error = f"{type(fault).__name__}: {fault}"[:500]
            _note(arguments.json, job.name, {"error": error, "job_seconds": perf_counter() - started})
            sys.stdout.flush()
            os._exit(3)
        seconds = perf_counter() - started
        took.append(seconds - warmed)
        _note(arguments.json, job.name, {**found, "job_seconds": seconds, "warm_up_seconds": warmed})
        print(f"{job.name}: {found.get('samples_per_second', found)} in {seconds:.1f} s", flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of a process group may abort an orderly end


def _chosen(every: list[Job], words: list[str]) -> list[Job]:
    """Those of ``every`` that ``--only`` asks for."""
    whole = {job.name for job in every}.intersection(words)
    parts = [word for word in words if word not in whole]
    return [job for job in every if not words or job.name in whole or any(part in job.name for part in parts)]


def _clean(torch: Any, device: Any) -> None:
    """Free what the work before has left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
    """Print errors, and a table of speeds beside TorchRec's, of its two caches the faster one: medians of the
    rounds, with the lowest and the highest."""
    found, rounds = results.get("jobs", {}), dict[str, list[tuple[float, float]]]()
    for name, one in found.items():
        if "samples_per_second" in one and name.startswith(("mlperf", "resident", "tiers")):
            start, _, end = name.rpartition("/")
            whole = start if end.isdigit() else name  # without the round
            speeds = float(one["samples_per_second"]), float(one["steady_samples_per_second"])
            rounds.setdefault(whole, []).append(speeds)
        elif "error" in one:
            print(f"{name}: {one['error']}")
        else:
            print(f"{name}: {json.dumps(one)[:600]}")
    middle = {name: [median(each) for each in zip(*both, strict=True)] for name, both in rounds.items()}
    print("\n| work | samples/s, all steps | over TorchRec | steady | over TorchRec |\n|---|---|---|---|---|")
    for name in sorted(middle):
        group = name.rpartition("/")[0]
        theirs = [middle[side] for kind in THEIRS if (side := f"{group}/{kind}") in middle]
        cells = [name]
        for number, speed in enumerate(middle[name]):
            best = max((each[number] for each in theirs), default=None)
            every = [each[number] for each in rounds[name]]
            spread = f" ({min(every):,.0f}..{max(every):,.0f})" if len(every) > 1 else ""
            cells += [f"{speed:,.0f}{spread}", f"{speed / best:.2f}" if best else ""]
        if name.startswith("mlperf"):
            cells[-1] += f", {middle[name][1] / PUBLISHED:.2f} of an H100's in MLPerf Training v4.1"
        print("| " + " | ".join(cells) + " |")


THEIRS = ("by_hand", "by_hand_compiled", "uvm", "uvm_large")


if __name__ == "__main__":
    sys.exit(main())
