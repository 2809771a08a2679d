"""Teachers of a run: trained models that a loss asks for their predictions, each loaded once."""

from __future__ import annotations

from typing import Any

import torch

from recpipe.answers.trained import Trained, open_trained
from recpipe.common.console import log
from recpipe.data.dataset import Dataset
from recpipe.errors import DataError, UserError, nearest_or_all, shown
from recpipe.model.call import Called
from recpipe.model.losses.distillation import Distillation


def give_teachers(called: Called, dataset: Dataset, device: torch.device) -> None:
    """Load the teachers that the losses of ``called`` name, onto ``device``.

    ``UserError`` for one that cannot be opened, that predicts something else, or that was trained on other
    features than those of ``dataset``.
    """
    opened: dict[str, Trained] = {}
    for label, loss in called.losses_by_name.items():
        if not isinstance(loss, Distillation):
            continue
        if loss.teacher is None:
            raise UserError(
                "model.loss=distillation: name the teacher, model.loss={name: distillation, teacher: RUN}"
            )
        if loss.teacher not in opened:
            log.info("loading the teacher %s", loss.teacher)
            opened[loss.teacher] = _opened(loss.teacher, dataset)
            opened[loss.teacher].model.to(device)
        loss.asks = _Teacher(opened[loss.teacher], loss, label)


class _Teacher:
    """Predicts by one of the outputs of ``trained``."""

    def __init__(self, trained: Trained, loss: Distillation, label: str) -> None:
        self._called = trained.called
        tasks = trained.called.tasks
        name = loss.output or (label if label in tasks or len(tasks) > 1 else next(iter(tasks)))
        said = f"model.loss.teacher={shown(str(loss.teacher))}"
        if name not in tasks:
            raise UserError(
                f"{said}: has no output '{shown(name)}', model.loss.output; {nearest_or_all(name, tasks)}"
            )
        self._task = tasks[name]
        if self._task.kind != loss.kind:
            raise UserError(
                f"{said}: predicts {self._task.kind}, and model.loss.of_label={loss.of_label} takes "
                f"{loss.kind}; set of_label"
            )

    def __call__(self, batch: Any) -> torch.Tensor:
        return self._task.prediction(self._called.output(batch)[1])


def _opened(path: str, dataset: Dataset) -> Trained:
    try:
        trained = open_trained(path)
        trained.require_columns(dataset)
    except (DataError, UserError) as fault:
        raise UserError(f"model.loss.teacher={shown(path)}: {fault}") from fault
    if any(feature.growth is not None for feature in trained.schema.sparse):
        raise UserError(
            f"model.loss.teacher={shown(path)}: its tables grow, and ids have other rows there than here; "
            "train it with tables of fixed rows"
        )
    learned = [
        own.learned.to_dict()
        for own in (trained.trained_on.preparation, dataset.preparation)
        if own is not None and own.learned is not None
    ]
    if len(learned) > 1 and learned[0] != learned[1]:
        raise UserError(
            f"model.loss.teacher={shown(path)}: its vocabularies, scales or edges were learnt from other "
            "data, so that it would see other values; train it on these data"
        )
    return trained
