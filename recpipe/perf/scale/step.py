"""A training step on paper, as tasks for the walk: the busiest GPU of all, which the others wait for.

The tasks run as in TorchRec's TrainPipelineSparseDist: the input of a later batch is copied, and its ids go
to the GPUs that have the rows, while this batch trains; the bottom layers run while vectors are on their way,
and the dense gradients are added up while rows are updated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recpipe.perf.scale.machine import GIGA, MICRO
from recpipe.perf.scale.messages import all_reduce, all_to_all, even_all_to_all
from recpipe.perf.scale.model import FLOAT, ID
from recpipe.perf.scale.placing import Plan
from recpipe.perf.scale.tiers import Tiered
from recpipe.perf.scale.work import (
    Training,
    backward_seconds,
    forward_seconds,
    interaction_seconds,
    operators,
)
from recpipe.perf.step.walk import Task, Walked, walk

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
    # The optimizer reads and writes weights and one state, and reads the gradient.
    optimizer = dense.parameters * FLOAT * 5 / training.memory_rate
    return {
        "copy": input_bytes / (known.pcie_gb_s * known.pcie_share * GIGA),
        "ids": even_all_to_all(training, plan.ids),
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
        "launch": operators(model) * known.operator_us * MICRO if training.eager else 0.0,
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
