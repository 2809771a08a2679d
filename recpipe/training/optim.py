"""``conf/optim``: the optimizers of the tables' rows, and what the recipe says of the dense part's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from inspect import signature
from typing import Annotated, Any

import torch
import torchrec.optim
from pydantic import BeforeValidator

from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.plugin.averaging import Averaging
from recpipe.plugin.tables import FROZEN, KNOBS, TableOptimizer

Argument = bool | int | float | str | list[float] | None
"""The types of arguments that yaml can give an optimizer of ``torch.optim``."""
Group = dict[str, Argument | list[str] | dict[str, Argument]]
"""A group of the dense parameters: globs of their names, and what they have of their own."""


def _named(values: object) -> object:
    """``values`` of one table's optimizer; a rate of 0 freezes the table under any optimizer, so that it
    needs no name."""
    frozen = isinstance(values, Mapping) and "name" not in values and values.get("lr") in (0, "0", "0.0")
    return {"name": FROZEN.name, **values} if frozen else values  # type: ignore[dict-item]


@dataclass(frozen=True)
class OptimConfig:
    """``conf/optim``: the tables' optimizer, and the name and arguments of the dense part's."""

    tables: TableOptimizer
    dense: dict[str, Argument | dict[str, Argument] | list[Group]]
    """Its ``schedule`` and ``groups`` are read in ``recpipe.training.dense``."""
    by_table: dict[str, Annotated[TableOptimizer, BeforeValidator(_named)]] | None = None
    """Optimizers for tables whose name matches a glob, instead of ``tables``; the first match counts."""
    average: Averaging | None = None
    """What rows are averaged by: the recipe's ``trainer.ema`` or ``trainer.swa``."""

    def __post_init__(self) -> None:
        """``UserError`` for an average of some tables alone."""
        if any(own.average is not None for own in (self.tables, *(self.by_table or {}).values())):
            raise UserError(
                "optim.tables.average: weights are averaged for the whole model: set trainer.ema.decay or "
                "trainer.swa.start"
            )

    def of_table(self, name: str, weights: torch.Tensor) -> TableOptimizer:
        """The optimizer of a table: ``FROZEN`` if its weights require no gradient or its rate is 0. Otherwise
        the one in ``by_table``, else the one that the model has attached to its weights
        (``apply_optimizer_in_backward``), else that of all tables."""
        if not weights.requires_grad:
            return FROZEN
        named = next((own for glob, own in (self.by_table or {}).items() if fnmatchcase(name, glob)), None)
        chosen = named or _attached(name, weights) or self.tables
        return FROZEN if chosen.frozen else replace(chosen, average=self.average)

    def check_tables(self, names: Sequence[str]) -> None:
        """``UserError`` for a glob of ``by_table`` that matches none of the tables' ``names``."""
        for glob in self.by_table or ():
            if not any(fnmatchcase(name, glob) for name in names):
                raise UserError(f"optim.by_table.{shown(glob)}: no such table; {nearest_or_all(glob, names)}")


DECOUPLED = {"weight_decay_mode": "decouple"}
ATTACHED: dict[type, tuple[str, dict[str, Any]]] = {
    torch.optim.SGD: ("sgd", {}),
    torch.optim.Adagrad: ("adagrad", {}),
    torch.optim.Adam: ("adam", {}),
    torch.optim.AdamW: ("adam", DECOUPLED),
    torchrec.optim.SGD: ("sgd", {}),
    torchrec.optim.Adagrad: ("adagrad", {}),
    torchrec.optim.RowWiseAdagrad: ("rowwise_adagrad", {}),
    # FBGEMM's, which these stand for, have decoupled decay and a rate of 0.01 where nothing else is said.
    torchrec.optim.Adam: ("adam", DECOUPLED),
    torchrec.optim.PartialRowWiseAdam: ("partial_rowwise_adam", DECOUPLED),
    torchrec.optim.LAMB: ("lamb", DECOUPLED),
    torchrec.optim.PartialRowWiseLAMB: ("partial_rowwise_lamb", DECOUPLED),
}
"""The classes that a model may attach to a table: the name of the tables' optimizer, and what it is given."""


def _attached(name: str, weights: torch.Tensor) -> TableOptimizer | None:
    """The optimizer that ``apply_optimizer_in_backward`` has attached to a table's weights."""
    classes = getattr(weights, "_optimizer_classes", None)
    if not classes:
        return None
    (kind, *others), (knobs, *_) = classes, weights._optimizer_kwargs  # type: ignore[attr-defined]
    own, also = ATTACHED.get(kind, ("", {}))
    takes = {"lr", "eps", *KNOBS.get(own, ())}
    defaults = {n: p.default for n, p in signature(kind).parameters.items()}
    values = {"lr": 0.01} | {n: value for n, value in _apart(defaults).items() if n in takes} | _apart(knobs)
    unknown = {n for n, value in values.items() if n not in takes and value != defaults.get(n, knobs)}
    if others or not own or unknown:
        what = f"{kind.__name__} with {', '.join(sorted(unknown))}" if own and unknown else kind.__name__
        raise UserError(
            f"table '{name}': the model attaches {what}, and tables are updated by one of "
            f"{', '.join(sorted({each.__name__ for each in ATTACHED}))} with "
            f"{', '.join(sorted(takes)) if own else 'their arguments'}; set optim.by_table, or attach one of "
            "these"
        )
    given: dict[str, Any] = {
        n: float(value) for n, value in values.items() if n in takes and value is not None
    }
    return TableOptimizer(own, **given, **(also if given.get("weight_decay") else {}))


def _apart(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """``knobs`` with ``betas`` as ``beta1`` and ``beta2``."""
    others = {name: value for name, value in knobs.items() if name != "betas"}
    pair = knobs.get("betas")
    return others if pair is None else {**others, "beta1": pair[0], "beta2": pair[1]}
