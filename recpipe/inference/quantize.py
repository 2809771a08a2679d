"""``recpipe quantize CHECKPOINT +plugin=NAME``: makes a finished model smaller by a plugin's method."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from recpipe.common.console import alone, heard, show
from recpipe.common.quiet import quieted
from recpipe.common.run_dir import hold
from recpipe.config.compose import active_plugins, compose
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError
from recpipe.inference.source import FloatCheckpoint
from recpipe.inference.trained import open_trained
from recpipe.plugin.load import activate
from recpipe.plugin.model_quantizer import FinishedModel, ModelQuantizer, Quantized
from recpipe.report.environment import environment
from recpipe.report.record import SCHEMA

log = logging.getLogger(__name__)
QUANTIZED = "model"
"""The folder of the quantized checkpoint in the output directory."""
_OF_PLUGINS = ("plugin", "plugins")


def quantize_checkpoint(
    checkpoint: str | Path,
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    model: nn.Module | None = None,
    dataset: Dataset | None = None,
    screen: bool = True,
) -> dict[str, Any]:
    """Quantize ``checkpoint`` by the plugin that ``overrides`` name; returns the report's content.

    ``output``: the directory for the report, and for the quantized checkpoint in its folder ``model``; None:
    ``quantized`` beside the checkpoint's folder. The other arguments are those of ``open_trained``.
    """
    mine = [word for word in overrides if _section(word) in _OF_PLUGINS]
    others = [word for word in overrides if _section(word) not in _OF_PLUGINS]
    quantizer = _quantizer(active_plugins(compose(mine)))
    trained = open_trained(checkpoint, others, model, dataset)
    directory = _output(trained.directory) if output is None else Path(output).expanduser().absolute()
    with quieted(), alone(), hold(directory), heard(directory, screen):
        log.info("quantizing %s into %s", trained.directory, directory)
        finished = FinishedModel(
            FloatCheckpoint.of(trained),
            trained.dataset,
            trained.cfg.data.batch_size,
            directory,
            directory / QUANTIZED,
        )
        made = quantizer.quantize(finished)
        report = {"schema": SCHEMA, "task": "quantize", **made.figures, "environment": environment()}
        _write(directory, report, made)
        return report


def _write(directory: Path, report: Mapping[str, Any], made: Quantized) -> None:
    """report.json, report.html and the lines on the terminal."""
    # They are for the end of a run, and take a second to import.
    from recpipe.report import html, plots
    from recpipe.report.files import ReportFiles
    from recpipe.report.record import replace_file

    sections = [
        {
            "title": section.title,
            "heads": section.heads,
            "rows": section.rows,
            "note": "",
            "plots": [
                plots.curves(
                    section.title,
                    {name: _apart(points) for name, points in section.curves.items()},
                    plots.Axis(section.axes[0], unit="bytes"),
                    plots.Axis(section.axes[1]),
                )
            ]
            if section.curves
            else [],
        }
        for section in made.sections
    ]
    files = ReportFiles(directory)
    files.write_json("report.json", report)
    page = html.page("measured.html.j2").render(
        title="Quantized model", lead=made.lead, sections=sections, environment=report["environment"]
    )
    files.write("report.html", lambda path: replace_file(path, page))

    def draw(out: Console) -> None:
        width = max(len(word) for word, _ in made.lines)
        for word, line in made.lines:
            out.print(f" {word:<{width}}  {line}", highlight=False, markup=False, soft_wrap=True)

    show(draw)
    log.info("report: %s", directory / "report.html")
    files.check()


def _apart(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _section(word: str) -> str:
    return word.lstrip("+~").partition("=")[0].partition(".")[0]


def _quantizer(plugins: Mapping[str, Mapping[str, Any]]) -> ModelQuantizer:
    """The one active plugin that works on finished models."""
    found = [plugin for _, plugin in activate(plugins)]
    if len(found) != 1 or not isinstance(found[0], ModelQuantizer):
        names = ", ".join(plugins) or "none"
        raise UserError(
            f"recpipe quantize takes one plugin that works on finished models, not {names}: "
            "say +plugin=low_precision"
        )
    return found[0]


def _output(checkpoint: Path) -> Path:
    folder = checkpoint.parent
    return (folder.parent if folder.name == "checkpoints" else folder) / "quantized"
