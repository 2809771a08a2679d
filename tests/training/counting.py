"""A model whose rows say how often each record was trained, in whatever order: -1 for each time."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.training.module import RankingModule

RECORDS = 400
WORDS = (
    "data=stream",
    f"data.features={{labels: [click], features: [{{name: record, ids: rows, rows: {RECORDS}}}]}}",
    "data.batch_size=20",
    "optim=sgd",
    "optim.tables.lr=1",
    "trainer.device=cpu",
    "trainer.backend=plain",
    "trainer.checkpoint_every=2",
    "trainer.progress=false",
    "trainer.logger=null",
)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="record", embedding_dim=4, num_embeddings=RECORDS, feature_names=["record"]
        )
        self.rows = EmbeddingBagCollection([config])
        nn.init.zeros_(self.rows.embedding_bags["record"].weight)
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, sparse: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rows(sparse).values()
        return rows.sum() + 0 * self.unused.sum(), rows[:, 0]


def train_slowly() -> None:
    """Train with the words of the command line, the first of which is the run's folder, and say each step."""
    step = RankingModule.training_step

    def slowly(self, batch, index):
        loss = step(self, batch, index)
        print("step", self.global_step, flush=True)
        time.sleep(0.02)
        return loss

    RankingModule.training_step = slowly
    folder, *words = sys.argv[1:]
    recpipe.train(Counting(), None, *WORDS, *words, output=folder)
