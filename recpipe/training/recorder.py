"""What a run has done so far: times of its steps, the learning curve, figures for loggers and callbacks, and
sums at most ``INTERVALS`` times, from which the report's series are made."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn

from recpipe.common.console import log
from recpipe.common.machine import Load, used_by_others
from recpipe.common.timing import Mark, Spans, mark, synchronized_time
from recpipe.errors import UserError
from recpipe.model.metrics import Quality
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.loader import TrainLoader
from recpipe.plugin.collection import TableCollection
from recpipe.report.figures import labelled
from recpipe.report.record import Point, Series, Throughput, rate
from recpipe.training.module import LossTotal, RankingModule
from recpipe.training.rates import Rates

LOG_EVERY = 50
"""Steps between a run's training figures; logging each step would slow small models down."""
INTERVALS = 120
"""Most intervals of a run."""


class Recorder(L.Callback):
    """Times the steps, keeps the learning curve, and prints a line for each evaluation.

    It passes figures to the trainer's loggers and, as ``trainer.callback_metrics``, to later callbacks:
    ``train/loss`` (mean since the last time) and ``train/samples_per_second`` every ``LOG_EVERY`` steps, with
    each evaluation and after the last step; with each evaluation ``val/loss`` and the figures that fit the
    model, such as ``val/auc``, of several labels ``val/LABEL/auc`` as well. With a schedule, each has the
    rates of the latest step (``lr/dense``, ``lr/tables``). Their step is ``trainer.global_step``, the
    optimizer steps done. ``self.log`` is not used: its steps are one less, and it slows every step.
    """

    def __init__(
        self, loader: TrainLoader, started: float, tables: TableCollection, rates: Rates | None = None
    ) -> None:
        self.loader, self.rates = loader, rates
        self.intervals = Intervals(tables)
        self.started = started
        self.first_step_seconds = math.nan
        """Seconds from ``started`` to the end of the first step; NaN before that."""
        self._spans = Spans()
        self.step_samples = array("q")
        """Samples of each step trained so far in this process."""
        self.samples = 0
        """Their sum: all samples of the run unless it was resumed."""
        self.skipped_samples = 0
        """How many of those samples a skipper has left out."""
        self.history: list[Point] = []
        self.quality: Quality = {}
        """The quality of the latest evaluation."""
        self.quality_by_label: dict[str, Quality] = {}
        """Of each label, if there are several."""
        self.evaluated_at = -1
        self.began = math.nan
        """The time of ``perf_counter`` when the first step began; NaN before that."""
        self._load: Load | None = None
        self.evaluation_seconds = 0.0
        self._evaluating = 0.0
        self._before = 0.0
        """Seconds of the parts before this one."""
        self._last: Mark = 0.0
        self._reported = 0
        self._loss = LossTotal()
        self._logged = LossTotal()

    @property
    def steps(self) -> int:
        """Steps trained so far in this process."""
        return len(self.step_samples)

    @property
    def step_seconds(self) -> Sequence[float]:
        """Seconds of each of them. On a GPU they are those between events on the training's stream, and this
        waits for it."""
        return self._spans.each()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock of the first step; in a run resumed inside an epoch, no epoch starts."""
        assert isinstance(pl_module, RankingModule)
        totals, self._load = pl_module.totals, Load.now()
        self.began, self._last = perf_counter(), mark(self.loader.device)
        self._before = totals.seconds
        seconds = self._before + self.began - self.started - self.evaluation_seconds
        self.intervals.begin(trainer.global_step, totals.samples or 0, seconds, totals.loss)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock of an epoch's first step."""
        self._last = mark(self.loader.device)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: InFlight,
        batch_idx: int,
    ) -> None:
        """Time the step from the end of the one before, so that waiting for data counts. Log every
        ``LOG_EVERY`` steps, counted from the run's beginning, also if it was resumed."""
        assert isinstance(pl_module, RankingModule)
        totals, device, ended = pl_module.totals, self.loader.device, mark(self.loader.device)
        if not self.step_samples:
            self.first_step_seconds = synchronized_time(device) - self.started
        self._spans.add(self._last, ended)
        self.step_samples.append(batch.consumed)
        self.samples += batch.consumed
        self.skipped_samples += batch.skipped
        now = ended if isinstance(ended, float) else perf_counter()
        # From the process's start, without evaluations, and with the parts before.
        totals.seconds = self._before + now - self.started - self.evaluation_seconds
        self._last = ended
        samples = self.samples if totals.samples is None else totals.samples
        if self.intervals.add(trainer.global_step, samples, totals.seconds, self.samples, totals.loss):
            self._last = mark(device)
        if trainer.global_step % LOG_EVERY == 0:
            self._log(trainer, pl_module, {})

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Close the last interval, and log the figures of the steps since the last time."""
        self.intervals.end()
        self._log(trainer, pl_module, {})

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start the clock of an evaluation."""
        self._evaluating = synchronized_time(self.loader.device)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the evaluation's figures, also those of the one after training."""
        assert isinstance(pl_module, RankingModule)
        quality = {f"val/{name}": value for name, value in pl_module.evaluation.result().items()}
        for label, own in pl_module.evaluation.by_label().items():
            quality |= {f"val/{label}/{name}": value for name, value in own.items()}
        self._log(trainer, pl_module, quality)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add a point to the learning curve and print its line. ``UserError`` if a callback monitors a figure
        that is not logged."""
        assert isinstance(pl_module, RankingModule)
        totals, total = pl_module.totals, pl_module.totals.loss_so_far()
        self.quality = pl_module.evaluation.result()
        self.quality_by_label = pl_module.evaluation.by_label()
        loss, self._loss = total.mean_since(self._loss), total
        speed = self.speed_since(self._reported)
        self._reported = self.steps
        step, self.evaluated_at = trainer.global_step, trainer.global_step
        samples = self.samples if totals.samples is None else totals.samples
        several = self.quality_by_label or {"": self.quality}
        held_out = "  ".join(
            " ".join([name] * bool(name) + [f"{label} {_known(value, '.4f')}"])
            for name, own in several.items()
            for label, value in labelled(own)
        )
        self.history.append(
            Point(
                step,
                samples,
                loss=loss,
                samples_per_second=speed,
                quality=self.quality,
                seconds=totals.seconds,
                learning_rates=self.learning_rates(),
            )
        )
        log.info(
            f"step {step:>6,}  {samples:>11,} samples  train loss {_known(loss, '.4f')}  {held_out}  "
            f"{_known(speed, ',.0f')} samples/s"
        )
        self._last = mark(self.loader.device)
        self.evaluation_seconds += synchronized_time(self.loader.device) - self._evaluating
        there = {*trainer.callback_metrics, "step", "epoch"}
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks if trainer.state.fn == TrainerFn.FITTING else ():
            monitor = getattr(callback, "monitor", None)
            if monitor is not None and monitor not in there and getattr(callback, "strict", True):
                raise UserError(
                    f"trainer: {type(callback).__name__} monitors '{monitor}', which nothing logs; "
                    f"there are {', '.join(sorted(there))}"
                )

    def _log(self, trainer: L.Trainer, module: L.LightningModule, figures: Mapping[str, float]) -> None:
        """Hand ``figures`` on, and those of the steps since the last call, if there are any."""
        assert isinstance(module, RankingModule)
        before, self._logged = self._logged, module.totals.loss_so_far()
        loss = self._logged.mean_since(before)
        if not math.isnan(loss):
            speed = self.speed_since(before.steps)
            figures = {"train/loss": loss, "train/samples_per_second": speed, **figures}
        if not figures:
            return
        figures = {**figures, **{f"lr/{name}": rate for name, rate in self.learning_rates().items()}}
        trainer.callback_metrics.update(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}
        )
        for logger in trainer.loggers:
            logger.log_metrics({**figures, "epoch": trainer.current_epoch}, step=trainer.global_step)
            logger.save()

    def learning_rates(self) -> dict[str, float]:
        """Those of the latest step by the optimizers' names; empty if none has a schedule."""
        return {} if self.rates is None else self.rates.in_force()

    def throughput(self, written_back: float) -> Throughput:
        """Speeds and times of the steps; ``written_back``: the time of ``perf_counter`` when all rows were in
        their tiers again."""
        return Throughput.of_steps(
            self.step_samples,
            self.step_seconds,
            first_step=self.first_step_seconds,
            set_up=self.began - self.started,
            evaluation=self.evaluation_seconds,
            start_to_end=written_back - self.started,
            # The share of the processors that other programs have used since the first step. Not with several
            # ranks, each of which counts as another program to the others.
            others=used_by_others(self._load) if self.loader.ranks.world == 1 else None,
        )

    def speed_since(self, step: int) -> float:
        """Samples per second of this run's steps from number ``step`` on; NaN if there are none."""
        return rate(sum(self.step_samples[step:]), sum(self.step_seconds[step:]))


