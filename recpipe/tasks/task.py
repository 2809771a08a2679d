"""The task of a recipe: found by its entry point, recpipe's own as those of other packages."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

from recpipe.distributed.launch import ProcessRank
from recpipe.plugin.calls import Origin, blaming
from recpipe.plugin.errors import PluginLoadError
from recpipe.plugin.offers import entry, imported, offered, origin_of
from recpipe.report.files import ReportFiles
from recpipe.setup.ctx import RunResult, TaskContext


def carry_out_task(context: TaskContext) -> RunResult:
    """Carry out the task ``context.recipe.task.name``; a report that it returns is written to ``NAME.json``.

    The entry point names a ``setup.ctx.Task``, or a class of one without arguments, or a function ``(recipe:
    Recipe, run_dir: Path) -> dict``. ``recipe.task.settings`` has a package's own keys. Raises
    ``PluginError`` if it cannot be imported or returns anything else.
    """
    name = context.recipe.task.name
    ep = entry("task", name, offered("task"))
    task = imported("task", ep)
    ours = origin_of(ep).distribution == Origin.distribution
    with nullcontext() if ours else blaming(origin_of(ep), "task"):
        if isinstance(task, type) and hasattr(task, "run"):
            task = task()
        run = getattr(task, "run", None)
        if callable(run):
            report = run(context)
        elif callable(task):
            report = task(context.recipe, context.directory)
        else:
            raise PluginLoadError(
                f"task {origin_of(ep)}: '{ep.value}' must have run(context) -> dict, or be a function "
                "(recipe: Recipe, run_dir: Path) -> dict; correct its entry point"
            )
    if isinstance(report, RunResult):
        return report
    if not isinstance(report, Mapping):
        raise PluginLoadError(
            f"task {origin_of(ep)} returns a {type(report).__name__}, not the report as a dict"
        )
    if ProcessRank.current().rank == 0:
        files = ReportFiles(context.directory)
        files.write_json(f"{name}.json", report)
        files.check()
    return RunResult(dict(report))
