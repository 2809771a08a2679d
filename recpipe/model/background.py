"""An evaluation's predictions of one label, judged in a thread."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recpipe.errors import UserError
from recpipe.model.calibrated import Calibration, calibration
from recpipe.model.config import MetricsConfig
from recpipe.model.metrics import LOSS, Judged, Quality, judge
from recpipe.model.scores import Kind, Scores
from recpipe.model.sides import Sides


class BackgroundQuality:
    """Collects an evaluation's predictions, of a ``kind``, and computes their quality in a thread.

    A thread is used because sorting millions of predictions takes seconds, in which signals must be handled.
    The thread ends with the process, finished or not.
    """

    def __init__(
        self, kind: Kind = "clicks", asked: MetricsConfig | None = None, sides: Sides | None = None
    ) -> None:
        self.kind, self.asked = kind, asked or MetricsConfig()
        self.sides = sides or Sides.of_metrics(self.asked, None)
        self.folder: Path | None = None
        """Where the predictions of each evaluation are written: ``0.npy`` of the first one, float32 [2, N],
        the predictions and their labels, or [3, N] with weights. None: nowhere."""
        self._evaluations = 0
        self._loss, self._samples = 0.0, 0.0
        self._logits: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self.calibration: Calibration | None = None
        """The calibration at the latest evaluation whose quality was computed; None unless its labels are
        clicks."""
        self.judged: Judged | None = None
        """The figures of that evaluation with their intervals."""
        self.slices: list[dict[str, Any]] = []
        """The same of its slices (``Sides.told``)."""

    def add(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> None:
        """Keep float32 host copies of one batch's ``logits`` [B], ``labels`` [B] and, if all batches have
        them, ``weights`` [B]; and its ``values`` of ``sides``, int64 [B, columns]."""
        if values is not None:
            self._values.append(values)
        for kept, values in ((self._logits, logits), (self._labels, labels), (self._weights, weights)):
            if values is not None:
                kept.append(values.detach().reshape(-1).to("cpu", torch.float32, copy=True))

    def add_loss(self, total: float, samples: float) -> None:
        """Add one batch's loss, weighted by its ``samples``."""
        self._loss += total
        self._samples += samples

    def submit(self) -> Future[Quality]:
        """Start to compute the quality of what was added since the last call."""
        loss = self._loss / self._samples if self._samples else math.nan
        self._loss, self._samples = 0.0, 0.0
        logits, self._logits = self._logits, []
        labels, self._labels = self._labels, []
        weights, self._weights = self._weights, []
        values, self._values = self._values, []
        promised: Future[Quality] = Future()
        file = None if self.folder is None else self.folder / f"{self._evaluations}.npy"
        self._evaluations += 1
        threading.Thread(
            target=self._judge,
            args=(promised, labels, logits, weights, values, loss, file),
            name="recpipe-quality",
            daemon=True,
        ).start()
        return promised

    def _judge(
        self,
        promised: Future[Quality],
        labels: list[torch.Tensor],
        logits: list[torch.Tensor],
        weights: list[torch.Tensor],
        values: list[torch.Tensor],
        loss: float,
        file: Path | None,
    ) -> None:
        empty = torch.empty(0)
        try:
            label, logit = torch.cat([empty, *labels]), torch.cat([empty, *logits])
            weight = torch.cat(weights) if weights else None
            if file is not None:
                _write(file, [logit, label] if weight is None else [logit, label, weight])
            value = torch.cat(values) if values else torch.empty((len(label), 0), dtype=torch.int64)

            def part(rows: Any) -> Scores:
                groups = None if self.asked.group is None or not values else value[rows, 0]
                own = None if weight is None else weight[rows]
                return Scores(self.kind, label[rows], logit[rows], own, groups)

            scores = part(slice(None))
            self.judged, self.calibration = judge(scores, self.asked), calibration(scores)
            self.slices = []
            if values:
                told = lambda rows: judge(part(rows), self.asked).to_dict()  # noqa: E731
                self.slices = self.sides.told(value, self.asked, told)
            promised.set_result({**self.judged.quality, LOSS: loss})
        except BaseException as fault:
            promised.set_exception(fault)


def _write(file: Path, rows: list[torch.Tensor]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, torch.stack(rows).numpy())
    except OSError as fault:
        raise UserError(
            f"cannot write task.export_predictions={file.parent}: {fault.strerror}; choose another directory"
        ) from fault
