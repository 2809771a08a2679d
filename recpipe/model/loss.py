"""Losses by name, for models that return none: what ``model.loss`` may say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast, get_type_hints

from recpipe.common.validation import fitted
from recpipe.common.words import make
from recpipe.data.schema import LabelColumn
from recpipe.errors import UserError, nearest_or_all, shown
from recpipe.model.losses.base import Loss, OwnLoss
from recpipe.model.losses.distillation import Distillation
from recpipe.model.losses.pointwise import (
    BinaryCrossEntropy,
    BinaryCrossEntropyOfProbabilities,
    CrossEntropy,
    Focal,
    Huber,
    MeanAbsoluteError,
    MeanSquaredError,
    Poisson,
)
from recpipe.model.losses.ranking import Bpr, InBatchSoftmax, SampledSoftmax
from recpipe.model.losses.tasks import Esmm
from recpipe.plugin.conf import TARGET

LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        BinaryCrossEntropy(),
        BinaryCrossEntropyOfProbabilities(),
        Focal(),
        CrossEntropy(),
        MeanSquaredError(),
        MeanAbsoluteError(),
        Huber(),
        Poisson(),
        InBatchSoftmax(),
        SampledSoftmax(),
        Bpr(),
        Distillation(),
    )
}
"""The names in ``model.loss``, each with its arguments' defaults."""

JOINT = Esmm()
"""The one that is over two labels together."""

OF_KIND = {
    "clicks": "binary_cross_entropy",
    "values": "mean_squared_error",
    "counts": "poisson",
    "classes": "cross_entropy",
}
"""The loss of labels of each kind, where the recipe names none."""
NAME = "name"
"""The key that tells the arguments of one loss from the losses of several labels."""


def parse_loss(
    chosen: str | Mapping[str, Any] | None, labels: Sequence[LabelColumn] = ()
) -> Loss | Esmm | dict[str, Loss]:
    """The loss that ``model.loss`` asks for: by name, with arguments or without, by ``_target_``, or one of
    these for each label. Where it names none, the loss of the label's kind.

    ``labels``: those of the data; (): they are not known. Raises ``UserError`` for an unknown loss, argument
    or label.
    """
    if JOINT.name in (chosen, chosen.get(NAME) if isinstance(chosen, Mapping) else None):
        given = chosen if isinstance(chosen, Mapping) else {}
        return _with(JOINT, given, "model.loss").of(labels)
    if isinstance(chosen, Mapping) and not is_one(chosen):
        if not chosen:
            raise UserError("model.loss={}: name a loss, or one for each label")
        named = {str(label): _one(loss, f"model.loss.{label}") for label, loss in chosen.items()}
        names = [label.name for label in labels]
        for name in named if len(names) > 1 else ():
            if name not in names:
                raise UserError(f"model.loss.{shown(name)}: no such label; {nearest_or_all(name, names)}")
        own = {n.name: named.get(n.name, LOSSES[OF_KIND[n.kind]]) for n in labels}
        return own if len(own) > 1 else named
    found = {n.name: _one(OF_KIND[n.kind] if chosen is None else chosen, "model.loss") for n in labels}
    if len(found) > 1:
        return found
    return found[labels[0].name] if found else _one(chosen or OF_KIND["clicks"], "model.loss")


def is_one(chosen: Mapping[str, Any]) -> bool:
    """Whether a mapping in ``model.loss`` is one loss, and not one for each label."""
    return TARGET in chosen or NAME in chosen


def named_loss(chosen: object) -> Loss | None:
    """The loss of that name, with the arguments' defaults; None if ``chosen`` names none."""
    name = chosen.get(NAME) if isinstance(chosen, Mapping) else chosen
    return LOSSES.get(name) if isinstance(name, str) else None


def _one(chosen: Any, key: str) -> Loss:
    if isinstance(chosen, Mapping) and TARGET in chosen:
        function: Callable[..., Any] = make(cast(Any, Callable), chosen, key)
        return OwnLoss(str(chosen[TARGET]), function)
    found = named_loss(chosen)
    if found is None:
        named = isinstance(chosen, Mapping) and NAME in chosen
        key, chosen = (f"{key}.{NAME}", chosen[NAME]) if named else (key, chosen)
        hint = nearest_or_all(str(chosen), [*LOSSES, JOINT.name])
        raise UserError(f"{key}={shown(chosen)}: is unknown; {hint}")
    return _with(found, chosen, key) if isinstance(chosen, Mapping) else found


L = TypeVar("L", bound=Loss | Esmm)


def _with(loss: L, arguments: Mapping[str, Any], key: str) -> L:
    """``loss`` with the arguments that the recipe gives it."""
    takes = [field.name for field in fields(cast(Any, loss)) if field.init]
    given = {str(name): value for name, value in arguments.items() if name != NAME}
    for name in given:
        if name not in takes:
            hint = nearest_or_all(name, takes) if takes else "it takes none"
            raise UserError(f"{key}.{shown(name)}: {loss.name} has no such argument; {hint}")
    hints = get_type_hints(type(loss), include_extras=True)
    return type(loss)(**{name: fitted(hints[name], value, f"{key}.{name}") for name, value in given.items()})
