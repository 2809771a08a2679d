"""This machine's limits for matrix products, streaming and random rows, each measured in about a second, and
the least time of each phase: its work divided by these limits.

The roofline model (Williams, Waterman, Patterson: "Roofline: an insightful visual performance model for
multicore architectures", CACM 52(4), 2009): at best, arithmetic and memory traffic overlap, so a phase takes
at least the longer of the two. Phases follow one another, so the step's floor is their sum.

The best of several repetitions is reported, since other programs can only make a measurement slower. Torch's
own operators are measured, with the process's threads and matmul setting, so that the limits are those of the
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from recpipe.backend.matmul import TF32
from recpipe.common.device import one_thread
from recpipe.common.timing import synchronized_time
from recpipe.profiling.workload import Work

BUFFER_BYTES = 2**28
"""The size of each of two buffers: 256 MiB, more than the last-level cache of most machines."""
REPEATS = 7
LEAST_SECONDS = 0.1
BAG = 16
"""Rows summed in one bag of the gather: so many rows are read for each one written."""
KINDS = (torch.float32, torch.bfloat16)
PRODUCT_SECONDS = 0.02
"""Matrix sizes are doubled until one product takes so many seconds."""
SIZES = (512, 1024, 2048, 4096, 8192)
"""Sizes to try at most; three float32 matrices of 8192 x 8192 take 768 MiB."""


@dataclass(frozen=True)
class Sample:
    """One measurement."""

    kind: str
    """What was run: an operator, or a part of a step."""
    at: Mapping[str, float | str]
    """Sizes and settings by name."""
    seconds: float
    """The median of several runs (of operators, see ``bench.timing``); of the machine's limits, the best."""


@dataclass(frozen=True)
class Limits:
    """Limits of one process's device, as measured."""

    threads: int
    """The number of threads of torch's operators on a CPU."""
    gemm_flops_per_s: dict[str, float]
    """Rates by the matrices' data type; an addition and a multiplication count as two operations."""
    copy_bytes_per_s: float
    """Read and written bytes together."""
    read_bytes_per_s: float
    row_bytes: int
    gather_bytes_per_s: float
    """The rate for rows of ``row_bytes`` bytes read at random from ``BUFFER_BYTES``."""
    gather_bytes_per_s_one_thread: float

    @property
    def stream_bytes_per_s(self) -> float:
        """The faster of reading and copying."""
        return max(self.copy_bytes_per_s, self.read_bytes_per_s)

    @classmethod
    def of(cls, samples: Iterable[Sample], row_bytes: int, threads: int) -> Limits | None:
        """The limits for rows of ``row_bytes`` from samples of ``measured``; None if some are missing.

        Between the sizes of rows that were measured, the logarithm of the rate is interpolated by that of the
        size; beyond them, the rate is that of the nearest.
        """
        rates: dict[str, float] = {}
        rows: dict[str, dict[float, float]] = {"gather": {}, "gather, one thread": {}}
        for sample in samples:
            rate = float(sample.at["amount"]) / sample.seconds
            if sample.kind in rows:
                rows[sample.kind][float(sample.at["row_bytes"])] = rate
            else:
                rates[sample.kind] = rate
        names = [str(kind).removeprefix("torch.") for kind in KINDS]
        if not rates.keys() >= {"copy", "read", *(f"gemm {name}" for name in names)} or not all(
            rows.values()
        ):
            return None
        all_threads, alone = (
            float(np.exp(np.interp(np.log(row_bytes), *np.log(sorted(found.items())).T)))
            for found in rows.values()
        )
        gemm = {name: rates[f"gemm {name}"] for name in names}
        return cls(threads, gemm, rates["copy"], rates["read"], row_bytes, max(all_threads, alone), alone)


def measure(row_bytes: int, device: torch.device) -> Limits:
    """Measure ``device``; ``row_bytes``: the size of an embedding row's float32 weights.

    Takes 2 to 10 seconds and at most 768 MiB at a time.
    """
    found = Limits.of(measured([row_bytes], device), row_bytes, torch.get_num_threads())
    assert found is not None, "all limits were measured"
    return found


