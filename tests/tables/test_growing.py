"""Tables whose ids get rows as they come, against a dictionary of rows in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.data.given import GivenBatches
from recpipe.data.id_mapper import MISSING_KEY
from recpipe.data.schema import Schema
from recpipe.errors import UserError
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import Growth, SparseFeature
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from tests.any_model.runs import left_by
from tests.tables.test_id_map import Dictionary

DIM, SIZE, LR, SEED = 4, 16, 0.1, 5
CAPACITY = {"item": 30, "user": 40}
GROWTH = {
    "item": Growth("item", evict="lfu"),
    "seen": Growth("item", evict="lfu"),
    "user": Growth("user", admit_after=2),
}
TABLE_OF = {"item": "item", "seen": "item", "user": "user"}
STD = 0.3
INIT = {"user": partial(nn.init.normal_, std=STD)}
MASK = 2**64 - 1
TIERS = {
    "resident": ("tiers.policy=resident",),
    "lru-host": ("tiers.policy=lru", "tiers.store=host", "tiers.resident_bytes=40%"),
    "lfu-ssd": ("tiers.policy=lfu", "tiers.store=ssd", "tiers.resident_bytes=30%"),
    "nocache-ssd": ("tiers.policy=nocache", "tiers.store=ssd"),
    "hotline": (
        "+plugin=hotline",
        "trainer.split=always",
        "plugins.hotline.min_micro_batch=1",
        "plugins.hotline.learn_batches=2",
        "tiers.resident_bytes=40%",
    ),
}


READS_AHEAD = {
    "bagpipe-ssd": (
        "+plugin=bagpipe",
        "tiers.store=ssd",
        "tiers.resident_bytes=40%",
        "plugins.bagpipe.lookahead=8",
    ),
    "bagpipe-host": ("+plugin=bagpipe", "tiers.store=host", "tiers.resident_bytes=40%"),
}
TIERS |= READS_AHEAD


class Model(nn.Module):
    """Sums of rows, and a loss that makes each gradient another."""

    def __init__(self) -> None:
        super().__init__()
        features = {"item": ["item", "seen"], "user": ["user"]}
        self.tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=DIM,
                    num_embeddings=CAPACITY[name],
                    feature_names=names,
                    init_fn=INIT.get(name),
                )
                for name, names in features.items()
            ],
        )
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.tables(batch.sparse).values().sum(1) + batch.dense.sum(1) + 0 * self.bias.sum()
        return ((scores - batch.labels) ** 2).mean(), scores.detach()


def made_batches(count: int = 24, seed: int = 1) -> list[Batch]:
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        lengths = rng.integers(0, 3, (3, SIZE))
        lengths[2] = 1
        keys = rng.zipf(1.3, int(lengths.sum())) % 90 + rng.integers(0, 4) - 20
        keys[rng.random(len(keys)) < 0.05] = MISSING_KEY
        sparse = KeyedJaggedTensor(
            keys=list(GROWTH), values=torch.from_numpy(keys), lengths=torch.from_numpy(lengths.reshape(-1))
        )
        dense, labels = (torch.from_numpy(rng.random(n).astype(np.float32)) for n in (SIZE, SIZE))
        made.append(Batch(dense[:, None], sparse, labels))
    return made


def given(batches: Sequence[Batch]) -> GivenBatches:
    sparse = tuple(SparseFeature(name, CAPACITY[TABLE_OF[name]], growth) for name, growth in GROWTH.items())
    return GivenBatches(batches, schema=Schema(("dense",), sparse))


def mixed(key: int) -> int:
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & MASK
    return key ^ (key >> 31)


def first_weights(key: int, table: str) -> torch.Tensor:
    """Of key and table alone, by splitmix64: uniform; of the users normal, by Box and Muller."""
    seed = SEED * 1_000_003 + list(CAPACITY).index(table)
    stream, values = mixed((key & MASK) ^ mixed(seed)), []
    for _ in range(DIM * (1 + (table in INIT))):
        stream = (stream + 0x9E3779B97F4A7C15) & MASK
        values.append((mixed(stream) >> 40) / 2**23 - 1)
    if table not in INIT:
        return torch.tensor(values) * float(np.float32(CAPACITY[table] ** -0.5))
    pairs = zip(values[:DIM], values[DIM:], strict=True)
    return STD * torch.tensor(
        [math.sqrt(-2 * math.log((1 - one) / 2)) * math.cos(math.pi * other) for one, other in pairs]
    )


class Plain:
    """A dictionary of rows for each table; row-wise Adagrad, SGD or Adam by hand."""

    def __init__(self, optimizer: str, first: dict[str, torch.Tensor]) -> None:
        self.optimizer = optimizer
        self.maps = {name: Dictionary(GROWTH[name], rows) for name, rows in CAPACITY.items()}
        self.weights = {name: first[name].clone() for name in CAPACITY}
        self.states = {name: torch.zeros(rows) for name, rows in CAPACITY.items()}
        """Sums of squares, or how often Adam has updated each row."""
        self.moments = {name: torch.zeros(2, *rows.shape) for name, rows in self.weights.items()}

    def step(self, batch: Batch) -> float:
        keys = {name: ids.tolist() for name, ids in zip(GROWTH, self._cut(batch), strict=True)}
        rows: dict[str, list[int]] = {}
        for table in CAPACITY:
            own = self.maps[table]
            mine = [name for name in GROWTH if TABLE_OF[name] == table]
            before = dict(own.rows)
            found = own.plan([key for name in mine for key in keys[name]])
            for key, row in own.rows.items():
                if before.get(key) != row:
                    self.weights[table][row] = first_weights(key, table)
                    self.states[table][row] = 0
                    self.moments[table][:, row] = 0
            for name in mine:
                rows[name], found = found[: len(keys[name])], found[len(keys[name]) :]
        leaves = {name: self.weights[name].clone().requires_grad_() for name in CAPACITY}
        scores = batch.dense.sum(1)
        for name, lengths in zip(GROWTH, batch.sparse.lengths().view(3, -1), strict=True):
            sums = leaves[TABLE_OF[name]][torch.tensor(rows[name], dtype=torch.int64)].sum(1)
            of = torch.repeat_interleave(torch.arange(SIZE), lengths)
            scores = scores.index_add(0, of, sums)
        loss = ((scores - batch.labels) ** 2).mean()
        loss.backward()
        for name, leaf in leaves.items():
            gradient = leaf.grad
            assert gradient is not None
            if self.optimizer == "sgd":
                self.weights[name] -= LR * gradient
            elif self.optimizer == "adam":
                seen = sorted(
                    {row for feature in GROWTH if TABLE_OF[feature] == name for row in rows[feature]}
                )
                self._adam(name, seen, gradient[seen])
            else:
                self.states[name] += (gradient**2).mean(1)
                self.weights[name] -= LR * gradient / (self.states[name].sqrt() + 1e-8)[:, None]
        return loss.item()

    def _adam(self, table: str, rows: list[int], gradient: torch.Tensor) -> None:
        self.states[table][rows] += 1
        updates = self.states[table][rows].double()[:, None]
        first, second = self.moments[table]
        first[rows] = 0.9 * first[rows] + 0.1 * gradient
        second[rows] = 0.999 * second[rows] + 0.001 * gradient**2
        size = first[rows] / (1 - 0.9**updates)
        self.weights[table][rows] -= (
            LR * size / ((second[rows] / (1 - 0.999**updates)).sqrt() + 1e-8)
        ).float()

    @staticmethod
    def _cut(batch: Batch) -> list[torch.Tensor]:
        return list(torch.split(batch.sparse.values(), batch.sparse.length_per_key()))


def first_rows(optimizer: str) -> dict[str, torch.Tensor]:
    """What tables start with; rows 0 and 1 are never given."""
    with recpipe.place(Model(), given(made_batches(2)), *words(optimizer, "resident")) as placed:
        return by_table(left_by(placed.model).parameters)


def by_table(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values[f"tables.embedding_bags.{name}.weight"] for name in CAPACITY}


def words(optimizer: str, tiers: str) -> tuple[str, ...]:
    return (
        *TIERS[tiers],
        f"optim.tables={{name: {optimizer}, lr: {LR}}}",
        f"seed={SEED}",
        "trainer.device=cpu",
        "trainer.backend=plain",
    )


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return made_batches()


@pytest.mark.parametrize(
    ("optimizer", "tiers"),
    [
        *(("rowwise_adagrad", tiers) for tiers in TIERS),
        *((other, tiers) for other in ("sgd", "adam") for tiers in ("resident", "lru-host")),
    ],
)
def test_trains_like_a_dictionary(batches: list[Batch], optimizer: str, tiers: str) -> None:
    plain, losses, wanted = Plain(optimizer, first_rows(optimizer)), [], []
    with recpipe.place(Model(), given(batches), *words(optimizer, tiers)) as placed:
        for _ in range(2):
            for batch in placed.loader:
                loss, _ = placed.model(batch)
                loss.backward()
                losses.append(loss.item())
        found = left_by(placed.model)
        figures = placed.loader._model.embeddings.growing.figures()
    wanted = [plain.step(batch) for _ in range(2) for batch in batches]
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for name, own in by_table(found.parameters).items():
        used = len(plain.maps[name].rows) + 2
        torch.testing.assert_close(own[:used], plain.weights[name][:used], rtol=1e-5, atol=1e-6)
        assert figures[name]["occupied"] == used - 2
        assert figures[name]["evicted"] > 10
    assert figures["user"]["defaulted"] > 10


@pytest.mark.parametrize("tiers", ["lru-host", *READS_AHEAD])
def test_an_epoch_left_early_leaves_no_trace(batches: list[Batch], tiers: str) -> None:
    """The loader is ahead of training; what it has planned for batches that are not trained is undone."""

    def trained(parts: Sequence[Sequence[int]]) -> Any:
        with recpipe.place(Model(), given(batches), *words("sgd", tiers)) as placed:
            loader = placed.loader._loader
            for first, stop in parts:
                loader.first = first
                for number, batch in enumerate(placed.loader, first):
                    placed.model(batch)[0].backward()
                    if number + 1 == stop:
                        break
            return by_table(
                left_by(placed.model).parameters
            ), placed.loader._model.embeddings.growing.figures()

    (whole, figures), (cut, others) = trained([(0, 20)]), trained([(0, 7), (7, 15), (15, 20)])
    assert figures == others
    assert all(torch.equal(whole[name], cut[name]) for name in CAPACITY)


def test_features_of_one_table_get_rows_together() -> None:
    sparse = tuple(SparseFeature(name, CAPACITY[TABLE_OF[name]], Growth(name)) for name in GROWTH)
    apart = GivenBatches(made_batches(2), schema=Schema(("dense",), sparse))
    with pytest.raises(UserError, match="item, seen, whose ids do not get rows together"):
        recpipe.place(Model(), apart, *words("sgd", "resident"))


def test_the_models_table_has_the_capacitys_rows() -> None:
    sparse = tuple(SparseFeature(name, CAPACITY[TABLE_OF[name]], growth) for name, growth in GROWTH.items())
    model = Model()
    del model.tables
    model.tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name="a", embedding_dim=DIM, num_embeddings=8, feature_names=["item"]),
            EmbeddingBagConfig(name="b", embedding_dim=DIM, num_embeddings=9, feature_names=["seen"]),
            EmbeddingBagConfig(name="c", embedding_dim=DIM, num_embeddings=8, feature_names=["user"]),
        ]
    )
    data = GivenBatches(made_batches(2), schema=Schema(("dense",), sparse))
    with pytest.raises(UserError, match="table 'b' of 'tables' has 9 rows, and its ids are given rows of 8"):
        recpipe.place(model, data, *words("sgd", "resident"))


def test_a_plugin_that_reads_ahead_is_ahead_of_the_map(batches: list[Batch]) -> None:
    ahead = []
    with recpipe.place(Model(), given(batches), *words("sgd", "bagpipe-ssd")) as placed:
        for batch in placed.loader:
            placed.model(batch)[0].backward()
            ahead.append(len(placed.loader._model.embeddings.growing._pending))
    assert max(ahead) >= 4
    assert ahead[-1] == 0


def test_rows_that_are_not_begun_anew_would_be_found(
    batches: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TieredEmbeddingBagCollection, "renew", lambda *_: None)
    with pytest.raises(AssertionError):
        test_trains_like_a_dictionary(batches, "sgd", "bagpipe-ssd")


@pytest.mark.parametrize(
    ("plugin", "fault"),
    [
        ("slipstream", "The tables of item, seen, user grow"),
        ("het", "kept by HetTables, which cannot initialise single rows anew: drop the plugin"),
    ],
)
def test_a_plugin_that_relies_on_ids_is_refused(plugin: str, fault: str) -> None:
    recipe = ["tiers.resident_bytes=50%", *words("sgd", "resident")[1:]]
    with pytest.raises(UserError, match=fault) as caught:
        recpipe.place(Model(), given(made_batches(2)), f"+plugin={plugin}", *recipe)
    assert "\n" not in str(caught.value)
