"""Progressive validation of a stream: each sample is scored, then trained."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import lightning as L
import numpy as np
import torch

from recpipe.common.console import log
from recpipe.data.dataset import WaitingStopped
from recpipe.distributed.ranks import Channel
from recpipe.errors import UserError
from recpipe.model.call import Scored
from recpipe.model.config import MetricsConfig
from recpipe.model.metrics import Quality, judge
from recpipe.model.scores import Kind, Scores
from recpipe.pipeline.batch import InFlight
from recpipe.report.figures import labelled
from recpipe.report.record import Window
from recpipe.training.module import RankingModule


class Progressive(L.Callback):
    """Judges the predictions that a step's own forward pass makes, before its update, in windows of ``size``
    samples or a few more, for they end with a batch (Blum, Kalai and Langford, COLT 1999).

    The module is in training mode then: with dropout, these are the predictions of the thinned network.
    Windows are counted from the run's first sample; of a resumed run, the first one has only what was trained
    since. It passes ``progressive/auc`` and so forth to the trainer's loggers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.windows: list[Window] = []
        self._module: RankingModule | None = None
        self._parts: list[tuple[dict[str, Scored | None], tuple[float, ...], torch.Tensor | None]] = []
        """The predictions of each part that was trained, the mean weights of its batch, and its groups."""
        self._weights: tuple[float, ...] = ()
        self._first = 0
        """Samples of the run when the window began."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See what the model gives from now on."""
        assert isinstance(pl_module, RankingModule)
        if pl_module.backend.graph is not None:
            raise UserError(
                "trainer.backend=cuda_graph hands out no predictions of training, by which a stream is "
                "judged: set trainer.backend=auto"
            )
        self._module, self._first = pl_module, pl_module.totals.samples or 0
        pl_module.model.sees = self._see

    def _see(self, batch: Any, output: Any) -> None:
        assert self._module is not None
        scored, evaluation = self._module.model.called.scored(output, batch), self._module.evaluation
        groups = None if evaluation.asked.group is None else evaluation.sides.of(batch)[:, 0]
        self._parts.append((scored, self._weights, groups))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: InFlight, batch_idx: int
    ) -> None:
        """Keep what the batch's weights were divided by."""
        self._weights = batch.mean_weights

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: InFlight, batch_idx: int
    ) -> None:
        """Close the window if the batch has filled it."""
        assert isinstance(pl_module, RankingModule)
        if (pl_module.totals.samples or 0) // self.size > self._first // self.size:
            self._close(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the last window."""
        assert isinstance(pl_module, RankingModule)
        pl_module.model.sees = None
        if (pl_module.totals.samples or 0) > self._first:
            self._close(trainer, pl_module)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Close it where training ends while it waits for records, too."""
        if isinstance(exception, WaitingStopped):
            self.on_train_end(trainer, pl_module)

    def _close(self, trainer: L.Trainer, module: RankingModule) -> None:
        parts, self._parts = self._parts, []
        called, samples = module.model.called, module.totals.samples or 0
        found = {}
        for name, task in called.judged.items():
            label = called.label_of(name)
            columns = called.labels.columns
            own = [(each[name], _of(columns, label, means), groups) for each, means, groups in parts]
            found[name] = _quality(own, task.kind, module.trainers, module.evaluation.asked)
        first, *others = found.values()
        window = Window(trainer.global_step, samples, samples - self._first, first, found if others else {})
        self.windows.append(window)
        self._first = samples
        known = {name: value for name, value in first.items() if not math.isnan(value)}
        shown = " ".join(f"{label} {value:.4f}" for label, value in labelled(known) if value is not None)
        log.info(f"step {window.step:>6,}  {samples:>11,} samples  progressive {shown}")
        measured = {f"progressive/{name}": value for name, value in known.items()}
        for logger in trainer.loggers:
            logger.log_metrics(measured, step=trainer.global_step)


def _of(columns: tuple[str, ...], name: str, means: tuple[float, ...]) -> float:
    """The mean weight of one label; 1 where there are none."""
    if not means:
        return 1.0
    return means[columns.index(name)] if name in columns and len(means) > 1 else means[0]


def _quality(
    parts: list[tuple[Scored | None, float, torch.Tensor | None]],
    kind: Kind,
    trainers: Channel,
    asked: MetricsConfig,
) -> Quality:
    """Of what all trainers have scored, which is the same on each."""
    there = [(scored, mean, groups) for scored, mean, groups in parts if scored is not None]
    weighted = any(scored.weights is not None for scored, *_ in there)
    columns = [scored.side_by_side() * torch.tensor([1.0, 1.0, mean]) for scored, mean, _ in there]
    own = torch.cat([torch.empty(0, 3), *columns])
    groups = torch.cat([torch.empty(0, dtype=torch.int64), *(each for *_, each in there if each is not None)])
    if trainers.size > 1:
        weighted = any(part[0] for part in trainers.gather(np.array([int(weighted)])))
        own = torch.from_numpy(np.concatenate(trainers.gather(own.numpy())))
        groups = torch.from_numpy(np.concatenate(trainers.gather(groups.numpy())))
    predictions, labels, weights = own.T.contiguous()
    scores = Scores(
        *(kind, labels, predictions, weights if weighted else None),
        groups=None if asked.group is None else groups,
    )
    return judge(scores, replace(asked, intervals=None)).quality