def _known(value: float | None, form: str) -> str:
    """``value`` in the format ``form``; ``-`` where there is none: a resumed run that evaluates its
    checkpoint first has trained no step, and a held-out part of one class has no AUC."""
    return "-" if value is None or math.isnan(value) else format(value, form)


@dataclass(frozen=True)
class _Sum:
    """Sums at the end of a step: of the whole run ``step``, ``samples`` and ``seconds``; of this part the
    others."""

    step: int
    samples: int
    seconds: float
    trained: int
    """Samples of this part."""
    done: int
    """Steps of this part."""
    loss: torch.Tensor
    """The sum of the steps' losses; on a GPU it is read when the run is over."""
    moved: tuple[int, int] | None
    """Bytes read and written; None if all rows are resident."""
    found: tuple[int, int] | None
    """Lookups and hits; None if they are not counted."""


class Intervals:
    """Notes sums after every ``every`` steps; if there are too many, forgets every other one and doubles
    ``every``."""

    def __init__(self, tables: TableCollection) -> None:
        self.tables = tables
        self.every = 1
        self._sums: list[_Sum] = []
        self._steps = 0
        self._latest: tuple[int, int, float, int, torch.Tensor] = 0, 0, 0.0, 0, torch.zeros(())

    def begin(self, step: int, samples: int, seconds: float, loss: torch.Tensor) -> None:
        """Start before the first step of this part."""
        self._steps, self._sums = 0, []
        self._latest = step, samples, seconds, 0, loss
        self._note()

    def add(self, step: int, samples: int, seconds: float, trained: int, loss: torch.Tensor) -> bool:
        """Count a step, after which the sums are these (see ``_Sum``); whether they were noted."""
        self._steps += 1
        self._latest = step, samples, seconds, trained, loss
        due = self._steps % self.every == 0
        if due:
            self._note()
        return due

    def end(self) -> None:
        """Note the sums after the last step, unless they are."""
        if self._sums[-1].done != self._steps:
            self._note()

    def _note(self) -> None:
        step, samples, seconds, trained, loss = self._latest
        moved = found = None
        tiers = self.tables.tier_figures()
        if tiers is not None:  # as they are now: they go on counting
            moved = tiers.io.bytes_read, tiers.io.bytes_written
            if tiers.lookups is not None and tiers.hits is not None:
                found = tiers.lookups, tiers.hits
        self._sums.append(_Sum(step, samples, seconds, trained, self._steps, loss, moved, found))
        if len(self._sums) > INTERVALS + 1 and self._steps % self.every == 0:
            self._sums = self._sums[::2]  # without the latest
            self.every *= 2

    def series(self, step_seconds: Sequence[float]) -> Series:
        """The differences between neighbouring sums; ``step_seconds``: of each step of this part."""
        sums, pairs = self._sums[1:], list(pairwise(self._sums))
        moved = [s.moved for s in self._sums if s.moved is not None]
        counted = [s.found for s in self._sums if s.found is not None]
        found = Series(
            step=[s.step for s in sums],
            steps=_differences([s.step for s in self._sums]),
            samples=[s.samples for s in sums],
            seconds=[_short(s.seconds) for s in sums],
            samples_per_second=[
                _short(rate(new.trained - old.trained, sum(step_seconds[old.done : new.done])))
                for old, new in pairs
            ],
            loss=[_short(float(new.loss - old.loss) / (new.step - old.step)) for old, new in pairs],
        )
        found.bytes_read, found.bytes_written = (_differences([m[n] for m in moved]) for n in (0, 1))
        found.lookups, found.hits = (_differences([c[n] for c in counted]) for n in (0, 1))
        return found


def _differences(values: Sequence[int]) -> list[int]:
    return [new - old for old, new in pairwise(values)]


def _short(value: float) -> float:
    """Six digits, which keep report.json small."""
    return float(f"{value:.6g}")
