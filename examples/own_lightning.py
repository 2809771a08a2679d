"""A LightningModule of your own under ``lightning.Trainer``, with its tables in recpipe's tiers.

    python examples/own_lightning.py                 # Hotline; also: resident, lru, bagpipe

The model, the data and the ways to keep the tables are those of ``own_loop.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn

import recpipe

sys.path.insert(0, str(Path(__file__).parent))
from own_loop import HOW, STEPS, Clicks, TwoTower, clicks


class Ranking(L.LightningModule):
    """What you have already: nothing in it is recpipe's."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Clicks, index: int) -> torch.Tensor:
        loss, _ = self.net(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.net.parameters(), lr=0.02)


def main(how: str) -> float:
    """Train two epochs; returns the last step's loss."""
    torch.manual_seed(1)
    model = TwoTower()
    with recpipe.place(
        model, [clicks(seed) for seed in range(STEPS)], *HOW[how], "optim.tables.lr=0.2"
    ) as placed:
        trainer = L.Trainer(
            max_epochs=2,
            accelerator="auto",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Ranking(model), placed.loader)
    loss = float(trainer.callback_metrics["loss"])
    print(f"{how}: loss of the last batch {loss:.4f}")
    return loss


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "hotline")
