"""Predicts training on machines that are not here: for each number of GPUs its plan, step, rate and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recpipe.errors import UserError
from recpipe.perf.scale.machine import GIGA, Machine
from recpipe.perf.scale.model import FLOAT, PaperModel
from recpipe.perf.scale.placing import Plan, make_plan
from recpipe.perf.scale.step import Step, step_of
from recpipe.perf.scale.tiers import Room, Tiered, tiered
from recpipe.perf.scale.work import Training

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
