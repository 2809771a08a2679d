"""``conf/trainer``, typed and checked."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Interval
from pydantic import AfterValidator, BeforeValidator

from recpipe.common.validation import Count, FilePath, Positive, Text, one_of
from recpipe.data.dataset import SplitName
from recpipe.errors import UserError, did_you_mean, shown
from recpipe.model.metrics import METRICS, named
from recpipe.plugin.averaging import Averaging


def _device(value: Any) -> Any:
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", str(value)):
        raise ValueError("is unknown; choose auto, cpu, cuda or cuda:N")
    return value


def _whole_or_share(words: str) -> AfterValidator:
    """Whole numbers above 0, and shares up to 1.0 of what ``words`` say."""

    def checked(value: int | float) -> int | float:
        if not 0 < value < 2**63 or (isinstance(value, float) and value > 1):
            raise ValueError(f"give a whole number of {words}")
        return value

    return AfterValidator(checked)


Every = Annotated[int | float, _whole_or_share("steps, or a share of an epoch (0.25)")]
"""An interval: whole steps, or a share of an epoch."""
Limit = Annotated[int | float, _whole_or_share("batches, or a share of them (0.1)")]
"""Whole batches, or a share of them."""


def _evaluates(value: object) -> object:
    if value is None:
        raise ValueError("a run always evaluates; 1.0 does so only at the end of each epoch and of the run")
    return value


MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
LOGGERS = ("csv", "tensorboard", "wandb", "mlflow")


def _logger(value: str) -> str:
    if value not in LOGGERS:
        raise ValueError(
            f"is unknown; choose {', '.join(LOGGERS)}, null, or any Lightning logger: "
            "{_target_: package.Class, ...}"
        )
    return value


@dataclass(frozen=True)
class Monitored:
    """A figure of evaluations, ``val/NAME`` as loggers get it, of which the best counts."""

    monitor: str
    mode: Annotated[str, one_of("min", "max")] | None = None
    """Which way it is better; where the recipe leaves it out, as its metric has it."""

    def __post_init__(self) -> None:
        """``UserError`` for a figure of which recpipe does not know which way it is better."""
        if self.mode is None:
            figure = self.monitor.rpartition("/")[2]
            metric = named(figure)
            better = "lower" if figure == "loss" else metric and metric.better
            if better not in ("lower", "higher"):
                known = [f"val/{one.name}" for one in METRICS if one.better in ("lower", "higher")]
                raise UserError(
                    f"monitor={shown(self.monitor)}: which way {shown(self.monitor)} is better is not known: "
                    f"set mode to min or max.{did_you_mean(self.monitor, [*known, 'val/loss'])}"
                )
            object.__setattr__(self, "mode", "min" if better == "lower" else "max")


@dataclass(frozen=True)
class Stopping(Monitored):
    """When training ends early, as Lightning's ``EarlyStopping`` has it."""

    patience: Positive = 3
    """After so many evaluations in a row without a better figure."""
    min_delta: Annotated[float, Ge(0)] = 0.0
    """By how much at least it must be better."""
    stopping_threshold: float | None = None
    """Training ends once the figure is better than this."""
    divergence_threshold: float | None = None
    """And once it is worse than this."""


def _monitored(value: object) -> object:
    return {"monitor": value} if isinstance(value, str) else value


PRECISIONS = {"32-true": "float32", "32": "float32", "bf16-mixed": "bfloat16", "bf16": "bfloat16"}
"""``model.precision`` by Lightning's names of it."""
_NO_PRECISION = {
    "16": "losses would have to be scaled, which updates inside the backward pass do not know",
    "bf16-true": "weights stay float32, or small steps of theirs would be lost",
    "64": "tables and their optimizers are float32",
    "transformer-engine": "it has layers of its own",
}


def _precision(value: Any) -> Any:
    name = str(value)
    if name not in PRECISIONS:
        why = next((why for begins, why in _NO_PRECISION.items() if name.startswith(begins)), None)
        choose = "choose 32-true or bf16-mixed"
        raise ValueError(f"is not to be had: {why}; {choose}" if why else f"is unknown; {choose}")
    return name


