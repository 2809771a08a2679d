"""Predicts training on machines that are not here: for each number of GPUs its plan, step, rate and time.

The tasks of a step run as in TorchRec's TrainPipelineSparseDist, on the busiest GPU of all, which the others
wait for: the input of a later batch is copied, and its ids go to the GPUs that have the rows, while this
batch trains; the bottom layers run while vectors are on their way, and the dense gradients are added up while
rows are updated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from recpipe.errors import UserError
from recpipe_perf_model.scale.machine import GIGA, MICRO
from recpipe_perf_model.scale.model import FLOAT, ID, Product
from recpipe_perf_model.scale.placing import (
    Plan,
    Room,
    Tiered,
    Training,
    all_reduce,
    all_to_all,
    make_plan,
    tiered,
)
from recpipe_perf_model.step.walk import Task, Walked, walk

STEP = {
    "copy": ("bus", "input", {"dense update": 2}),
    "launch": ("host", "host", {"dense update": 2}),
    "lookup": ("GPU", "lookups", {"ids": 1, "fetch": 1, "launch": 0}),
    "vectors": ("network", "row messages", {"lookup": 0}),
    "ids": ("network", "id messages", {"copy": 1}),
    "fetch": ("tiers", "slower tiers", {"ids": 0}),
    "bottom": ("GPU", "dense math", {}),
    "top": ("GPU", "dense math", {"vectors": 0}),
    "top backward": ("GPU", "dense math", {}),
    "row gradients": ("network", "row messages", {"top backward": 0}),
    "all-reduce": ("network", "all-reduce", {"top backward": 0}),
    "bottom backward": ("GPU", "dense math", {}),
    "update": ("GPU", "row update", {"row gradients": 0}),
    "dense update": ("GPU", "dense math", {"all-reduce": 0}),
}
"""The tasks of a step in the order in which each place runs them: where, what for, and after which tasks of
how many steps ago. "ids" and "fetch" of a step are for the next batch, "copy" for that after it."""
COPIES = 4
"""Times that eager code reads or writes the vectors of the tables before it can use them: TorchRec puts them
in the tables' order after they have come, and models join them."""
BASE_OPERATORS = 246
"""Eager operators of one step of TorchRec 1.8's TrainPipelineSparseDist beside one for each table: counted by
torch's profiler for a DLRM with 8 layers and the dot interaction."""
WORKSPACE = 2
"""Copies of a batch's activations: with their gradients."""


@dataclass(frozen=True)
class Prediction:
    """What is predicted for one number of GPUs."""

    training: Training
    room: Room
    plan: Plan
    rows: Tiered
    """Of the GPU whose rows take longest to fetch."""
    seconds: Mapping[str, float]
    """By task of a step, if nothing ran beside it."""
    walked: Walked
    """The step, on the GPU that waits most."""

    @property
    def samples_per_second(self) -> float:
        """Of all GPUs together, in the steady state."""
        return self.training.batch / self.walked.step_seconds

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds of the step on its critical path by what they are for, the longest first."""
        found: dict[str, float] = defaultdict(float)
        for task, seconds in self.walked.critical.items():
            found[STEP[task][1]] += seconds
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    @property
    def hbm_bytes(self) -> float:
        """Of the fullest GPU's memory: rows, dense part and activations."""
        return max(min(count, self.room.hbm) for count in self.plan.memory) + dense_bytes(self.training)

    def seconds_to_quality(self) -> float | None:
        """To the published quality, with evaluations; None: no figure for this batch size."""
        target, batch = self.training.model.target, self.training.batch
        needed = None if target is None else target.needed(batch)
        if target is None or needed is None:
            return None
        # A step of an evaluation: lookups, vectors and the forward pass.
        forward = sum(self.seconds[task] for task in ("lookup", "vectors", "top")) + self.seconds["fetch"]
        evaluation = target.evaluated / batch * forward
        return needed / self.samples_per_second + needed / target.evaluations * evaluation


