"""What one step asks of a GPU, on paper: bytes of rows, messages and products, for a way to place each table.

A GPU takes ``batch / gpus`` samples. A table lies whole on one GPU, in parts of its rows on several, or on
every GPU (data parallel). Who has a part looks its rows up for the whole batch, adds those of
a sample, and sends each GPU the vectors of its samples. A table's row parts within one host add up their
vectors there before they are sent to other hosts, as TorchRec's table_row_wise and HugeCTR's hierarchical
plans do. Ids follow Zipf's law: row i is looked up in proportion to i^-skew; ``skew`` 0 is uniform.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log, log2, pow

import numpy as np

from recpipe_perf_model.scale.machine import GIGA, MICRO, Machine
from recpipe_perf_model.scale.model import FLOAT, ID, Dense, PaperModel, Product, Table

SORT_BITS, PAIR = 8, 12
"""Bits that one pass of a radix sort orders, and bytes of an id with its position: a table's update sorts
its ids, to add up the gradients of a row."""
COPIES = 4
"""Times that eager code reads or writes the vectors of the tables before it can use them: TorchRec puts them
in the tables' order after they have come, and models join them."""
WHOLE, ROWS, REPLICATED = "table_wise", "row_wise", "data_parallel"
BASE_OPERATORS = 246
"""Eager operators of one step of TorchRec 1.8's TrainPipelineSparseDist beside one for each table: counted by
torch's profiler for a DLRM with 8 layers and the dot interaction."""


@dataclass(frozen=True)
class Training:
    """How a model is trained on a machine."""

    model: PaperModel
    machine: Machine
    gpus: int
    batch: int
    """Samples of a step, of all GPUs together."""
    precision: str = "bf16"
    """Of the dense part's products: fp32, tf32, fp16 or bf16."""
    message_bytes: int = 4
    """Of a value that is sent between GPUs: rows and their gradients."""
    gradient_bytes: int = 4
    """Of a value of the dense part's gradients."""
    eager: bool = True
    """Whether the host begins every operator; otherwise CUDA graphs do, with activations in the products."""

    @property
    def host_gpus(self) -> int:
        """GPUs of one host that take part."""
        return min(self.gpus, int(self.machine.constants.gpus_per_host))

    @property
    def hosts(self) -> int:
        """Hosts that take part."""
        return ceil(self.gpus / self.host_gpus)

    @property
    def samples(self) -> float:
        """Of a step, on one GPU."""
        return self.batch / self.gpus

    @property
    def memory_rate(self) -> float:
        """Bytes a second that a GPU's kernels reach."""
        return self.machine.constants.hbm_gb_s * self.machine.constants.hbm_share * GIGA

    @property
    def value_bytes(self) -> int:
        """Of an activation."""
        return 2 if self.precision in ("fp16", "bf16") else 4

    def peak(self) -> float:
        """Operations a second of a GPU's products, at best."""
        known = self.machine.constants
        teras = {"fp32": known.tflops_fp32, "tf32": known.tflops_tf32}
        return 1e12 * teras.get(self.precision, known.tflops_half)


@dataclass(frozen=True)
class Load:
    """What a part of a table asks of the GPU that has it, in one step."""

    memory: float = 0.0
    """Bytes of rows with their state."""
    record: float = 0.0
    """Bytes of one of them."""
    lookups: float = 0.0
    distinct: float = 0.0
    read: float = 0.0
    """Bytes of memory that the lookups move."""
    updated: float = 0.0
    """Bytes of memory that the gradients and the update move."""
    ids: float = 0.0
    """Bytes of ids that come from other GPUs."""
    near: float = 0.0
    """Bytes of vectors to GPUs of its host, forward; backward as many come back."""
    far: float = 0.0
    """The same to other hosts."""
    reduced: float = 0.0
    """Bytes of the all-reduce of a data-parallel table's gradients."""


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


