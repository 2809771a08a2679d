"""This machine's limits for matrix products, streaming and random rows, each measured in about a second.

The best of several repetitions is reported, since other programs can only make a measurement slower. Torch's
own operators are measured, with the process's threads and matmul setting, so that the limits are those of the
run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from recpipe.common.threads import one_thread

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
class Machine:
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


def measure(row_bytes: int, device: torch.device) -> Machine:
    """Measure ``device``; ``row_bytes``: the size of an embedding row's float32 weights.

    Takes 2 to 10 seconds and at most 768 MiB at a time.
    """
    gemm = {str(kind).removeprefix("torch."): gemm_flops_per_s(kind, device) for kind in KINDS}
    source = torch.ones(BUFFER_BYTES // 4, device=device)
    copy = copy_bytes_per_s(source)
    read = BUFFER_BYTES / min(best_seconds(reads, device) for reads in (source.sum, source.max))
    dim = row_bytes // 4
    table = source[: len(source) // dim * dim].view(-1, dim)
    gather = gather_bytes_per_s(table)
    with one_thread():
        alone = gather_bytes_per_s(table)
    return Machine(torch.get_num_threads(), gemm, copy, read, row_bytes, max(gather, alone), alone)


def gemm_flops_per_s(kind: torch.dtype, device: torch.device) -> float:
    """The best rate of square products of matrices of type ``kind`` in several sizes.

    Without units for bfloat16, already the smallest size is slow enough to be the last.
    """
    rate = 0.0
    for size in SIZES:
        left, right = (torch.rand(size, size, device=device).to(kind) for _ in range(2))
        product = torch.empty_like(left)

        def multiply(a: torch.Tensor = left, b: torch.Tensor = right, out: torch.Tensor = product) -> None:
            torch.mm(a, b, out=out)

        seconds = best_seconds(multiply, device)
        rate = max(rate, 2 * size**3 / seconds)
        if seconds > PRODUCT_SECONDS:
            break
    return rate


def copy_bytes_per_s(source: torch.Tensor) -> float:
    """Bytes read and written per second when ``source`` is copied."""
    target = torch.ones_like(source)  # written once so that its pages exist
    seconds = best_seconds(lambda: target.copy_(source), source.device)
    return 2 * source.numel() * source.element_size() / seconds


def gather_bytes_per_s(table: torch.Tensor) -> float:
    """Bytes of rows of ``table`` (float32 [rows, values]) read per second at random, in bags of ``BAG``."""
    rows, values = table.shape
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(rows, (max(BAG, rows // 4),), generator=generator).to(table.device)
    offsets = torch.arange(0, len(ids), BAG, device=table.device)
    seconds = best_seconds(lambda: torch.embedding_bag(table, ids, offsets), table.device)
    return len(ids) * values * table.element_size() / seconds


def best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The fastest of at least ``REPEATS`` runs; more if they take less than ``LEAST_SECONDS``."""
    times: list[float] = []
    while len(times) < REPEATS or sum(times) < LEAST_SECONDS:
        times.append(_seconds(run, device))
    return min(times)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    _settle(device)
    started = perf_counter()
    run()
    _settle(device)
    return perf_counter() - started


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
