"""``recpipe evaluate``: a checkpoint's quality on any data, over all rows and by slices of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Annotated, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recpipe.answers.trained import Scoring, Trained
from recpipe.checkpoint.averaged import LAST, WEIGHTS
from recpipe.common.console import show
from recpipe.common.files import RunDir
from recpipe.common.meter import Meter
from recpipe.common.validation import Positive, one_of
from recpipe.common.validation import Text as Word
from recpipe.data.config import DataConfig, FilesConfig, SamplesConfig
from recpipe.data.dataset import Dataset, SplitName
from recpipe.data.file_columns import has_columns, read_columns
from recpipe.data.files import RowChecks
from recpipe.data.row_parts import RowParts
from recpipe.data.split import WORDS
from recpipe.errors import DataError, UserError, shown
from recpipe.model.metrics import judge
from recpipe.model.scores import Kind, Scores
from recpipe.model.sides import RowSlice, Sides, buckets, by_value
from recpipe.report import figures
from recpipe.report.environment import environment

log = logging.getLogger(__name__)
SCHEMA = 1
WHOLE = ("logloss", "pr_auc", "ece")
"""Figures that the table of slices leaves out: the first two move with a slice's share of clicks."""


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of ``recpipe evaluate``."""

    split: Annotated[str, one_of("all", "eval", "test")] = "all"
    """``all``: every row of the data, of ``data.path`` if it has one; ``eval``: those held out while it was
    trained; ``test``: those held out for the finished model."""
    by: Word | None = None
    """A column by whose values the rows are told apart as well."""
    by_top: Positive = 10
    """Values with a line of their own, the most frequent ones; or, of a dense column, buckets."""
    weights: Annotated[str, one_of(*WEIGHTS)] | None = None
    """``last``, or the averages ``ema`` or ``swa``; None: the averages, if training made any."""


def evaluate(trained: Trained, options: EvaluateOptions, run_dir: RunDir) -> dict[str, Any]:
    """Score the data of ``trained`` and return the content of evaluation.json."""
    config, asked = trained.cfg.data, trained.cfg.metrics
    if options.split == "all" and isinstance(config, SamplesConfig):
        trained = replace(trained, cfg=replace(trained.cfg, data=config.whole()))
    dataset = trained.dataset
    wanted = dataset.splits if options.split == "all" else (cast(SplitName, options.split),)
    splits = [split for split in wanted if split in dataset.splits and dataset.size(split)]
    if not splits:
        key = "data.test_fraction" if options.split == "test" else "data.eval_fraction"
        raise UserError(f"split={options.split}: the data holds nothing out; set {key}, or take split=all")
    with trained.scoring(dataset, run_dir) as scoring:
        rows = sum(dataset.size(split) for split in splits)
        slicer, of_batches = None, list[tuple[str, str]]()
        if options.by is not None:
            slicer = slicer_of_files(trained, options.by, dataset, options.split)
            if slicer is None:  # no files have the column: the batches' own values are taken
                of_batches = [("by", options.by)]
        sides = Sides.of_metrics(asked, dataset, of_batches)
        log.info("scoring %s rows of %s", f"{rows:,}", trained.directory)
        started = perf_counter()
        scores, labels, weights, losses, values = _collect(scoring, splits, rows, sides)
        seconds = perf_counter() - started
        unknown = scoring.unknown_ids
        kinds: dict[str, Kind] = {name: task.kind for name, task in scoring.tasks.items()}
    log.info("computing figures and intervals")

    def judged(n: int, kind: Kind, rows: Any) -> dict[str, Any]:
        weight = None if weights is None else weights[rows, n]
        groups = None if asked.group is None else values[rows, 0]
        return judge(Scores(kind, labels[rows, n], scores[rows, n], weight, groups), asked).to_dict()

    def of_tasks(rows: Any) -> dict[str, Any]:
        return {name: judged(n, kind, rows) for n, (name, kind) in enumerate(kinds.items())}

    by = None
    if options.by is not None:
        parts = sides.slices(values, -1, options.by_top) if slicer is None else slicer.slices(options.by_top)
        slices = [{"value": part.name, "tasks": of_tasks(torch.from_numpy(part.rows))} for part in parts]
        by = {"column": options.by, "slices": slices}
    path = getattr(trained.cfg.data, "path", None)
    loss = float(sum(lost / total for lost, total in losses if total))
    return {
        "schema": SCHEMA,
        "task": "evaluate",
        "checkpoint": str(trained.directory),
        "step": trained.step,
        "weights": trained.weights,
        "data": {
            "name": trained.cfg.data.name,
            "path": [*map(str, path)] if isinstance(path, list | tuple) else path and str(path),
            "split": options.split,
            "samples": len(scores),
            "rejected_rows": dataset.rejected_rows,
            "unknown_ids": unknown,
            "fingerprint": dataset.fingerprint,
        },
        "loss": None if np.isnan(loss) else loss,
        "weighted": weights is not None,
        "level": asked.intervals,
        "tasks": {
            name: {
                "kind": kind,
                **judged(n, kind, slice(None)),
                "slices": sides.told(values, asked, partial(judged, n, kind)),
            }
            for n, (name, kind) in enumerate(kinds.items())
        },
        "by": by,
        "seconds": seconds,
        "samples_per_second": len(scores) / seconds,
        "environment": environment(),
    }


def _collect(
    scoring: Scoring, splits: list[SplitName], rows: int, sides: Sides
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, NDArray[np.float64], torch.Tensor]:
    """Scores and labels float32 [N, T] of all samples, their weights if they have any, the sums of losses and
    of weights (``Scored.losses``), and the values of ``sides``, int64 [N, columns]."""
    tasks, started = len(scoring.tasks), perf_counter()
    scores, labels = [torch.empty(0, tasks)], [torch.empty(0, tasks)]
    weights, losses, done = list[torch.Tensor](), np.zeros((1, 2)), 0
    values = [torch.empty((0, len(sides.columns)), dtype=torch.int64)]

    def batches() -> Iterator[Any]:
        for split in splits:
            for batch in scoring.batches(split):
                if sides.columns:
                    values.append(sides.of(batch))
                yield batch

    with Meter() as meter:
        for scored in scoring.scores(batches()):
            assert scored.labels is not None
            assert scored.losses is not None
            scores.append(scored.scores.reshape(-1, tasks))
            labels.append(scored.labels.reshape(-1, tasks))
            if scored.weights is not None:
                weights.append(scored.weights.reshape(-1, tasks))
            losses = losses + scored.losses
            done += len(scores[-1])
            if meter.due:
                speed = done / (perf_counter() - started)
                meter.show(done / rows, f"evaluating  {done:,} rows  {speed:,.0f} rows/s")
    own = torch.cat(weights) if weights else None
    return torch.cat(scores), torch.cat(labels), own, losses, torch.cat(values)


def print_evaluation(content: Mapping[str, Any]) -> None:
    """Print the content of evaluation.json."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(content):
        table.add_row(name, Text(value))

    def draw(out: Console) -> None:
        out.print(table)
        several = len(content["tasks"]) > 1
        for name, task in content["tasks"].items():
            for part in [*([_of_task(content["by"], name)] if content["by"] else []), *task["slices"]]:
                title = f"{part['column']}{f' ({name})' if several else ''}"
                out.print(_sliced(title, part["slices"]))

    show(draw)


