"""task=characterize: what each operator of a step does, how long it takes, and what bounds it.

The operators of any recipe, checkpoint or package, of a forward pass without gradients or of a step of
training, by batch size, against this machine's limits (after Gupta et al., HPCA 2020, and Park et al., "Deep
Learning Inference in Facebook Data Centers", 2018).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from recpipe.answers.manifest import is_package
from recpipe.answers.teacher import give_teachers
from recpipe.answers.trained import Trained, open_trained
from recpipe.backend.build import convert_for_loop
from recpipe.common.console import log
from recpipe.common.machine import Load, used_by_others
from recpipe.common.own_cache import default_cache_dir
from recpipe.common.words import quoted
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.data.parts import batch_size
from recpipe.errors import UserError, shown
from recpipe.pipeline.placed import PlacedModel
from recpipe.report.environment import environment
from recpipe.report.files import ReportFiles
from recpipe.setup.built import built
from recpipe.setup.ctx import RunResult, TaskContext, find_device, refuse_ranks
from recpipe.setup.footprint import require_memory
from recpipe.setup.planned import Planned
from recpipe.tasks.interleaved import RUNS
from recpipe.tasks.process import interrupt_on_sigterm, run_apart
from recpipe.training.dense import dense_optimizer
from recpipe_deeprecsys.characterize import page
from recpipe_deeprecsys.characterize.config import NAME, SECTION, TRAINING, CharacterizeConfig
from recpipe_deeprecsys.characterize.ids import accesses, tables_of
from recpipe_deeprecsys.characterize.package import Package
from recpipe_deeprecsys.characterize.precision import studied
from recpipe_deeprecsys.characterize.roofs import Machine
from recpipe_deeprecsys.characterize.steps import Stepped, of_model
from recpipe_deeprecsys.characterize.told import told_steps

BATCHES = 4
"""Different batches of each size, which steps take in turn."""
FREE = ("data", "tiers", "trainer", "metrics", "seed")
"""Sections of the command line that a checkpoint's recipe takes."""


class Characterize:
    """What each operator of a step does, how long it takes, and what bounds it."""

    def run(self, context: TaskContext) -> RunResult:
        """Write characterize.json and .html, and print the tables."""
        refuse_ranks(f"task={NAME}")
        config = context.recipe.section(CharacterizeConfig, SECTION)
        if find_device(context.recipe.trainer.device).type != "cpu":
            raise UserError(
                "task=characterize times the operators of a CPU: add trainer.device=cpu; the kernels of a "
                "GPU are in the trace of task=profile"
            )
        if config.recipes:
            models = beside(config, context)
        else:
            models = [of_source(context, config) if config.source else of_recipe(context, config)]
        told = {"schema": 1, "task": NAME, "models": models, "environment": environment()}
        files = ReportFiles(context.directory)
        files.write_json(f"{NAME}.json", told)
        files.write(f"{NAME}.html", lambda path: page.write(told, path.parent))
        page.show_tables(told, context.directory / f"{NAME}.html")
        files.check()
        return RunResult(told)


def beside(config: CharacterizeConfig, context: TaskContext) -> list[Any]:
    """Characterise ``config.recipes`` one after the other, each in a process of its own, whose memory is free
    again afterwards; their models in order."""
    if context.command_line is None:
        raise UserError(f"{SECTION}.recipes are words of the command line: run python -m recpipe task={NAME}")
    own = (f"{SECTION}.recipes", "hydra.run.dir")
    common = [word for word in context.command_line if word.lstrip("+").partition("=")[0] not in own]
    models = []
    with interrupt_on_sigterm():
        for number, text in enumerate(config.recipes):
            try:
                words = shlex.split(text)
            except ValueError as fault:
                raise UserError(f"{SECTION}.recipes: {shown(text)}: {fault}") from fault
            directory = context.directory / RUNS / str(number)
            log.info("recipe %d of %d: %s", number + 1, len(config.recipes), text)
            try:
                run_apart([*common, *words, quoted("hydra.run.dir", directory)], directory)
            except UserError as error:
                raise UserError(f"{SECTION}.recipes: '{shown(text)}': {error}") from error
            (found,) = json.loads((directory / f"{NAME}.json").read_text(encoding="utf-8"))["models"]
            models.append({**found, "name": text})
    return models


def of_recipe(context: TaskContext, config: CharacterizeConfig) -> dict[str, Any]:
    """Characterise the recipe's own model, all its rows in memory."""
    cfg = context.recipe
    if config.study:
        raise UserError(
            f"{SECTION}.study is about a trained model's weights: name its checkpoint, {SECTION}.source=RUN"
        )
    if cfg.plugins:
        raise UserError(
            f"task=characterize looks at a model's operators, all rows in memory: leave "
            f"+plugin={','.join(cfg.plugins)} out"
        )
    machine = Machine()
    resident = replace(context, recipe=replace(cfg, tiers=replace(cfg.tiers, policy="resident")))
    run = resident.joined
    plan = Planned.of(run)
    unplaced = plan.unplaced
    require_memory(
        run.recipe,
        run.dataset,
        unplaced.tables,
        unplaced.called.module,
        plan.described,
        run.ranks,
        run.device,
    )
    with built(run, plan) as placed:
        assert placed.model is not None, "one process trains"
        give_teachers(placed.model.called, run.dataset, run.device)
        sizes = config.batch_sizes or [run.recipe.data.batch_size]
        cache = default_cache_dir() / "backend"
        convert_for_loop(cfg.trainer.kernels, placed.model, max(sizes), run.device, cache)
        name = type(placed.model.module).__name__
        return characterized(name, placed.model, run.dataset, run.recipe, config, machine)