@dataclass(frozen=True)
class CompileConfig:
    """``trainer.compile``: arguments of ``torch.compile``."""

    mode: Annotated[str, one_of(*MODES)] | None = None
    backend: Text = "inductor"
    dynamic: bool | None = None
    fullgraph: bool = False


@dataclass(frozen=True)
class EmaConfig:
    """``trainer.ema``: the exponential moving average of dense part and tables."""

    decay: Annotated[float, Interval(gt=0, lt=1)] | None = None
    """How much of the average each point keeps; None: there is none."""
    start: Every = 1
    """The step after which the first point is, or the share of the run that is trained by then."""
    every: Every = 1
    """From point to point: whole steps, or a share of an epoch."""


@dataclass(frozen=True)
class SwaConfig:
    """``trainer.swa``: the mean of dense part and tables, after Lightning's ``StochasticWeightAveraging``."""

    start: Every | None = None
    """The step after which the first point is, or the share of the run that is trained by then; None: there
    are none."""
    every: Every = 1.0
    """From point to point: whole steps, or a share of an epoch."""
    lr: Annotated[float, Gt(0)] | None = None
    """The dense rate from then on; None: as its schedule has it."""
    tables_lr: Annotated[float, Gt(0)] | None = None
    anneal_steps: Count = 0
    """For how many steps the rates go there from those before; 0: at once."""
    anneal_strategy: Annotated[str, one_of("cos", "linear")] = "cos"

    def rate(self, step: int, before: float, first: int, rate: float) -> float:
        """The rate in ``step``, which was ``before`` in the step ``first``, and goes to ``rate``."""
        share = min(1.0, (step - first) / self.anneal_steps) if self.anneal_steps else 1.0
        if self.anneal_strategy == "cos":
            share = (1 - math.cos(math.pi * share)) / 2
        return before + (rate - before) * share


@dataclass(frozen=True)
class PublishConfig:
    """``trainer.publish``: deltas of a package that a run writes while it trains."""

    dir: FilePath | None = None
    """Where they are written; None: nothing is published."""
    every_steps: Positive | None = None
    every_seconds: Annotated[float, Gt(0)] | None = None
    base: FilePath | None = None
    """The package that they begin with; None: ``base.recpipe`` in ``dir``, made when the run starts."""
    threshold: Annotated[float, Ge(0)] = 0.0
    """Rows of which no weight has moved further than this since it was published are left for later; 0: every
    row that was updated is published."""
    sign: FilePath | None = None
    """A private Ed25519 key, as a PEM file, by which they are signed."""

    def __post_init__(self) -> None:
        """``UserError`` unless the interval of what is published is said once."""
        if self.dir is not None and (self.every_steps is None) == (self.every_seconds is None):
            raise UserError("trainer.publish: say how often, by one of every_steps=500 and every_seconds=30")


