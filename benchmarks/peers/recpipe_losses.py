"""The losses of a run of recpipe that starts from given weights: its command line in this process, watched.

python benchmarks/peers/recpipe_losses.py DIR WEIGHTS [OVERRIDE ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from recpipe_cli import recipe

from recpipe.cli import main as run_recpipe


def record() -> list[float]:
    """From now on every training step's mean loss goes into this list."""
    from recpipe.training.module import RankingModule

    losses: list[float] = []
    train = RankingModule.training_step

    def training_step(self: RankingModule, batch: Any, batch_idx: int) -> Any:
        loss = train(self, batch, batch_idx)
        losses.append(float(loss))
        return loss

    RankingModule.training_step = training_step  # type: ignore[method-assign]
    return losses


def main() -> None:
    directory, weights, overrides = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["trainer.progress=false", "trainer.logger=null"]
        chosen = [*recipe(directory, Path(folder)), f"model.pretrained={weights}", *quiet, *overrides]
        sys.argv = ["recpipe", *chosen]
        losses = record()
        try:
            run_recpipe()
        except SystemExit as end:
            if end.code:
                raise
    print(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
