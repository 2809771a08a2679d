"""``recpipe quantize CHECKPOINT +plugin=NAME``: makes a finished model smaller by a plugin's method."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from recpipe.answers.command import TERMINAL, Caller, answering
from recpipe.answers.row_types import encode_rows
from recpipe.answers.trained import open_trained
from recpipe.answers.words import of_plugins, parted, the_plugin
from recpipe.common.console import log, show
from recpipe.common.files import unwritable
from recpipe.common.owned import require_absent, written_alone
from recpipe.common.validation import FilePath
from recpipe.data.given import GivenBatches
from recpipe.distributed.launch import ProcessRank
from recpipe.errors import UserError
from recpipe.report.environment import environment
from recpipe.report.record import SCHEMA
from recpipe.tasks.process import interrupt_on_sigterm, prepare_process
from recpipe_low_precision.checkpoint import require_free, take_place
from recpipe_low_precision.format import is_quantized
from recpipe_low_precision.model_quantizer import FinishedModel, ModelQuantizer, Quantized

FLOAT32 = "fp32"
QUANTIZED = "quantized"
"""The folder of the quantized checkpoint in the run's directory."""


@dataclass(frozen=True)
class QuantizeOptions:
    """The options of ``recpipe quantize``."""

    output: FilePath | None = None
    """The directory of the quantized checkpoint; None: ``quantized`` in the run's directory."""
    overwrite: bool = False
    """Whether an ``output`` that exists is replaced."""


def quantize(words: Sequence[str]) -> int:
    """``recpipe quantize CHECKPOINT +plugin=NAME key=value ...``; returns 0."""
    prepare_process()
    with interrupt_on_sigterm():
        quantize_for(TERMINAL, Path(words[0]), words[1:])
    return 0


def quantize_for(caller: Caller, checkpoint: Path, words: Sequence[str]) -> dict[str, Any]:
    """Quantize ``checkpoint`` by the plugin that ``words`` name; returns the content of report.json."""
    if ProcessRank.current().world > 1:
        raise UserError("a checkpoint is quantized by one process, sharded or not; start it without torchrun")
    options, overrides, directory = parted(words, QuantizeOptions, "quantize")
    mine, others = of_plugins(overrides)
    quantizer = the_plugin(mine, ModelQuantizer, "quantize", "low_precision")
    with answering(caller, directory) as run_dir:
        target = run_dir.path / QUANTIZED if options.output is None else Path(options.output).expanduser()
        require_free(target)
        replaces = options.overwrite or options.output is None  # the run's own directory
        require_absent("output", target, replaces)
        trained = open_trained(checkpoint, others, caller.model, caller.data)
        if is_quantized(trained.directory):
            raise UserError(f"{trained.directory} is quantized already: name the checkpoint it was made from")
        dataset = trained.dataset
        sparse = () if dataset.schema is None else dataset.schema.sparse
        growing = next((feature.name for feature in sparse if feature.growth is not None), None)
        if growing is not None:
            raise UserError(
                f"{trained.directory}: the ids of '{growing}' got rows as they came (rows: dynamic), and a "
                "quantized checkpoint has no map of these: package the checkpoint itself (recpipe package)"
            )
        if isinstance(dataset, GivenBatches):
            dataset.device = torch.device("cpu")  # where a quantizer's model is
        source = trained.source()
        for name, value in source.dense.items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise UserError(
                    f"{source.directory}: '{name}' has a weight that is not finite: train it again"
                )
        for table in source.shapes:
            for start, values in source.blocks(table):
                encode_rows(values, FLOAT32, table, start)  # which names the first weight that is not finite
        alone = written_alone("output", target, replaces, ("quantize", str(trained.directory)))
        with alone, _beside(target.absolute()) as draft:
            size = trained.cfg.data.batch_size
            made = quantizer.quantize(FinishedModel(source, dataset, size, run_dir.path, draft))
            take_place(draft, target)
        log.info("wrote %s", target)
        report = {"schema": SCHEMA, "task": "quantize", **made.figures, "environment": environment()}
        _write(run_dir.path, report, made)
    return report


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """The place of a quantized checkpoint that is not judged yet, beside ``target``. What is there at the end
    of the block is removed; so is what a killed command has left. ``UserError`` if no folder can be made
    there."""
    draft = target.with_name(f"{target.name}.unjudged")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    except OSError as fault:
        raise unwritable(target, fault, "choose another directory, output=DIRECTORY") from fault
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(directory: Path, report: Mapping[str, Any], made: Quantized) -> None:
    """report.json, report.html and the lines on the terminal."""
    # They are for the end of a run, and take a second to import.
    from recpipe.report import html, plots
    from recpipe.report.files import ReportFiles
    from recpipe.report.page import Head, Page, Section, Table, environment

    sections = []
    for section in made.sections:
        each = {
            name: ([x for x, _ in points], [y for _, y in points]) for name, points in section.curves.items()
        }
        axes = plots.Axis(section.axes[0], unit="bytes"), plots.Axis(section.axes[1])
        drawn = [plots.curves(section.title, each, *axes)] if each else []
        sections.append(Section(section.title, [drawn, Table([*map(Head, section.heads)], section.rows)]))
    files = ReportFiles(directory)
    files.write_json("report.json", report)
    sections.append(environment(report["environment"]))
    page = Page("Quantized model", "Quantized model", made.lead, sections)
    files.write("report.html", lambda path: html.write(page, path))

    def draw(out: Console) -> None:
        width = max(len(word) for word, _ in made.lines)
        for word, line in made.lines:
            out.print(f" {word:<{width}}  {line}", highlight=False, markup=False, soft_wrap=True)

    show(draw)
    log.info("report: %s", directory / "report.html")
    files.check()
