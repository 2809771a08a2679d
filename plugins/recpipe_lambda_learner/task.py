"""task=lambda: what coefficients of entities, learnt as events arrive, add to a trained model.

The model is trained on the training part of the data, or a finished one is taken. The held-out part is then
read in its order, mini-batch by mini-batch: each is scored, by the frozen model and by the model with its
effects, and the effects learn from it (progressive validation). With ``lambda.retrain_every`` a new model is
trained on all events so far each so many mini-batches: alone it is the field's daily retrain, and with
effects over it, the correction of the lambda architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Interval, MinLen
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.table import Table

from recpipe.answers.trained import Trained, open_trained
from recpipe.common.console import log, show
from recpipe.common.validation import FilePath, Positive, one_of
from recpipe.data.dataset import NumberedDataset
from recpipe.errors import UserError
from recpipe.model.config import MetricsConfig
from recpipe.model.metrics import judge
from recpipe.model.scores import Scores
from recpipe.report import figures
from recpipe.report.files import ReportFiles
from recpipe.setup.ctx import RunInputs, RunResult, TaskContext, refuse_ranks
from recpipe_lambda_learner.effects import EffectConfig, Effects
from recpipe_lambda_learner.events import MiniBatch, Reader
from recpipe_lambda_learner.posterior import Floats, Learning, Precision

FROZEN, LAMBDA, RETRAINED, CORRECTED = "frozen", "lambda", "retrained", "retrained, lambda"
FIGURES = {"auc": "AUC", "ne": "NE", "calibration": "calibration"}


@dataclass(frozen=True)
class LambdaConfig:
    """``lambda`` of conf/task/lambda.yaml."""

    checkpoint: FilePath | None
    effects: Annotated[list[EffectConfig], MinLen(1)]
    batch_size: Positive
    ridge: Annotated[float, Interval(ge=0)]
    keep: Annotated[float, Interval(ge=0, le=1)]
    precision: Annotated[str, one_of("full", "diagonal", "identity")]
    retrain_every: Positive | None
    windows: Positive

    @property
    def learning(self) -> Learning:
        """How effects learn."""
        kept: Precision = self.precision  # type: ignore[assignment]
        return Learning(self.ridge, self.keep, kept)


class LambdaTask:
    """The entry point of task=lambda."""

    def run(self, context: TaskContext) -> RunResult:
        """Write lambda.json, and print a row for each curve."""
        refuse_ranks("task=lambda")
        config = context.recipe.section(LambdaConfig, "lambda")
        checkpoint: Path | None = None if config.checkpoint is None else Path(config.checkpoint)
        if checkpoint is None:
            checkpoint = context.train().checkpoint
            if checkpoint is None:
                raise UserError(
                    "task=lambda starts with the checkpoint that training writes when it ends: set "
                    "trainer.checkpoint_every, or name one by lambda.checkpoint"
                )
        words = [f"data.batch_size={config.batch_size}"]
        trained = open_trained(checkpoint, words, context.given.model, context.given.dataset)
        stream = Stream(context, config, trained)
        curves, seconds = stream.curves(), stream.seconds
        effects = {e.entity: own for e, own in zip(config.effects, stream.effects.each, strict=True)}
        told = {
            "schema": 1,
            "task": "lambda",
            "checkpoint": str(trained.directory),
            "events": len(curves.clicks),
            "mini_batches": stream.read,
            "entities": {name: len(own) for name, own in effects.items()},
            "unsettled": sum(own.unsettled for own in effects.values()),
            "updates_per_second": stream.updates / seconds if seconds else None,
            "curves": {name: curves.judged(scores, config.windows) for name, scores in curves.scores.items()},
        }
        files = ReportFiles(context.directory)
        files.write_json("lambda.json", told)
        torch.save(
            {name: own.state_dict() for name, own in effects.items()}, context.directory / "effects.pt"
        )
        print_curves(told)
        files.check()
        return RunResult(told)


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

    def _of(self, scores: Floats, rows: slice) -> dict[str, Any]:
        clicks, own, weights = (
            torch.from_numpy(each[rows].astype(np.float32)) for each in (self.clicks, scores, self.weights)
        )
        found = judge(Scores("clicks", clicks, own, weights), MetricsConfig())
        told = found.to_dict()["figures"]
        return {"first": rows.start, "end": rows.stop, **{k: told[k] for k in FIGURES if k in told}}


class Stream:
    """The held-out events in their order, and what is learnt of them."""

    def __init__(self, context: TaskContext, config: LambdaConfig, trained: Trained) -> None:
        self.context, self.config, self.trained = context, config, trained
        self.reader = Reader(trained, config.effects)
        self.effects = Effects([], config.learning)
        """Of the first model, after all events."""
        self.read = self.updates = 0
        """Mini-batches, and updates of one entity by one of them."""
        self.seconds = 0.0
        """Spent on updates."""

    def curves(self) -> Curves:
        """Read the stream once for each model that scores it."""
        dataset, config = self.trained.dataset, self.config
        if "eval" not in dataset.splits or not dataset.size("eval"):
            raise UserError("task=lambda streams the held-out part of the data: set data.eval_fraction")
        events = list(self._read(self.trained))
        self.read = len(events)
        clicks, weights, frozen = (np.concatenate([e[n] for e in events]) for n in (1, 2, 3))
        learnt, self.effects = self._learnt(events)
        scores = {FROZEN: frozen, LAMBDA: learnt}
        if config.retrain_every is not None and config.retrain_every < len(events):
            scores[RETRAINED], scores[CORRECTED] = self._retrained(events, config.retrain_every)
        return Curves(clicks, weights, scores)

    def _read(self, trained: Trained, count: int | None = None) -> Iterator[MiniBatch]:
        with trained.scoring(trained.dataset) as scoring:
            yield from islice(self.reader.read(scoring, scoring.batches("eval")), count)

    def _learnt(self, events: list[MiniBatch]) -> tuple[Floats, Effects]:
        """The logits of ``events`` with new effects, each scored before it is learnt, and these effects."""
        effects = Effects([own.inputs.shape[1] for own in events[0].seen], self.config.learning)
        logits = []
        for seen, clicks, weights, offsets in events:
            logits.append(np.sum([offsets, *effects.scores(seen)], axis=0))
            started = perf_counter()
            effects.learn(seen, clicks, weights, offsets)
            self.seconds += perf_counter() - started
            self.updates += sum(len(np.unique(own.entities)) for own in seen)
        return np.concatenate(logits), effects

    def _retrained(self, events: list[MiniBatch], every: int) -> tuple[Floats, Floats]:
        """The logits by models that are trained anew each ``every`` mini-batches on all events before, alone
        and with effects. Effects of a new model learn the stream's events from the first on, scored by it,
        before they take over, so that no knowledge of an entity is lost with the model that it corrected."""
        alone = [own.offsets for own in events[:every]]
        corrected = [self._learnt(events[:every])[0]]
        for number, first in enumerate(range(every, len(events), every), 1):
            log.info(f"training model {number + 1} on the events before mini-batch {first:,}")
            own = list(self._read(self._trained_on(first, number), first + every))
            alone += [each.offsets for each in own[first:]]
            logits, _ = self._learnt(own)
            corrected.append(logits[sum(len(each.offsets) for each in own[:first]) :])
        return np.concatenate(alone), np.concatenate(corrected)

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
        return open_trained(found.checkpoint, words, self.context.given.model, self.trained.dataset)


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
