"""A slice of the data, kept so that a model with other tables is evaluated by its dense part alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recpipe.answers.stored import FloatCheckpoint
from recpipe.kit import Meter, batch_size, select
from recpipe.model.call import Called
from recpipe.plugin import UserError
from recpipe_low_precision.layers import LowPrecisionLinear
from recpipe_low_precision.replay import Pieces, Stub, TableRows, put_stubs
from recpipe_low_precision.row_types import FLOAT, Assignment

LAYER = "layer:"
"""What comes before a linear layer's path in its name in an assignment."""


@dataclass(frozen=True)
class Losses:
    """What a model says of a slice's samples, float64 [N] each."""

    logits: NDArray[np.float64]
    losses: NDArray[np.float64]
    """Cross-entropy in nats."""


class Slice:
    """The samples of ``batches``, of a finished model.

    Only rows that these samples look up are kept in memory, each in float32 and in the types that were asked
    for. Row-wise types make a row's bytes of that row alone, so the pooled rows, and so the scores, have the
    same bits as those of the whole table. Pooled rows are kept between evaluations, up to ``cache_bytes``.
    """

    def __init__(
        self,
        source: FloatCheckpoint,
        batches: Iterable[Any],
        cache_bytes: int,
        used: Mapping[str, NDArray[np.bool_]] | None = None,
    ) -> None:
        self.source, self.called = source, source.called()
        self.batches = list(batches)
        if not self.batches:
            raise UserError("there are no samples to judge types by: raise data.eval_fraction")
        self.pieces = Pieces(cache_bytes)
        self.stubs = put_stubs(self.called, source, self.pieces)
        # Without rows, so that the stubs see the ids.
        self.labels = _learnt(self.called, self.stubs, self.batches)
        self.tables: dict[str, TableRows] = {}
        for stub in self.stubs:
            self.tables |= stub.gather(source, used or {})
        self.pieces.tables = self.tables
        self.layers: dict[str, LowPrecisionLinear] = {}
        """Linear layers that can be computed in low precision, by their names in an assignment."""

    def evaluate(self, assignment: Assignment) -> Losses:
        """The model's scores and losses with tables kept, and layers computed, by ``assignment``."""
        self.assign(assignment)
        return self.evaluate_called(self.called)

    def assign(self, assignment: Assignment) -> None:
        """Use ``assignment``; layers that it does not name are in float32."""
        self.pieces.assignment = assignment
        for name, layer in self.layers.items():
            layer.kind = assignment.get(name, FLOAT).kind

    def evaluate_called(self, called: Called) -> Losses:
        """The scores and losses of the slice's samples by any model."""
        logits = []
        for number, batch in enumerate(self.batches):
            self.pieces.number = number
            logits.append(_judged(called, batch)[0])
        score = torch.cat(logits).double()
        label = torch.from_numpy(self.labels).double()
        losses = nn.functional.binary_cross_entropy_with_logits(score, label, reduction="none")
        return Losses(score.numpy(), losses.numpy())

    @cached_property
    def base_entropy(self) -> float:
        """Logloss of always predicting the mean label, in nats; normalized entropy is logloss over it."""
        rate = float(self.labels.mean(dtype=np.float64))
        return -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def asked_in(*slices: Slice) -> dict[str, torch.Tensor]:
    """The ids that they look up, int64 [n] of each feature."""
    found: dict[str, list[torch.Tensor]] = {}
    for asked in (asked for slice_ in slices for stub in slice_.stubs for asked in stub.asked):
        for name, own in asked.to_dict().items():
            found.setdefault(name, []).append(own.values().long())
    return {name: torch.cat(parts) for name, parts in found.items()}


def check_slice(source: FloatCheckpoint, batches: Iterable[Any]) -> None:
    """``UserError`` if a finished model cannot be judged by these samples, of which nothing is kept."""
    called = source.called()
    _learnt(called, put_stubs(called, source, Pieces(0)), batches)


def _learnt(called: Called, stubs: Sequence[Stub], batches: Iterable[Any]) -> NDArray[np.float32]:
    """The labels of all samples, float32 [N]; the stubs have then seen the ids."""
    labels = []
    for batch in batches:
        labels.append(_judged(called, batch)[1])
        for stub in stubs:
            stub.end_batch()
    found: NDArray[np.float32] = torch.cat(labels).numpy()
    if not np.isin(found, (0, 1)).all():
        raise UserError("normalized entropy is of clicks, and the labels are not 0 and 1 alone")
    if found.min() == found.max():
        raise UserError("all labels of a slice are equal: raise data.eval_fraction")
    return found


def _judged(called: Called, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        _, judged = called.judge(batch)
    if judged is None or called.kind != "clicks":
        raise UserError("types are chosen by normalized entropy: the model must predict one click a sample")
    return judged[0], judged[1].float()


def between_samples(batches: Iterable[Any], low: int, high: int) -> Iterator[Any]:
    """Samples ``low`` to ``high`` (excluded) of all that ``batches`` hold."""
    at = 0
    for batch in batches:
        size = batch_size(batch)
        first, last = max(low - at, 0), min(high - at, size)
        if first < last:
            yield batch if last - first == size else select(batch, np.arange(first, last))
        at += size
        if at >= high:
            return


def used_rows(
    source: FloatCheckpoint, batches: Iterable[Any], count: int, meter: Meter
) -> dict[str, NDArray[np.bool_]]:
    """For each table, bool [rows]: the rows that ``batches``, of which there are ``count``, look up."""
    called = source.called()
    stubs = put_stubs(called, source, Pieces(0))
    used = {table: np.zeros(rows, np.bool_) for table, (rows, _) in source.shapes.items()}
    for number, batch in enumerate(batches):
        with torch.no_grad():
            called(batch)
        for stub in stubs:
            asked = stub.taken().to_dict()
            for config in stub.configs:
                for feature in config.feature_names:
                    used[stub.tables[config.name]][asked[feature].values().numpy()] = True
        if meter.due:
            meter.show((number + 1) / count, f"reading training samples: batch {number + 1:,} of {count:,}")
    return used
