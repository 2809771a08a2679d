"""What the figures of an evaluation cost: CPU seconds of one core, which other programs hardly change.

python benchmarks/judging.py --samples 1000000
"""

import argparse
import time
from collections.abc import Callable

import torch

from recpipe.model.calibrated import calibration
from recpipe.model.config import MetricsConfig
from recpipe.model.metrics import judge
from recpipe.model.ranked import auc
from recpipe.model.scores import Scores


def seconds(what: Callable[[], object], rounds: int) -> float:
    """The least CPU time of so many rounds."""
    least = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        what()
        least = min(least, time.process_time() - began)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--each", type=int, default=20, help="samples of a group, on average")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logits = torch.randn(options.samples)
    labels = (torch.rand(options.samples) < (logits - 2).sigmoid()).float()
    users = torch.randint(0, max(1, options.samples // options.each), (options.samples,))

    def figures(groups: torch.Tensor | None = None, **asked: object) -> None:
        scores = Scores("clicks", labels, logits, groups=groups)
        judge(scores, MetricsConfig(**asked))  # type: ignore[arg-type]
        calibration(scores)

    for name, what in (
        ("AUC alone", lambda: auc(Scores("clicks", labels, logits))),
        ("all figures, no intervals", lambda: figures(intervals=None)),
        ("all figures", lambda: figures()),
        ("and those of groups", lambda: figures(users)),
    ):
        print(f"{name:28s} {seconds(what, options.rounds):.3f} s")


if __name__ == "__main__":
    main()
