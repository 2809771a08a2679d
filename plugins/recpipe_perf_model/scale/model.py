"""A model on paper: its tables, its dense part and what is published of its way to quality, from a yaml file
or from the recipe's own model.

Files for published models lie in ``models/``; their form is in docs/guide/scale.md. Ids follow Zipf's law:
row i is looked up in proportion to i^-skew; ``skew`` 0 is uniform.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, log, pow
from pathlib import Path

import numpy as np
from torch import nn

from recpipe.data.dataset import Dataset
from recpipe.errors import UserError, shown
from recpipe.model.config import ModelConfig, UserModel
from recpipe.tables.inputs import Inputs
from recpipe_perf_model.scale.reading import Reader

MODELS = Path(__file__).parent / "models"
STATES = {
    "sgd": 0,
    "rowwise_adagrad": 0,
    "adagrad": 1,
    "partial_rowwise_adam": 1,
    "partial_rowwise_lamb": 1,
    "adam": 2,
    "lamb": 2,
    "ftrl": 2,
}
"""State values by optimizer for each value of a row; rowwise_adagrad has one for a whole row."""
MOST_TABLES = 20_000
FLOAT, ID = 4, 8
"""Bytes of a float32 and of an id."""


@dataclass(frozen=True)
class Table:
    """A table: ``pooling`` ids of a sample are looked up and their rows added, on average."""

    name: str
    rows: int
    dim: int
    pooling: float = 1.0
    skew: float = 0.0
    """Exponent of Zipf's law of its ids; 0: uniform."""
    pooled: bool = True
    """Whether the rows of a sample are added up, or each is handed out."""

    @property
    def vectors(self) -> float:
        """Vectors that a sample gets from it."""
        return 1.0 if self.pooled else self.pooling


@dataclass(frozen=True)
class Product:
    """A layer of the dense part: ``inputs`` x ``outputs`` weights, for each sample once."""

    inputs: int
    outputs: int
    activated: bool = True


@dataclass(frozen=True)
class Dense:
    """The dense part, in the order of its forward pass."""

    inputs: int
    """Dense features of a sample."""
    bottom: tuple[Product, ...]
    """Needs no rows, so that it runs while they are on their way."""
    top: tuple[Product, ...]
    """Products after the rows have come, those of the interaction among them."""
    interaction_flops: float = 0.0
    """Operations of a sample that have no weights: pairs of vectors."""
    interaction_values: float = 0.0
    """Values that the interaction reads and writes for a sample, products aside."""
    operators: int = 0
    """Eager operators that a cross network begins, forward and backward: 17 for each of its products, counted
    as ``predict.BASE_OPERATORS`` are."""

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return sum((each.inputs + 1) * each.outputs for each in (*self.bottom, *self.top))


@dataclass(frozen=True)
class Target:
    """What is published of the samples that the model needs to reach a quality."""

    quality: str
    samples: tuple[tuple[float, float], ...]
    """Batch size and samples, ascending."""
    evaluated: float
    """Samples of an evaluation."""
    evaluations: float
    """Trained samples between two evaluations."""

    def needed(self, batch: float) -> float | None:
        """Samples to the quality, between the published batch sizes; None outside of them."""
        sizes, samples = zip(*self.samples, strict=True)
        return float(np.interp(batch, sizes, samples)) if sizes[0] <= batch <= sizes[-1] else None


