"""Models as people bring them, batches of a type of their own, and the loop that they would write by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import torch
import torchrec.optim
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.data.dataset import Dataset

ROWS = 400
"""Of every table: the data's ids are taken modulo this."""
BATCH = 128
FLAT = tuple(f"c{i}" for i in range(8))
"""Features with one id for each sample."""
TECHNIQUES: dict[str, tuple[str, ...]] = {
    "resident": (),
    "lru_ssd": ("tiers.policy=lru", "tiers=ssd"),
    "hotline": (
        "+plugin=hotline",
        "trainer.split=always",
        "plugins.hotline.min_micro_batch=1",
        "plugins.hotline.learn_batches=2",
    ),
    "bagpipe": ("+plugin=bagpipe", "plugins.bagpipe.lookahead=3", "tiers.resident_bytes=90%"),
    "fae": (
        "+plugin=fae",
        "plugins.fae.schedule=false",
        "plugins.fae.sample=1.0",
        "tiers.resident_bytes=80%",
    ),
    "slipstream_hotline": (
        "+plugin=[hotline,slipstream]",
        "trainer.split=always",
        "plugins.hotline.min_micro_batch=1",
        "plugins.hotline.learn_batches=2",
        "plugins.slipstream.drop=0",
    ),
    "het": ("+plugin=het", "plugins.het.bound=0"),
}
"""Slipstream leaves nothing out here, so that it must not change anything."""


@dataclass
class Events:
    """A batch as a user's own loader makes it: ids in two ``KeyedJaggedTensor``, one of them with lists."""

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    lists: KeyedJaggedTensor
    """``clicked`` and ``carted``: 0 to 4 ids for each sample."""
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Events:
        return Events(*(getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)))


def events(dataset: Dataset, count: int, first: int = 0) -> list[Events]:
    """``count`` batches of real rows, from number ``first`` on."""
    found = []
    for batch in dataset.batches("train", BATCH, first):
        ids = batch.sparse.values().view(-1, batch.size) % ROWS
        bags = ids[8:16].t().reshape(batch.size, 2, 4)
        lengths = (bags.sum(2) % 5).t().contiguous()
        keep = torch.arange(4) < lengths.t().unsqueeze(2)
        lists = torch.cat([bags[:, i][keep[:, i]] for i in range(2)])
        found.append(
            Events(
                batch.dense,
                KeyedJaggedTensor(
                    list(FLAT), ids[:8].reshape(-1), lengths=torch.ones(8 * batch.size, dtype=torch.long)
                ),
                KeyedJaggedTensor(["clicked", "carted"], lists, lengths=lengths.reshape(-1)),
                batch.labels,
            )
        )
        if len(found) == count:
            break
    return found


def bags(dim: int, features: Sequence[str] = FLAT) -> EmbeddingBagCollection:
    """A table for each feature."""
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=f"t_{f}", embedding_dim=dim, num_embeddings=ROWS, feature_names=[f])
            for f in features
        ]
    )


