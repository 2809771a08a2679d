"""task=lambda: what coefficients of entities, learnt as events arrive, add to a trained model.

The model is trained on the training part of the data, or a finished one is taken. The held-out part is then
read in its order, mini-batch by mini-batch: each is scored, by the frozen model and by the model with its
effects, and the effects learn from it (progressive validation). With ``lambda.retrain_every`` a new model is
trained on all events so far each so many mini-batches: alone it is the field's daily retrain, and with
effects over it, the correction of the lambda architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from recpipe.answers.trained import Trained, open_trained
from recpipe.common.console import log, show, within
from recpipe.data.dataset import NumberedDataset
from recpipe.errors import UserError
from recpipe.model.config import MetricsConfig
from recpipe.model.metrics import judge
from recpipe.model.scores import Scores
from recpipe.report import figures
from recpipe.report.files import ReportFiles
from recpipe.setup.ctx import RunInputs, RunResult, TaskContext, refuse_ranks
from recpipe_lambda_learner.config import LambdaConfig
from recpipe_lambda_learner.posterior import Floats
from recpipe_lambda_learner.stream import Left, Passed, Stream

FROZEN, LAMBDA, RETRAINED, CORRECTED = "frozen", "lambda", "retrained", "retrained, lambda"
SCORES = "scores.safetensors"
FIGURES = {"auc": "AUC", "ne": "NE", "calibration": "calibration"}


class LambdaTask:
    """The entry point of task=lambda."""

    def run(self, context: TaskContext) -> RunResult:
        """Write lambda.json and the effects, and print a row for each curve."""
        refuse_ranks("task=lambda")
        config = context.recipe.section(LambdaConfig, "lambda")
        left = None if config.resume is None else Left.of(Path(config.resume), config)
        trained = opened(context, config, left)
        stream = Stream(config, trained, context.directory, left)
        with closing(stream):
            passed, effects = stream.first()
            curves = Curves(passed.clicks, passed.weights, {FROZEN: passed.offsets, LAMBDA: passed.logits})
            mini_batches = -(-len(passed.clicks) // config.batch_size)
            changes: list[dict[str, Any]] = []
            if config.retrain_every is not None and config.retrain_every < mini_batches:
                changes = Retraining(context, config, stream).add(curves, passed, mini_batches)
            told = {
                "schema": 2,
                "task": "lambda",
                "checkpoint": str(trained.directory),
                "events": len(curves.clicks),
                "mini_batches": mini_batches,
                "entities": {own.name: len(own) for own in effects.each},
                "evicted": {own.name: own.rows.map.content.figures.evicted for own in effects.each},
                "unsettled": sum(own.unsettled for own in effects.each),
                "updates_per_second": effects.updates / stream.seconds if stream.seconds else None,
                "curves": {
                    name: curves.judged(scores, config.windows) for name, scores in curves.scores.items()
                },
                "changes": changes,
            }
        files = ReportFiles(context.directory)
        files.write_json("lambda.json", told)
        if config.save_scores:
            curves.save(context.directory / SCORES)
        print_curves(told)
        files.check()
        return RunResult(told)


def opened(context: TaskContext, config: LambdaConfig, left: Left | None) -> Trained:
    """The model that is corrected: a finished one, or one that the recipe trains first."""
    checkpoint = None if config.checkpoint is None else Path(config.checkpoint)
    if checkpoint is None and left is not None:
        checkpoint = Path(left.learnt.checkpoint)
    if checkpoint is None:
        checkpoint = context.train().checkpoint
        if checkpoint is None:
            raise UserError(
                "task=lambda starts with the checkpoint that training writes when it ends: set "
                "trainer.checkpoint_every, or name one by lambda.checkpoint"
            )
    words = [f"data.batch_size={config.batch_size}"]
    return open_trained(checkpoint, words, context.given.model, context.given.dataset)


@dataclass
class Curves:
    """The logits float64 [N] of each curve, of the same events in the order of time."""

    clicks: Floats
    weights: Floats
    scores: dict[str, Floats]

    def judged(self, scores: Floats, windows: int) -> list[dict[str, Any]]:
        """The figures of each window, then those of all events, with intervals."""
        edges = [len(scores) * n // windows for n in range(windows + 1)]
        parts = [slice(*pair) for pair in pairwise(edges) if pair[0] < pair[1]]
        return [self._of(scores, rows) for rows in [*parts, slice(0, len(scores))]]

    def save(self, file: Path) -> None:
        """Write the logits, clicks and weights of each event, float64 [N]."""
        save_file({"clicks": self.clicks, "weights": self.weights, **self.scores}, file)

    def _of(self, scores: Floats, rows: slice) -> dict[str, Any]:
        clicks, own, weights = (
            torch.from_numpy(each[rows].astype(np.float32)) for each in (self.clicks, scores, self.weights)
        )
        found = judge(Scores("clicks", clicks, own, weights), MetricsConfig())
        told = found.to_dict()["figures"]
        return {"first": rows.start, "end": rows.stop, **{k: told[k] for k in FIGURES if k in told}}


class Retraining:
    """Models that are trained anew while the stream goes on, to compare with and to correct by."""

    def __init__(self, context: TaskContext, config: LambdaConfig, stream: Stream) -> None:
        self.context, self.config, self.stream = context, config, stream

    def add(self, curves: Curves, passed: Passed, mini_batches: int) -> list[dict[str, Any]]:
        """Add to ``curves`` those of models that are trained each ``lambda.retrain_every`` mini-batches on
        all events before, alone and with effects, of which the first one has ``passed`` the events; and say
        how each change of the model was felt.

        A new model's effects learn the stream's events from the first on, scored by it, before they take
        over, so that no knowledge of an entity is lost with the model that it corrected. This is why each
        model reads the stream from its beginning."""
        every, size = self.config.retrain_every, self.config.batch_size
        assert every is not None
        first, alone, corrected, changes = every * size, [passed.offsets], [passed.logits], []
        before, ends = passed, [first]
        for number in range(1, -(-mini_batches // every)):
            log.info(f"training model {number + 1} on the events before mini-batch {number * every:,}")
            with within():
                trained = self._trained_on(number * every, number)
                # One mini-batch more than it answers: by what it would have said, the next change is judged.
                after = self.stream.by(trained, (number + 1) * every + 1)
            changes.append(change(before, after, slice(first, first + size), number * every))
            first += every * size
            ends.append(first)
            alone.append(after.offsets)
            corrected.append(after.logits)
            before = after
        for name, own in ((RETRAINED, alone), (CORRECTED, corrected)):
            starts = [0, *ends[:-1]]
            curves.scores[name] = np.concatenate(
                [x[slice(*p)] for x, p in zip(own, zip(starts, ends, strict=True), strict=True)]
            )
        return changes

    def _trained_on(self, mini_batches: int, number: int) -> Trained:
        """A model that was trained as the first one, on its samples and the first ``mini_batches``."""
        from recpipe.run import carry_out  # a run within this one

        dataset = self.context.joined.dataset
        if not isinstance(dataset, NumberedDataset):
            raise UserError(
                f"lambda.retrain_every: the samples of data={self.context.recipe.data.name} cannot be read "
                "again from any place; leave it out, or take data=files"
            )
        dataset = dataset.training_on(mini_batches * self.config.batch_size)
        recipe = self.context.recipe
        data = {"name": "given", "batch_size": recipe.data.batch_size, "read_ahead": recipe.data.read_ahead}
        values = {**recipe.values, "task": {"name": "train"}, "data": data}
        given = RunInputs(self.context.given.model, dataset, screen=False, files=False, evaluates=False)
        found = carry_out(OmegaConf.create(values), self.context.directory / f"retrained-{number}", given)
        assert found.checkpoint is not None
        words = [f"data.batch_size={self.config.batch_size}"]
        return open_trained(found.checkpoint, words, self.context.given.model, self.stream.trained.dataset)


def change(before: Passed, after: Passed, rows: slice, mini_batch: int) -> dict[str, Any]:
    """How a change of the model is felt in the first mini-batch after it, the events ``rows``: log-losses,
    and by how much logits moved, with the new model's effects and by the new model alone."""
    clicks, weights = before.clicks[rows], before.weights[rows]

    def loss(logits: Floats) -> float:
        return float(np.average(np.logaddexp(0, (1 - 2 * clicks) * logits), weights=weights))

    def moved(logits: Floats) -> float:
        return float(np.average(np.abs(logits - before.logits[rows]), weights=weights))

    return {
        "mini_batch": mini_batch,
        "logloss": {
            "before": loss(before.logits[rows]),
            "after": loss(after.logits[rows]),
            "after, alone": loss(after.offsets[rows]),
        },
        "moved": {"after": moved(after.logits[rows]), "after, alone": moved(after.offsets[rows])},
    }


