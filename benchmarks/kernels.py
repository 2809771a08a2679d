"""recpipe's compiled loops on this CPU beside what they replace: interaction, crosses, lookup and update.

    python benchmarks/kernels.py [--batches 128 2048 8192] [--dims 16 64] [--ids 1] [--rounds 9]

26 features, of tables with 64 MiB together, on one thread. Milliseconds of CPU time, the least of interleaved
rounds: what else the machine does hardly counts. "before" is torch's operators as recpipe puts them together
(interaction) and FBGEMM (tables). The last column is the largest difference between both, relative to the
largest number. To imitate a CPU with AVX2 alone:

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \\
        NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES= python benchmarks/kernels.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil
from time import process_time
from typing import Any

from recpipe.backend.allocator import bound_kernel_caches, tune_allocator

tune_allocator()
bound_kernel_caches()

import torch  # noqa: E402
from torchrec.modules.crossnet import LowRankCrossNet  # noqa: E402
from torchrec.modules.embedding_configs import DataType  # noqa: E402

from recpipe.backend.choices import Host  # noqa: E402
from recpipe.backend.crosses import cross  # noqa: E402
from recpipe.backend.dense import interact  # noqa: E402
from recpipe.backend.matmul import float32_products  # noqa: E402
from recpipe.backend.pairs import pair_products  # noqa: E402
from recpipe.common.loops import has_wide_registers  # noqa: E402
from recpipe.plugin.tables import SparseFeature, TableOptimizer, TableSet  # noqa: E402
from recpipe.tables.group_rows import marked  # noqa: E402
from recpipe.tables.resident import FEW_BYTES, ResidentCollection  # noqa: E402

FEATURES = 26
RANK = 64
OPTIMIZERS = ("rowwise_adagrad", "adagrad", "sgd", "adam", "partial_rowwise_adam")
KINDS: dict[str, dict[str, Any]] = {
    "": {},
    ", weighted": {"weighted": True},
    ", float16": {"storage": DataType.FP16},
}
"""What tables may be beside rows of float32 without weights."""
LEAST = 0.02
"""Seconds of one timing."""
Run = Callable[[], object]


def least_ms(runs: list[Run], rounds: int) -> list[float]:
    """Milliseconds of CPU time of one call of each, the least of so many rounds."""
    for run in runs:
        run()
    counts = [max(1, ceil(LEAST / max(_seconds(run, 1), 1e-6))) for run in runs]
    found = [[_seconds(run, n) for run, n in zip(runs, counts, strict=True)] for _ in range(rounds)]
    return [1e3 * min(times) for times in zip(*found, strict=True)]


def _seconds(run: Run, count: int) -> float:
    began = process_time()
    for _ in range(count):
        run()
    return (process_time() - began) / count


def farthest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def show(name: str, dim: int, batch: int, times: list[float], difference: float) -> None:
    before, after = times
    print(f"{name:36} {dim:4} {batch:6} {before:9.3f} {after:9.3f} {before / after:6.2f}  {difference:.1e}")
    sys.stdout.flush()


def interaction(dim: int, batch: int, rounds: int) -> None:
    torch.manual_seed(0)
    wide, dense = torch.randn(batch, (1 + FEATURES) * dim), torch.randn(batch, dim, requires_grad=True)
    rows = marked(wide[:, dim:].unflatten(1, (FEATURES, dim))).requires_grad_()
    before, after = partial(interact, dense, rows, True), partial(pair_products, dense, rows)
    with torch.no_grad():
        made = [before(), after()]
        show("interaction forward", dim, batch, least_ms([before, after], rounds), farthest(*made))
    outs = [before(), after()]
    given = torch.randn_like(outs[0])
    back: list[Run] = [
        partial(torch.autograd.grad, out, [dense, rows], given, retain_graph=True) for out in outs
    ]
    differences = [farthest(*pair) for pair in zip(*(run() for run in back), strict=True)]  # type: ignore[call-overload]
    show("interaction backward", dim, batch, least_ms(back, rounds), max(differences))


def crosses(dim: int, batch: int, rounds: int) -> None:
    torch.manual_seed(0)
    net = LowRankCrossNet((1 + FEATURES) * dim, num_layers=3, low_rank=RANK)
    x = torch.randn(batch, (1 + FEATURES) * dim, requires_grad=True)
    outs = [cross(x, net, loops) for loops in (False, True)]
    given = torch.randn_like(x)
    steps: list[Run] = [
        lambda loops=loops: cross(x, net, loops).backward(given)  # type: ignore[misc]
        for loops in (False, True)
    ]
    difference = farthest(*(out.detach() for out in outs))
    show(f"3 crosses of rank {RANK}, both", dim, batch, least_ms(steps, rounds), difference)


def tables(dim: int, batch: int, ids: int, optimizer: str, kind: str, rounds: int) -> None:
    torch.manual_seed(0)
    own = TableOptimizer(optimizer, 1e-3)
    rows = FEW_BYTES // (4 * FEATURES * (dim + own.state_width(dim)))
    features = [SparseFeature(f"f{number}", rows) for number in range(FEATURES)]
    sets = [replace(TableSet.one_each(features, dim, own, 0), **KINDS[kind]) for _ in range(2)]
    made = [ResidentCollection(each, torch.device("cpu"), padded=False) for each in sets]
    sets[1].kernel.faster = lambda: True
    indices = torch.randint(rows, (FEATURES * batch * ids,))
    offsets = torch.arange(0, FEATURES * batch + 1) * ids
    weights = torch.rand(len(indices)) if sets[0].weighted else None
    look_up: list[Run] = [partial(each.tbes[0], indices, offsets, weights) for each in made]
    found = [run() for run in look_up]
    if optimizer == OPTIMIZERS[0]:
        times = least_ms(look_up, rounds)
        show(f"lookup of {ids}{kind}", dim, batch, times, farthest(*(x.detach() for x in found)))  # type: ignore[attr-defined]
    given = torch.randn_like(found[0])  # type: ignore[call-overload]
    update: list[Run] = [partial(x.backward, given, retain_graph=True) for x in found]  # type: ignore[attr-defined]
    for run in update:
        run()
    after = [each.weights_of(each.resident_rows()) for each in made]
    difference = farthest(*map(torch.from_numpy, after))
    show(f"update of {ids}, {optimizer}{kind}", dim, batch, least_ms(update, rounds), difference)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 2048, 8192])
    parser.add_argument("--dims", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--ids", nargs="+", type=int, default=[1])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with float32_products(torch.device("cpu")):
        host = Host.current()
        print(f"{host.processor}, {host.instruction_set}, loops for wide registers: {has_wide_registers()}")
        print("kernel                                dim  batch    before     loops  ratio  difference")
        for dim in arguments.dims:
            for batch in arguments.batches:
                interaction(dim, batch, arguments.rounds)
                crosses(dim, batch, arguments.rounds)
                for ids in arguments.ids:
                    for optimizer in OPTIMIZERS:
                        for kind in KINDS if optimizer == OPTIMIZERS[0] else [""]:
                            tables(dim, batch, ids, optimizer, kind, arguments.rounds)


if __name__ == "__main__":
    main()