@dataclass(frozen=True)
class PaperModel:
    """A model as far as its speed on paper depends on it."""

    name: str
    title: str
    tables: tuple[Table, ...]
    dense: Dense
    optimizer: str
    """Of the tables."""
    batch_size: int
    """Of all GPUs together, if the recipe says none."""
    row_bytes: int
    """Of a value of a row."""
    target: Target | None = None
    notes: tuple[str, ...] = ()
    """What is said of the file's figures, in sentences."""
    averaged: bool = False
    """Whether a row has its average, too, as ``trainer.ema`` and ``trainer.swa`` make it: float32 [D + 1]."""

    def record_bytes(self, table: Table) -> float:
        """A row's values, its optimizer's state and its average's."""
        whole = (self.optimizer == "rowwise_adagrad") + self.averaged
        return table.dim * (self.row_bytes + FLOAT * (STATES[self.optimizer] + self.averaged)) + FLOAT * whole

    @property
    def bytes(self) -> float:
        """Of all rows, with state."""
        return sum(table.rows * self.record_bytes(table) for table in self.tables)

    @property
    def parameters(self) -> int:
        """Of tables and dense part."""
        return sum(table.rows * table.dim for table in self.tables) + self.dense.parameters


def paper_model(name: str) -> PaperModel:
    """A model that is shipped, by its name, or one from a yaml file; ``UserError`` in one line names the file
    and the key."""
    reader = Reader.named("scale.model", name, MODELS, also="; null: the recipe's own model")
    reader.only({"title", "sources", "notes", "tables", "dense", "optimizer", "batch_size", "rows", "target"})
    optimizer = reader.text("optimizer", "rowwise_adagrad")
    if optimizer not in STATES:
        raise reader.wrong("optimizer", f"must be one of {', '.join(STATES)}, not {shown(optimizer)}")
    tables: list[Table] = []
    for each in reader.several("tables"):
        tables += _tables(each, len(tables))
    if len({table.name for table in tables}) < len(tables):
        raise reader.wrong("tables", "has two tables of one name")
    rows = reader.text("rows", "fp32")
    if rows not in ("fp32", "fp16"):
        raise reader.wrong("rows", f"must be fp32 or fp16, not {shown(rows)}")
    return PaperModel(
        Path(reader.where).stem,
        reader.text("title"),
        tuple(tables),
        _dense(reader.part("dense"), [table.dim for table in tables]),
        optimizer,
        reader.whole("batch_size"),
        4 if rows == "fp32" else 2,
        _target(reader.part("target")) if "target" in reader.values else None,
        tuple(str(note) for note in reader.values.get("notes") or []),
    )


def _tables(reader: Reader, before: int) -> list[Table]:
    reader.only({"name", "rows", "dim", "pooling", "skew", "count", "pooled"})
    count = reader.whole("count", 1)
    if before + count > MOST_TABLES:
        raise reader.wrong("count", f"makes more than {MOST_TABLES:,} tables")
    name = reader.text("name", f"table{before}")
    shape = reader.whole("rows"), reader.whole("dim"), reader.number("pooling", 1.0), reader.number("skew", 0)
    pooled = reader.get("pooled", bool, "be true or false, not", True)
    names = [name] if count == 1 else [f"{name}.{number}" for number in range(count)]
    return [Table(each, *shape, pooled) for each in names]


def _dense(reader: Reader, dims: list[int]) -> Dense:
    """``inputs``, ``bottom``, ``interaction`` (dot, cat or cross with layers and rank) and ``top``; or
    ``flops`` of a sample's forward pass, and the ``width`` of square layers that have them."""
    reader.only({"inputs", "bottom", "top", "interaction", "layers", "rank", "flops", "width"})
    inputs = reader.whole("inputs", 0, 0)
    if "flops" in reader.values:
        width = reader.whole("width")
        layers = max(1, ceil(reader.number("flops") / (2 * width * width)))
        return Dense(inputs, (), (Product(width, width),) * layers)
    bottom = [int(n) for n in reader.numbers("bottom", [])]
    top = [int(n) for n in reader.numbers("top", [])]
    kind = reader.text("interaction", "dot")
    if kind not in ("dot", "cat", "cross"):
        raise reader.wrong("interaction", f"must be dot, cat or cross, not {shown(kind)}")
    cross = reader.whole("layers", 3), reader.whole("rank", 512)
    return dense_of(dims, inputs, bottom, kind, cross, top)