def print_curves(told: Mapping[str, Any]) -> None:
    """One row for each curve: its figures over all events, and below the AUC of each window."""
    curves = told["curves"]
    whole, by_time = Table(box=box.SIMPLE_HEAD, pad_edge=False), Table(box=box.SIMPLE_HEAD, pad_edge=False)
    windows = len(next(iter(curves.values()))) - 1
    for table, heads in (
        (whole, [*FIGURES.values()]),
        (by_time, [f"{n + 1} of {windows}" for n in range(windows)]),
    ):
        table.add_column("model" if table is whole else "AUC in time")
        for head in heads:
            table.add_column(head, justify="right", no_wrap=True)
    for name, (*parts, every) in curves.items():
        whole.add_row(name, *(_cell(every, figure) for figure in FIGURES))
        by_time.add_row(name, *(_cell(part, "auc", False) for part in parts))

    def draw(out: Console) -> None:
        out.print(whole)
        out.print(by_time)
        counts = ", ".join(f"{n:,} of {name}" for name, n in told["entities"].items())
        out.print(
            f"{told['events']:,} events in {told['mini_batches']:,} mini-batches; coefficients {counts}"
        )

    show(draw)


def _table(first: str, heads: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _cell(window: Mapping[str, Any], figure: str, spread: bool = True) -> str:
    found = window.get(figure)
    if found is None:
        return "-"
    half = "" if not spread or found["low"] is None else f"±{(found['high'] - found['low']) / 2:.4f}"
    return f"{figures.decimal(found['value'])}{half}"