def of_source(context: TaskContext, config: CharacterizeConfig) -> dict[str, Any]:
    """Characterise a checkpoint, or a package."""
    source = Path(str(config.source)).expanduser()
    if is_package(source):
        return of_package(source, config, context.recipe)
    if not source.exists():
        raise UserError(
            f"{SECTION}.source={shown(str(source), 200)}: there is no such checkpoint, run or package"
        )
    words = [w for w in context.command_line or () if w.partition("=")[0].partition(".")[0] in FREE]
    if not any(word.startswith("tiers") for word in words):
        words.append("tiers.policy=resident")
    trained = open_trained(source, words)
    if type(trained) is not Trained:
        raise UserError(
            f"{trained.directory} is quantized, and not taken apart as it is: package it (recpipe package), "
            f"and name the package, {SECTION}.source=PACKAGE"
        )
    machine = Machine()
    rows = studied(trained.directory) if config.study else None
    with trained.scoring() as scoring:
        give_teachers(scoring.model.called, scoring.dataset, scoring.device)
        name = str(trained.directory)
        told = characterized(name, scoring.model, scoring.dataset, trained.cfg, config, machine)
        return {**told, "precision": rows}


def of_package(directory: Path, config: CharacterizeConfig, cfg: Recipe) -> dict[str, Any]:
    """Characterise a package, which scores candidates that are drawn."""
    asked = f"mode={TRAINING}" if config.mode == TRAINING else "study=true" if config.study else None
    if asked is not None:
        raise UserError(
            f"{SECTION}.{asked}: {directory} is a package, which is neither trained nor taken apart: name "
            "the checkpoint that it was made from"
        )
    sizes = config.batch_sizes or [cfg.data.batch_size]
    package, machine = Package(directory, config.ids, max(sizes), cfg.seed), Machine()
    compiled: dict[int, float] = {}

    def step(size: int) -> Stepped:
        found, compiled[size] = package.stepped(size, config.seconds)
        return found

    told = told_model(str(directory), config, sizes, step, machine)
    for each in told["batches"]:
        each["compiled_seconds"] = compiled[each["batch_size"]]
    return {**told, "tables": package.tables(), "skew": None, "reuse": None}


def characterized(
    name: str,
    model: PlacedModel,
    dataset: Dataset,
    cfg: Recipe,
    config: CharacterizeConfig,
    machine: Machine,
) -> dict[str, Any]:
    """A model's steps by batch size, its tables and their ids."""

    def step(size: int) -> Stepped:
        optimizer = None
        if config.mode == TRAINING:
            parameters = {n: p for n, p in model.dense_parameters().items() if p.requires_grad}
            optimizer = dense_optimizer(cfg.optim.dense, parameters.values(), [*parameters])
        return of_model(model, batches_of(model, dataset, size), config.seconds, optimizer)

    told = told_model(name, config, config.batch_sizes or [cfg.data.batch_size], step, machine)
    tables = tables_of(model.embeddings.tables)
    return {**told, "tables": tables, **accesses(cfg, dataset, model, config.batches)}


def told_model(
    name: str,
    config: CharacterizeConfig,
    sizes: Sequence[int],
    step: Callable[[int], Stepped],
    machine: Machine,
) -> dict[str, Any]:
    """Steps of each of ``sizes`` against the machine's limits, which are measured anew if an operator is
    faster than they allow."""
    found: list[tuple[int, Stepped]] = []
    before = Load.now()
    for size in sizes:
        log.info("timing steps of %s samples", f"{size:,}")
        found.append((size, step(size)))
    others = used_by_others(before)
    batches = [told_steps(*pair, machine.roofs) for pair in found]
    if any(each["above"] for each in batches) and not machine.again:
        machine.measure_again()
        batches = [told_steps(*pair, machine.roofs) for pair in found]
    return {
        "name": name,
        "mode": config.mode,
        "batches": batches,
        "machine": machine.roofs.to_dict(),
        "measured_again": machine.again,
        "disturbed": machine.disturbed,
        "others_cpu_share": others,
        "precision": None,
    }


def batches_of(model: PlacedModel, dataset: Dataset, size: int) -> list[Any]:
    """Up to ``BATCHES`` whole batches of ``size`` samples, their ids checked."""
    found = []
    for batch in islice(_whole(dataset, size), BATCHES):
        if model.embeddings.growing is not None:
            batch = model.embeddings.growing.rows_of(batch)
        model.inputs.require_ids(model.inputs.each(batch))
        found.append(batch)
    if not found:
        raise UserError(
            f"{SECTION}.batch_sizes={size}: the data have {dataset.size('train'):,} samples to train: choose "
            "fewer"
        )
    return found


def _whole(dataset: Dataset, size: int) -> Iterator[Any]:
    return (batch for batch in dataset.batches("train", size) if batch_size(batch) == size)
