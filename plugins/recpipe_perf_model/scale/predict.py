"""Predicts training on machines that are not here: for each number of GPUs its plan, step, rate and time.

The tasks of a step run as in TorchRec's TrainPipelineSparseDist, on the busiest GPU of all, which the others
wait for: the input of a later batch is copied, and its ids go to the GPUs that have the rows, while this
batch trains; the bottom layers run while vectors are on their way, and the dense gradients are added up while
rows are updated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recpipe.errors import UserError
from recpipe_perf_model.scale.machine import GIGA, MICRO, Machine
from recpipe_perf_model.scale.model import FLOAT, ID, PaperModel
from recpipe_perf_model.scale.placing import Plan, Room, Tiered, make_plan, tiered
from recpipe_perf_model.scale.work import (
    BASE_OPERATORS,
    Training,
    all_reduce,
    all_to_all,
    backward_seconds,
    forward_seconds,
    interaction_seconds,
)
from recpipe_perf_model.step.walk import Task, Walked, walk

PARTS = {
    "copy": "input",
    "ids": "id messages",
    "lookup": "lookups",
    "vectors": "row messages",
    "bottom": "dense math",
    "top": "dense math",
    "top backward": "dense math",
    "row gradients": "row messages",
    "bottom backward": "dense math",
    "all-reduce": "all-reduce",
    "update": "row update",
    "dense update": "dense math",
    "fetch": "slower tiers",
    "launch": "host",
}
"""What each task is for."""


@dataclass(frozen=True)
class Step:
    """A step's times."""

    seconds: Mapping[str, float]
    """By task, if nothing ran beside it."""
    walked: Walked
    forward: float
    """Seconds of a step of an evaluation: lookups, vectors and the forward pass."""

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds of the step on its critical path by what they are for, the longest first."""
        found: dict[str, float] = {}
        for task, seconds in self.walked.critical.items():
            found[PARTS[task]] = found.get(PARTS[task], 0.0) + seconds
        return dict(sorted(found.items(), key=lambda each: -each[1]))


def step_of(training: Training, plan: Plan, rows: Tiered) -> Step:
    """Walk the step of ``plan`` with its rows in tiers as ``rows`` has them, for the GPU that waits most."""
    seconds = task_seconds(training, plan, rows)
    forward = sum(seconds[task] for task in ("lookup", "vectors", "top")) + seconds["fetch"]
    return Step(seconds, walk(_tasks(seconds), 1), forward)


def task_seconds(training: Training, plan: Plan, rows: Tiered) -> dict[str, float]:
    """Each task's seconds."""
    model, known = training.model, training.machine.constants
    dense, b = model.dense, training.samples
    least = known.kernel_us * MICRO
    ids = ID * sum(t.pooling for t in model.tables)
    input_bytes = b * (FLOAT * (dense.inputs + 1) + ids)
    reduced = dense.parameters * training.gradient_bytes + plan.reduced
    inner, inner_backward = interaction_seconds(training, dense)
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
        "top backward": backward_seconds(training, dense.top, not dense.bottom) + inner_backward,
        "row gradients": all_to_all(training, plan.near, plan.far),
        "bottom backward": backward_seconds(training, dense.bottom, True),
        "all-reduce": all_reduce(training, reduced),
        "update": plan.updated / training.memory_rate + least,
        "dense update": optimizer + least,
        "fetch": rows.seconds,
        "launch": operators * known.operator_us * MICRO if training.eager else 0.0,
    }


