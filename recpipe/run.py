"""A whole run, top to bottom: the recipe becomes data, tables, model, pipeline, training and a report.

Read this file first. Each line that matters calls into one room: ``config`` -> ``data`` -> ``plugin`` ->
``tables`` -> ``model`` -> ``pipeline`` -> ``training`` -> ``report``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recpipe.answers.teacher import give_teachers
from recpipe.backend.matmul import float32_products
from recpipe.checkpoint.table_files import export_parameters
from recpipe.common.console import capture_logs, log
from recpipe.common.device import gpu_explained
from recpipe.common.files import lock_run_dir
from recpipe.common.process import quieted
from recpipe.config.recipe import Recipe
from recpipe.distributed.launch import ProcessRank, begin_run
from recpipe.plugin.calls import threads_left
from recpipe.report.files import ReportFiles
from recpipe.setup.built import built
from recpipe.setup.ctx import NOTHING, RunInputs, RunResult, TaskContext, Watcher
from recpipe.setup.described import with_features
from recpipe.setup.footprint import require_memory
from recpipe.setup.planned import Planned
from recpipe.setup.training import Training
from recpipe.tasks.summary import summarize
from recpipe.tasks.task import carry_out_task
from recpipe.training.callbacks import make_callbacks
from recpipe.training.signals import exits_told
from recpipe.training.trainer import make_logger


def run(composed: DictConfig, directory: Path, command_line: Sequence[str] | None = None) -> dict[str, Any]:
    """Carry out the recipe's task in ``directory``; returns the content of report.json (or compare.json,
    assembly.json).

    ``command_line``: the overrides, if the command line started the run; Hydra has then set up the log.
    """
    return carry_out(composed, directory, command_line=command_line).report


def carry_out(
    composed: DictConfig,
    directory: Path,
    given: RunInputs = NOTHING,
    command_line: Sequence[str] | None = None,
) -> RunResult:
    """``run`` for a caller in Python, who may bring a model and data and keep the trained model open."""
    with ExitStack() as stack:
        stack.enter_context(quieted())
        stack.enter_context(gpu_explained())
        stack.enter_context(exits_told())
        begin_run()
        # 1. The recipe's values, typed and checked; the directory, which is this run's alone.
        cfg = Recipe.of(composed)
        kept = stack.enter_context(ExitStack())
        run_dir = kept.enter_context(lock_run_dir(directory))
        if command_line is None:
            stack.enter_context(capture_logs(run_dir.path if given.files else None, given.screen))
        try:
            # What the columns of its files are, if they are still to be chosen.
            cfg = with_features(cfg, directory if given.files else None)
            with ExitStack() as until_end:
                context = TaskContext(cfg, run_dir, command_line, given, until_end, train)
                outcome = train(context) if cfg.task.name == "train" else carry_out_task(context)
        finally:
            for line in () if given.keeps else threads_left():
                log.warning(line)
        if given.keeps:
            run_dir.let_go()
            kept.callback(outcome.kept.close)
            outcome.kept = kept.pop_all()
    return outcome


def train(context: TaskContext, watcher: Watcher | None = None) -> RunResult:
    """This rank's part of a training run; reports are rank 0's. ``watcher``: a task that looks at its
    steps."""
    cfg, given, directory = context.recipe, context.given, context.directory
    users = make_callbacks(cfg.trainer.callbacks, cfg.trainer.checkpoints(directory), given.callbacks)
    logger = make_logger(cfg.trainer.logger, directory) if ProcessRank.current().rank == 0 else None
    files = ReportFiles(directory)

    # 2. The device, the processes that share the work (mostly one), and the data in time order.
    run = context.joined

    # 3. The model, with tables still to be placed. 4. Plugins: each contributes its parts; conflicts are
    # refused here, before any memory is taken.
    plan = Planned.of(run, context.command_line)
    if run.leads:
        plan.write(files)
    require_memory(
        run.recipe,
        run.dataset,
        plan.unplaced.tables,
        plan.unplaced.called.module,
        plan.described,
        run.ranks,
        run.device,
    )

    with ExitStack() as open_tiers:
        # 5. Tables in their tiers, with first values or the rows of a checkpoint; proxies replace the model's
        # collections. A rank that only holds rows serves them here, until the run is over.
        placed = open_tiers.enter_context(built(run, plan))
        if placed.model is None:
            return RunResult({})
        give_teachers(placed.model.called, run.dataset, run.device)

        # 6. The pipeline in front of Lightning: read, transform, split, plan and fetch ahead.
        training = Training(run, plan, placed, watcher)

        # 7. Lightning runs the loop.
        if cfg.trainer.publish.dir is not None and watcher is None:
            # It packages, with a compiler that takes a second to import.
            from recpipe.answers.publish import Publisher

            users = [*users, Publisher(cfg.trainer.publish, training, files.late)]
        finished = training.fit(logger, users, files.late)

        # 8. The report: figures first, since what comes after them can fail.
        report = summarize(training, finished, context.command_line)
        tells = run.leads and finished.stopped is None  # who stops a run does not want to wait for plots
        if run.leads:
            files.write_json("report.json", report.to_dict())
            if watcher is not None:
                watcher.complete(training, report, files)
                files.write_json("report.json", report.to_dict())
        content = report.to_dict()
        if tells:
            # Imported here, so that training does not wait for what only reports need.
            from recpipe.report import run_table

            run_table.print_result(content, directory)
        if cfg.task.export_parameters:
            export_parameters(Path(cfg.task.export_parameters), training.model, writes=run.leads)
        # With several ranks, all would have to take part in a prediction.
        if not (given.keeps and run.ranks.world == 1):
            open_tiers.close()
        if tells and given.files and cfg.task.page:
            log.info("writing the report")
            from recpipe.report import run_page, terminal

            if files.write("report.html", lambda page: run_page.write(content, page.parent)):
                terminal.print_place(directory / "report.html")
        if finished.stopped is not None:
            log.info(finished.stopped)
        files.check()
        if finished.stopped is not None:
            raise KeyboardInterrupt
        model = training.model.eval()
        # Rounded as the run's own scores are.
        scores = float32_products(run.device, cfg.model.precision)(model.predict)
        return RunResult(
            content, plan.unplaced.called.module, scores, finished.checkpoint, open_tiers.pop_all()
        )
