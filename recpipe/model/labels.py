"""The labels of a batch of any type, and their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recpipe.errors import UserError, nearest_or_all
from recpipe.model.losses.base import vector
from recpipe.model.outputs import ABSENT, names_of, part_of
from recpipe.plugin.batch import Batch

LABELS = "labels"
"""The attribute of a batch that has the labels, unless the recipe names another."""


class Labels:
    """Reads labels and weights at dotted paths, the first part of which is the batch's attribute and the
    second, where there is one, a label's name."""

    def __init__(self, path: str, columns: Sequence[str], weights: str | None) -> None:
        self.path = path
        """Of the labels; with several losses, of the object that holds the labels by name."""
        self.columns = tuple(columns)
        """The names of the columns of labels [B, L]; (): they have none."""
        self.of_own = tuple(weights.split(".")) if weights else ()
        """Where batches of a user's own type have the labels' weights, names one within another."""

    def weighs(self, batch: Any) -> bool:
        """Whether the labels of ``batch`` may have weights."""
        return batch.weights is not None if isinstance(batch, Batch) else bool(self.of_own)

    def weights(self, batch: Any, path: str) -> torch.Tensor | None:
        """The weights of the labels at ``path``, in their shape; None if they count alike."""
        if not isinstance(batch, Batch):
            return self._of_own(batch, path) if self.of_own else None
        if batch.weights is None or path.split(".")[0] != LABELS:
            return None
        found: Any = batch.weights
        for name in path.split(".")[1:]:
            found = self._column(found, name)
        return found if isinstance(found, torch.Tensor) else None

    def _of_own(self, batch: Any, path: str) -> torch.Tensor | None:
        """``weights`` of a batch of a user's own type: a tensor for all labels, or one for each by name."""
        where = ".".join(self.of_own)
        found = self._part(batch, self.of_own, f"model.label_weights={where}")
        for name in path[len(self.path) :].split(".")[1:]:
            column = self._column(found, name)
            found = found if isinstance(found, torch.Tensor) else part_of(found, name)
            found = found if column is ABSENT else column
        if found is ABSENT:
            return None
        if not isinstance(found, torch.Tensor):
            raise UserError(f"model.label_weights={where}: is a {type(found).__name__}, not a tensor")
        labels = self.at(batch, path)
        if vector(found).shape != vector(labels).shape:
            raise UserError(
                f"model.label_weights={where}: the weights are {list(found.shape)} and the labels "
                f"{list(labels.shape)}; give each label a weight"
            )
        return found.float().reshape(labels.shape)

    def _column(self, labels: Any, name: str) -> Any:
        """The column of that name of ``labels`` [B] or [B, L]; ``ABSENT`` if they are something else."""
        if not isinstance(labels, torch.Tensor) or name not in self.columns:
            return ABSENT
        if labels.dim() == 2 and labels.shape[1] == len(self.columns):
            return labels[:, self.columns.index(name)]
        return labels if len(self.columns) == 1 else ABSENT

    def at(self, batch: Any, path: str) -> torch.Tensor:
        """The labels at ``path``; ``UserError`` if the batch has none there."""
        found = self._part(batch, path.split("."), f"model.labels={path}")
        if not isinstance(found, torch.Tensor):
            at = "'s ".join(["the batch", *path.split(".")])
            raise UserError(f"model.labels={path}: {at} is a {type(found).__name__}, not a tensor")
        return found

    def _part(self, batch: Any, path: Sequence[str], key: str) -> Any:
        """The part of ``batch`` at ``path``, which ``key`` names."""
        found, at = batch, "the batch"
        for name in path:
            in_columns = isinstance(found, torch.Tensor)
            part = self._column(found, name) if in_columns else part_of(found, name)
            if part is ABSENT:
                raise UserError(
                    f"{key}: {at} ({type(found).__name__}) has no '{name}'; "
                    f"{nearest_or_all(name, names_of(found))}"
                )
            found, at = part, f"{at}'s {name}"
        return found
