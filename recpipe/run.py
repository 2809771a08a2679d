"""A whole run, top to bottom: the recipe becomes data, tables, model, pipeline, training and a report.

Read this file first. Each line that matters is a call into the folder of that name:
``data`` -> ``plugin`` -> ``embedding`` -> ``model`` -> ``pipeline`` -> Lightning -> ``report``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig

from recpipe.checkpoint import TableCheckpointIO
from recpipe.clock import run_start
from recpipe.config import knobs, typed
from recpipe.data.make import open_dataset
from recpipe.embedding.build import TierConfig, build_embeddings, is_sharded, plan_shards, sends_ahead
from recpipe.embedding.tables import TableOptimizer, TableSet
from recpipe.errors import UserError
from recpipe.launch import Process, Topology, joined, require_same_data
from recpipe.metrics import reset_peak_rss
from recpipe.model.matmul import vector_units, warn_without_units
from recpipe.model.module import RankingModule
from recpipe.model.ranker import ModelConfig, Ranker
from recpipe.optim import dense_optimizer
from recpipe.pipeline.loader import EvalLoader, TrainLoader
from recpipe.quiet import quiet_libraries
from recpipe.ranks import Ranks
from recpipe.report.files import ReportFiles
from recpipe.run_dir import RunDir, hold
from recpipe.setup import (
    assemble_plugins,
    choose_device,
    closing_tiers,
    output_dir,
    refuse_ranks,
    remove_left_stores,
    resume_from,
)
from recpipe.tasks.export import export_parameters
from recpipe.tasks.plan import describe, print_plan
from recpipe.tasks.profile import StepProfiler, profiling
from recpipe.tasks.summary import summarize
from recpipe.tasks.unshard import load_pretrained
from recpipe.training.config import TrainerConfig
from recpipe.training.recorder import Recorder
from recpipe.training.trainer import fit, make_trainer


def run(cfg: DictConfig) -> dict[str, Any]:
    """Carry out the recipe's task; returns the content of report.json (or compare.json, assembly.json)."""
    quiet_libraries()
    task = cfg.task.name
    if task not in ("train", "profile", "compare", "plan"):
        raise UserError(f"task.name={task} is unknown; choose train, profile, compare or plan")
    device = choose_device(cfg.trainer.device)
    with hold(output_dir()) as run_dir, vector_units(device):
        if task == "compare":
            from recpipe.tasks.compare import compare

            refuse_ranks("task=compare")
            return compare(cfg, run_dir.path)
        return _run_by_ranks(cfg, run_dir, device)


def _run_by_ranks(cfg: DictConfig, run_dir: RunDir, device: torch.device) -> dict[str, Any]:
    # 1. The recipe's values, typed and checked; the processes that share the work (mostly one).
    tier_config = typed(TierConfig, cfg.tiers, "tiers")
    topology = typed(Topology, cfg.topology, "topology")
    if Process.current().rank == 0 and cfg.task.name != "plan":
        remove_left_stores(tier_config, run_dir, cfg.resume)
    with joined(topology, tier_config.emulation, device) as ranks:
        return run_on(ranks, cfg, run_dir, device, tier_config)