def measured(sizes: Iterable[int], device: torch.device) -> Iterator[Sample]:
    """Measure ``device``, with rows of each of ``sizes`` bytes.

    ``amount`` in a sample: its operations or bytes.
    """
    for kind in KINDS:
        flops, seconds = best_product(kind, device)
        yield Sample(f"gemm {str(kind).removeprefix('torch.')}", {"amount": flops}, seconds)
    source = torch.ones(BUFFER_BYTES // 4, device=device)
    target = torch.ones_like(source)  # written once so that its pages exist
    seconds = best_seconds(partial(target.copy_, source), device)
    yield Sample("copy", {"amount": 2.0 * BUFFER_BYTES}, seconds)
    seconds = min(best_seconds(reads, device) for reads in (source.sum, source.max))
    yield Sample("read", {"amount": float(BUFFER_BYTES)}, seconds)
    for row_bytes in sizes:
        dim = row_bytes // 4
        table = source[: len(source) // dim * dim].view(-1, dim)
        at = {"row_bytes": float(row_bytes)}
        amount, seconds = gathered(table)
        yield Sample("gather", {**at, "amount": amount}, seconds)
        with one_thread():
            amount, seconds = gathered(table)
        yield Sample("gather, one thread", {**at, "amount": amount}, seconds)


def best_product(kind: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Operations and seconds of the square product of matrices of type ``kind`` with the best rate of several
    sizes.

    Without units for bfloat16, already the smallest size is slow enough to be the last.
    """
    best = (0.0, 1.0)
    for size in SIZES:
        left, right = (torch.rand(size, size, device=device).to(kind) for _ in range(2))
        product = torch.empty_like(left)

        def multiply(a: torch.Tensor = left, b: torch.Tensor = right, out: torch.Tensor = product) -> None:
            torch.mm(a, b, out=out)

        seconds = best_seconds(multiply, device)
        best = max(best, (2.0 * size**3, seconds), key=lambda found: found[0] / found[1])
        if seconds > PRODUCT_SECONDS:
            break
    return best


def gathered(table: torch.Tensor, count: int | None = None, bag: int = BAG) -> tuple[float, float]:
    """Bytes of ``count`` rows of ``table`` (float32 [rows, values]; None: of a quarter of them) read at
    random, in bags of so many, and seconds."""
    rows, values = table.shape
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(rows, (max(bag, rows // 4 if count is None else count),), generator=generator)
    ids = ids.to(table.device)
    offsets = torch.arange(0, len(ids), bag, device=table.device)
    seconds = best_seconds(lambda: torch.embedding_bag(table, ids, offsets), table.device)
    return float(len(ids) * values * table.element_size()), seconds


def best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The fastest of at least ``REPEATS`` runs; more if they take less than ``LEAST_SECONDS``."""
    times: list[float] = []
    while len(times) < REPEATS or sum(times) < LEAST_SECONDS:
        started = synchronized_time(device)
        run()
        times.append(synchronized_time(device) - started)
    return min(times)


def floors_ms(workload: Mapping[str, Work], machine: Limits, precision: str) -> dict[str, float]:
    """Each phase's least milliseconds: the longer of the time at the peak of matrix products under
    ``model.precision=precision`` and that at the bandwidths of streaming and of random rows."""
    # The rate of float32 is measured under the run's own setting, which is what tf32 is.
    flops_per_s = machine.gemm_flops_per_s["float32" if precision == TF32 else precision]
    found = {}
    for name, work in workload.items():
        streamed = work.streamed_bytes / machine.stream_bytes_per_s
        moved = streamed + work.gathered_bytes / machine.gather_bytes_per_s
        found[name] = max(1e3 * work.flops / flops_per_s, 1e3 * moved)
    return found


@dataclass(frozen=True)
class Recheck:
    """What measuring a machine again has found."""

    words: str
    fresh: bool
    """Whether what is known of the machine is right now."""


class StepModel:
    """What the entry point ``recpipe.profiles`` names, or a class of it that takes no arguments, can do. This
    one, used where there is none, knows no machine."""

    def limits(self, row_bytes: int, device: torch.device) -> Limits | None:
        """The limits for rows of ``row_bytes`` that were measured on this machine before; None: none were."""
        return None

    def predict(self, training: Any, steps: int, phases: Mapping[str, Any]) -> dict[str, Any]:
        """What is predicted of the later half of the first ``steps`` steps of ``training`` (a
        ``setup.training.Training``), beside the measured ``phases``: ``step_ms`` and more; or only
        ``reason``, why nothing is."""
        return {"reason": "no installed package predicts steps; recpipe's own is the performance model"}

    def recheck(self, profile: Mapping[str, Any], disturbed: bool) -> Recheck | None:
        """Measure the machine again if a measured ``profile``, as in report.json, contradicts what is known
        of it; None: it does not, or nothing is known. ``disturbed``: whether other programs slowed the run
        down."""
        return None
