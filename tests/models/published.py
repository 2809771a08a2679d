"""recpipe's published models over a small schema, made from their recipes; batches, and plain formulas."""

from __future__ import annotations

from functools import partial
from urllib.parse import unquote

import torch
from torch import nn
from torch.nn import functional as F
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.schema import LabelColumn, Schema
from recpipe.model.config import UserModel
from recpipe.model.make import make_model
from recpipe.plugin.batch import Batch
from recpipe.plugin.tables import SparseFeature
from tests.any_model import runs
from tests.any_model.zoo import OTHERS

DIM, HISTORY = 8, 5
FEATURES = (
    SparseFeature("user", 40),
    SparseFeature("item", 50, table="goods", pooling="mean"),
    SparseFeature("category", 12, dim=4),
    SparseFeature("liked", 50, table="goods", pooling="mean"),
    SparseFeature("tags", 20),
)
"""One id each, but for the lists ``liked`` and ``tags``."""
LISTS = ("liked", "tags", "items", "kinds")
SCHEMA = Schema(("price", "age"), FEATURES)
EVENTS = (
    SparseFeature("user", 40),
    SparseFeature("item", 50, table="goods"),
    SparseFeature("kind", 12),
    SparseFeature("items", 50, table="goods", sequence=HISTORY),
    SparseFeature("kinds", 12, table="kind", sequence=HISTORY),
    SparseFeature("tags", 20, dim=4),
)
"""Of models that compare a history with a target."""
MODELS: dict[str, tuple[str, ...]] = {
    "wide_deep": ("model.hidden=[16,8]", "model.wide=[user,category]"),
    "deepfm": ("model.hidden=[16,8]",),
    "dcnv2": ("model.hidden=[16,8]", "model.layers=2", "model.rank=3"),
    "autoint": ("model.layers=2", "model.width=4", "model.hidden=[8]"),
    "finalmlp": (
        "model.left=[16,8]",
        "model.right=[12]",
        "model.gate=[8]",
        "model.left_gate=[user]",
        "model.right_gate=[item,price]",
    ),
    "din": ("model.hidden=[16,8]", "model.attention=[8]"),
    "bst": ("model.hidden=[16,8]", "model.heads=2", "model.place_dim=4"),
    "tbsm": (
        "model.bottom=[8]",
        "model.top=[16]",
        "model.vector=12",
        "model.weighting=[6]",
        "model.hidden=[8]",
    ),
}
"""Their keys here."""


def schema_of(name: str, labels: int = 1) -> Schema:
    """The columns that the model ``name`` is tried with."""
    sparse = EVENTS if name in ("din", "bst", "tbsm") else SCHEMA.sparse
    return Schema(SCHEMA.dense, sparse, tuple(LabelColumn(f"label_{n}") for n in range(labels)))


