"""How a learning rate changes with the steps of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Protocol
from weakref import WeakSet

from annotated_types import Ge, Gt, Interval

from recpipe.common.validation import Count, FieldError, Positive, one_of

_DECAY = ("decay_start_step", "decay_steps", "min_lr")
TAKES = {
    "constant": (),
    "cosine": _DECAY,
    "polynomial": (*_DECAY, "power"),
    "step": ("decay_start_step", "step_size", "gamma", "min_lr"),
    "plateau": ("monitor", "mode", "factor", "patience", "threshold", "cooldown", "min_lr"),
}
"""What each schedule takes beside ``warmup_steps``."""
_NEEDS = {"cosine": "decay_steps", "polynomial": "decay_steps", "step": "step_size"}
Share = Annotated[float, Interval(ge=0, le=1)]


@dataclass(frozen=True)
class Schedule:
    """A learning rate by the number of the optimizer step, which counts from 1 over the whole run.

    Step n of the first ``warmup_steps`` W has n / W of the rate that the recipe sets. From
    ``decay_start_step`` on it falls: ``cosine`` as ``torch.optim.lr_scheduler.CosineAnnealingLR``,
    ``polynomial`` as MLPerf's DLRM (``LRPolicyScheduler``), ``step`` as ``StepLR``. ``plateau`` falls as
    ``ReduceLROnPlateau`` when a figure of the evaluations stops improving (``recpipe.training.plateau``).
    """

    name: Annotated[str, one_of(*TAKES)]
    warmup_steps: Count = 0
    decay_start_step: Positive | None = None
    """None: the last step of the warm-up, which is the first one with the whole rate."""
    decay_steps: Positive | None = None
    """How many steps it falls for; it then stays as it is."""
    power: Annotated[float, Gt(0)] = 2.0
    """Of the share of ``decay_steps`` that is left."""
    step_size: Positive | None = None
    """After how many steps each it is multiplied by ``gamma``."""
    gamma: Share = 0.1
    min_lr: Annotated[float, Ge(0)] = 0.0
    """The rate falls no lower."""
    monitor: str = "val/logloss"
    mode: Annotated[str, one_of("min", "max")] | None = None
    """Whether the figure improves when it falls or when it grows; None: as its metric has it."""
    factor: Annotated[float, Interval(gt=0, lt=1)] = 0.1
    patience: Count = 10
    """How many evaluations without improvement it waits for."""
    threshold: Annotated[float, Ge(0)] = 1e-4
    """The least relative improvement that counts."""
    cooldown: Count = 0
    """How many evaluations it does not judge after a fall."""

    def __post_init__(self) -> None:
        """``FieldError`` for keys that this schedule does not take, or lacks."""
        takes = ("warmup_steps", *TAKES.get(self.name, ()))
        for each in fields(self)[1:]:
            if each.name not in takes and getattr(self, each.name) != each.default:
                raise FieldError(
                    f"{each.name}={getattr(self, each.name)}: the schedule {self.name} takes no {each.name}, "
                    f"but {', '.join(takes)}"
                )
        needs = _NEEDS.get(self.name)
        if needs is not None and getattr(self, needs) is None:
            raise FieldError(
                f"{needs} has no value: the schedule {self.name} needs {needs}, in optimizer steps"
            )
        if self.start < self.warmup_steps:
            raise FieldError(
                f"decay_start_step={self.start} is before the end of the warm-up, "
                f"warmup_steps={self.warmup_steps}: the schedule {self.name} falls after it"
            )

    @property
    def start(self) -> int:
        """The step in which the rate is still whole, and after which it falls."""
        return max(1, self.warmup_steps) if self.decay_start_step is None else self.decay_start_step

    def rate(self, step: int, base: float) -> float:
        """The rate in ``step`` (1, 2, ...) if the recipe's is ``base``: these alone decide, but for
        ``plateau``, whose ``base`` is the one that it has fallen to."""
        if step < self.warmup_steps:
            return base * (step / self.warmup_steps)
        past = step - self.start
        if past <= 0 or self.name in ("constant", "plateau"):
            return base
        least = min(self.min_lr, base)
        if self.name == "step":
            assert self.step_size is not None
            return max(least, base * math.pow(self.gamma, past // self.step_size))
        assert self.decay_steps is not None
        if self.name == "cosine":
            share = min(past, self.decay_steps) / self.decay_steps
            return least + (base - least) * (1 + math.cos(math.pi * share)) / 2
        # MLPerf's code keeps the rate of the last of these steps, which is not zero.
        left = self.decay_steps - min(past, self.decay_steps - 1)
        return max(least, base * math.pow(left / self.decay_steps, self.power))


class KeepsRate(Protocol):
    """Who has a copy of a learning rate, as FBGEMM's tables have."""

    def set_learning_rate(self, lr: float) -> None:
        """Use this rate from now on."""


@dataclass(eq=False)
class Rate:
    """The learning rate in force, of an optimizer whose steps are made in several places."""

    value: float
    _copies: WeakSet[KeepsRate] = field(default_factory=WeakSet, repr=False)

    def follow(self, copy: KeepsRate) -> None:
        """Keep the rate of ``copy`` equal to this one, as long as it lives."""
        copy.set_learning_rate(self.value)
        self._copies.add(copy)

    def set(self, value: float) -> None:
        """Use ``value`` from now on."""
        if value != self.value:
            self.value = value
            for copy in self._copies:
                copy.set_learning_rate(value)
