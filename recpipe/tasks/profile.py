"""task=profile: a short training run whose last steps are profiled by torch and compared with the floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any, TypeVar

import lightning as L
import torch

from recpipe import private_api
from recpipe.common.machine import Load, disturbance, used_by_others
from recpipe.common.timing import PHASES, watch
from recpipe.config.task import ProfileConfig
from recpipe.model.config import ModelConfig, UserModel
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.placed import PlacedModel
from recpipe.plugin.calls import Origin, blame
from recpipe.plugin.offers import imported, offered, origin_of
from recpipe.profiling.limits import Limits, StepModel, floors_ms, measure
from recpipe.profiling.trace import OVERHEAD, STEP, ProfiledStep, mean_step, profiled_steps, top_operators
from recpipe.profiling.traced import tell_parts, traced
from recpipe.profiling.workload import (
    FLOAT_BYTES,
    Lookups,
    Work,
    count_lookups,
    dense_work,
    embedding_work,
    optimizer_work,
)
from recpipe.report.files import ReportFiles
from recpipe.report.record import RunReport, Throughput
from recpipe.setup.ctx import RunResult, TaskContext
from recpipe.setup.training import Training
from recpipe.training.recorder import Recorder

T = TypeVar("T")
TRACE = "trace.json.gz"
COUNTED_BATCHES = 8
"""How many batches, the first ones of a run, have their lookups counted."""


class Profile:
    """Where a step's time goes, against what the machine could do."""

    def run(self, context: TaskContext) -> RunResult:
        """Train for so many steps as are profiled, without anything else."""
        cfg = context.recipe
        assert isinstance(cfg.task, ProfileConfig)
        self.config = cfg.task
        shortened = replace(cfg, trainer=cfg.task.shortened(cfg.trainer))
        return replace(context, recipe=shortened).train(self)

    def callback(self, training: Training) -> L.Callback:
        """Profiles the training's last steps."""
        run = training.run
        self.profiler = StepProfiler(self.config, training.recorder, training.model, run.device)
        return self.profiler

    def complete(self, training: Training, report: RunReport, files: ReportFiles) -> None:
        """Put the profile into the report and write the trace beside it."""
        self.profiler.complete(report, training, files)


def step_model() -> tuple[StepModel, Origin]:
    """The first installed model of steps, and whose it is."""
    for ep in offered("profile").values():
        made: Any = imported("profile", ep)
        return (made() if isinstance(made, type) else made), origin_of(ep)
    return StepModel(), Origin("recpipe")