def _tasks(seconds: Mapping[str, float]) -> list[Task]:
    """In the order in which each place runs them. "ids" and "fetch" of a step are for the next batch, "copy"
    for that after it."""

    def task(name: str, place: str, **after: int) -> Task:
        waited = {key.replace("_", " "): ago for key, ago in after.items()}
        return Task(name, place, waits=seconds[name], after=waited)

    return [
        task("copy", "bus", dense_update=2),
        task("launch", "host", dense_update=2),
        task("lookup", "GPU", ids=1, fetch=1, launch=0),
        task("vectors", "network", lookup=0),
        task("ids", "network", copy=1),
        task("fetch", "tiers", ids=0),
        task("bottom", "GPU"),
        task("top", "GPU", vectors=0),
        task("top backward", "GPU"),
        task("row gradients", "network", top_backward=0),
        Task("all-reduce", "network", waits=seconds["all-reduce"], after={"top backward": 0}),
        task("bottom backward", "GPU"),
        task("update", "GPU", row_gradients=0),
        Task("dense update", "GPU", waits=seconds["dense update"], after={"all-reduce": 0}),
    ]


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
    step: Step

    @property
    def step_seconds(self) -> float:
        """Of a step in the steady state."""
        return self.step.walked.step_seconds

    @property
    def samples_per_second(self) -> float:
        """Of all GPUs together."""
        return self.training.batch / self.step_seconds

    @property
    def hbm_bytes(self) -> float:
        """Of the fullest GPU's memory: rows, dense part and activations."""
        return max(min(count, self.room.hbm) for count in self.plan.memory) + dense_bytes(self.training)

    def seconds_for(self, samples: float) -> float:
        """To train so many, without evaluations."""
        return samples / self.samples_per_second

    def seconds_to_quality(self) -> float | None:
        """To the published quality, with evaluations; None: no figure for this batch size."""
        target = self.training.model.target
        needed = None if target is None else target.needed(self.training.batch)
        if target is None or needed is None:
            return None
        evaluations = needed / target.evaluations
        evaluation = target.evaluated / self.training.batch * self.step.forward
        return self.seconds_for(needed) + evaluations * evaluation


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


def predict(training: Training, slowest: str = "hbm") -> Prediction:
    """Plan, place and walk one setting; ``UserError`` if it does not fit."""
    check(training)
    room = room_of(training, slowest)
    plan = make_plan(training, room)
    full = sorted(range(training.gpus), key=lambda gpu: -plan.memory[gpu])
    over = [gpu for gpu in full if plan.memory[gpu] > room.hbm] or full[:1]
    rows = max((tiered(training, plan.parts(gpu), room) for gpu in over), key=lambda each: each.seconds)
    return Prediction(training, room, plan, rows, step_of(training, plan, rows))


def check(training: Training) -> None:
    """Refuse numbers that do not fit together."""
    within = int(training.machine.constants.gpus_per_host)
    if training.gpus > within and training.gpus % within:
        raise UserError(
            f"scale.gpus={training.gpus}: a host of {training.machine.name} has {within}; say at most "
            f"{within}, or a multiple of it"
        )
    if training.batch < training.gpus:
        raise UserError(
            f"a batch of {training.batch:,} samples cannot be shared by {training.gpus:,} GPUs; raise "
            "scale.batch_size"
        )


@dataclass(frozen=True)
class Setting:
    """How a model is trained, whatever the number of GPUs."""

    model: PaperModel
    machine: Machine
    batch: int | None = None
    """Of all GPUs; None: ``gpu_batch`` or the model's own."""
    gpu_batch: int | None = None
    precision: str = "bf16"
    messages: str = "fp32"
    gradients: str = "fp32"
    eager: bool = True
    tiers: str = "hbm"

    def training(self, gpus: int) -> Training:
        """On so many GPUs."""
        size = {"fp32": 4}
        batch = self.batch or (self.gpu_batch * gpus if self.gpu_batch else self.model.batch_size)
        return Training(
            self.model,
            self.machine,
            gpus,
            batch,
            self.precision,
            size.get(self.messages, 2),
            size.get(self.gradients, 2),
            self.eager,
        )

    def predict(self, gpus: Sequence[int]) -> list[Prediction]:
        """For each number of GPUs."""
        return [predict(self.training(each), self.tiers) for each in gpus]
