"""What computing DLRM's bottom layers while the questions to the shards are on their way brings:

    python benchmarks/scale_out_overlap.py --bottom 512 256 64 --samples 16 64 256

A package is cut twice, with its dense part in two and in one piece. Its shards are processes; the two main
servers' scorers are here, take the same batches in turn, and note when questions were asked, when the bottom
layers were computed, when the last answer was taken, and when the batch was scored. Scores must be equal bit
by bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from recpipe_scale_out.calls import ShardCalls
from recpipe_scale_out.command import cut
from recpipe_scale_out.config import CutConfig
from recpipe_scale_out.dense import ShardedScorer
from recpipe_serve.batching.scorer import RequestScorer, Side
from scale_out_servers import Process, free_ports

import recpipe
from recpipe.errors import UserError


class Traced:
    """A cut's scorer, and when it did what with the latest batch, in seconds since this was asked for."""

    def __init__(self, directory: Path, addresses: list[str]) -> None:
        calls = ShardCalls([[one] for one in addresses], 5.0, None)
        scorer = ShardedScorer(directory, calls, 60.0)
        self.scorer, self.apart, self.times = RequestScorer(scorer), scorer.in_two, dict[str, float]()
        ask = calls.ask

        def asked(questions: Any) -> Any:
            answers = ask(questions)
            self._note("asked")

            def taken() -> Any:
                self._note("waits")
                found = answers()
                self._note("answered")
                return found

            return taken

        calls.ask = asked  # type: ignore[method-assign]
        for two in scorer.in_two.values():
            two.begun = self._noted(two.begun)  # type: ignore[method-assign]

    def _noted(self, begun: Callable[..., Any]) -> Callable[..., Any]:
        def noted(dense: torch.Tensor) -> Any:
            self._note("begins")
            found = begun(dense)
            self._note("begun")
            return found

        return noted

    def _note(self, what: str) -> None:
        self.times[what] = perf_counter() - self._start

    def __call__(self, dense: torch.Tensor, sides: list[Side]) -> torch.Tensor:
        self.times.clear()
        self._start = perf_counter()
        scores = self.scorer(dense, sides)
        self._note("scored")
        return scores


@contextmanager
def both(options: argparse.Namespace, folder: Path) -> Iterator[list[Traced]]:
    """The scorers of both cuts, in two and in one piece."""
    tables = {f"t{n}": options.rows for n in range(options.tables)}
    words = [
        *("data.samples=600", "data.batch_size=128", "trainer.device=cpu", "trainer.logger=null"),
        "data.tables={" + ", ".join(f"{name}: {rows}" for name, rows in tables.items()) + "}",
        f"model.embedding_dim={options.bottom[-1]}",
        f"model.bottom=[{','.join(map(str, options.bottom[:-1]))}]",
        *("model.top=[512,256]", "trainer.max_steps=2"),
    ]
    recpipe.train(None, None, *words, output=folder / "run", quiet=True).close()
    package = recpipe.package(folder / "run", folder / "model.recpipe", reference=False, quiet=True)
    found = []
    with ExitStack() as open_:
        for overlap in (True, False):
            place = folder / f"cut-{overlap}"
            cut(package, place, CutConfig(options.shards, overlap=overlap))
            ports = free_ports(options.shards)
            for number, port in enumerate(ports):
                words = ["serve", str(place / f"shard{number}"), f"port={port}"]
                log = folder / f"shard-{overlap}-{number}.log"
                shard = Process([sys.executable, "-m", "recpipe", *words], log, "serving shard")
                open_.callback(shard.end)
            found.append(Traced(place / "main.recpipe", [f"127.0.0.1:{port}" for port in ports]))
        if not found[0].apart:
            raise UserError(
                "the dense part does not give the same bits in two, so there is nothing to compare"
            )
        yield found


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bottom", type=int, nargs="+", default=[512, 256, 64], help="widths of the layers")
    parser.add_argument("--samples", type=int, nargs="+", default=[16, 64, 256], help="of a batch")
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=20_000, help="of a table")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--batches", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = ("bottom layers, ms", "answers take", "waiting after", "a batch", "in one piece", "times")
    print("| samples |", " | ".join(names), "|\n| --: |", " | ".join(["--:"] * len(names)), "|")
    with tempfile.TemporaryDirectory() as place, both(options, Path(place)) as (apart, whole):
        draw = np.random.default_rng(0)
        for samples in options.samples:
            notes: list[dict[str, float]] = []
            totals: list[float] = []
            for _ in range(options.batches):
                dense = torch.from_numpy(draw.normal(size=(samples, 13)).astype(np.float32))
                ids = torch.from_numpy(draw.integers(0, options.rows, options.tables * samples))
                sides = [Side(tuple(range(options.tables)), ids, None, samples)]
                scores = apart(dense, sides), whole(dense, sides)
                if not torch.equal(*scores):
                    sys.exit("the scores differ")
                notes.append(dict(apart.times))
                totals.append(whole.times["scored"])
            told = [
                median(one["begun"] - one["begins"] for one in notes),
                median(one["answered"] - one["asked"] for one in notes),
                median(one["answered"] - one["waits"] for one in notes),
                median(one["scored"] for one in notes),
                median(totals),
            ]
            ratio = median(one["scored"] / total for one, total in zip(notes, totals, strict=True))
            print(f"| {samples} |", " | ".join(f"{1e3 * own:.2f}" for own in told), f"| {ratio:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
