"""``recpipe evaluate``: a checkpoint's quality on any data, over all rows and by slices of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from recpipe.answers.figures import Judged, judge
from recpipe.answers.slices import Slicer, add_of_batch, slicer_of_files
from recpipe.answers.trained import Scoring, Trained
from recpipe.answers.words import EvaluateOptions
from recpipe.common.files import RunDir
from recpipe.common.meter import Meter
from recpipe.data.config import SamplesConfig
from recpipe.data.dataset import Dataset, SplitName
from recpipe.data.parts import batch_size
from recpipe.errors import UserError
from recpipe.model.metrics import Kind
from recpipe.report.environment import environment

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