def run_on(
    ranks: Ranks, cfg: DictConfig, run_dir: RunDir, device: torch.device, tier_config: TierConfig
) -> dict[str, Any]:
    """This rank's part of a run; reports are rank 0's."""
    started = run_start()
    trainer_config = typed(TrainerConfig, cfg.trainer, "trainer")
    model_config = typed(ModelConfig, cfg.model, "model")
    leads = ranks.rank == 0
    if leads:
        warn_without_units(model_config.precision, device)
    profile = profiling(cfg)
    if profile is not None:
        trainer_config = profile.shortened(trainer_config)

    # 2. Data: a schema, two splits in time order, batches from any position.
    dataset = open_dataset(cfg.data, cfg.seed)
    require_same_data(dataset.fingerprint)
    steps = trainer_config.steps(dataset.num_batches("train", cfg.data.batch_size))
    tables = TableSet(
        dataset.schema.sparse,
        model_config.embedding_dim,
        typed(TableOptimizer, cfg.optim.tables, "optim.tables"),
        cfg.seed,
    )

    # 3. Plugins: each contributes its parts; conflicts are refused here, before any memory is taken.
    assembly = assemble_plugins(cfg, dataset, tables, tier_config, device, steps, ranks)
    shards = None
    if is_sharded(tier_config, assembly):
        world = (cfg.task.name == "plan" and cfg.task.ranks) or ranks.world
        shards = plan_shards(tables, tier_config, assembly, device, cfg.data.batch_size, ranks, world)
    described = describe(assembly, tables, tier_config, ranks, shards, model_config.precision == "bfloat16")
    files = ReportFiles(run_dir.path)
    if leads:
        files.write_json("assembly.json", described)
        if shards is not None:
            files.write_json("plan.json", shards[1].to_dict())
        files.check()
    if cfg.task.name == "plan":
        print_plan(described, run_dir.path)
        return described

    # 4. Tables in their tiers, and the model over them. A rank that only holds rows serves them here.
    reset_peak_rss()
    embeddings = build_embeddings(
        tables,
        tier_config,
        assembly,
        device,
        run_dir,
        cfg.data.batch_size,
        ranks,
        shards,
        partial(dataset.ids_per_bag, cfg.data.batch_size),
    )
    trainers = ranks.channel(ranks.trainers)
    with closing_tiers(embeddings, ranks) as tiers:
        if not ranks.trains:
            embeddings.serve()
            return {}
        L.seed_everything(cfg.seed, verbose=False)
        ranker = Ranker(model_config, embeddings, len(dataset.schema.dense), device)

        if model_config.pretrained:
            names = load_pretrained(Path(model_config.pretrained).expanduser(), embeddings, tables, ranker)
            print(f"starting from {len(names)} tensors of {model_config.pretrained}")

        # 5. The pipeline in front of Lightning: read, transform, split, plan and fetch ahead.
        ahead = shards is not None and sends_ahead(tier_config, embeddings)
        loader = TrainLoader(dataset, cfg.data.batch_size, assembly, tiers, device, ranks, ahead)
        evaluation = EvalLoader(dataset, cfg.data.batch_size, device, ranks)
        make_optimizer = partial(dense_optimizer, knobs(cfg.optim.dense, "optim.dense"))
        module = RankingModule(ranker, make_optimizer, assembly, loader, trainers)

        # 6. Lightning runs the loop.
        recorder = Recorder(loader, started)
        checkpoint_io = TableCheckpointIO(embeddings, tables.shapes(), writes=leads)
        callbacks = [recorder, *(owned.part for owned in assembly.callbacks)]
        profiler = StepProfiler(profile, recorder, device) if profile and leads else None
        if profiler is not None:
            callbacks.insert(1, profiler)
        evaluates = len(evaluation) > 0 and profile is None
        trainer = make_trainer(
            trainer_config, loader, evaluates, checkpoint_io, callbacks, run_dir.path, leads
        )
        resume = resume_from(cfg.resume, trainer_config.checkpoints(run_dir.path))
        stopped = fit(trainer, module, loader, evaluation, recorder, resume, files.late)

        # 7. What it did: the figures first, since whatever comes after them can fail.
        report = summarize(cfg, dataset, assembly, described, tables, embeddings, module, recorder, ranks)
        if leads:
            # Here, not above: training does not wait for jinja2 and matplotlib.
            from recpipe.report import html, terminal

            files.write_json("report.json", report.to_dict())
            if profiler is not None:
                profiler.complete(report, model_config, len(dataset.schema.dense), tables, files)
                files.write_json("report.json", report.to_dict())
            terminal.print_result(report.to_dict(), run_dir.path)
        if cfg.task.export_parameters:
            target = Path(cfg.task.export_parameters)
            export_parameters(target, embeddings, tables, ranker, writes=leads)
    content = report.to_dict()
    if leads and files.write("report.html", lambda page: html.write(content, page.parent)):
        terminal.print_place(run_dir.path / "report.html")
    if stopped is not None:
        print(stopped)
    files.check()
    if stopped is not None:
        raise KeyboardInterrupt
    return content
