"""Tasks of installed packages: functions of the typed recipe and the run's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recpipe.config.recipe import Recipe
from recpipe.distributed.launch import Process
from recpipe.plugin.calls import blaming
from recpipe.plugin.errors import PluginLoadError
from recpipe.plugin.offers import entry, imported, offered, origin_of
from recpipe.report.files import ReportFiles


def run_installed(cfg: Recipe, run_dir: Path) -> dict[str, Any]:
    """Carry out the task ``cfg.task.name``; its report is returned and written to ``run_dir/NAME.json``.

    The entry point is a function ``(recipe: Recipe, run_dir: Path) -> dict``; ``recipe.task.settings`` has
    its keys. Raises ``PluginError`` if it cannot be imported or returns anything else.
    """
    name = cfg.task.name
    ep = entry("task", name, offered("task"))
    function = imported("task", ep)
    if not callable(function):
        raise PluginLoadError(
            f"task {origin_of(ep)}: '{ep.value}' must be a function (recipe: Recipe, run_dir: Path) -> dict; "
            "correct its entry point"
        )
    with blaming(origin_of(ep), "task"):
        report = function(cfg, run_dir)
    if not isinstance(report, dict):
        raise PluginLoadError(
            f"task {origin_of(ep)} returns a {type(report).__name__}, not the report as a dict"
        )
    if Process.current().rank == 0:
        files = ReportFiles(run_dir)
        files.write_json(f"{name}.json", report)
        files.check()
    return report