def _rows(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    data = content["data"]
    where = f" of {data['path']}" if data["path"] else ""
    part = {"eval": ", the held-out part", "test": ", the part for testing"}.get(data["split"], "")
    rejected = f", {figures.count(data['rejected_rows'])} bad rows left out" if data["rejected_rows"] else ""
    yield "data", f"{data['name']}: {figures.count(data['samples'])} rows{where}{part}{rejected}"
    averages = "" if content["weights"] == LAST else f", averages ({content['weights']})"
    yield "checkpoint", f"{content['checkpoint']}, step {figures.count(content['step'])}{averages}"
    several = len(content["tasks"]) > 1
    for name, task in content["tasks"].items():
        title = f"{name} " if several else ""
        if task["positives"] is not None:
            share = task["positives"] / max(1, task["samples"])
            yield f"{title}positives", f"{figures.count(task['positives'])} ({share:.2%})"
        if groups := task.get("groups"):
            out = f"{groups['one_class']:,} of one class, {groups['without_positives']:,} without a positive"
            yield f"{title}groups", f"{groups['groups']:,}; {out}"
        for figure, found in task["figures"].items():
            text = figures.decimal(found["value"], 5)
            if found["low"] is not None:
                text = f"{text}   {100 * content['level']:g}%: {found['low']:.5f} to {found['high']:.5f}"
            yield f"{title}{figures.title(figure)}", text
    if content["loss"] is not None and not any(task["figures"] for task in content["tasks"].values()):
        yield "loss", figures.decimal(content["loss"], 5)
    yield "speed", f"{figures.count(content['samples_per_second'])} rows/s"


def _of_task(by: Mapping[str, Any], task: str) -> dict[str, Any]:
    """``by`` of evaluation.json in the form of a task's ``slices``."""
    slices = [{"value": part["value"], **part["tasks"][task]} for part in by["slices"]]
    return {"column": by["column"], "slices": slices}


def _sliced(title: str, slices: Sequence[Mapping[str, Any]]) -> Table:
    """One line for each slice: rows, positives and figures, each with half the width of its interval."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title, overflow="fold")
    first = slices[0]
    told = [name for name in first["figures"] if name not in WHOLE and "@" not in name]
    names = told[: 4 if first["positives"] is None else 3]  # as many as a terminal has room for
    for name in ("rows", *(["positives"] if first["positives"] is not None else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for name in names:
        table.add_column(figures.title(name), justify="right", no_wrap=True)
    for own in slices:
        counts = [figures.short(own["samples"])]
        counts += [] if first["positives"] is None else [figures.short(own["positives"])]
        cells = []
        for name in names:
            found = own["figures"].get(name)
            text = "-" if found is None else figures.decimal(found["value"])
            if found is not None and found["low"] is not None and found["high"] is not None:
                text = f"{text}±{(found['high'] - found['low']) / 2:.3f}"
            cells.append(text)
        table.add_row(Text(own["value"]), *counts, *cells)
    return table


class Slicer:
    """Collects a column's values: 4 bytes a row, and its distinct values."""

    def __init__(self, column: str) -> None:
        self.column = column
        self._codes: dict[Any, int] = {}
        self._parts: list[NDArray[Any]] = []
        self._numeric: bool | None = None

    def add(self, values: pa.Array, numeric: bool) -> None:
        """The next rows' values; ``numeric``: to be put into buckets."""
        self._numeric = numeric
        if numeric:
            filled = pc.fill_null(values.cast(pa.float64(), safe=False), np.nan)
            self._parts.append(np.asarray(filled.to_numpy(zero_copy_only=False), np.float32))
            return
        encoded = pc.dictionary_encode(values, null_encoding="encode")
        words = encoded.dictionary.to_pylist()
        codes = [self._codes.setdefault(word, len(self._codes)) for word in words]
        self._parts.append(np.array(codes, np.int32)[np.asarray(encoded.indices)])

    def slices(self, top: int) -> Iterator[RowSlice]:
        """The ``top`` most frequent values, then the rest as one; or as many buckets with about equally many
        rows."""
        codes = np.concatenate(self._parts)
        if self._numeric:
            yield from buckets(codes, top)
            return
        yield from by_value(codes, list(self._codes), top)


def slicer_of_files(trained: Trained, column: str, dataset: Dataset, part: str) -> Slicer | None:
    """The slicer with the rows of a ``part`` of ``dataset`` (``EvaluateOptions.split``) of ``column`` as the
    files have it; None if the data has no such files, whose batches then have the values."""
    config = trained.cfg.data
    drawn = config.drawn if isinstance(config, FilesConfig) else None
    if not has_columns(config) or (drawn is not None and drawn.each > 1):  # negatives are no rows
        return None
    if dataset.rejected_rows:
        raise UserError(
            f"by={column}: {dataset.rejected_rows:,} bad rows were left out of the data, so that the column "
            "cannot be matched; correct the file, and drop data.on_bad_row=skip"
        )
    columns = trained.trained_on.columns
    dense = columns is not None and column in columns.dense
    slicer = Slicer(column)
    for values in _values_of_part(config, column, dataset, part):
        if len(values):
            kind = values.type
            if pa.types.is_nested(kind):
                raise DataError(
                    f"by={shown(column)}: the column holds {kind}, not one value a row; choose another"
                )
            if pa.types.is_dictionary(kind):
                values = values.dictionary_decode()
            if dense and pa.types.is_string(kind):  # Criteo's text
                values = values.cast(pa.float64())
            slicer.add(values, dense or pa.types.is_floating(kind))
    return slicer


def _values_of_part(config: DataConfig, column: str, dataset: Dataset, part: str) -> Iterator[pa.Array]:
    """The values of a column in the rows of one part of ``dataset``, in the files' order."""
    split = None
    if isinstance(config, FilesConfig):
        split = config.rows_split
        own = {"eval": config.eval_path, "test": config.test_path}.get(part)
        if own:
            config, part = replace(config.whole(), path=own), "all"
    if split is not None and part != "all":
        number, of_row = WORDS.index("valid" if part == "eval" else part), RowParts(split)
        of_row.begin(_batches(config, split.columns))
        for rows in _batches(config, list(dict.fromkeys([column, *split.columns]))):
            parts = of_row.of(rows, RowChecks(str(config.name), 1, len(rows)))
            yield rows[column].filter(pa.array(parts == number))
        return
    sizes = [dataset.size(each) for each in dataset.splits]
    sizes[0] += dataset.dropped_samples
    place = dict(zip(dataset.splits, pairwise(accumulate(sizes, initial=0)), strict=True))
    first, end = (0, sum(sizes)) if part == "all" else place[cast(SplitName, part)]
    at = 0
    for block in read_columns(config, [column]):
        low, high = max(first - at, 0), min(end - at, len(block))
        at += len(block)
        made = block.column(0).slice(low, max(0, high - low)).combine_chunks()
        yield made.chunk(0) if isinstance(made, pa.ChunkedArray) else made


def _batches(config: DataConfig, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for block in read_columns(config, names):
        yield from block.to_batches()