@dataclass(frozen=True)
class TrainerConfig:
    """``conf/trainer``; ``eval_every`` and ``checkpoint_every`` are whole steps or a share of an epoch."""

    max_epochs: Positive
    max_steps: Positive | None
    device: Annotated[str, BeforeValidator(_device)]
    eval_every: Annotated[Every, BeforeValidator(_evaluates)]
    checkpoint_every: Every | None
    keep_checkpoints: Positive
    checkpoint_dir: FilePath | None
    logger: Annotated[str, AfterValidator(_logger)] | dict[str, Any] | None
    """A name, or the ``_target_`` of a Lightning logger with its arguments."""
    callbacks: list[dict[str, Any]]
    """The ``_target_`` of Lightning callbacks with their arguments."""
    progress: bool
    backend: Annotated[str, one_of("auto", "plain", "cpu", "cuda_graph")] = "auto"
    """Who computes the model's dense part: its modules, ``recpipe.backend`` on a CPU, or a CUDA graph."""
    split: Annotated[str, one_of("auto", "always", "never")] = "auto"
    """Whether batches are cut into micro-batches by a plugin's splitter."""
    accumulate_grad_batches: Positive = 1
    """How many batches make one optimizer step, of the dense part and of the tables."""
    gradient_clip_val: Annotated[float, Gt(0)] | None = None
    """The limit of the dense gradients' norm, or of each of their values; None: there is none."""
    gradient_clip_algorithm: Annotated[str, one_of("norm", "value")] = "norm"
    gradient_clip_over: Annotated[str, one_of("dense", "all")] = "dense"
    """Whether the norm is that of the dense part, or of dense part and tables."""
    precision: Annotated[str, BeforeValidator(_precision)] | None = None
    """``model.precision`` by Lightning's names; None: what that says."""
    compile: bool | CompileConfig = False
    """Whether, and how, torch.compile makes the parts of the model that hold no tables."""
    deterministic: bool = False
    """Whether a GPU uses only algorithms that give the same bits each time."""
    ema: EmaConfig = EmaConfig()
    swa: SwaConfig = SwaConfig()
    early_stopping: Annotated[Stopping | None, BeforeValidator(_monitored)] = None
    best_checkpoint: Annotated[Monitored | None, BeforeValidator(_monitored)] = None
    """Of which figure the best evaluation's checkpoint is kept; None: of none."""
    limit_train_batches: Limit | None = None
    """How many batches of each part are taken; None: all."""
    limit_val_batches: Limit | None = None
    limit_test_batches: Limit | None = None
    publish: PublishConfig = PublishConfig()
    fast_dev_run: bool | Positive = False
    """How many steps and batches of each part to try, writing no checkpoint and no log; False: no trial."""

    def __post_init__(self) -> None:
        """``UserError`` for two averages at once."""
        if self.ema.decay is not None and self.swa.start is not None:
            raise UserError(
                "trainer.ema.decay and trainer.swa.start: a run averages its weights by one of them"
            )

    @property
    def average(self) -> Averaging | None:
        """What weights are averaged by; None: by nothing."""
        if self.ema.decay is not None:
            return Averaging("ema", self.ema.decay)
        return None if self.swa.start is None else Averaging("swa")

    def effective(self) -> TrainerConfig:
        """The same for a trial (``fast_dev_run``), else itself."""
        tried = int(self.fast_dev_run)
        if not tried:
            return self
        return replace(
            self,
            max_steps=tried,
            eval_every=tried,
            limit_val_batches=tried,
            limit_test_batches=tried,
            checkpoint_every=None,
            best_checkpoint=None,
            early_stopping=None,
            logger=None,
            publish=PublishConfig(),
        )

    def limits(self) -> list[tuple[SplitName, int | float]]:
        """The parts of the data that end early, each with its limit."""
        parts: dict[SplitName, int | float | None] = {
            "train": self.limit_train_batches,
            "eval": self.limit_val_batches,
            "test": self.limit_test_batches,
        }
        return [(split, limit) for split, limit in parts.items() if limit is not None]

    @property
    def kernels(self) -> str:
        """``backend``, which is plain where torch.compile takes the place of other kernels; ``UserError`` if
        both are asked for."""
        if not self.compile:
            return self.backend
        if self.backend in ("cpu", "cuda_graph"):
            raise UserError(
                f"trainer.compile and trainer.backend={self.backend} each make the dense part by kernels of "
                "their own: leave one of them out"
            )
        return "plain"

    def interval(self, every: int | float, steps_per_epoch: int) -> int:
        """``every`` as a number of steps, at most an epoch's. A share refers to an epoch, or to the run if it
        is shorter."""
        steps = (
            every
            if isinstance(every, int)
            else every * min(steps_per_epoch, self.max_steps or steps_per_epoch)
        )
        return max(1, min(math.ceil(steps), steps_per_epoch))

    def checkpoints(self, run_dir: Path) -> Path:
        """The directory of checkpoints."""
        return Path(self.checkpoint_dir).expanduser() if self.checkpoint_dir else run_dir / "checkpoints"

    def steps(self, steps_per_epoch: int) -> int:
        """The number of optimizer steps of the whole run."""
        return min(self.max_steps or sys.maxsize, self.max_epochs * steps_per_epoch)