def _target(reader: Reader) -> Target:
    reader.only({"quality", "epoch", "epochs", "evaluated", "evaluations"})
    epoch = reader.number("epoch", least=1)
    found = tuple((size, share * epoch) for size, share in reader.pairs("epochs"))
    if any(a[0] >= b[0] for a, b in pairwise(found)):
        raise reader.wrong("epochs", "must be [batch size, epochs] with ascending batch sizes")
    every = reader.number("evaluations", 1.0) * epoch
    return Target(reader.text("quality"), found, reader.number("evaluated", 0), every)


def dense_of(
    dims: list[int], inputs: int, bottom: list[int], kind: str, cross: tuple[int, int], top: list[int]
) -> Dense:
    """The dense part of a DLRM: ``bottom`` over the dense features, ``kind`` of interaction between its
    result and the tables' vectors, ``top``. ``cross``: layers and rank of a low-rank cross network."""
    last = bottom[-1] if bottom else 0
    vectors, joined = len(dims) + bool(last), sum(dims) + last
    below = _chain([inputs, *bottom])
    if kind == "dot":
        pairs = vectors * (vectors - 1) // 2
        flops, values = 2.0 * vectors * vectors * max(dims), joined + vectors * vectors + 2 * (pairs + last)
        return Dense(inputs, below, _chain([pairs + last, *top], True), flops, values)
    if kind == "cat":
        return Dense(inputs, below, _chain([joined, *top], True), 0.0, 2.0 * joined)
    layers, rank = cross
    crossing = (Product(joined, rank, False), Product(rank, joined, False)) * layers
    # x0 * y + x: three vectors are read, one is written.
    moved, operators = layers * 4.0 * joined, 17 * 2 * layers
    return Dense(inputs, below, (*crossing, *_chain([joined, *top], True)), 0.0, moved, operators)


def _chain(sizes: list[int], ends: bool = False) -> tuple[Product, ...]:
    """``ends``: the last layer has no activation."""
    steps = list(pairwise(sizes)) if len(sizes) > 1 and sizes[0] else []
    return tuple(Product(i, o, not (ends and n == len(steps) - 1)) for n, (i, o) in enumerate(steps))


BATCHES = 8
"""Batches of the recipe's own data whose lookups are counted."""
STEEPEST = 2.0
"""The largest exponent of Zipf's law that is tried."""


def own_model(
    config: ModelConfig | UserModel, module: nn.Module, inputs: Inputs, dataset: Dataset, batch_size: int
) -> PaperModel:
    """What ``task=scale`` needs of the recipe's model. Poolings, and how skewed ids are, come from the first
    ``BATCHES`` batches; of a user's model its linear layers count, once for each sample."""
    optimizers = {group.tables.optimizer.name for group in inputs.tables.groups}
    (optimizer, *others) = sorted(optimizers, key=lambda name: STATES.get(name, 1))[::-1]
    tables = _looked_up(inputs, dataset, batch_size)
    if not any(table.pooling for table in tables):
        raise UserError(f"the first {BATCHES} batches look nothing up; nothing is known of the tables' work")
    notes = [f"poolings and skews are those of the first {BATCHES} batches of {batch_size:,} samples"]
    if others:
        notes.append(f"all tables are counted with the state of {optimizer}")
    if isinstance(config, ModelConfig):
        features = len(dataset.known_schema().dense)
        kind = "dot" if config.name == "dlrm" else "cross"
        bottom = [*config.bottom, config.embedding_dim] if features else []
        cross = config.cross_layers, config.cross_rank
        dense = dense_of([t.dim for t in tables], features, bottom, kind, cross, [*config.top, 1])
    else:
        layers = [each for each in module.modules() if isinstance(each, nn.Linear)]
        products = tuple(Product(each.in_features, each.out_features) for each in layers)
        dense = Dense(layers[0].in_features if layers else 0, (), products)
        notes.append(
            f"of the model's own code its {len(layers)} linear layers are counted, once for each sample, and "
            "nothing else"
        )
    name = config.name if isinstance(config, ModelConfig) else type(module).__name__
    title = f"the recipe's own model, {name}"
    averaged = any(group.tables.optimizer.average is not None for group in inputs.tables.groups)
    return PaperModel(name, title, tables, dense, optimizer, batch_size, 4, None, tuple(notes), averaged)


