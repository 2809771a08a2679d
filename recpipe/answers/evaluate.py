"""``recpipe evaluate``: a checkpoint's quality on any data, over all rows and by slices of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recpipe.answers.figures import CALIBRATION, judge
from recpipe.answers.slices import Slicer, add_of_batch, slicer_of_files
from recpipe.answers.trained import Scoring, Trained
from recpipe.answers.words import EvaluateOptions
from recpipe.common.console import show
from recpipe.common.files import RunDir
from recpipe.common.meter import Meter
from recpipe.data.config import SamplesConfig
from recpipe.data.dataset import SplitName
from recpipe.errors import UserError
from recpipe.model.metrics import Kind
from recpipe.report import figures
from recpipe.report.environment import environment
from recpipe.report.figures import LABELS

log = logging.getLogger(__name__)
SCHEMA = 1


def evaluate(trained: Trained, options: EvaluateOptions, run_dir: RunDir) -> dict[str, Any]:
    """Score the data of ``trained`` and return the content of evaluation.json."""
    config = trained.cfg.data
    if options.split == "all" and isinstance(config, SamplesConfig):
        data = replace(config, eval_fraction=0.0, last_batch="keep")
        trained = replace(trained, cfg=replace(trained.cfg, data=data))
    dataset = trained.dataset
    asked: list[SplitName] = ["eval"] if options.split == "eval" else ["train", "eval"]
    splits = [split for split in asked if dataset.size(split)]
    if not splits:
        raise UserError(
            f"split={options.split}: the data holds nothing out; set data.eval_fraction, or take split=all"
        )
    with trained.scoring(dataset, run_dir) as scoring:
        rows = sum(dataset.size(split) for split in splits)
        slicer = of_batches = None
        if options.by is not None:
            first = dataset.size("train") if options.split == "eval" else 0
            slicer = slicer_of_files(trained, options.by, first, rows, dataset.rejected_rows)
            if slicer is None:  # no files have the column: the batches' own values are taken
                slicer = of_batches = Slicer(options.by)
        log.info("scoring %s rows of %s", f"{rows:,}", trained.directory)
        started = perf_counter()
        scores, labels, loss = _collect(scoring, splits, rows, of_batches)
        seconds = perf_counter() - started
        kinds: dict[str, Kind] = {name: task.kind for name, task in scoring.tasks.items()}
    log.info("computing figures and intervals")

    def judged(rows: Any) -> dict[str, dict[str, Any]]:
        return {
            name: judge(kind, labels[rows, n], scores[rows, n]).to_dict()
            for n, (name, kind) in enumerate(kinds.items())
        }

    by = None
    if slicer is not None:
        slices = [
            {"value": part.name, "tasks": judged(torch.from_numpy(part.rows.astype(np.int64)))}
            for part in slicer.slices(options.by_top)
        ]
        by = {"column": slicer.column, "slices": slices}
    path = getattr(trained.cfg.data, "path", None)
    return {
        "schema": SCHEMA,
        "task": "evaluate",
        "checkpoint": str(trained.directory),
        "step": trained.step,
        "data": {
            "name": trained.cfg.data.name,
            "path": [*map(str, path)] if isinstance(path, list | tuple) else path and str(path),
            "split": options.split,
            "samples": len(scores),
            "rejected_rows": dataset.rejected_rows,
            "fingerprint": dataset.fingerprint,
        },
        "loss": loss,
        "tasks": {name: {"kind": kinds[name], **own} for name, own in judged(slice(None)).items()},
        "by": by,
        "seconds": seconds,
        "samples_per_second": len(scores) / seconds,
        "environment": environment(),
    }


def _collect(
    scoring: Scoring, splits: list[SplitName], rows: int, slicer: Slicer | None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Scores and labels float32 [N, T] of all samples, and their mean loss; ``slicer`` gets the batches' own
    values."""
    tasks, started = len(scoring.tasks), perf_counter()
    scores, labels = [torch.empty(0, tasks)], [torch.empty(0, tasks)]
    loss, done = 0.0, 0

    def batches() -> Iterator[Any]:
        for split in splits:
            for batch in scoring.batches(split):
                if slicer is not None:
                    add_of_batch(slicer, batch, scoring.dataset.schema)
                yield batch

    with Meter() as meter:
        for scored in scoring.scores(batches()):
            assert scored.labels is not None
            assert scored.loss is not None
            scores.append(scored.scores.reshape(-1, tasks))
            labels.append(scored.labels.reshape(-1, tasks))
            size = len(scores[-1])
            loss += scored.loss * size
            done += size
            if meter.due:
                speed = done / (perf_counter() - started)
                meter.show(done / rows, f"evaluating  {done:,} rows  {speed:,.0f} rows/s")
    return torch.cat(scores), torch.cat(labels), loss / done


NAMES = {**LABELS, CALIBRATION: "calibration"}


def print_evaluation(content: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the content of evaluation.json."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(content):
        table.add_row(name, Text(value))

    def draw(out: Console) -> None:
        out.print(table)
        if content["by"]:
            for task in content["tasks"]:
                out.print(_sliced(content["by"], task, len(content["tasks"]) > 1))

    show(draw, console)


def _rows(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    data = content["data"]
    where = f" of {data['path']}" if data["path"] else ""
    part = ", the held-out part" if data["split"] == "eval" else ""
    rejected = f", {figures.count(data['rejected_rows'])} bad rows left out" if data["rejected_rows"] else ""
    yield "data", f"{data['name']}: {figures.count(data['samples'])} rows{where}{part}{rejected}"
    yield "checkpoint", f"{content['checkpoint']}, step {figures.count(content['step'])}"
    several = len(content["tasks"]) > 1
    for name, task in content["tasks"].items():
        title = f"{name} " if several else ""
        if task["positives"] is not None:
            share = task["positives"] / max(1, task["samples"])
            yield f"{title}positives", f"{figures.count(task['positives'])} ({share:.2%})"
        for figure, found in task["figures"].items():
            text = figures.decimal(found["value"], 5)
            if found["low"] is not None:
                text = f"{text}   95%: {found['low']:.5f} to {found['high']:.5f}"
            yield f"{title}{NAMES[figure]}", text
    yield "speed", f"{figures.count(content['samples_per_second'])} rows/s"


def _sliced(by: Mapping[str, Any], task: str, several: bool) -> Table:
    """One line for each slice: rows, positives and figures, each with half the width of its interval."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"{by['column']}{f' ({task})' if several else ''}", overflow="fold")
    first = by["slices"][0]["tasks"][task]
    names = [name for name in first["figures"] if name != "logloss"]
    for name in ("rows", *(["positives"] if first["positives"] is not None else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for name in names:
        table.add_column(NAMES[name], justify="right", no_wrap=True)
    for part in by["slices"]:
        own = part["tasks"][task]
        counts = [figures.short(own["samples"])]
        counts += [] if first["positives"] is None else [figures.short(own["positives"])]
        cells = [_short(own["figures"].get(name)) for name in names]
        table.add_row(Text(part["value"]), *counts, *cells)
    return table


def _short(found: Mapping[str, float | None] | None) -> str:
    if found is None:
        return "-"
    text = figures.decimal(found["value"])
    if found["low"] is None or found["high"] is None:
        return text
    return f"{text}±{(found['high'] - found['low']) / 2:.3f}"