def part_load(training: Training, table: Table, kind: str, parts: int) -> Load:
    """What one of ``parts`` equal parts of a table asks for; for a table on every GPU, what each asks for."""
    model, world, rows = training.model, training.gpus, float(table.rows)
    record, row, pooling = model.record_bytes(table), table.dim * model.row_bytes, table.pooling
    if kind == REPLICATED:
        lookups, whole = training.samples * pooling, table.rows * table.dim * FLOAT
        return Load(
            memory=table.rows * record + whole,
            record=record,
            lookups=lookups,
            distinct=distinct(rows, table.skew, lookups),
            read=lookups * (row + ID) + training.samples * table.vectors * table.dim * training.value_bytes,
            # Gradients are a dense tensor, and the optimizer goes over all rows.
            updated=2 * (lookups * table.dim * FLOAT + whole + table.rows * record),
            reduced=whole if world > 1 else 0.0,
        )
    share = 1 / parts
    lookups, found = training.batch * pooling * share, distinct(rows, table.skew, training.batch * pooling)
    vector = table.dim * training.message_bytes
    passes = ceil(max(1.0, log2(max(2, table.rows))) / SORT_BITS)
    sent = training.batch * table.vectors * vector
    within = min(parts, training.host_gpus) if kind == ROWS and training.hosts > 1 else 1
    spread = sent / within
    return Load(
        memory=table.rows * share * record,
        record=record,
        lookups=lookups,
        distinct=found * share,
        read=lookups * (row + ID) + sent,
        updated=lookups * (vector + 2 * passes * PAIR) + found * share * 2 * record,
        ids=lookups * ID * (world - 1) / world,
        near=sent * (within - 1) / within + spread * (training.host_gpus - 1) / world,
        far=spread * (world - training.host_gpus) / world,
    )


def all_to_all(training: Training, near: float, far: float) -> float:
    """The seconds of an all-to-all in which the GPU that sends most sends ``near`` bytes within its host and
    ``far`` to other hosts; both go at the same time."""
    if training.gpus == 1:
        return 0.0
    curves = training.machine.curves
    within = curves["alltoall"].seconds(near)
    return max(within, curves["network"].seconds(far) if training.hosts > 1 else 0.0)


def all_reduce(training: Training, count: float) -> float:
    """The seconds to add up a buffer of ``count`` bytes of every GPU: within hosts, and for a share of it on
    each GPU between hosts."""
    if training.gpus == 1 or count <= 0:
        return 0.0
    curves, hosts, within = training.machine.curves, training.hosts, training.host_gpus
    near = curves["allreduce"].seconds(count) if within > 1 else 0.0
    far = 2 * count * (hosts - 1) / hosts / within
    return near + (curves["network"].seconds(far) if hosts > 1 else 0.0)


def product_seconds(training: Training, m: float, n: float, k: float) -> float:
    """The time of a matrix product of m x n results over k."""
    share = training.machine.products.share(m * n, k)
    moved = training.value_bytes * (m * n + m * k + n * k)
    busy = 2.0 * m * n * k / (training.peak() * share)
    return max(busy, moved / training.memory_rate, training.machine.constants.kernel_us * MICRO)


def _pointwise(training: Training, values: float) -> float:
    """The time of a kernel that reads and writes ``values``."""
    moved = values * training.value_bytes / training.memory_rate
    return max(moved, training.machine.constants.kernel_us * MICRO) if values else 0.0


def forward_seconds(training: Training, layers: tuple[Product, ...]) -> float:
    """The time of some layers' forward pass on one GPU."""
    b = training.samples
    products = sum(product_seconds(training, b, p.outputs, p.inputs) for p in layers)
    outputs = [p.outputs for p in layers if p.activated and training.eager]
    return products + sum(_pointwise(training, 2 * b * o) for o in outputs)


def backward_seconds(training: Training, layers: tuple[Product, ...], first: bool) -> float:
    """The time of some layers' backward pass: gradients of the weights and, unless it is the model's
    ``first`` layer, of its input."""
    b, total = training.samples, 0.0
    for number, p in enumerate(layers):
        total += product_seconds(training, p.inputs, p.outputs, b)
        if not (first and number == 0):
            total += product_seconds(training, b, p.inputs, p.outputs)
        # An activation's gradient, and the sum over samples for the biases.
        total += _pointwise(training, (3 if p.activated else 0) * b * p.outputs) if training.eager else 0.0
        total += _pointwise(training, b * p.outputs) if training.eager else 0.0
    return total


def interaction_seconds(training: Training, dense: Dense) -> tuple[float, float]:
    """The times of the interaction beside its products with weights, forward and backward."""
    joined = sum(table.vectors * table.dim for table in training.model.tables)
    values = training.samples * (dense.interaction_values + (COPIES * joined if training.eager else 0))
    busy = training.samples * dense.interaction_flops / training.peak()
    seconds = max(_pointwise(training, values), busy)
    return seconds, 2 * seconds
