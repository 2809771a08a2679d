"""What a model keeps beside its parameters: statistics of its batches, and parameters that nothing trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import recpipe
from recpipe.data.make import open_dataset
from recpipe.tasks.unshard import unshard

TABLES = {"a": 60, "b": 30}
DATA = {"name": "synthetic", "samples": 600, "batch_size": 64, "tables": TABLES}
QUIET = ("trainer.progress=false", "trainer.logger=null", "data.batch_size=64")


class Normed(nn.Module):
    """Statistics of batches, a frozen parameter, one that the loss does not see, and a scratch buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        configs = [
            EmbeddingBagConfig(name=n, embedding_dim=8, num_embeddings=r, feature_names=[n])
            for n, r in TABLES.items()
        ]
        self.rows = EmbeddingBagCollection(configs)
        self.norm = nn.BatchNorm1d(16)
        self.over = nn.Linear(16, 1)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, batch):
        logits = self.over(self.norm(self.rows(batch.sparse).values())).squeeze(1) * self.frozen
        return binary_cross_entropy_with_logits(logits, batch.labels), logits


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Seven steps at one go, and four that are resumed to seven."""
    whole, parts = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("parts")
    data = open_dataset(DATA, seed=1)
    recpipe.train(Normed(), data, *QUIET, "trainer.max_steps=7", output=whole, quiet=True).close()
    recpipe.train(Normed(), data, *QUIET, "trainer.max_steps=4", output=parts, quiet=True).close()
    more = (*QUIET, "trainer.max_steps=7", f"resume={parts}")
    recpipe.train(Normed(), data, *more, output=parts / "more", quiet=True).close()
    return whole, parts / "more"


def test_a_resumed_run_has_the_statistics_of_an_undisturbed_one(runs: tuple[Path, Path]) -> None:
    one, other = (recpipe.load(folder, model=Normed()).state_dict() for folder in runs)
    assert int(one["norm.num_batches_tracked"]) == 7
    assert "scratch" not in one
    assert one.keys() == Normed().state_dict().keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    assert not torch.equal(one["norm.running_mean"], Normed().norm.running_mean)


def test_a_file_of_all_tensors_has_them(runs: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    unshard(runs[0], file)
    tensors, trained = load_file(file), recpipe.load(runs[0], model=Normed())
    assert tensors["norm.num_batches_tracked"].dtype == torch.int64
    for name, value in trained.state_dict().items():
        if not name.startswith("rows."):
            assert torch.equal(tensors[name], value), name
    more = (*QUIET, "trainer.max_steps=1", "optim.dense.lr=0", f"model.pretrained={file}")
    with recpipe.train(Normed(), open_dataset(DATA, seed=1), *more, quiet=True) as run:
        assert int(run.model.norm.num_batches_tracked) == 8
