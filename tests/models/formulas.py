"""The formulas of published models' papers, of plain tensors, each sample's history alone."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from math import log
from urllib.parse import unquote

import torch
from torch import nn
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import JaggedTensor

from recpipe.data.schema import Schema
from recpipe.plugin.batch import Batch
from tests.models.published import DIM, HISTORY

BUCKETS = 40
"""Of times between events."""
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

    def norm(self, name: str, x: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
        """Each row less its mean, by its standard deviation, scaled."""
        centred = x - x.mean(1, keepdim=True)
        scaled = centred / (centred.square().mean(1, keepdim=True) + eps).sqrt()
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


def wide(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    """Dense features and pooled rows, side by side."""
    return torch.cat([batch.dense, *w.pooled("embedding_bag_collection", batch, schema)], dim=1)


def masknet(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    """Two blocks, one after the other."""
    seen, x = masknet_inputs(w, batch, schema)
    for number in range(2):
        x = masked(w, f"blocks.{number}", seen, x)
    return w.linear("top", x)


def masknet_parallel(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    """Two blocks side by side."""
    seen, x = masknet_inputs(w, batch, schema)
    return w.last_layers("top", torch.cat([masked(w, f"blocks.{n}", seen, x) for n in range(2)], dim=1))


def masknet_inputs(w: Weights, batch: Batch, schema: Schema) -> tuple[torch.Tensor, torch.Tensor]:
    """All values of the fields, and those of normalized ones."""
    fields = w.fields("fields", batch, schema)
    centred = fields - fields.mean(2, keepdim=True)
    normed = centred / (centred.square().mean(2, keepdim=True) + 1e-5).sqrt()
    return fields.flatten(1), (normed * w["norm.scale"] + w["norm.shift"]).flatten(1)


def masked(w: Weights, name: str, seen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A mask block."""
    mask = w.last_layers(f"{name}.mask", seen)
    return w.norm(f"{name}.norm", w.linear(f"{name}.masked", mask * x)).relu()


