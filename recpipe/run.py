"""A whole run, top to bottom: the recipe becomes data, tables, model, pipeline, training and a report.

Read this file first. Each line that matters calls into one room: ``data`` -> ``plugin`` -> ``tables`` ->
``model`` -> ``pipeline`` -> ``training`` -> ``report``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig

from recpipe.access.sample import AccessSample
from recpipe.backend.build import build_backend
from recpipe.backend.matmul import float32_products, require_units
from recpipe.checkpoint.table_io import OpenCheckpoint, TableCheckpointIO, checkpoints_in
from recpipe.checkpoint.trained_on import TrainedOn
from recpipe.common.console import heard, log
from recpipe.common.device import begin_on, gpu_explained, same_bits
from recpipe.common.files import EXPORTS, RunDir, hold
from recpipe.common.machine import peak_rss_bytes, reset_peak_rss
from recpipe.common.own_cache import default_cache_dir
from recpipe.common.owned import remove_arrays
from recpipe.common.process import quieted, run_start
from recpipe.common.timing import settled
from recpipe.common.words import readable_bytes
from recpipe.config.recipe import Recipe
from recpipe.config.task import (
    AdviseTask,
    CompareConfig,
    InstalledTask,
    MissesConfig,
    PlanConfig,
    ProfileConfig,
)
from recpipe.data.make import open_dataset
from recpipe.distributed.launch import Process, begin_run, joined, require_same_data
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.model.dlrm import sizes_of
from recpipe.pipeline.loader import EvalLoader, TrainLoader
from recpipe.pipeline.sample_filter import SampleFilter
from recpipe.pipeline.source import BatchSource
from recpipe.pipeline.splitting import Splitting
from recpipe.plugin.calls import threads_left
from recpipe.report.files import ReportFiles
from recpipe.setup.accumulating import accumulating, accumulating_in
from recpipe.setup.footprint import require_inputs, require_memory
from recpipe.setup.given import NOTHING, Given, Outcome
from recpipe.setup.placing import Unplaced
from recpipe.setup.prepare import (
    assemble_plugins,
    choose_device,
    closing_tiers,
    find_device,
    owning_places,
    refuse_ranks,
    remove_left_stores,
    resume_from,
)
from recpipe.setup.pretrained import Pretrained
from recpipe.tables.capabilities import SendsAhead
from recpipe.tables.owners import group_owners, is_sharded, warn_of_unused
from recpipe.tables.quantized import check_quantized
from recpipe.tables.sharding.claims import ShardClaims
from recpipe.tables.sharding.prepare import plan_shards
from recpipe.tasks.export import export_parameters
from recpipe.tasks.installed import run_installed
from recpipe.tasks.nudge import Nudge
from recpipe.tasks.plan import describe, planned_ranks, print_plan
from recpipe.tasks.profile import StepProfiler
from recpipe.tasks.summary import summarize
from recpipe.training.callbacks import check_callbacks, make_callbacks
from recpipe.training.figures import FigureLogger
from recpipe.training.intervals import Intervals
from recpipe.training.loggers import make_logger
from recpipe.training.module import RankingModule
from recpipe.training.optim import dense_optimizer, try_out
from recpipe.training.recorder import Recorder
from recpipe.training.resume import check_resumable
from recpipe.training.signals import exits_told, interruptible
from recpipe.training.trainer import fit, make_trainer, saved_last


def run(composed: DictConfig, directory: Path, command_line: Sequence[str] | None = None) -> dict[str, Any]:
    """Carry out the recipe's task in ``directory``; returns the content of report.json (or compare.json,
    assembly.json).

    ``command_line``: the overrides, if the command line started the run; Hydra has then set up the log.
    """
    return carry_out(composed, directory, command_line=command_line).report


def carry_out(
    composed: DictConfig,
    directory: Path,
    given: Given = NOTHING,
    command_line: Sequence[str] | None = None,
) -> Outcome:
    """``run`` for a caller in Python, who may bring a model and data and keep the trained model open."""
    with ExitStack() as stack:
        stack.enter_context(quieted())
        stack.enter_context(gpu_explained())
        stack.enter_context(exits_told())
        begin_run()
        # 1. The recipe's values, typed and checked; the processes that share the work (mostly one).
        cfg = Recipe.of(composed)
        kept = stack.enter_context(ExitStack())
        run_dir = kept.enter_context(hold(directory))
        if command_line is None:
            stack.enter_context(heard(run_dir.path if given.files else None, given.screen))
        try:
            outcome = _run_task(cfg, run_dir, given, command_line)
        finally:
            for line in () if given.keeps else threads_left():
                log.warning(line)
        if given.keeps:
            run_dir.let_go()
            kept.callback(outcome.kept.close)
            outcome.kept = kept.pop_all()
    return outcome


def _run_task(cfg: Recipe, run_dir: RunDir, given: Given, command_line: Sequence[str] | None) -> Outcome:
    if isinstance(cfg.task, InstalledTask):
        return Outcome(run_installed(cfg, run_dir.path))
    if cfg.scale is not None:
        refuse_ranks("task=scale")
        if cfg.scale.model is not None:
            # Imported here, so that training does not wait for its plots.
            from recpipe.tasks.scale import tell_scale

            return Outcome(tell_scale(cfg.scale, run_dir.path))
    if cfg.compare is not None:
        return Outcome(_compare(cfg, cfg.compare, run_dir, command_line))
    device = choose_device(cfg.trainer.device)
    begin_on(device)
    cfg = replace(cfg, tiers=cfg.tiers.on(device))
    try_out(cfg.optim.dense, device)
    with float32_products(device, cfg.model.precision), same_bits(cfg.trainer.deterministic, device):
        if Process.current().rank == 0 and not isinstance(cfg.task, PlanConfig):
            remove_left_stores(cfg.tiers, run_dir, cfg.resume)
        with (
            owning_places(cfg, run_dir),
            interruptible(),
            joined(cfg.topology, cfg.tiers.emulate, device) as ranks,
        ):
            return run_on(ranks, cfg, run_dir, device, given, command_line)


def _compare(
    cfg: Recipe, config: CompareConfig, run_dir: RunDir, command_line: Sequence[str] | None
) -> dict[str, Any]:
    """Compare in processes of their own. This one does not use the GPU, whose memory is theirs."""
    from recpipe.tasks.compare import compare

    refuse_ranks("task=compare")
    if command_line is None:
        raise UserError(
            "task=compare starts runs from the command line's overrides: run python -m recpipe task=compare"
        )
    device, cpu = find_device(cfg.trainer.device), torch.device("cpu")
    try_out(cfg.optim.dense, cpu)
    with float32_products(device):
        return compare(config, run_dir.path, command_line)


def run_on(
    ranks: Ranks,
    cfg: Recipe,
    run_dir: RunDir,
    device: torch.device,
    given: Given = NOTHING,
    command_line: Sequence[str] | None = None,
) -> Outcome:
    """This rank's part of a run; reports are rank 0's."""
    started = run_start()
    reset_peak_rss()  # of an earlier run in this process
    trainer_config, model_config, tier_config = cfg.trainer, cfg.model, cfg.tiers
    leads = ranks.rank == 0
    require_units(model_config.precision, device, model_config.emulate_bfloat16)
    profile = cfg.task if isinstance(cfg.task, ProfileConfig) else None
    if profile is not None:
        trainer_config = profile.shortened(trainer_config)
    checkpoints = trainer_config.checkpoints(run_dir.path)
    logger = make_logger(trainer_config.logger, run_dir.path) if leads else None
    own_callbacks = make_callbacks(trainer_config.callbacks, checkpoints)

    # 2. Data: a schema, two splits in time order, batches from any position.
    dataset = open_dataset(cfg.data, cfg.seed, given.dataset)
    require_same_data(dataset.fingerprint)
    log.info(f"{dataset.size('train'):,} samples to train, {dataset.size('eval'):,} held out")
    part, cfg = cfg.data.batch_size, accumulating(cfg, dataset)
    steps = trainer_config.steps(dataset.num_batches("train", cfg.data.batch_size))

    # 3. The model, with tables still to be placed, and where its ids are in a batch.
    L.seed_everything(cfg.seed, verbose=False)
    require_inputs(cfg, dataset, ranks, device)
    unplaced = Unplaced.of(cfg, dataset, device, given.model)
    if isinstance(cfg.task, MissesConfig):
        # Imported here, so that training does not wait for its plots.
        from recpipe.tasks.misses import tell_misses

        return Outcome(tell_misses(cfg, cfg.task, dataset, unplaced.inputs, run_dir.path))
    if isinstance(cfg.task, AdviseTask):
        from recpipe.tasks.advise.advise import advise

        return Outcome(advise(cfg, dataset, unplaced, device, run_dir.path, command_line))
    if cfg.scale is not None:
        from recpipe.perf.scale.own import own_model
        from recpipe.tasks.scale import tell_scale

        size, module = cfg.data.batch_size, unplaced.called.module
        own = own_model(model_config, module, unplaced.inputs, dataset, size)
        return Outcome(tell_scale(cfg.scale, run_dir.path, own))

    # 4. Plugins: each contributes its parts; conflicts are refused here, before any memory is taken.
    log.info("planning: plugins %s", ", ".join(cfg.plugins) or "none")
    assembly, unplaced = assemble_plugins(cfg, dataset, unplaced, device, steps, ranks)
    if assembly.plugins:
        log.info("plugins' parts: %s", ", ".join(assembly.points()) or "none")
    check_callbacks(assembly.callbacks)
    if cfg.data.batch_size > part:
        assembly = accumulating_in(assembly, part)
    called, tables, inputs = unplaced.called, unplaced.tables, unplaced.inputs
    owners = group_owners(tier_config, assembly, tables)
    shards, sharded = None, is_sharded(tier_config, assembly)
    if not sharded:
        warn_of_unused(command_line or (), owners)
    check_quantized(assembly.quantizing, tables, owners, sharded, device, ranks)
    if sharded:
        world = planned_ranks(cfg.task, len(tables.tables)) or ranks.world
        claims = ShardClaims.of(assembly)
        shards = plan_shards(tables, tier_config, claims, device, cfg.data.batch_size, ranks, world, owners)
    rounded = model_config.precision != "float32"
    described = describe(assembly, tables, tier_config, owners, ranks, cfg.data.batch_size, shards, rounded)
    files = ReportFiles(run_dir.path)
    if leads:
        files.write_json("assembly.json", described)
        if shards is not None:
            files.write_json("plan.json", shards[1].to_dict())
        files.check()
    if isinstance(cfg.task, PlanConfig):
        print_plan(described, run_dir.path)
        return Outcome(described)

    require_memory(cfg, dataset, tables, called.module, described, ranks, device)

    # 5. Tables in their tiers, with first values or the rows of a checkpoint; fronts replace the model's
    # collections. A rank that only holds rows serves them here.
    preparing = peak_rss_bytes()
    reset_peak_rss()
    pretrained = opened = None
    if model_config.pretrained:
        file = Path(model_config.pretrained).expanduser()
        pretrained = Pretrained.of(file, called.module, tables)
        unplaced = unplaced.starting_with(pretrained.rows)
    resume = resume_from(cfg.resume, checkpoints)
    if resume is not None:
        opened = OpenCheckpoint.of(resume, tables.shapes())
        unplaced = unplaced.starting_with(opened.rows)
    of = "" if resume is None else f" of {resume}"
    log.info("building %d tables%s: %s", len(tables.tables), of, readable_bytes(tables.total_bytes))
    roomy = trainer_config.backend != "plain"
    saved = None if opened is None else opened.shards
    embeddings = unplaced.build(cfg, dataset, owners, device, run_dir, ranks, shards, roomy, saved)
    trainers = ranks.channel(ranks.trainers)
    with ExitStack() as open_tiers:
        tiers = open_tiers.enter_context(closing_tiers(embeddings, inputs, ranks))
        if not ranks.trains:
            embeddings.serve()
            return Outcome({})
        model = unplaced.over(embeddings, assembly.skipper)

        if pretrained is not None:
            names = pretrained.load_dense(model)
            log.info("starting from %d tensors of %s", len(names), model_config.pretrained)

        # 6. The pipeline in front of Lightning: read, transform, split, plan and fetch ahead.
        ahead = tier_config.prefetch and bool(embeddings.each(SendsAhead))
        source = BatchSource(dataset, cfg.data.batch_size, assembly.feed)
        filtered = SampleFilter.of(assembly.skipper, model.rows)
        splitting = Splitting.of(
            assembly.splitter, trainer_config.split, cfg.data.batch_size, tiers, trainers
        )
        accesses = AccessSample(tables) if leads and profile is None else None
        loader = TrainLoader(source, inputs, tiers, device, ranks, ahead, filtered, splitting, accesses)
        evaluation = EvalLoader(dataset, part, inputs, device, ranks)
        make_optimizer = partial(dense_optimizer, cfg.optim.dense)
        backend = build_backend(
            trainer_config.backend,
            model,
            assembly.splitter,
            unplaced.first_batch,
            cfg.data.batch_size,
            device,
            trainers,
            default_cache_dir() / "backend",
            assembly.step,
        )
        module = RankingModule(model, make_optimizer, loader, trainers, backend, assembly.around_step)
        if leads and cfg.task.export_predictions is not None:
            module.evaluation.quality.folder = Path(cfg.task.export_predictions)

        # 7. Lightning runs the loop.
        recorder = Recorder(loader, started, Intervals(embeddings))
        resumable = partial(check_resumable, module)
        noted = sizes_of(model_config, dataset)
        recipe = TrainedOn.of(cfg.values, dataset).to_dict()
        checkpoint_io = TableCheckpointIO(
            embeddings, tables.shapes(), leads, resumable, noted, recipe, opened
        )
        del opened  # whose trainer.pt may be large
        for key, place in run_dir.replaces.items():
            if key in EXPORTS:
                remove_arrays(place)
            else:
                checkpoint_io.replaces += checkpoints_in(place)
        figures = FigureLogger(recorder)
        callbacks = [recorder, figures, *(owned.part for owned in assembly.callbacks), *own_callbacks]
        if cfg.task.nudge:
            callbacks.append(Nudge(embeddings, module.dense))
        profiler = StepProfiler(profile, recorder, model, device) if profile and leads else None
        if profiler is not None:
            callbacks.insert(1, profiler)
        evaluates = len(evaluation) > 0 and profile is None and given.evaluates
        trainer = make_trainer(
            trainer_config, loader, evaluates, checkpoint_io, callbacks, logger, run_dir.path, trainers
        )
        if logger is not None:
            logger.log_hyperparams(cfg.values)
        with ranks.closing(module.close):
            stopped = fit(trainer, module, loader, evaluation, recorder, resume, files.late)

        embeddings.write_back()
        written_back = settled(device)

        # 8. The report: figures first, since what comes after them can fail.
        report = summarize(
            cfg,
            dataset,
            assembly,
            described,
            tables,
            embeddings,
            module,
            ranks,
            resume,
            recorder,
            written_back,
            preparing,
            command_line,
        )
        if leads:
            files.write_json("report.json", report.to_dict())
            if profiler is not None:
                # Imported here, so that training does not wait for what only profiles need.
                from recpipe.tasks.profile_predicted import predicted_step

                alone = ranks.world == 1 and device.type == "cpu"
                predict = partial(predicted_step, cfg, dataset, model, backend, alone)
                profiler.complete(report, model_config, files, predict)
                files.write_json("report.json", report.to_dict())
        if leads and stopped is None:
            # Imported here, so that training does not wait for what only reports need.
            from recpipe.report import terminal

            terminal.print_result(report.to_dict(), run_dir.path)
        if cfg.task.export_parameters:
            target = Path(cfg.task.export_parameters)
            export_parameters(target, model, writes=leads)
        # With several ranks, all would have to take part in a prediction.
        if not (given.keeps and ranks.world == 1):
            open_tiers.close()
        content = report.to_dict()
        # A user who stops a run does not want to wait for plots.
        if leads and stopped is None and given.files and cfg.task.page:
            log.info("writing the report")
            from recpipe.report import html

            if files.write("report.html", lambda page: html.write(content, page.parent)):
                terminal.print_place(run_dir.path / "report.html")
        if stopped is not None:
            log.info(stopped)
        files.check()
        if stopped is not None:
            raise KeyboardInterrupt
        checkpoint = saved_last(trainer) if recorder.steps else resume
        model.eval()
        # Rounded as the run's own scores are.
        scores = float32_products(device, model_config.precision)(model.predict)
        return Outcome(content, called.module, scores, checkpoint, open_tiers.pop_all())
