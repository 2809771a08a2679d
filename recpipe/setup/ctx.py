"""What a caller in Python hands to a run, and what a task is given: the recipe and the run's directory at
once, and the run itself when it asks for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
from torch import nn

from recpipe.backend.matmul import float32_products, require_units
from recpipe.common.console import log
from recpipe.common.device import begin_on, same_bits
from recpipe.common.files import RunDir
from recpipe.common.machine import reset_peak_rss
from recpipe.common.process import run_start
from recpipe.config.recipe import Recipe
from recpipe.config.task import PlanConfig
from recpipe.data.dataset import Dataset
from recpipe.data.given import GivenBatches
from recpipe.data.make import open_dataset
from recpipe.distributed.launch import ProcessRank, joined, require_same_data
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.report.files import ReportFiles
from recpipe.report.record import RunReport
from recpipe.setup.footprint import require_inputs
from recpipe.setup.placing import Unplaced
from recpipe.setup.prepare import choose_device, owning_places, remove_left_stores
from recpipe.training.optim import try_out
from recpipe.training.signals import interruptible


@dataclass(frozen=True)
class RunInputs:
    """What a caller in Python passes to a run. For what is None, the recipe counts."""

    model: nn.Module | None = None
    dataset: Dataset | None = None
    screen: bool = True
    """Whether lines, bars and tables are shown on the terminal."""
    files: bool = True
    """Whether to write recpipe.log and report.html, for a user who looks into the run directory."""
    evaluates: bool = True
    """Whether to evaluate on the held-out part."""
    keeps: bool = False
    """Whether the caller will use the model; it then ends the run by closing ``RunResult.kept``."""


NOTHING = RunInputs()


@dataclass
class RunResult:
    """The result of a run: its ``report`` (the content of report.json, plan or comparison) and, after
    training, the model."""

    report: dict[str, Any]
    model: nn.Module | None = None
    predict: Callable[[Any], torch.Tensor] | None = None
    """Predicts a batch with the model; None if there is no model."""
    checkpoint: Path | None = None
    """The newest checkpoint, which has the same values as ``model``; None if none was written."""
    kept: ExitStack = field(default_factory=ExitStack)
    """Closes the tiers and releases the run directory; empty if the run has done so."""


class Joined:
    """A run that this process takes part in: its ranks, its device and its data; a model when asked for.

    ``recipe``: with what depends on the device decided, and with ``data.batch_size`` the samples of a whole
    step. ``micro_batch``: samples of each batch that adds to it, as the user set them. ``steps``: of the
    training, at most. ``started``: when the run began, by ``perf_counter``.
    """

    def __init__(
        self, recipe: Recipe, ranks: Ranks, device: torch.device, run_dir: RunDir, given: RunInputs
    ) -> None:
        self.started = run_start()
        reset_peak_rss()  # of an earlier run in this process
        self.ranks, self.device, self.run_dir, self.given = ranks, device, run_dir, given
        self.leads = ranks.rank == 0
        require_units(recipe.model.precision, device, recipe.model.emulate_bfloat16)
        self.dataset = open_dataset(recipe.data, recipe.seed, given.dataset)
        require_same_data(self.dataset.fingerprint)
        log.info(f"{self.dataset.size('train'):,} samples to train, {self.dataset.size('eval'):,} held out")
        self.micro_batch, count = recipe.data.batch_size, recipe.trainer.accumulate_grad_batches
        if count > 1:
            # A step's batches are read as one and trained as its micro-batches. Dense gradients add up; rows
            # are looked up once, and what several micro-batches send to a row makes its one update.
            if isinstance(self.dataset, GivenBatches):
                raise UserError(
                    f"trainer.accumulate_grad_batches={count}: the batches handed over are made already and "
                    "trained one by one; hand over batches of a whole step, or a recpipe.kit.Dataset"
                )
            recipe = replace(recipe, data=replace(recipe.data, batch_size=count * self.micro_batch))
        self.recipe = recipe
        self.steps = recipe.trainer.steps(self.dataset.num_batches("train", self.recipe.data.batch_size))

    @cached_property
    def unplaced(self) -> Unplaced:
        """The model, with tables still to be placed, and where its ids are in a batch."""
        L.seed_everything(self.recipe.seed, verbose=False)
        require_inputs(self.recipe, self.dataset, self.ranks, self.device)
        return Unplaced.of(self.recipe, self.dataset, self.device, self.given.model)


class Watcher(Protocol):
    """A task's look at the steps of a training run, which is then not evaluated."""

    def callback(self, training: Any) -> L.Callback:
        """The callback of Lightning's that watches ``training``, a ``setup.training.Training``."""

    def complete(self, training: Any, report: RunReport, files: ReportFiles) -> None:
        """Add to the report and the files of the finished run."""


class Train(Protocol):
    """``recpipe.run.train``."""

    def __call__(self, context: TaskContext, watcher: Watcher | None = None) -> RunResult:
        """Train the context's run and return its report and model."""


@dataclass(frozen=True)
class TaskContext:
    """What a task is given.

    ``recipe``: typed and checked. ``command_line``: the user's overrides; None for a run from Python.
    ``given``: what a caller in Python brings. ``until_end``: closed when the task has ended. ``trainer``:
    trains the run, for tasks that look at a training.
    """

    recipe: Recipe
    run_dir: RunDir
    command_line: Sequence[str] | None
    given: RunInputs
    until_end: ExitStack
    trainer: Train

    @property
    def directory(self) -> Path:
        """The run's directory, which is there and this run's alone."""
        return self.run_dir.path

    @cached_property
    def joined(self) -> Joined:
        """Choose the device, join the other ranks and open the data; all is left when the task has ended."""
        cfg = self.recipe
        device = choose_device(cfg.trainer.device)
        begin_on(device)
        cfg = replace(cfg, tiers=cfg.tiers.on(device))
        try_out(cfg.optim.dense, device)
        enter = self.until_end.enter_context
        enter(float32_products(device, cfg.model.precision))
        enter(same_bits(cfg.trainer.deterministic, device))
        if ProcessRank.current().rank == 0 and not isinstance(cfg.task, PlanConfig):
            remove_left_stores(cfg.tiers, self.run_dir, cfg.resume)
        enter(owning_places(cfg, self.run_dir))
        enter(interruptible())
        ranks = enter(joined(cfg.topology, cfg.tiers.emulate, device))
        return Joined(cfg, ranks, device, self.run_dir, self.given)

    def train(self, watcher: Watcher | None = None) -> RunResult:
        """Train the run, watched by ``watcher``."""
        return self.trainer(self, watcher)


class Task(Protocol):
    """What ``task=NAME`` chooses: an object, or a class without arguments, named by the entry point
    ``recpipe.tasks``."""

    def run(self, context: TaskContext) -> RunResult | Mapping[str, Any]:
        """Carry it out. A mapping is the report, which is also written to NAME.json."""
