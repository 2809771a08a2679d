"""Lookups of tables in each type of rows over float32: ids a second, one thread, interleaved.

    python benchmarks/low_precision.py [--dims 64] [--pooling 1 20 80] [--bytes 1200000000] [--rounds 15]

``tbe`` is FBGEMM's fused float32 table as training uses it, ``fp32`` float32 rows through the operator of the
other types. All tables are larger than the caches, and ids are uniform: the case that bandwidth decides.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from recpipe_low_precision.bags import LowPrecisionBags, RowType
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from recpipe.answers.row_types import ROW_TYPES
from recpipe.common.timing import seconds_by_round
from recpipe.report.environment import environment

TABLES = 8
BATCHES = 4
FILLED = 0x3C
"""The byte that rows are filled with: no denormals, and every page is written."""
Look = Callable[[int], object]


def ways(dim: int, rows: int, ids: list[torch.Tensor], offsets: torch.Tensor) -> dict[str, Look]:
    """A lookup of batch number n for each kind of table."""
    place = (rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [place] * TABLES,
        optimizer=EmbOptimType.EXACT_SGD,
        device=torch.device("cpu"),
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    tbe.init_embedding_weights_uniform(-0.1, 0.1)
    found: dict[str, Look] = {"tbe": lambda number: tbe(ids[number], offsets)}
    configs = [
        EmbeddingBagConfig(name=f"t{t}", embedding_dim=dim, num_embeddings=rows, feature_names=[f"f{t}"])
        for t in range(TABLES)
    ]
    for kind in ROW_TYPES:
        bags = LowPrecisionBags(configs, {config.name: RowType(kind) for config in configs})
        for config in configs:
            bags.rows_of(config.name).fill_(FILLED)
        found[kind] = lambda number, bags=bags: bags.look_up(ids[number], offsets)  # type: ignore[misc]
    return found


def measured(dim: int, pooling: int, size: int, rounds: int) -> dict[str, tuple[float, float, float, float]]:
    """For each way: millions of ids a second, and the median, least and most ratio to ``tbe`` in a round."""
    rows = size // (TABLES * 4 * dim)
    bags = max(32, 4096 // pooling)
    count = TABLES * bags * pooling
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, rows, (count,), generator=draw) for _ in range(BATCHES)]
    offsets = torch.arange(0, count + 1, pooling)
    looks = ways(dim, rows, ids, offsets)
    with torch.no_grad():
        times = seconds_by_round([partial(_all, look) for look in looks.values()], rounds)
    found = {}
    for name, taken in zip(looks, times, strict=True):
        ratios = [base / own for base, own in zip(times[0], taken, strict=True)]
        speed = BATCHES * count / median(taken) / 1e6
        found[name] = (speed, median(ratios), min(ratios), max(ratios))
    return found


def _all(look: Look) -> None:
    for batch in range(BATCHES):
        look(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[64])
    parser.add_argument("--pooling", type=int, nargs="+", default=[1, 20, 80])
    parser.add_argument("--bytes", type=int, default=1_200_000_000, help="of all tables in float32")
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{environment()['cpu']}, one thread, {TABLES} tables, {asked.bytes:,} bytes in float32")
    for dim in asked.dims:
        for pooling in asked.pooling:
            found = measured(dim, pooling, asked.bytes, asked.rounds)
            line = "  ".join(
                f"{name} {speed:.1f} M/s {ratio:.2f} ({least:.2f}-{most:.2f})"
                for name, (speed, ratio, least, most) in found.items()
            )
            print(f"dim {dim} pooling {pooling}: {line}", flush=True)


if __name__ == "__main__":
    main()
