"""What a caller in Python hands to a run, and what a task is given: the recipe and the run's directory at
once, and the run itself, with its device and the places that it writes, when it asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
from torch import nn

from recpipe.backend.matmul import float32_products, require_units
from recpipe.checkpoint.table_io import holds_checkpoint, newest
from recpipe.common.console import log
from recpipe.common.device import begin_on, gpu_explained, same_bits, use_device, why_no_gpu
from recpipe.common.files import EXPORTS, RunDir
from recpipe.common.machine import reset_peak_rss
from recpipe.common.owned import Owner, Writer, holds_arrays
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
from recpipe.setup.sized import sized_by_module
from recpipe.tables.config import SCRATCH, TierConfig
from recpipe.tables.stores.home import remove_crashed
from recpipe.training.dense import try_out
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
    callbacks: Sequence[L.Callback] = ()
    """Lightning callbacks beside those of the recipe."""


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
        recipe, self._module = sized_by_module(recipe, given.model, device)
        self.dataset = open_dataset(recipe.data, recipe.seed, given.dataset)
        for split, limit in recipe.trainer.limits():
            self.dataset.limit(split, limit, recipe.data.batch_size)
        require_same_data(self.dataset.fingerprint)
        if self.dataset.endless:
            require_one_pass(recipe)
        else:
            for_test = self.dataset.size("test") if "test" in self.dataset.splits else 0
            log.info(
                f"{self.dataset.size('train'):,} samples to train, {self.dataset.size('eval'):,} held out"
                + f", {for_test:,} for recpipe evaluate split=test" * bool(for_test)
            )
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
        if self._module is self.given.model:  # else its making was seeded
            L.seed_everything(self.recipe.seed, verbose=False)
        require_inputs(self.recipe, self.dataset, self.ranks, self.device)
        return Unplaced.of(self.recipe, self.dataset, self.device, self._module)


def require_one_pass(recipe: Recipe) -> None:
    """``UserError`` for a recipe that a stream, which has no epochs, cannot be trained by."""
    if recipe.trainer.max_epochs > 1:
        raise UserError(
            f"trainer.max_epochs={recipe.trainer.max_epochs}: a stream is read once; leave it at 1"
        )
    if isinstance(recipe.trainer.checkpoint_every, float) and recipe.trainer.max_steps is None:
        log.info("checkpoints: only when training ends; trainer.checkpoint_every=1000: every 1,000 steps")


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


def refuse_ranks(task: str) -> None:
    """Refuse several ranks for a task that starts processes itself."""
    if ProcessRank.current().world > 1:
        raise UserError(f"{task} runs in one process; start it without torchrun")


@contextmanager
def owning_places(cfg: Recipe, run_dir: RunDir) -> Iterator[None]:
    """In the block, the places outside of the run's directory that the recipe names for results are this
    run's alone. Those with another run's results, which it replaces, are then in ``run_dir.replaces``.

    Rank 0 owns them for all ranks. ``UserError`` for one that another process owns, or that has another run's
    results without ``overwrite=true``.
    """
    with ExitStack() as stack:
        if ProcessRank.current().rank == 0 and cfg.task.name in ("train", "profile"):
            trainer = cfg.trainer
            resume = newest(Path(cfg.resume).expanduser()) if cfg.resume else None
            own = run_dir.path.resolve()
            here = Owner.here(str(own), trainer.checkpoints(run_dir.path), cfg.values)
            writer, owned = Writer(here, resume, cfg.overwrite), set[Path]()
            places: list[tuple[str, Path, Callable[[Path], bool]]] = []
            if trainer.checkpoint_dir and (
                trainer.checkpoint_every is not None or trainer.best_checkpoint or trainer.callbacks
            ):
                directory = Path(trainer.checkpoint_dir).expanduser()
                places.append(("trainer.checkpoint_dir", directory, holds_checkpoint))
            for number, callback in enumerate(trainer.callbacks):
                if callback.get("dirpath"):
                    key = f"trainer.callbacks[{number}].dirpath"
                    places.append((key, Path(str(callback["dirpath"])), holds_checkpoint))
            for key in EXPORTS:
                if named := getattr(cfg.task, key.rpartition(".")[2]):
                    places.append((key, Path(named), holds_arrays))
            for key, place, holds in places:
                real = place.resolve()
                if real.is_relative_to(own) or real in owned:
                    continue
                owned.add(real)
                if stack.enter_context(writer.owning(key, place, holds)):
                    run_dir.replaces[key] = place
        yield


def remove_left_stores(tiers: TierConfig, run_dir: RunDir, resume: str | None) -> None:
    """Remove the ssd stores of killed runs from this run's directory, ``tiers.dir`` and the resumed run's
    directory.

    Rank 0 calls it, before any rank makes its store.
    """
    places = {run_dir.path / SCRATCH, tiers.directory(run_dir.path)}
    if resume:
        checkpoints = newest(Path(resume).expanduser()).parent
        places.add(checkpoints.parent / SCRATCH)
    for place in sorted(places):
        remove_crashed(place)


def choose_device(name: str) -> torch.device:
    """The device of ``trainer.device``, which becomes the current GPU of this thread.

    ``auto`` takes a GPU if there is one. Each of several processes on this machine takes the GPU of its local
    rank. ``UserError`` if torch does not see that GPU, or if a name would give one GPU to several processes,
    which NCCL refuses.
    """
    device = find_device(name)
    with gpu_explained():
        use_device(device)
    return device


def find_device(name: str) -> torch.device:
    """The same device, not used yet: this process takes no memory of a GPU."""
    kind, _, index = name.partition(":")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not there):
        return torch.device("cpu")
    process = ProcessRank.current()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here > 1 and index:
        raise UserError(
            f"trainer.device={name}: {here} processes on this machine cannot share one GPU; use "
            "trainer.device=cuda, which gives each its own, or cpu"
        )
    if here > there > 0:
        raise UserError(
            f"trainer.device={name}: torchrun started {here} processes on this machine, and torch sees "
            f"{there} CUDA devices; use --nproc-per-node={there}, or trainer.device=cpu"
        )
    number = int(index or (process.local_rank if here > 1 else 0))
    if not there:
        raise UserError(f"trainer.device={name}: torch sees no GPU ({why_no_gpu()}); use trainer.device=cpu")
    if number >= there:
        raise UserError(
            f"trainer.device={name}: torch sees {there} GPU{'s' if there > 1 else ''}, numbered from 0; use "
            f"trainer.device=cuda:{there - 1} or cpu"
        )
    return torch.device("cuda", number)
