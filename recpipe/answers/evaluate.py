"""``recpipe evaluate``: a checkpoint's quality on any data, over all rows and by slices of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recpipe.answers.figures import CALIBRATION, Judged, judge
from recpipe.answers.slices import Slicer, add_of_batch, slicer_of_files
from recpipe.answers.trained import Scoring, Trained
from recpipe.answers.words import EvaluateOptions
from recpipe.common.console import show
from recpipe.common.files import RunDir
from recpipe.common.meter import Meter
from recpipe.data.config import SamplesConfig
from recpipe.data.dataset import Dataset, SplitName
from recpipe.data.parts import batch_size
from recpipe.errors import UserError
from recpipe.model.metrics import Kind
from recpipe.report import figures
from recpipe.report.environment import environment
from recpipe.report.figures import LABELS

log = logging.getLogger(__name__)
SCHEMA = 1


@dataclass
class Collected:
    """All scores and labels, float32: 8 bytes a row and task."""

    scores: list[torch.Tensor] = field(default_factory=list)
    labels: list[torch.Tensor] = field(default_factory=list)
    loss: float = 0.0
    rows: int = 0

    def joined(self, tasks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and labels, [N, T]."""
        empty = torch.empty(0, tasks)
        scores, labels = (
            torch.cat([empty, *(part.reshape(-1, tasks) for part in parts)])
            for parts in (self.scores, self.labels)
        )
        return scores, labels


def evaluate(trained: Trained, options: EvaluateOptions, run_dir: RunDir) -> dict[str, Any]:
    """Score the data of ``trained`` and return the content of evaluation.json."""
    config = trained.cfg.data
    if options.split == "all" and isinstance(config, SamplesConfig):
        data = replace(config, eval_fraction=0.0, last_batch="keep")
        trained = replace(trained, cfg=replace(trained.cfg, data=data))
    dataset = trained.dataset
    splits = [split for split in _splits(options) if dataset.size(split)]
    if not splits:
        raise UserError(
            f"split={options.split}: the data holds nothing out; set data.eval_fraction, or take split=all"
        )
    with trained.scoring(dataset, run_dir) as scoring:
        rows = sum(dataset.size(split) for split in splits)
        slicer, from_batches = _slicer(trained, options, dataset, rows), False
        if options.by is not None and slicer is None:
            slicer, from_batches = Slicer(options.by), True
        log.info("scoring %s rows of %s", f"{rows:,}", trained.directory)
        started = perf_counter()
        collected = _collect(scoring, splits, rows, slicer if from_batches else None)
        seconds = perf_counter() - started
        kinds: dict[str, Kind] = {name: task.kind for name, task in scoring.tasks.items()}
    log.info("computing figures and intervals")
    return _report(trained, options, dataset, collected, kinds, slicer, seconds)


def _splits(options: EvaluateOptions) -> list[SplitName]:
    return ["eval"] if options.split == "eval" else ["train", "eval"]


def _slicer(trained: Trained, options: EvaluateOptions, dataset: Dataset, rows: int) -> Slicer | None:
    """The slicer with the files' column, if one is asked for and there are files."""
    if options.by is None:
        return None
    first = dataset.size("train") if options.split == "eval" else 0
    return slicer_of_files(trained, options.by, first, rows, dataset.rejected_rows)


def _collect(scoring: Scoring, splits: list[SplitName], rows: int, slicer: Slicer | None) -> Collected:
    found, started = Collected(), perf_counter()

    def batches() -> Iterator[Any]:
        for split in splits:
            for batch in scoring.batches(split):
                if slicer is not None:
                    add_of_batch(slicer, batch, scoring.dataset.schema)
                sizes.append(batch_size(batch))
                yield batch

    sizes: list[int] = []
    with Meter() as meter:
        for scored in scoring.scores(batches()):
            assert scored.labels is not None
            assert scored.loss is not None
            found.scores.append(scored.scores)
            found.labels.append(scored.labels)
            found.loss += scored.loss * sizes[-1]
            found.rows += sizes[-1]
            if meter.due:
                speed = found.rows / (perf_counter() - started)
                meter.show(found.rows / rows, f"evaluating  {found.rows:,} rows  {speed:,.0f} rows/s")
    return found


def _report(
    trained: Trained,
    options: EvaluateOptions,
    dataset: Dataset,
    collected: Collected,
    kinds: dict[str, Kind],
    slicer: Slicer | None,
    seconds: float,
) -> dict[str, Any]:
    scores, labels = collected.joined(len(kinds))
    tasks = {
        name: {"kind": kind, **judge(kind, labels[:, n], scores[:, n]).to_dict()}
        for n, (name, kind) in enumerate(kinds.items())
    }
    by = None
    if slicer is not None:
        by = {"column": slicer.column, "slices": [*_slices(slicer, options.by_top, kinds, scores, labels)]}
    return {
        "schema": SCHEMA,
        "task": "evaluate",
        "checkpoint": str(trained.directory),
        "step": trained.step,
        "data": {
            "name": trained.cfg.data.name,
            "path": _plain(getattr(trained.cfg.data, "path", None)),
            "split": options.split,
            "samples": collected.rows,
            "rejected_rows": dataset.rejected_rows,
            "fingerprint": dataset.fingerprint,
        },
        "loss": collected.loss / collected.rows,
        "tasks": tasks,
        "by": by,
        "seconds": seconds,
        "samples_per_second": collected.rows / seconds,
        "environment": environment(),
    }


def _plain(path: Any) -> Any:
    return [str(part) for part in path] if isinstance(path, list | tuple) else path and str(path)


def _slices(
    slicer: Slicer, top: int, kinds: dict[str, Kind], scores: torch.Tensor, labels: torch.Tensor
) -> Iterator[dict[str, Any]]:
    for part in slicer.slices(top):
        rows = torch.from_numpy(part.rows.astype(np.int64))
        judged: dict[str, Judged] = {
            name: judge(kind, labels[rows, n], scores[rows, n])
            for n, (name, kind) in enumerate(kinds.items())
        }
        yield {"value": part.name, "tasks": {name: one.to_dict() for name, one in judged.items()}}


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
            yield f"{title}positives", _positives(task)
        for figure, found in task["figures"].items():
            yield f"{title}{NAMES[figure]}", _interval(found)
    yield "speed", f"{figures.count(content['samples_per_second'])} rows/s"


def _positives(task: Mapping[str, Any]) -> str:
    share = task["positives"] / max(1, task["samples"])
    return f"{figures.count(task['positives'])} ({share:.2%})"


def _interval(found: Mapping[str, float | None]) -> str:
    text = figures.decimal(found["value"], 5)
    return text if found["low"] is None else f"{text}   95%: {found['low']:.5f} to {found['high']:.5f}"


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
