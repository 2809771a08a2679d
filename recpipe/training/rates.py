"""The learning rates of a run's optimizers, as their schedules have them in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L

from recpipe.common.saved import entries
from recpipe.errors import UserError
from recpipe.plugin.schedule import Rate, Schedule
from recpipe.plugin.tables import TableOptimizer, TableSet
from recpipe.training.config import SwaConfig
from recpipe.training.dense import DenseGroup
from recpipe.training.plateau import Plateau, ReduceLROnPlateau


@dataclass
class _Paced:
    """An optimizer of tables, or a group of the dense one, with the rate that the recipe sets."""

    name: str
    base: float
    schedule: Schedule | None
    rates: list[Rate] = field(default_factory=list)
    """Those of the tables that have it."""
    later: Callable[[int, float], float] | None = None
    """Gives the rate of a step after the first averaging point, from that of that point's step; None: what
    the schedule has."""
    first: int = 0
    """The step of that point."""
    plateau: Plateau | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.schedule is not None and self.schedule.name == "plateau":
            self.plateau = Plateau(self.name, self.base, self.schedule)

    @property
    def moves(self) -> bool:
        """Whether it is set before each step."""
        return self.schedule is not None or self.later is not None

    def rate(self, step: int) -> float:
        """The rate in ``step``."""
        if self.later is not None and step > self.first:
            return self.later(step, self.rate(self.first))
        base = self.base if self.plateau is None else self.plateau.rate
        return base if self.schedule is None else self.schedule.rate(step, base)


class Rates(L.Callback):
    """Sets the rate of each optimizer before each step, by the step's number alone (and the falls of a
    ``plateau``), so that a resumed run has those of an undisturbed one.

    A run that is resumed with another schedule, or without one, has the new rates from its first step on.
    """

    def __init__(self, dense: Sequence[DenseGroup], tables: Iterable[TableSet]) -> None:
        self._dense = [self._of_group(group, n, len(dense)) for n, group in enumerate(dense)]
        self._groups: Sequence[dict[str, Any]] = ()
        alike: dict[TableOptimizer, list[TableSet]] = {}
        for group in tables:
            if not group.optimizer.frozen:
                alike.setdefault(group.optimizer, []).append(group)
        self._tables = [
            _Paced(
                "tables" if len(alike) == 1 else f"tables/{groups[0].tables[0].name}",
                optimizer.lr,
                optimizer.schedule,
                [group.optimizer.rate for group in groups],
            )
            for optimizer, groups in alike.items()
        ]
        self._all = [*self._dense, *self._tables]
        self.moving = any(one.moves for one in self._all)
        """Whether any rate has a schedule."""
        self._now: dict[str, float] = {}
        self._were: list[bool] = []
        """Which dense groups of the checkpoint that is resumed had a schedule."""

    @staticmethod
    def _of_group(group: DenseGroup, number: int, groups: int) -> _Paced:
        if group.rate is None and group.schedule is not None:
            raise UserError(f"{group.where}.schedule: {group.kind.__name__} takes no lr that it could change")
        name = "dense" if groups == 1 else f"dense/{number}"
        return _Paced(name, group.rate or 0.0, group.schedule)

    def settle(self, swa: SwaConfig, first: int) -> None:
        """From the step after ``first`` on, take the rates of ``swa``."""
        for owned, rate in ((self._dense, swa.lr), (self._tables, swa.tables_lr)):
            for one in owned:
                if rate is not None:
                    one.first, one.later = first, partial(swa.rate, first=first, rate=rate)
        self.moving = any(one.moves for one in self._all)

    def callbacks(self) -> list[L.Callback]:
        """Itself, and those that watch a figure."""
        return [self, *(one.plateau for one in self._all if one.plateau is not None)]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take over the dense optimizer's groups, which a checkpoint has been loaded into."""
        self._groups = trainer.optimizers[0].param_groups
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        scheduled = any(one.schedule is not None for one in self._dense)
        if scheduled and any(type(callback) is ReduceLROnPlateau for callback in callbacks):
            raise UserError(
                "optim.dense.schedule and the callback ReduceLROnPlateau both set the dense rate: leave one "
                "out (optim.dense.schedule={name: plateau, monitor: val/logloss} is the same)"
            )
        for one, group, was in zip(self._dense, self._groups, self._were, strict=False):
            if was and not one.moves:
                group["lr"] = one.base
        self._set(trainer.global_step + 1)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the rates of the step that begins."""
        self._set(trainer.global_step + 1)

    def _set(self, step: int) -> None:
        if not self.moving:
            return
        self._now = {one.name: one.rate(step) for one in self._all}
        for one, group in zip(self._dense, self._groups, strict=True):
            if one.moves:
                group["lr"] = self._now[one.name]
        for one in self._tables:
            for rate in one.rates:
                rate.set(self._now[one.name])

    def in_force(self) -> dict[str, float]:
        """The rates of the latest step by the optimizers' names; empty if none has a schedule."""
        return dict(self._now)

    def state_dict(self) -> dict[str, Any]:
        """Which dense groups have a schedule: their saved rates are not those of the recipe."""
        return {"scheduled": [one.moves for one in self._dense]}

    def check_state(self, state: dict[str, Any]) -> None:
        """``Damaged`` for what is no result of ``state_dict``."""
        entries({"scheduled": list[bool]}, state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember which rates the checkpoint's schedules have made."""
        self._were = state_dict["scheduled"]
