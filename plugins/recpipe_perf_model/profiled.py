"""A profiled run's step, predicted beside the measured one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from recpipe.backend.build import Backend
from recpipe.common.timing import BACKWARD
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError
from recpipe.pipeline.placed import PlacedModel
from recpipe.plugin.load import activate
from recpipe.profiling.limits import Limits, Recheck
from recpipe.profiling.trace import OVERHEAD
from recpipe.setup.training import Training
from recpipe_perf_model.advise.candidates import Candidate
from recpipe_perf_model.advise.judged import (
    NEEDED,
    Judged,
    Machine,
    Paper,
    by_beginning,
    judge,
    told_timeline,
)
from recpipe_perf_model.calibrate import contradicts, recheck
from recpipe_perf_model.facts.collect import collect
from recpipe_perf_model.machine import Host, own_profile, profile_path
from recpipe_perf_model.step.step import MAIN
from recpipe_perf_model.step.walk import SHOWN
from recpipe_perf_model.tiers.predict import Kind, costs_of, of_policy

LOOK_UP, UPDATE, OPTIMIZER = "embedding forward", "embedding backward and update", "dense optimizer"
FORWARD, BACK, INPUT = "forward", "backward", "input"
PARTS = (INPUT, LOOK_UP, FORWARD, BACK, UPDATE, OPTIMIZER, OVERHEAD)
"""The parts of a step in which prediction and measurement are compared: phases, of which those of the dense
part's forward pass are one, and those of its backward pass."""
_PART_OF = {
    "look up": LOOK_UP,
    "forward": FORWARD,
    "backward": BACK,
    "table update": UPDATE,
    "dense optimizer": OPTIMIZER,
    "loop": OVERHEAD,
    "add up gradients": OVERHEAD,
}
"""By the words that a predicted task's name begins with. All others bring rows or the batch."""

Phases = Mapping[str, Mapping[str, float | None]]
"""The figures of each of ``task=profile``'s phases; ``ms`` is used."""


class StepModel:
    """What the performance model adds to ``task=profile``: a ``recpipe.profiling.limits.StepModel``."""

    def limits(self, row_bytes: int, device: torch.device) -> Limits | None:
        """Those in this machine's profile, if ``recpipe perf calibrate`` has made one."""
        host = Host.current(device)
        profile = own_profile(host) if device.type == "cpu" else None
        if profile is None:
            return None
        return Limits.of(profile.samples.get("limits", ()), row_bytes, host.threads)

    def predict(self, training: Training, steps: int, phases: Phases) -> dict[str, Any]:
        """The prediction for the later half of a run's first ``steps`` steps.

        ``step_ms`` with the least and the most expected, the training thread's milliseconds by part, beside
        those of the measured ``phases``, the share of a step in which each thread works or waits, and a
        timeline; or only ``reason``, why there is none.
        """
        run = training.run
        try:
            if run.ranks.world > 1 or run.device.type != "cpu" or training.module.backend is None:
                raise UserError("steps are predicted for one process on a CPU")
            found = _judged(run.recipe, run.dataset, training.model, training.module.backend, steps)
        except UserError as error:
            return {"reason": str(error)}
        measured: dict[str, float] = defaultdict(float)
        for name, figures in phases.items():
            part = name if name in PARTS else FORWARD if name in BACKWARD else BACK
            measured[part] += figures["ms"] or 0.0
        return {
            "step_ms": [1e3 * seconds for seconds in found.seconds],
            "parts_ms": _by_part(found.prediction.kinds),
            "utilisation": dict(found.main.walked.utilisation),
            "memory": dict(found.prediction.memory),
            "timeline": told_timeline(found.main),
            "measured_parts_ms": {part: measured[part] for part in PARTS},
        }

    def recheck(self, profile: Mapping[str, Any], disturbed: bool) -> Recheck | None:
        """Measure this machine's limits again if the measured step contradicts its profile: the prediction by
        far, or the whole floor at all."""
        predicted, measured = profile["predicted"].get("step_ms"), profile["step_ms"]
        below = profile["floor"]["ms"] > measured
        if not below and (predicted is None or not contradicts(predicted[0], measured, disturbed)):
            return None
        return recheck(profile_path(Host.current()))


def _judged(cfg: Recipe, dataset: Dataset, model: PlacedModel, backend: Backend, steps: int) -> Judged:
    """The prediction for a run with its own policy and plugins; ``UserError`` says why there is none."""
    profile = own_profile(Host.current())
    if profile is None or any(name not in profile.samples for name in NEEDED):
        raise UserError("this machine was not measured for it: run recpipe perf calibrate once")
    size = cfg.data.batch_size
    batches = min(steps, dataset.num_batches("train", size))
    tables = model.inputs.tables
    facts = collect(cfg, dataset, model.inputs, batches, steps)
    facts = facts.at(share=cfg.tiers.budget(tables) / tables.total_bytes)
    active = activate(cfg.plugins)
    plugins = {origin.plugin: plugin for origin, plugin in active}
    asked = {origin.plugin: costs_of(origin, plugin, facts) for origin, plugin in active}
    stated = {name: statement for name, statement in asked.items() if statement}
    silent = sorted(plugins.keys() - stated.keys())
    if silent:
        raise UserError(f"{', '.join(silent)} does not state what it costs here")
    candidate = Candidate(cfg.tiers.policy, of_policy(cfg.tiers.policy, facts), plugins, stated)
    batch = next(iter(dataset.batches("train", size)))
    paper = Paper.over(cfg, dataset, model, backend, batch)
    return judge(candidate, facts, Machine(profile), paper)


def _by_part(kinds: Sequence[Kind]) -> dict[str, float]:
    """The training thread's milliseconds in each of ``PARTS``, over all kinds of batches; its waits are
    input."""
    found: dict[str, float] = defaultdict(float)
    for kind in kinds:
        found[INPUT] += 1e3 * kind.phase.share * kind.walked.step_seconds
        for span in kind.walked.timeline:
            if span.task.place == MAIN:
                part = by_beginning(span.task.name, _PART_OF, INPUT)
                milliseconds = 1e3 * kind.phase.share * (span.end - span.start) / SHOWN
                found[INPUT] -= milliseconds
                found[part] += milliseconds
    return {part: max(0.0, found[part]) for part in PARTS}