def shared_bottom(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    shared = w.mlp("bottom", wide(w, batch, schema))
    logits = [w.last_layers(f"towers.{label}", shared) for label in range(max(1, len(schema.labels)))]
    return torch.cat(logits, dim=1)


def mmoe(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    x, logits = wide(w, batch, schema), []
    experts = [w.mlp(f"experts.mlps.{number}", x) for number in range(3)]
    for label in range(max(1, len(schema.labels))):
        gate = w.linear(f"gates.{label}.weigh", x).softmax(1)
        mixed = sum(gate[:, number : number + 1] * own for number, own in enumerate(experts))
        logits.append(w.last_layers(f"towers.{label}", mixed))
    return torch.cat(logits, dim=1)


def ple(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    """Two layers; of each label two experts, of all one."""
    labels = max(1, len(schema.labels))
    streams = [wide(w, batch, schema)] * (labels + 1)
    for layer in range(2):
        made = [
            [w.mlp(f"layers.{layer}.experts.{group}.mlps.{n}", streams[group]) for n in range(count)]
            for group, count in enumerate([2] * labels + [1])
        ]
        found = []
        for label in range(labels):
            gate = w.linear(f"layers.{layer}.gates.{label}.weigh", streams[label]).softmax(1)
            seen = [*made[label], *made[-1]]
            found.append(sum(gate[:, n : n + 1] * own for n, own in enumerate(seen)))
        if layer == 0:
            gate = w.linear("layers.0.shared_gate.weigh", streams[-1]).softmax(1)
            every = [own for group in made for own in group]
            found.append(sum(gate[:, n : n + 1] * own for n, own in enumerate(every)))
        streams = found
    return torch.cat([w.last_layers(f"towers.{n}", own) for n, own in enumerate(streams)], dim=1)


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


def wukong(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    x = w.fields("fields", batch, schema)
    for layer in range(2):
        name, inputs = f"layers.{layer}", x.shape[1]
        found = []
        for sample in x:
            products = torch.stack([torch.stack([a @ b for b in sample]) for a in sample])  # all pairs
            small = (products @ w[f"{name}.products.compress.weight"].T).flatten()
            made = w.last_layers(f"{name}.products.mlp", w.norm(f"{name}.products.norm", small[None]))
            mixed = w[f"{name}.mixtures.mix.weight"] @ sample
            kept = sample if inputs == 5 else w[f"{name}.residual.mix.weight"] @ sample
            found.append(w.norm(f"{name}.norm", torch.cat([made.view(3, DIM), mixed]) + kept))
        x = torch.stack(found)
    return w.last_layers("top", x.flatten(1))


def xdeepfm(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    fields = w.fields("fields", batch, schema)
    count, last, sums = fields.shape[1], fields, []
    for layer, width in enumerate((4, 3)):
        weights = w[f"interaction.weights.{layer}"]
        made = torch.zeros(batch.size, width, DIM)
        for h in range(width):
            for i in range(last.shape[1]):
                for j in range(count):
                    made[:, h] += weights[h, i, j] * last[:, i] * fields[:, j]
        last = made
        sums.append(made.sum(2))
    found = w.linear_part("linear", batch, schema) + w.last_layers("deep", fields.flatten(1))
    return found + w.linear("top", torch.cat(sums, dim=1))


def sasrec(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    logits = []
    for state, target in zip(*sasrec_vectors(w, batch), strict=True):
        queries = state[None]
        if schema.labels[1:]:
            queries = w.linear("queries", state).view(len(schema.labels), -1)
        logits.append(queries @ target)
    return torch.stack(logits)


def sasrec_vectors(w: Weights, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """States after the latest events, and targets, [B, 2 * DIM]."""
    name, found, targets = "transformers.0", [], []
    for events, target in w.history(batch):
        x = events + w[f"{name}.places"][HISTORY - len(events) :]
        x = x - x.mean(1, keepdim=True)
        x = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt()
        for block in (f"{name}.blocks.{n}" for n in range(2)):
            own = w.norm(f"{block}.norms.0", x)
            q, k, v = (own @ part.T for part in w[f"{block}.attention.project.weight"].chunk(3))
            heads = []
            for a, b, c in zip(q.chunk(2, 1), k.chunk(2, 1), v.chunk(2, 1), strict=True):
                rows = [(a[i] @ b[: i + 1].T / DIM**0.5).softmax(0) @ c[: i + 1] for i in range(len(x))]
                heads.append(torch.stack(rows) if rows else a)
            x = x + torch.cat(heads, dim=1)
            hidden = w.linear(f"{block}.feed.0", w.norm(f"{block}.norms.1", x)).relu()
            x = x + w.linear(f"{block}.feed.2", hidden)
        found.append(w.norm(f"{name}.norm", x)[-1] if len(x) else torch.zeros(2 * DIM))
        targets.append(target)
    return torch.stack(found), torch.stack(targets)


def dien(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    targets, interests = [], []
    for events, target in w.history(batch):
        states = dien_states(w, events)
        scores = [state @ w["evolutions.0.nearness.weight"] @ target for state in states]
        interest = torch.zeros(2 * DIM)
        for state, near in zip(states, torch.stack(scores).softmax(0) if scores else (), strict=True):
            interest = gru_step(
                interest,
                w.linear("evolutions.0.evolving.of_inputs", state),
                w.linear("evolutions.0.evolving.of_state", interest),
                near,
            )
        targets.append(target)
        interests.append(interest)
    known = [w.context(batch, schema), torch.stack(targets), torch.stack(interests)]
    return w.last_layers("top", torch.cat(known, dim=1))


def dien_states(w: Weights, events: torch.Tensor) -> list[torch.Tensor]:
    """Of the GRU after each event."""
    name, state, found = "evolutions.0.extractor", torch.zeros(2 * DIM), []
    for event in events:
        inputs = w[f"{name}.weight_ih_l0"] @ event + w[f"{name}.bias_ih_l0"]
        own = w[f"{name}.weight_hh_l0"] @ state + w[f"{name}.bias_hh_l0"]
        r, u, n = inputs.chunk(3)  # torch's gates are reset, 1 - update, new
        a, b, c = own.chunk(3)
        state = gru_step(state, torch.cat([r, -u, n]), torch.cat([a, -b, c]), torch.ones(()))
        found.append(state)
    return found


def gru_step(
    state: torch.Tensor, inputs: torch.Tensor, own: torch.Tensor, near: torch.Tensor
) -> torch.Tensor:
    """The next state; the update gate lets so much of the candidate in."""
    r, u, n = inputs.chunk(3)
    a, b, c = own.chunk(3)
    update = near * (u + b).sigmoid()
    return (1 - update) * state + update * (n + (r + a).sigmoid() * c).tanh()


def dien_loss(w: Weights, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """Of one label, with what tells the next events from those of the sample half a batch away."""
    loss, samples = F.binary_cross_entropy_with_logits(logits.squeeze(1), batch.labels), w.history(batch)
    share = 1 / (batch.size * (HISTORY - 1))
    for n, (events, _) in enumerate(samples):
        others, states = samples[n - batch.size // 2][0], dien_states(w, events)
        for t in range(1, len(events)):
            loss = loss - share * (states[t - 1] @ events[t]).sigmoid().log()
            if t < len(others) and not torch.equal(events[t], others[t]):
                loss = loss - share * (1 - (states[t - 1] @ others[t]).sigmoid()).log()
    return loss


def hstu(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    states = [
        hstu_states(w, torch.cat([events, target[None]]), ranks=True)[-1]
        for events, target in w.history(batch)
    ]
    return w.last_layers("top", torch.cat([w.context(batch, schema), torch.stack(states)], dim=1))


def hstu_with_ages(w: Weights, batch: Batch, schema: Schema) -> torch.Tensor:
    """Dense inputs are the price, the ages of events, and an age."""
    others, states = copy(batch), []
    others.dense = batch.dense[:, [0, HISTORY + 1]]
    for (events, target), ages in zip(
        w.history(batch), batch.dense[:, 1 : HISTORY + 1].tolist(), strict=True
    ):
        own = [*ages[HISTORY - len(events) :], 0.0]
        states.append(hstu_states(w, torch.cat([events, target[None]]), HISTORY + 1, own, ranks=True)[-1])
    return w.last_layers("top", torch.cat([w.context(others, schema), torch.stack(states)], dim=1))


def hstu_states(
    w: Weights,
    events: torch.Tensor,
    most: int = HISTORY + 1,
    ages: Sequence[float] = (),
    ranks: bool = False,
) -> torch.Tensor:
    """Of each token, of which there are up to ``most``; where a model ``ranks``, they enter normalized."""
    name = "transducers.0"
    x = w.linear(f"{name}.enter", events)
    if ranks:
        x = w.norm(f"{name}.entered", x)
    for unit in (f"{name}.units.{n}" for n in range(2)):
        made = F.silu(w.linear(f"{unit}.project", w.norm(f"{unit}.norm", x, 1e-6)))
        u, v, q, k = made.chunk(4, dim=1)
        rows = []
        for i in range(len(x)):
            heads = [torch.zeros(6), torch.zeros(6)]
            for j in range(i + 1):
                bias = w[f"{unit}.places"][i - j]
                if ages:
                    passed = ages[j] - (*ages, 0.0)[i + 1]
                    bucket = min(BUCKETS - 1, int(log(max(1, passed)) / 0.301))
                    bias = bias + w[f"{unit}.times"][bucket]
                for head in range(2):
                    own = slice(6 * head, 6 * head + 6)
                    weight = F.silu(q[i, own] @ k[j, own] + bias) / most
                    heads[head] = heads[head] + weight * v[j, own]
            rows.append(torch.cat(heads))
        found = w.norm(f"{unit}.found_norm", torch.stack(rows), 1e-6)
        x = x + w.linear(f"{unit}.joined", found * u)
    return w.norm(f"{name}.norm", x)