class StepProfiler(L.Callback):
    """Switches torch's profiler on for the last steps. Place it after ``recorder``, whose clock it uses."""

    def __init__(
        self, config: ProfileConfig, recorder: Recorder, model: PlacedModel, device: torch.device
    ) -> None:
        self.config, self.recorder, self.model, self.device = config, recorder, model, device
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # Several cores may share a batch.
        watched = private_api.ExperimentalConfig(profile_all_threads=device.type == "cpu")
        self.profiler = torch.profiler.profile(activities=activities, experimental_config=watched)
        self.batches: list[Any] = []
        """The first batches that this rank trained."""
        self.optimizer = Work()
        """The work of the dense optimizer per step."""
        self.finished = False
        self._watching = False
        self._untell: Callable[[], None] | None = None
        self._step: Any = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock of an epoch's first step, as in ``Recorder``."""
        if self._watching:
            self._begin_step()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: InFlight,
        batch_idx: int,
    ) -> None:
        """Time the step from the end of the one before."""
        if len(self.batches) < COUNTED_BATCHES:
            self.batches.append(batch.batch)
        done = self.recorder.steps
        self._end_step()
        if done == self.config.warmup + self.config.steps:
            self.profiler.start()
            self._watching = True
            watch(True)
            # On a GPU a part's kernels run later than its operators, and passes are not divided into parts.
            if self.device.type == "cpu":
                self._untell = tell_parts(self.model.module)
        elif done == self.config.warmup + 2 * self.config.steps:
            self.optimizer = optimizer_work(trainer.optimizers[0])
            self._stop()
            self.finished = True
        if self._watching and not trainer.is_last_batch:
            self._begin_step()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Clean up if a signal has ended the training early."""
        self._stop()

    def _begin_step(self) -> None:
        self._step = torch.profiler.record_function(STEP)
        self._step.__enter__()

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _stop(self) -> None:
        self._end_step()
        if self._watching:
            if self._untell is not None:
                self._untell()
            watch(False)
            self.profiler.stop()
            self._watching = False

    def complete(self, report: RunReport, training: Training, files: ReportFiles) -> None:
        """Put the ``profile`` into the report and write the trace beside it, unless a signal came first.

        The report's throughput becomes that of the timed steps. It measures the machine, which takes seconds.
        """
        if not self.finished:
            return
        config = training.run.recipe.model
        timed = slice(self.config.warmup, self.config.warmup + self.config.steps)
        seconds, samples = self.recorder.step_seconds[timed], self.recorder.step_samples[timed]
        in_training = report.throughput.others_cpu_share
        report.throughput = Throughput.of_steps(samples, seconds, others=in_training)
        files.write(TRACE, lambda path: self.profiler.export_chrome_trace(str(path)))
        work, lookups = model_work(self.model, config, self.batches)
        work["dense optimizer"] = self.optimizer
        widest = max(group.tables.dim for group in self.model.embeddings.tables.groups)
        row_bytes = FLOAT_BYTES * widest
        model, origin = step_model()
        ask = partial(blame, origin, "profile")
        before = Load.now()
        limits = ask(model.limits)(row_bytes, self.device) or measure(row_bytes, self.device)
        others = used_by_others(before)
        events = self.profiler.events()  # type: ignore[no-untyped-call]
        step = mean_step(middle_half(profiled_steps(events), key=lambda step: step.ms))

        def told(limits: Limits) -> dict[str, Any]:
            timing = achieved(seconds, step, floors_ms(work, limits, config.precision))
            floor = {
                "ms": sum(floors_ms(work, limits, config.precision).values()),
                "precision": config.precision,
                "flops": sum(each.flops for each in work.values()),
                **asdict(lookups),
                "work": {name: asdict(each) for name, each in work.items()},
            }
            return {
                **timing,
                "predicted": ask(model.predict)(training, timed.stop, timing["phases"]),
                "floor": floor | {"stale": stale(timing, floor["ms"], disturbance(others))},
                "machine": asdict(limits),
            }

        found = told(limits)
        said = None
        if self.device.type == "cpu":
            said = ask(model.recheck)(found, bool(disturbance(in_training)))
        if said is not None or (self.device.type == "cpu" and found["floor"]["ms"] > found["step_ms"]):
            before = Load.now()
            known = ask(model.limits)(row_bytes, self.device) if said is None or said.fresh else None
            limits = known or measure(row_bytes, self.device)
            others = used_by_others(before)
            found = told(limits)
        report.profile = {
            **found,
            "recheck": None if said is None else said.words,
            "others_cpu_share": others,
            "operators": top_operators(self.profiler, self.config.steps),
            "trace": TRACE,
        }


def stale(timing: Mapping[str, Any], whole_ms: float, disturbed: str) -> str | None:
    """What is wrong with floors that are above the measured times; None: there are none.

    ``whole_ms``: the step's floor; ``disturbed``: by what the limits were, when they were measured now.
    """
    pairs = {name: (each["ms"], each["floor_ms"]) for name, each in timing["phases"].items()}
    pairs["step"] = (timing["step_ms"], whole_ms)
    above = [name for name, (ms, floor_ms) in pairs.items() if ms is not None and floor_ms > ms]
    if not above:
        return None
    why = f", for they were measured while {disturbed}" if disturbed else ""
    or_else = "" if "step" in above else ", or what such a phase needs stays in the caches"
    return (
        f"the floor of {', '.join(above)} is above the measured time, so this machine's limits are stale"
        f"{why}{or_else}: profile again when it is quiet"
    )


def model_work(
    model: PlacedModel, config: ModelConfig | UserModel, batches: Sequence[Any]
) -> tuple[dict[str, Work], Lookups]:
    """The work of lookups, update and dense part for a batch, by phase, and the lookups in all tables.

    Lookups are means over ``batches``; those by ids that the model makes are counted in the first batch only.
    The dense part of recpipe's own models is counted by its sizes, that of others by one step with the first
    batch.
    """
    inputs, tables = model.inputs, [group.tables for group in model.embeddings.tables.groups]
    lookups = [count_lookups([inputs.bags(b, n) for b in batches]) for n in range(len(tables))]
    if isinstance(config, ModelConfig):
        features = sum(len(group.features) for group in tables)
        dense = dense_work(config, batches[0].dense.shape[1], features, lookups[0].samples)
    else:
        dense, late = traced(model, batches[0])
        lookups = [sum(late[n], own) for n, own in enumerate(lookups)]
    work = embedding_work(list(zip(tables, lookups, strict=True))) | dense
    return work, sum(lookups[1:], lookups[0])


def achieved(
    step_seconds: Sequence[float], profiled: ProfiledStep, floors: dict[str, float]
) -> dict[str, Any]:
    """Milliseconds of the step and its phases, with the ``floors`` (milliseconds by phase).

    The step's time is that of ``step_seconds``, timed without the profiler, which slows steps down. The
    phases' shares of it are those in the ``profiled`` step, and add up to the step. ``ms`` is None for a
    phase that the step lacks. The floor of a part of the model that was not recorded is added to the dense
    part, which includes its time.
    """
    floors = dict(floors)
    for part, way in product(("interaction", "MLP"), ("forward", "backward")):
        name, whole = f"{part} {way}", f"dense {way}"
        if name not in profiled.phases and whole in profiled.phases:
            floors[whole] = floors.get(whole, 0.0) + floors.pop(name, 0.0)
    step_ms = 1e3 * fmean(middle_half(step_seconds, key=float))
    by_phase = {}
    for name in (*PHASES, OVERHEAD):
        there = profiled.phases.get(name)
        by_phase[name] = {
            "ms": None if there is None else there / profiled.ms * step_ms,
            "floor_ms": floors.get(name, 0.0),
            "profiled_ms": there,
        }
    return {"step_ms": step_ms, "profiled_step_ms": profiled.ms, "phases": by_phase}


def middle_half(steps: Sequence[T], key: Callable[[T], float]) -> list[T]:
    """The steps without the slowest and the fastest quarter, which other programs disturb most."""
    ordered = sorted(steps, key=key)
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut]
