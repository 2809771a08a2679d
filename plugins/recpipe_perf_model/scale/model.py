"""A model on paper: its tables, its dense part and what is published of its way to quality, from a yaml file.

Files for published models lie in ``models/``; their form is in docs/guide/scale.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path

import numpy as np

from recpipe.errors import shown
from recpipe_perf_model.scale.reading import Reader

MODELS = Path(__file__).parent / "models"
STATES = {"sgd": 0, "rowwise_adagrad": 0, "adagrad": 1, "adam": 2}
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
    as ``work.BASE_OPERATORS`` are."""

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return sum((each.inputs + 1) * each.outputs for each in (*self.bottom, *self.top))

    @property
    def flops(self) -> float:
        """Operations of a sample's forward pass."""
        return self.interaction_flops + 2.0 * sum(p.inputs * p.outputs for p in (*self.bottom, *self.top))


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

    def record_bytes(self, table: Table, columns: int | None = None) -> float:
        """A row's values and its optimizer's state."""
        width = table.dim if columns is None else columns
        whole = FLOAT if self.optimizer == "rowwise_adagrad" else 0
        return width * (self.row_bytes + FLOAT * STATES[self.optimizer]) + whole

    @property
    def bytes(self) -> float:
        """Of all rows, with state."""
        return sum(table.rows * self.record_bytes(table) for table in self.tables)

    @property
    def parameters(self) -> int:
        """Of tables and dense part."""
        return sum(table.rows * table.dim for table in self.tables) + self.dense.parameters


def paper_model(name: str) -> PaperModel:
    """A model that is shipped, by its name, or one from a yaml file."""
    reader = Reader.named("scale.model", name, MODELS, also="; null: the recipe's own model")
    return parsed(reader, Path(reader.where).stem)


def parsed(reader: Reader, name: str) -> PaperModel:
    """The model that a file describes; ``UserError`` in one line names the file and the key."""
    reader.only({"title", "sources", "notes", "tables", "dense", "optimizer", "batch_size", "rows", "target"})
    optimizer = reader.text("optimizer", "rowwise_adagrad")
    if optimizer not in STATES:
        raise reader.wrong("optimizer", f"must be one of {', '.join(STATES)}, not {shown(optimizer)}")
    tables: list[Table] = []
    for each in reader.several("tables"):
        tables += _tables(each, len(tables))
    if len({table.name for table in tables}) < len(tables):
        raise reader.wrong("tables", "has two tables of one name")
    notes = reader.values.get("notes") or []
    return PaperModel(
        name,
        reader.text("title"),
        tuple(tables),
        dense_part(reader.part("dense"), tables),
        optimizer,
        reader.whole("batch_size"),
        {"fp32": 4, "fp16": 2}.get(reader.text("rows", "fp32")) or _unknown(reader, "rows", "fp32 or fp16"),
        _target(reader.part("target")) if "target" in reader.values else None,
        tuple(str(note) for note in notes),
    )


def _unknown(reader: Reader, key: str, known: str) -> int:
    raise reader.wrong(key, f"must be {known}, not {shown(reader.values[key])}")


def _tables(reader: Reader, before: int) -> list[Table]:
    reader.only({"name", "rows", "dim", "pooling", "skew", "count", "pooled"})
    count = reader.whole("count", 1)
    if before + count > MOST_TABLES:
        raise reader.wrong("count", f"makes more than {MOST_TABLES:,} tables")
    name = reader.text("name", f"table{before}")
    shape = reader.whole("rows"), reader.whole("dim"), reader.number("pooling", 1.0), reader.number("skew", 0)
    pooled = reader.get("pooled", True)
    if not isinstance(pooled, bool):
        raise reader.wrong("pooled", f"must be true or false, not {shown(pooled)}")
    names = [name] if count == 1 else [f"{name}.{number}" for number in range(count)]
    return [Table(each, *shape, pooled) for each in names]


def dense_part(reader: Reader, tables: list[Table]) -> Dense:
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
    return dense_of([t.dim for t in tables], inputs, bottom, kind, cross, top)


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


def _target(reader: Reader) -> Target:
    reader.only({"quality", "epoch", "epochs", "evaluated", "evaluations"})
    epoch = reader.number("epoch", least=1)
    found = tuple((size, share * epoch) for size, share in reader.pairs("epochs"))
    if any(a[0] >= b[0] for a, b in pairwise(found)):
        raise reader.wrong("epochs", "must be [batch size, epochs] with ascending batch sizes")
    every = reader.number("evaluations", 1.0) * epoch
    return Target(reader.text("quality"), found, reader.number("evaluated", 0), every)
