"""What serving with rows on the SSD costs: user-side tables in ``TieredRows`` against all rows in DRAM.

    python benchmarks/sdm.py [--rows 1000000] [--shares 0.05 0.1 0.25] [--directory DIR_ON_THE_DISK]
    python benchmarks/sdm.py --http        over HTTP: benchmarks/sdm_http.py

A request is one user, with ids in several tables of int8 rows (zipf), and candidates that an MLP scores.
Eight requests are scored together, while the rows of the next eight are read. Both sides score the same
requests in turn and must give the same bits. ``share`` is DRAM for rows and index over the tables' bytes in
float32. The bound is min(1 / (c + m * c_io), IOPS / m) for m missed rows a request: c is the processor time
of a request with all rows in DRAM, c_io that of a row read, IOPS what the disk gives at this depth.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "plugins"))

from recpipe_sdm.admission import Admission
from recpipe_sdm.budget import Beside, Size
from recpipe_sdm.index import RowIndex
from recpipe_sdm.rows import Shared, TieredRows
from recpipe_sdm.tiers import Tiers

from recpipe.answers.row_types import encode_rows
from recpipe.plugin.store import StoreLayout
from recpipe.private_api import SUM, NbitLayout, look_up_nbit
from recpipe.tables.stores.ssd import SsdStore

TOGETHER = 8
"""Requests scored together."""
Ids = torch.Tensor
Figures = NDArray[np.float64]
"""Seconds, processor seconds and the 99th percentile of a batch, for each round: [rounds, 3]."""


@dataclass
class Side:
    """Medians over rounds."""

    share: float
    hit_rate: float
    missed_a_request: float
    dram_mib: float
    requests: float
    dram_requests: float
    ratio: float
    lowest: float
    highest: float
    cpu_ratio: float
    p99_ratio: float
    bound: float


def main() -> int:
    """Run the benchmark; always 0."""
    if "--http" in sys.argv:
        from sdm_http import main as over_http

        return over_http(sys.argv[1:])
    options = _options()
    torch.set_num_threads(1)
    work = Work(options)
    sides = []
    with torch.inference_mode(), tempfile.TemporaryDirectory(dir=options.directory, prefix="sdm-") as place:
        for share in options.shares:
            sides.append(work.measured(share, Path(place) / f"{share}"))
            _print(sides[-1])
    if options.json:
        options.json.write_text(json.dumps([asdict(side) for side in sides], indent=2) + "\n")
    if options.plot:
        _plot(sides, options.plot)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of all tables (default 1,000,000)")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--pooling", type=int, default=20, help="ids of a user in a table (default 20)")
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.1, 0.25])
    parser.add_argument(
        "--adapt", action="store_true", help="LFU admission from no knowledge, not the best rows"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--batches", type=int, default=60, help="batches of eight requests a round (default 60)"
    )
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk (default: here)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write DRAM share against requests/s to this .svg")
    return parser.parse_args()


class Work:
    """The tables, the requests, and both ways to score them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rng = np.random.default_rng(0)
        rows, dim, tables = options.rows, options.dim, options.tables
        weights = torch.randn(rows, dim, generator=torch.Generator().manual_seed(0)) * 0.05
        self.rows = encode_rows(weights, "int8")
        popularity = np.arange(1, rows + 1, dtype=np.float64) ** -options.zipf
        self.cumulative = np.cumsum(popularity / popularity.sum())
        self.row_of_rank = self.rng.permutation(rows)
        self.layout = NbitLayout(("int8",) * tables, (dim,) * tables)
        self.tensors = self.layout.tensors()
        self.starts = torch.zeros(tables, dtype=torch.int64)
        ids = tables * TOGETHER * options.pooling
        self.offsets = torch.arange(0, ids + 1, options.pooling)
        self.ids = ids
        torch.manual_seed(0)
        widths = (tables * dim + 64, 512, 256, 1)
        layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
        self.net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        self.items = torch.randn(TOGETHER * options.candidates, 64)

    def batches(self) -> list[Ids]:
        """Rows that batches of users look up."""
        draws = self.rng.random((self.options.batches, self.ids))
        ranks = np.minimum(np.searchsorted(self.cumulative, draws), self.options.rows - 1)
        return list(torch.from_numpy(self.row_of_rank[ranks]))

    def score(self, buffer: torch.Tensor, ids: Ids) -> torch.Tensor:
        """Scores of all candidates."""
        return self.scores(self.pooled(buffer, ids))

    def pooled(self, buffer: torch.Tensor, ids: Ids) -> torch.Tensor:
        """Each user's rows, pooled once."""
        return look_up_nbit(self.layout, self.tensors, buffer.view(-1), self.starts, ids, self.offsets, SUM)

    def scores(self, users: torch.Tensor) -> torch.Tensor:
        """Users are set beside their candidates."""
        wide = users.repeat_interleave(self.options.candidates, 0)
        scores: torch.Tensor = self.net(torch.cat([wide, self.items], 1))
        return scores

    def in_dram(self, batches: list[Ids]) -> Iterator[torch.Tensor]:
        """With all rows in DRAM."""
        for ids in batches:
            yield self.score(self.rows, ids)

    def tiered(self, tiers: Tiers, batches: list[Ids]) -> Iterator[torch.Tensor]:
        """With the rows of the next batch read while one is scored, as a server does."""
        (tier,) = tiers.tiers
        looks = tiers.look(batches[0].numpy())
        tiers.ahead(looks)
        for following in [*batches[1:], None]:
            with tiers.found(looks) as places:
                users = self.pooled(tier.buffer, torch.from_numpy(places).long())
            if following is not None:
                looks = tiers.look(following.numpy())
                tiers.ahead(looks)
            yield self.scores(users)

    def measured(self, share: float, place: Path) -> Side:
        """Both in turn, with DRAM for ``share`` of the float32 bytes."""
        options, width = self.options, self.rows.shape[1]
        budget = share * options.rows * options.dim * 4
        beside = Beside(options.adapt)
        left = budget - beside.of_rows([Size(options.rows, width)])
        slots = max(0, min(options.rows, int(left / (width + beside.of_slot))))
        hot = np.arange(slots) if options.adapt else np.sort(self.row_of_rank[:slots])
        admission = Admission(slots) if options.adapt else None
        shared = Shared(RowIndex(options.rows, changes=options.adapt), admission)
        tiers = Tiers(shared, [TieredRows(shared, self._store(place), hot, self.ids)])
        warm = 40 if options.adapt else 1
        for _ in range(warm):
            batches = self.batches()
            pairs = zip(self.tiered(tiers, batches), self.in_dram(batches), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), "other bits than with all rows in DRAM"
        before = asdict(shared.reads)
        dram, ssd = [], []
        for _ in range(options.rounds):
            batches = self.batches()
            dram.append(_timed(lambda given=batches: self.in_dram(given)))  # type: ignore[misc]
            ssd.append(_timed(lambda given=batches: self.tiered(tiers, given)))  # type: ignore[misc]
        reads = {name: value - before[name] for name, value in asdict(shared.reads).items()}
        side = self._side(share, tiers, reads, np.array(dram), np.array(ssd))
        tiers.close()
        return side

    def _side(
        self,
        share: float,
        tiers: Tiers,
        reads: dict[str, int],
        dram: Figures,
        ssd: Figures,
    ) -> Side:
        requests = self.options.batches * TOGETHER
        ratios = dram / ssd
        missed = reads["rows_read"] / (reads["batches"] * TOGETHER)
        cpu = float(np.median(dram[:, 1])) / requests
        io_cpu, iops = self._disk(tiers)
        bound = min(1.0, cpu / (cpu + missed * io_cpu), iops / max(missed, 1e-9) * cpu)
        return Side(
            share,
            1 - reads["missed"] / reads["lookups"],
            missed,
            tiers.dram_bytes / 2**20,
            requests / float(np.median(ssd[:, 0])),
            requests / float(np.median(dram[:, 0])),
            float(np.median(ratios[:, 0])),
            float(ratios[:, 0].min()),
            float(ratios[:, 0].max()),
            float(np.median(ratios[:, 1])),
            float(np.median(1 / ratios[:, 2])),
            bound,
        )

    def _disk(self, tiers: Tiers) -> tuple[float, float]:
        """Processor seconds of a row read, and rows a second, in calls of as many rows as a batch misses."""
        (tier,), reads = tiers.tiers, tiers.shared.reads
        count = max(1, reads.rows_read // reads.batches)
        rows = [self.rng.choice(self.options.rows, count, replace=False) for _ in range(50)]
        out = np.empty((count, self.rows.shape[1] // 4), np.float32)
        wall, cpu = time.perf_counter(), time.process_time()
        for part in rows:
            tier.store.gather(part, out)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return cpu / (50 * count), 50 * count / wall

    def _store(self, place: Path) -> SsdStore:
        words = self.rows.numpy().view(np.float32)
        layout = StoreLayout(("users",), (len(words),), words.shape[1])
        return SsdStore.create(
            layout, lambda _, start, stop: words[start:stop], place, staging_bytes=1 << 20, scratch=True
        )


def _timed(scored: Callable[[], Iterator[torch.Tensor]]) -> tuple[float, float, float]:
    """Seconds, processor seconds, and the 99th percentile of a batch's seconds."""
    wall, cpu, last, each = time.perf_counter(), time.process_time(), time.perf_counter(), []
    for _ in scored():
        now = time.perf_counter()
        each.append(now - last)
        last = now
    return time.perf_counter() - wall, time.process_time() - cpu, float(np.percentile(each, 99))


def _print(side: Side) -> None:
    print(
        f"{side.share:>5.0%} of float32, {side.dram_mib:,.0f} MiB: {side.requests:>8,.0f} requests/s, "
        f"{side.ratio:.2f} ({side.lowest:.2f}..{side.highest:.2f}) of {side.dram_requests:,.0f} in DRAM; "
        f"processor {side.cpu_ratio:.2f}, p99 {side.p99_ratio:.2f}, hits {side.hit_rate:.2%}, "
        f"{side.missed_a_request:.1f} rows read a request, bound {side.bound:.2f}",
        flush=True,
    )


def _plot(sides: list[Side], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    shares = [100 * side.share for side in sides]
    axes.plot(shares, [side.ratio for side in sides], "o-", label="measured")
    axes.plot(shares, [side.bound for side in sides], "--", label="bound")
    axes.set(
        xlabel="DRAM, % of the tables in float32", ylabel="requests/s over all rows in DRAM", ylim=(0, 1.1)
    )
    axes.legend()
    figure.savefig(file)


if __name__ == "__main__":
    sys.exit(main())
