"""From a built model to a trained one: the pipeline in front of Lightning, and Lightning's loop."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import Logger

from recpipe.access.sample import AccessSample
from recpipe.backend.build import build_backend
from recpipe.backend.compiled import compile_dense
from recpipe.checkpoint.table_io import TableCheckpointIO, checkpoints_in
from recpipe.checkpoint.trained_on import TrainedOn
from recpipe.common.console import log
from recpipe.common.files import EXPORTS
from recpipe.common.own_cache import default_cache_dir
from recpipe.common.owned import remove_arrays
from recpipe.common.timing import synchronized_time
from recpipe.errors import UserError, shown
from recpipe.model.dlrm import sizes_of
from recpipe.pipeline.loader import EvalLoader, TrainLoader
from recpipe.pipeline.placed import PlacedModel
from recpipe.pipeline.source import BatchSource, SampleFilter
from recpipe.pipeline.splitting import Splitting
from recpipe.setup.built import Built
from recpipe.setup.ctx import Joined, Watcher
from recpipe.setup.planned import Planned
from recpipe.training.averages import Averages, Pace
from recpipe.training.callbacks import Nudge
from recpipe.training.clipping import Clipping
from recpipe.training.dense import dense_groups, dense_optimizer
from recpipe.training.module import RankingModule
from recpipe.training.progressive import Progressive
from recpipe.training.rates import Rates
from recpipe.training.recorder import Recorder
from recpipe.training.resume import check_resumable
from recpipe.training.trainer import fit, make_trainer


@dataclass(frozen=True)
class Finished:
    """How a training ended. ``stopped``: the message if a signal ended it early. ``checkpoint``: of the last
    step; None if none was written. ``written_back``: when all rows were, by ``perf_counter``."""

    stopped: str | None
    checkpoint: Path | None
    written_back: float


class Training:
    """The run of a model: batches read, transformed, split, planned and fetched ahead; the module that
    Lightning trains; and the recorder of its steps."""

    def __init__(self, run: Joined, plan: Planned, built: Built, watcher: Watcher | None) -> None:
        assert built.model is not None
        self.run, self.plan, self.built, self.watcher = run, plan, built, watcher
        self.model: PlacedModel = built.model
        cfg, assembly, device, ranks = run.recipe, plan.assembly, run.device, run.ranks
        inputs, embeddings = plan.unplaced.inputs, built.embeddings
        self.model.called.check(plan.unplaced.first_batch)
        trainers, size = ranks.channel(ranks.trainers), cfg.data.batch_size
        loader = TrainLoader(
            BatchSource(run.dataset, size, assembly.feed),
            inputs,
            embeddings.groups,
            device,
            ranks,
            cfg.tiers.prefetch and all(tables.sends for tables in embeddings.groups),
            SampleFilter.of(assembly.skipper, self.model.rows),
            Splitting.of(assembly.splitter, cfg.trainer.split, size, embeddings.groups, trainers),
            AccessSample(plan.unplaced.tables) if run.leads and watcher is None else None,
            embeddings.growing,
            self.model.called.labels.of_own,
        )
        growing = embeddings.growing
        self.evaluation = EvalLoader(run.dataset, run.micro_batch, inputs, device, ranks, growing=growing)
        backend = build_backend(
            cfg.trainer.kernels,
            self.model,
            assembly.splitter,
            plan.unplaced.first_batch,
            size,
            device,
            trainers,
            default_cache_dir() / "backend",
            assembly.step,
        )
        if chosen := cfg.trainer.compile:
            arguments = {} if chosen is True else {k: v for k, v in asdict(chosen).items() if v is not None}
            compile_dense(self.model.module, arguments)
        names = list(self.model.dense_parameters())
        make_optimizer = partial(dense_optimizer, cfg.optim.dense, names=names)
        self.module = RankingModule(
            self.model,
            make_optimizer,
            loader,
            trainers,
            backend,
            assembly.around_step if assembly.step else nullcontext,
            Clipping.of(cfg.trainer),
            cfg.metrics,
        )
        if run.leads and cfg.task.export_predictions is not None:
            self.module.evaluation.write_to(Path(cfg.task.export_predictions))
        groups = [group.tables for group in embeddings.tables.groups]
        self.rates = Rates(dense_groups(cfg.optim.dense), groups)
        self.averages: Averages | None = None
        if (average := cfg.trainer.average) is not None:
            pace, clocks = Pace.of(cfg.trainer, len(loader)), [group.optimizer.clock for group in groups]
            self.averages = Averages(average, pace, self.model.dense_parameters(), clocks)
            if average.kind == "swa":
                self.rates.settle(cfg.trainer.swa, pace.start)
        self.recorder = Recorder(loader, run.started, embeddings, self.rates)
        self.progressive = Progressive(run.dataset.window) if run.dataset.window else None

    def fit(self, logger: Logger | None, users: list[L.Callback], late: list[UserError]) -> Finished:
        """Train, evaluate at the end, and write all rows back.

        ``users``: the callbacks of the recipe. ``late`` gets the errors of writing after the last step, which
        must not lose the figures.
        """
        run, module, recorder = self.run, self.module, self.recorder
        cfg, loader, trainers = run.recipe, self.module.loader, self.module.trainers
        callbacks = [
            *self.rates.callbacks(),
            *([self.averages] if self.averages is not None else ()),
            recorder,
            *([self.progressive] if self.progressive is not None else ()),
            *([self.watcher.callback(self)] if self.watcher is not None and run.leads else ()),
            *(owned.part for owned in self.plan.assembly.callbacks),
            *users,
            *([Nudge(self.built.embeddings, module.dense)] if cfg.task.nudge else ()),
        ]
        evaluates = len(self.evaluation) > 0 and self.watcher is None and run.given.evaluates
        trainer = make_trainer(
            cfg.trainer,
            loader,
            evaluates,
            self._checkpoint_io(),
            callbacks,
            logger,
            run.run_dir.path,
            trainers,
        )
        if logger is not None:
            logger.log_hyperparams(cfg.values)
        try:
            with run.ranks.closing(module.close):
                stopped, saved = fit(trainer, module, self.evaluation, recorder, self.built.resume, late)
        except Exception as fault:
            # A callback given in Python may have raised it.
            if run.given.callbacks and not isinstance(fault, UserError):
                kind, why = type(fault).__name__, shown(fault, 300)
                log.info("ended at step %d: %s: %s", module.global_step, kind, why)
            raise
        self.built.embeddings.write_back()
        checkpoint = saved if recorder.steps else self.built.resume
        return Finished(stopped, checkpoint, synchronized_time(run.device))

    def _checkpoint_io(self) -> TableCheckpointIO:
        """Writes tables and trainer, and replaces what an earlier run left in the places of this one."""
        run, built = self.run, self.built
        # The opened checkpoint is handed on, not kept: its trainer.pt may be large.
        opened, built.opened = built.opened, None
        written = TableCheckpointIO(
            built.embeddings,
            self.plan.unplaced.tables.shapes(),
            run.leads,
            partial(check_resumable, self.module),
            sizes_of(run.recipe.model, run.dataset),
            TrainedOn.of(run.recipe.values, run.dataset).to_dict(),
            opened,
            built.embeddings.growing,
        )
        for key, place in run.run_dir.replaces.items():
            if key in EXPORTS:
                remove_arrays(place)
            else:
                written.replaces += checkpoints_in(place)
        return written