def made(name: str, *words: str, schema: Schema | None = None) -> nn.Module:
    """The model of the recipe, its tables with values, the same at every call."""
    config = Recipe.of(compose([f"model={name}", f"model.embedding_dim={DIM}", *MODELS[name], *words])).model
    assert isinstance(config, UserModel)
    torch.manual_seed(7)
    model = make_model(config, schema or schema_of(name), torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            for weight in module.to_empty(device=torch.device("cpu")).parameters():
                nn.init.uniform_(weight, -0.5, 0.5)
    return model


def batches(schema: Schema, count: int, size: int = 32) -> list[Batch]:
    """Made-up samples; sequences are as long as each other, none to ``HISTORY`` ids."""
    drawn = torch.Generator().manual_seed(3)
    labels = max(1, len(schema.labels))
    found = []
    for _ in range(count):
        lengths, ids = [], []
        history = torch.randint(0, HISTORY + 1, (size,), generator=drawn)
        for feature in schema.sparse:
            own = torch.ones(size, dtype=torch.long)
            if feature.sequence is not None:
                own = history
            elif feature.name in LISTS:
                own = torch.randint(0, 4, (size,), generator=drawn)
            lengths.append(own)
            ids.append(torch.randint(0, feature.rows, (int(own.sum()),), generator=drawn))
        names = [feature.name for feature in schema.sparse]
        sparse = KeyedJaggedTensor(names, torch.cat(ids), lengths=torch.cat(lengths))
        dense = torch.randn(size, len(schema.dense), generator=drawn)
        clicks = torch.randint(0, 2, (size, labels), generator=drawn).float()
        found.append(Batch(dense, sparse, clicks[:, 0] if labels == 1 else clicks))
    return found


OTHERS |= {f"model={name}": partial(made, name) for name in MODELS}


def rank(*arguments: object) -> None:
    """A process of ``all_on_two_ranks`` that knows these models."""
    runs._rank(*arguments)  # type: ignore[arg-type]


# -- plain formulas --------------------------------------------------------------------------


EVENT_NAMES = ("item", "kind", "items", "kinds")


class Weights:
    """A model's parameters by name, and what is computed of them without its modules."""

    def __init__(self, model: nn.Module) -> None:
        self.own = model.state_dict()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.own[name]

    def tables(self, collection: str) -> dict[str, torch.Tensor]:
        """The weights of each table of the collection at that path."""
        start = f"{collection}.embedding"
        found = {key: value for key, value in self.own.items() if key.startswith(start)}
        return {unquote(key.split(".")[-2]): value for key, value in found.items()}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b, the latter where there is one."""
        return F.linear(x, self[f"{name}.weight"], self.own.get(f"{name}.bias"))

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Hidden layers with ReLU."""
        number = 0
        while f"{name}._mlp.{number}._linear.weight" in self.own:
            x = self.linear(f"{name}._mlp.{number}._linear", x).relu()
            number += 1
        assert number
        return x

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Each row less its mean, by its standard deviation, scaled."""
        centred = x - x.mean(1, keepdim=True)
        scaled = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
        return scaled * self[f"{name}.weight"] + self[f"{name}.bias"]

    def last_layers(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Hidden layers with ReLU and a linear one."""
        return self.linear(f"{name}.1", self.mlp(f"{name}.0", x))

    def pooled(self, collection: str, batch: Batch, schema: Schema, prefix: str = "") -> list[torch.Tensor]:
        """For each feature, table by table, the sum or mean of its rows, float32 [B, D]."""
        tables, found = self.tables(collection), []
        for name, features in schema.tables.items():
            for feature in features:
                if f"{prefix}{name}" in tables:
                    rows = tables[f"{prefix}{name}"]
                    found.append(pooled(rows, batch.sparse[feature.name], feature.pooling == "mean"))
        return found

    def history(self, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each sample its events, float32 [n, 2 * DIM], the latest last, and its target [2 * DIM]."""
        goods, kinds = (self.tables("histories.embedding_collection")[name] for name in ("goods", "kind"))
        parts = {n: batch.sparse[n].values().split(batch.sparse[n].lengths().tolist()) for n in EVENT_NAMES}
        return [
            (
                torch.cat([goods[parts["items"][i]], kinds[parts["kinds"][i]]], dim=1),
                torch.cat([goods[parts["item"][i]], kinds[parts["kind"][i]]], dim=1)[0],
            )
            for i in range(batch.size)
        ]

    def context(self, batch: Batch, schema: Schema) -> torch.Tensor:
        """Dense features and pooled rows of the tables of no history."""
        return torch.cat(
            [batch.dense, *self.pooled("context.embedding_bag_collection", batch, schema)], dim=1
        )

    def fields(self, name: str, batch: Batch, schema: Schema) -> torch.Tensor:
        """A vector for each feature, projected where it has another width; and one for each number."""
        vectors = self.pooled(f"{name}.sparse_arch.embedding_bag_collection", batch, schema)
        for place, vector in enumerate(vectors):
            if vector.shape[1] != DIM:  # of the one table that has
                vectors[place] = self.linear(f"{name}.sparse_arch.projections.category", vector)
        numbers = [batch.dense[:, i, None] * v for i, v in enumerate(self[f"{name}.numbers"])]
        return torch.stack([*vectors, *numbers], dim=1)

    def linear_part(
        self, name: str, batch: Batch, schema: Schema, only: tuple[str, ...] = ()
    ) -> torch.Tensor:
        """A weight of each id and of each number, for each output."""
        collection = f"{name}.embedding_bag_collection"
        outputs = max(1, len(schema.labels))
        found = self.pooled(collection, batch, schema, "wide_")
        assert len(found) == (len(only) or len(schema.sparse))
        return sum(rows[:, :outputs] for rows in found) + self.linear(f"{name}.dense", batch.dense)


def pooled(rows: torch.Tensor, ids: JaggedTensor, mean: bool) -> torch.Tensor:
    """The sum, or mean, of each sample's rows."""
    parts = ids.values().split(ids.lengths().tolist())
    return torch.stack([rows[part].sum(0) / (max(1, len(part)) if mean else 1) for part in parts])


def wide_deep(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    x = torch.cat([batch.dense, *w.pooled("embedding_bag_collection", batch, schema)], dim=1)
    return w.last_layers("deep", x) + w.linear_part("wide", batch, schema, ("user", "category"))


def deepfm(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    fields = w.fields("fields", batch, schema)
    pairs = torch.zeros(batch.size, 1)
    for i in range(fields.shape[1]):
        for j in range(i):
            pairs += (fields[:, i] * fields[:, j]).sum(1, keepdim=True)
    return w.linear_part("linear", batch, schema) + pairs + w.last_layers("deep", fields.flatten(1))


def dcnv2(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    x0 = torch.cat([batch.dense, *w.pooled("embedding_bag_collection", batch, schema)], dim=1)
    x = x0
    for layer in range(2):
        low = x @ w[f"crosses.V_kernels.{layer}"].T
        x = x0 * (low @ w[f"crosses.W_kernels.{layer}"].T + w[f"crosses.bias.{layer}"]) + x
    return w.linear("top", torch.cat([x, w.mlp("deep", x0)], dim=1))


def dcnv2_mixture(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    """Stacked, of two experts."""
    x0 = torch.cat([batch.dense, *w.pooled("embedding_bag_collection", batch, schema)], dim=1)
    x = x0
    for layer in range(2):
        gates = torch.cat([w.linear(f"crosses.gates.{k}", x) for k in range(2)], dim=1).softmax(1)
        mixed = torch.zeros_like(x)
        for k in range(2):
            u, v, c = (w[f"crosses.{m}_kernels.{layer}"][k] for m in "UVC")
            low = (torch.tanh(x @ v.T) @ c.T).tanh()
            mixed += gates[:, k, None] * (x0 * (low @ u.T + w[f"crosses.bias.{layer}"][:, 0]))
        x = mixed + x
    return w.linear("top", w.mlp("deep", x))


def dcnv2_whole(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    """Of whole matrices."""
    x0 = torch.cat([batch.dense, *w.pooled("embedding_bag_collection", batch, schema)], dim=1)
    x = x0
    for layer in range(2):
        x = x0 * (x @ w[f"crosses.kernels.{layer}"].T + w[f"crosses.bias.{layer}"][:, 0]) + x
    return w.linear("top", torch.cat([x, w.mlp("deep", x0)], dim=1))


def autoint(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    fields = first = w.fields("fields", batch, schema)
    for layer in range(2):
        projections = w[f"interacting.{layer}.attention.project.weight"]
        q, k, v = (part.view(2, 4, -1) for part in projections.chunk(3))
        heads = []
        for head in range(2):
            scores = (fields @ q[head].T) @ (fields @ k[head].T).transpose(1, 2)
            heads.append(scores.softmax(2) @ (fields @ v[head].T))
        residual = w.linear(f"interacting.{layer}.residual", fields)
        fields = (torch.cat(heads, dim=2) + residual).relu()
    return w.linear("top", fields.flatten(1)) + w.last_layers("deep", first.flatten(1))


def finalmlp(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    fields = w.fields("fields", batch, schema)
    order = [f.name for own in schema.tables.values() for f in own] + list(schema.dense)
    streams = []
    for number, names in enumerate((("user",), ("item", "price"))):
        seen = torch.cat([fields[:, order.index(name)] for name in names], dim=1)
        gate = 2 * w.last_layers(f"gates.{number}.mlp", seen).sigmoid()
        streams.append(w.mlp(f"mlps.{number}", gate * fields.flatten(1)))
    x, y = streams
    found = w.linear("fusion.left", x) + w.linear("fusion.right", y)
    for head, products in enumerate(w["fusion.products"]):
        a, b = x.chunk(2, dim=1)[head], y.chunk(2, dim=1)[head]
        for output in range(found.shape[1]):
            found[:, output] += ((a @ products[:, :, output]) * b).sum(1)
    return found


def din(w: Weights, batch: Batch, schema: Schema, softmax: bool = False) -> torch.Tensor:
    targets, interests = [], []
    for events, target in w.history(batch):
        near = []
        for event in events:
            x = torch.cat([event, target, event - target, event * target])
            x = w.linear("interests.0.nearness.0._mlp.0._linear", x)
            slope = w["interests.0.nearness.0._mlp.0._activation_fn.weight"]
            near.append(w.linear("interests.0.nearness.1", torch.where(x > 0, x, slope * x)))
        weights = torch.cat(near) if near else torch.zeros(0)
        interests.append((weights.softmax(0) if softmax else weights) @ events)
        targets.append(target)
    known = [w.context(batch, schema), torch.stack(targets), torch.stack(interests)]
    return w.last_layers("top", torch.cat(known, dim=1))


def din_softmax(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    return din(w, batch, schema, softmax=True)


def bst(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    name, seen = "behaviors.0.blocks.0", []
    dim, width = 2 * DIM + 4, (2 * DIM + 4) // 2
    for events, target in w.history(batch):
        count = len(events) + 1
        x = torch.cat([torch.cat([events, target[None]]), w["behaviors.0.places"][-count:]], dim=1)
        q, k, v = (x @ part.T for part in w[f"{name}.attention.project.weight"].chunk(3))
        heads = [
            (a @ b.T / width**0.5).softmax(1) @ c
            for a, b, c in zip(q.chunk(2, 1), k.chunk(2, 1), v.chunk(2, 1), strict=True)
        ]
        x = w.norm(f"{name}.norms.0", x + w.linear(f"{name}.joined", torch.cat(heads, dim=1)))
        fed = w.linear(f"{name}.second", F.leaky_relu(w.linear(f"{name}.first", x)))
        x = w.norm(f"{name}.norms.1", x + fed)
        seen.append(torch.cat([torch.zeros(HISTORY + 1 - count, dim), x]).flatten())
    return w.last_layers("top", torch.cat([w.context(batch, schema), torch.stack(seen)], dim=1))


def tbsm(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    dense = w.mlp("dense_arch.model", batch.dense)
    user, tags = w.pooled("sparse_arch.embedding_bag_collection", batch, schema)
    tags = w.linear("sparse_arch.projections.tags", tags)

    def vector(sample: int, event: torch.Tensor) -> torch.Tensor:
        fields = [dense[sample], *event.chunk(2), user[sample], tags[sample]]
        pairs = [fields[i] @ fields[j] for i in range(5) for j in range(i + 1, 5)]
        made = w.last_layers("series.0.top", torch.cat([dense[sample], torch.stack(pairs)]))
        return made / made.norm().clamp(min=1e-12)

    inner, found = w["series.0.inner"], []
    for sample, (events, target) in enumerate(w.history(batch)):
        last = vector(sample, target)
        vectors = [torch.zeros_like(last)] * (HISTORY - len(events))
        vectors += [vector(sample, event) for event in events]
        near = torch.stack([(inner @ each) @ (inner @ last) for each in vectors])
        weights = w.last_layers("series.0.weighting", near).sigmoid()
        found.append(torch.cat([weights @ torch.stack(vectors), last]))
    return w.last_layers("top", torch.stack(found))