def predict(training: Training, slowest: str = "hbm") -> Prediction:
    """Plan, place and walk one setting; rows may be in the tiers up to the ``slowest``. ``UserError`` if it
    does not fit."""
    within, gpus = int(training.machine.constants.gpus_per_host), training.gpus
    if gpus > within and gpus % within:
        raise UserError(
            f"scale.gpus={gpus}: a host of {training.machine.name} has {within}; say at most {within}, or a "
            "multiple of it"
        )
    if training.batch < gpus:
        raise UserError(
            f"a batch of {training.batch:,} samples cannot be shared by {gpus:,} GPUs; raise scale.batch_size"
        )
    room = room_of(training, slowest)
    plan = make_plan(training, room)
    full = sorted(range(gpus), key=lambda gpu: -plan.memory[gpu])
    over = [gpu for gpu in full if plan.memory[gpu] > room.hbm] or full[:1]
    rows = max((tiered(training, plan.parts(gpu), room) for gpu in over), key=lambda each: each.seconds)
    seconds = task_seconds(training, plan, rows)
    tasks = [Task(name, place, waits=seconds[name], after=after) for name, (place, _, after) in STEP.items()]
    return Prediction(training, room, plan, rows, seconds, walk(tasks, 1))


def dense_bytes(training: Training) -> float:
    """Bytes that a GPU needs beside its rows: weights, gradients and state of the dense part, activations,
    vectors of its samples."""
    model, b = training.model, training.samples
    dense = model.dense
    outputs = sum(p.outputs for p in (*dense.bottom, *dense.top)) + dense.interaction_values
    vectors = sum(t.vectors * t.dim for t in model.tables)
    ids = sum(t.pooling for t in model.tables)
    activations = b * (WORKSPACE * training.value_bytes * (outputs + vectors) + 2 * 8 * ids)
    return dense.parameters * FLOAT * 3 + activations


def room_of(training: Training, slowest: str) -> Room:
    """The room for rows that each GPU has in the tiers up to the ``slowest``."""
    known = training.machine.constants
    hbm = known.hbm_gb * GIGA * (1 - known.reserved_share) - dense_bytes(training)
    if hbm <= 0:
        raise UserError(
            f"{training.samples:,.0f} samples a GPU need {dense_bytes(training) / GIGA:.1f} GB beside rows, "
            f"and a GPU of {training.machine.name} has {known.hbm_gb:g} GB; take a smaller batch or more GPUs"
        )
    within = training.host_gpus
    dram = known.dram_gb * GIGA * (1 - known.reserved_share) / within if slowest != "hbm" else 0.0
    return Room(hbm, dram, known.ssd_gb * GIGA / within if slowest == "ssd" else 0.0)


def task_seconds(training: Training, plan: Plan, rows: Tiered) -> dict[str, float]:
    """Each task's seconds."""
    model, known = training.model, training.machine.constants
    dense, b = model.dense, training.samples
    least = known.kernel_us * MICRO
    ids = ID * sum(t.pooling for t in model.tables)
    input_bytes = b * (FLOAT * (dense.inputs + 1) + ids)
    reduced = dense.parameters * training.gradient_bytes + plan.reduced
    # The interaction beside its products with weights; its backward pass takes twice as long.
    joined = sum(table.vectors * table.dim for table in model.tables)
    values = b * (dense.interaction_values + (COPIES * joined if training.eager else 0))
    inner = max(_pointwise(training, values), b * dense.interaction_flops / training.peak())
    near = plan.ids * (training.host_gpus - 1) / max(1, training.gpus - 1)
    operators = BASE_OPERATORS + len(model.tables) + dense.operators
    # The optimizer reads and writes weights and one state, and reads the gradient.
    optimizer = dense.parameters * FLOAT * 5 / training.memory_rate
    return {
        "copy": input_bytes / (known.pcie_gb_s * known.pcie_share * GIGA),
        "ids": all_to_all(training, near, plan.ids - near),
        "lookup": plan.read / training.memory_rate + least,
        "vectors": all_to_all(training, plan.near, plan.far),
        "bottom": forward_seconds(training, dense.bottom),
        "top": forward_seconds(training, dense.top) + inner,
        "top backward": backward_seconds(training, dense.top, not dense.bottom) + 2 * inner,
        "row gradients": all_to_all(training, plan.near, plan.far),
        "bottom backward": backward_seconds(training, dense.bottom, True),
        "all-reduce": all_reduce(training, reduced),
        "update": plan.updated / training.memory_rate + least,
        "dense update": optimizer + least,
        "fetch": rows.seconds,
        "launch": operators * known.operator_us * MICRO if training.eager else 0.0,
    }


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