class TwoTower(nn.Module):
    """Two collections of different dimensions; the user's takes means, of a table for two features."""

    def __init__(self) -> None:
        super().__init__()
        self.user = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name="goods",
                    embedding_dim=8,
                    num_embeddings=ROWS,
                    feature_names=["clicked", "carted"],
                    pooling=PoolingType.MEAN,
                ),
            ]
        )
        self.item = nn.ModuleDict({"tables": bags(4, FLAT[:4])})
        self.left = nn.Sequential(nn.Linear(2 * 8 + 13, 16), nn.ReLU(), nn.Linear(16, 8))
        self.right = nn.Linear(4 * 4, 8)

    def forward(self, batch: Events) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and logits [B]."""
        logits = (self.of_user(batch) * self.of_item(batch)).sum(1)
        return binary_cross_entropy_with_logits(logits, batch.labels), logits

    def of_user(self, batch: Events) -> torch.Tensor:
        return self.left(torch.cat([self.user(batch.lists).values(), batch.dense_features], dim=1))

    def of_item(self, batch: Events) -> torch.Tensor:
        return self.right(self.item["tables"](batch.sparse_features).values())


class Turned(TwoTower):
    """Calls its collections in another order than it has them."""

    def forward(self, batch: Events) -> tuple[torch.Tensor, torch.Tensor]:
        item = self.of_item(batch)
        logits = (self.of_user(batch) * item).sum(1)
        return binary_cross_entropy_with_logits(logits, batch.labels), logits


class Din(nn.Module):
    """Attention of a candidate over a history: rows that are not pooled, of one shared table."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name="goods", embedding_dim=8, num_embeddings=ROWS, feature_names=["clicked", "c0"]
                ),
                EmbeddingConfig(name="shops", embedding_dim=8, num_embeddings=ROWS, feature_names=["c1"]),
            ]
        )
        self.bags = bags(4, ["carted", "c2"])
        self.attention = nn.Linear(16, 1)
        self.top = nn.Sequential(nn.Linear(8 + 8 + 8 + 8 + 13, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Events) -> torch.Tensor:
        """Logits [B, 1]; the ids of two parts of the batch are put together first."""
        ids = KeyedJaggedTensor.concat([batch.lists, batch.sparse_features])
        found = self.sequences(ids)
        history, item = found["clicked"], found["c0"].values()
        sample = torch.repeat_interleave(torch.arange(len(item), device=item.device), history.lengths())
        weights = self.attention(torch.cat([history.values(), item[sample]], dim=1)).sigmoid()
        taste = torch.zeros_like(item).index_add(0, sample, weights * history.values())
        pooled = self.bags(ids).values()
        return self.top(torch.cat([taste, item, found["c1"].values(), pooled, batch.dense_features], dim=1))


def dlrm() -> nn.Module:
    return DLRM(bags(8), 13, [16, 8], [16, 1])


def dcn() -> nn.Module:
    return DLRM_DCN(bags(8), 13, [16, 8], [16, 1], dcn_num_layers=2, dcn_low_rank_dim=4)


def deepfm() -> nn.Module:
    return SimpleDeepFMNN(13, bags(8), hidden_layer_size=16, deep_fm_dimension=4)


ZOO: dict[str, Callable[[], nn.Module]] = {
    "dlrm": dlrm,
    "dcn": dcn,
    "deepfm": deepfm,
    "two_tower": TwoTower,
    "din": Din,
}
FROZEN = ("item.tables.embedding_bags.t_c1.weight", "item.tables.embedding_bags.t_c2.weight")
OF_DLRM = "sparse_arch.embedding_bag_collection.embedding_bags"
FROZEN_SEQUENCES = ("sequences.embeddings.shops.weight", "bags.embedding_bags.t_carted.weight")


def frozen(make_whole: Callable[[], nn.Module], *names: str) -> Callable[[], nn.Module]:
    """A model of which these tables are not trained."""

    def made() -> nn.Module:
        model = make_whole()
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return model

    return made


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "turned": Turned,
    "two_tower_frozen": frozen(TwoTower, *FROZEN),
    "din_frozen": frozen(Din, *FROZEN_SEQUENCES),
    "dlrm_part": frozen(dlrm, *(f"{OF_DLRM}.t_{f}.weight" for f in FLAT[1:4])),
    "dlrm_frozen": frozen(dlrm, *(f"{OF_DLRM}.t_{f}.weight" for f in FLAT)),
}
"""Which not every technique is tried with."""
OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "rowwise_adagrad": (
        lambda p: torchrec.optim.RowWiseAdagrad(p, lr=0.05, eps=1e-8),
        lambda p: torch.optim.Adagrad(p, lr=0.05),
    ),
}
"""Of tables and dense part."""
OVERRIDES = {
    "sgd": ("optim=sgd", "optim.tables.lr=0.1", "optim.dense.lr=0.1"),
    "rowwise_adagrad": ("optim.tables.lr=0.05", "optim.dense.lr=0.05"),
}


def make(name: str) -> nn.Module:
    """A model with its first weights, the same at every call."""
    torch.manual_seed(7)
    return (ZOO | OTHERS)[name]()


@dataclass
class Trained:
    """What a loop leaves: every parameter, and each table's optimizer state, float32 [rows, S]."""

    parameters: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    losses: list[float]


def loss_of(model: nn.Module, batch: Events) -> torch.Tensor:
    """As a trainer written by hand calls these models."""
    batch = batch.to(next(model.parameters()).device)
    if isinstance(model, TwoTower):
        return model(batch)[0]
    logits = model(batch) if isinstance(model, Din) else model(batch.dense_features, batch.sparse_features)
    return binary_cross_entropy_with_logits(logits.squeeze(1), batch.labels)


def is_table(name: str) -> bool:
    return ".embedding_bags." in f".{name}" or ".embeddings." in f".{name}"


def by_hand(
    model: nn.Module,
    batches: Iterable[Events],
    optimizer: str,
    before_step: Callable[[int, list[torch.optim.Optimizer]], None] | None = None,
) -> Trained:
    """Train with plain modules of TorchRec, and optimizers of torch and TorchRec.

    ``before_step``: called after each backward pass with the number of the step, from 1, and the optimizers
    of dense part and tables.
    """
    tables = {n: p for n, p in model.named_parameters() if is_table(n) and p.requires_grad}
    dense = [p for n, p in model.named_parameters() if not is_table(n)]
    for_tables, for_dense = OPTIMIZERS[optimizer]
    optimizers = [for_dense(dense), *([for_tables(list(tables.values()))] if tables else [])]
    losses = []
    for number, batch in enumerate(batches, 1):
        for one in optimizers:
            one.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        if before_step is not None:
            before_step(number, optimizers)
        for one in optimizers:
            one.step()
    states = {}
    for name, table in tables.items():
        kept = [v for k, v in optimizers[-1].state[table].items() if "sum" in str(k) or "momentum" in str(k)]
        kept = [v for v in kept if isinstance(v, torch.Tensor)]
        states[name] = kept[0].reshape(len(table), -1) if kept else torch.zeros(len(table), 0)
    return Trained(
        {n: p.detach().clone() for n, p in model.named_parameters()}, copy.deepcopy(states), losses
    )


def furthest(mine: Trained, theirs: Trained) -> float:
    """Largest difference of any parameter or state, relative to the largest value of its tensor."""
    worst = 0.0
    assert mine.parameters.keys() == theirs.parameters.keys()
    for left, right in ((mine.parameters, theirs.parameters), (mine.states, theirs.states)):
        for name, value in right.items():
            if value.numel():
                scale = max(1.0, float(value.abs().max()))
                worst = max(worst, float((left[name].to(value.device) - value).abs().max()) / scale)
    return worst