def _looked_up(inputs: Inputs, dataset: Dataset, size: int) -> tuple[Table, ...]:
    """The recipe's tables with the poolings and skews of the first ``BATCHES`` batches."""
    groups = inputs.tables.groups
    # For each table how many batches, samples, lookups and distinct rows were counted.
    counted = {name: np.zeros(4) for group in groups for name in group.tables.layout.tables}
    for _, batch in zip(range(BATCHES), dataset.batches("train", size), strict=False):
        for number, group in enumerate(groups):
            bags, own = inputs.bags(batch, number), group.tables
            ends = bags.offsets[np.arange(len(own.features) + 1) * bags.batch_size]
            for at, name in enumerate(own.layout.tables):
                features = np.flatnonzero(own.table_of == at)
                found = [bags.indices[ends[feature] : ends[feature + 1]] for feature in features]
                ids = np.concatenate(found) if found else np.empty(0, np.int64)
                counted[name] += 1, bags.batch_size, len(ids), len(np.unique(ids))
    made = []
    for group in groups:
        layout = group.tables.layout
        for name, rows in zip(layout.tables, layout.rows, strict=True):
            batches, samples, lookups, different = counted[name].tolist()
            skew = skew_of(rows, lookups / max(1, batches), different / max(1, batches))
            pooling = lookups / max(1, samples)
            made.append(Table(name, rows, group.tables.dim, pooling, skew, group.tables.pooled))
    return tuple(made)


def skew_of(rows: float, lookups: float, different: float) -> float:
    """The exponent of Zipf's law under which so many lookups have so many different rows; 0 if uniform ids
    had no more."""
    low, high = 0.0, STEEPEST
    if lookups <= 1 or different >= distinct(rows, 0.0, lookups):
        return 0.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if distinct(rows, middle, lookups) > different else (low, middle)
    return round(low, 3)


EXACT = 1024
"""Rows that are summed one by one; those after them in steps of their logarithm."""


def weight(rows: float, skew: float) -> float:
    """The sum of i^-skew for i up to ``rows``, beyond ``EXACT`` by Euler's and Maclaurin's formula."""
    few = np.arange(1, min(rows, EXACT) + 1, dtype=np.float64)
    found = float((few**-skew).sum())
    if rows <= EXACT:
        return found
    found += 0.5 * (pow(rows, -skew) - pow(EXACT, -skew))
    if abs(skew - 1) < 1e-9:
        return found + log(rows / EXACT)
    return found + (pow(rows, 1 - skew) - pow(EXACT, 1 - skew)) / (1 - skew)


def covered(rows: float, skew: float, share: float) -> float:
    """The share of lookups that the most popular ``share`` of the rows get."""
    kept = share * rows
    return 1.0 if share >= 1 else (weight(kept, skew) if kept >= 1 else kept) / weight(rows, skew)


@lru_cache(maxsize=65536)
def distinct(rows: float, skew: float, lookups: float) -> float:
    """How many different rows ``lookups`` lookups have, expected; for up to 10^12 rows and more."""
    if lookups <= 1 or rows <= 1:
        return min(rows, lookups)
    whole = weight(rows, skew)
    few = np.arange(1, min(rows, EXACT) + 1, dtype=np.float64)
    found = float(-np.expm1(-lookups * few**-skew / whole).sum())
    if rows > EXACT:
        edges = np.geomspace(EXACT, rows, 601)
        middle = np.sqrt(edges[1:] * edges[:-1])
        found += float((np.diff(edges) * -np.expm1(-lookups * middle**-skew / whole)).sum())
    return min(found, rows, lookups)
