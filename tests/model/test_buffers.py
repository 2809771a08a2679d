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
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.answers.plain import unshard
from recpipe.data.make import open_dataset
from recpipe.plugin.errors import PluginError

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


class Seen(Normed):
    """Keeps the ids that it has seen, ever more of them, and how many batches they were in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, dtype=torch.long))
        self.batches = 0

    def forward(self, batch):
        if self.training:
            self.seen = torch.unique(torch.cat([self.seen, batch.sparse.values().long()]))
            self.batches += 1
        return super().forward(batch)


@pytest.mark.parametrize("more", [(), ("tiers=host", "tiers.policy=lru", "tiers.resident_bytes=50%")])
def test_buffers_that_grow_and_counters_are_those_of_the_trained_batches(more: tuple[str, ...]) -> None:
    """Four steps over the data's first batches: what was tried before training is not in them."""
    data, own, plain = open_dataset(DATA, seed=1), Seen(), Seen()
    torch.set_num_threads(2)  # cores may share batches, which is measured
    try:
        with recpipe.train(own, data, *QUIET, *more, "trainer.max_steps=4", quiet=True) as run:
            trained = run.model
            for _, batch in zip(range(4), data.batches("train", 64), strict=False):
                plain(batch)
            assert trained.batches == plain.batches == 4
            assert torch.equal(trained.seen, plain.seen)
            assert int(trained.norm.num_batches_tracked) == 4
    finally:
        torch.set_num_threads(1)


class Managed(nn.Module):
    """TorchRec's managed collision: any id gets one of a table's rows, until it is evicted."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        tables = [EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=20, feature_names=["f"])]
        rows = MCHManagedCollisionModule(
            zch_size=20,
            device=torch.device("cpu"),
            eviction_interval=2,
            eviction_policy=LFU_EvictionPolicy(),
        )
        managed = ManagedCollisionCollection({"t": rows}, tables)
        self.rows = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables), managed)
        self.over = nn.Linear(4, 1)

    def forward(self, batch):
        logits = self.over(self.rows(batch["ids"])[0].values()).squeeze(1)
        return binary_cross_entropy_with_logits(logits, batch["labels"]), logits


def managed_batches() -> list[dict[str, object]]:
    """Eight of ten samples: the ids of every other one are spread over 2**40."""
    drawn = torch.Generator().manual_seed(0)
    return [
        {
            "ids": KeyedJaggedTensor(
                ["f"],
                torch.randint(0, 2**40 if number % 2 else 10, (20,), generator=drawn),
                lengths=torch.full((10,), 2),
            ),
            "labels": torch.arange(10) % 2.0,
        }
        for number in range(8)
    ]


MANAGED = ("optim=sgd", "trainer.logger=null", "trainer.progress=false")
TIERED = ("tiers=host", "tiers.policy=lru", "tiers.resident_bytes=60%")


@pytest.mark.parametrize(
    "more", [(), TIERED, (*TIERED[:1], TIERED[2], "+plugin=bagpipe")], ids=["resident", "lru", "bagpipe"]
)
def test_managed_collision_trains_as_without_recpipe(more: tuple[str, ...]) -> None:
    plain, own, batches = Managed(), Managed(), managed_batches()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        plain(batch)[0].backward()
        optimizer.step()
    with recpipe.train(own, batches, *MANAGED, *more, quiet=True) as run:
        found = run.model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    taken = found["rows._managed_collision_collection._managed_collision_modules.t._mch_sorted_raw_ids"]
    assert (taken > 20).sum() > 5, "or no id was beyond the table"


def test_managed_collision_goes_on_where_it_was(tmp_path: Path) -> None:
    words, batches = (*MANAGED, *TIERED), managed_batches()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    recpipe.train(Managed(), batches, *words, "trainer.max_steps=7", output=whole, quiet=True).close()
    recpipe.train(Managed(), batches, *words, "trainer.max_steps=4", output=parts, quiet=True).close()
    more = (*words, "trainer.max_steps=7", f"resume={parts}")
    recpipe.train(Managed(), batches, *more, output=parts / "more", quiet=True).close()
    one, other = (recpipe.load(folder, model=Managed()).state_dict() for folder in (whole, parts / "more"))
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_managed_collision_is_not_cut_into_parts() -> None:
    with pytest.raises(PluginError, match=r"plugin hotline .*keeps statistics of its batches"):
        recpipe.train(Managed(), managed_batches(), *MANAGED, "+plugin=hotline", *TIERED[:1], quiet=True)
