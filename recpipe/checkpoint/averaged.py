"""The averages of a checkpoint's weights: those of the dense part in trainer.pt, those of rows in the records
of the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.checkpoint.manifest import TABLES
from recpipe.checkpoint.table_files import open_tables
from recpipe.common.saved import Damaged, entries, like, within
from recpipe.common.tensors import TensorFiles
from recpipe.errors import UserError
from recpipe.plugin.averaging import KINDS, Averaging
from recpipe.plugin.tables import state_name, weight_name

AVERAGED = "averaged"
"""The key of trainer.pt; checkpoints of runs without averages lack it."""
LAST = "last"
"""The word for the weights of the last step."""
WEIGHTS = (*KINDS, LAST)


@dataclass(frozen=True)
class Averaged:
    """What trainer.pt has of averages: what they are made by, after which steps (``Pace``), how many points
    have passed, and the dense averages by name, none before the first point."""

    kind: str
    decay: float | None
    start: int
    every: int
    points: int
    dense: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, trainer: Mapping[str, Any]) -> Averaged | None:
        """That of the content of trainer.pt; None if it has none; ``Damaged`` for what no run saves."""
        if AVERAGED not in trainer:
            return None
        kinds = {"kind": str, "decay": float | None, "start": int, "every": int, "points": int}
        saved = entries({AVERAGED: dict[str, Any]}, trainer)[AVERAGED]
        found = entries({**kinds, "dense": dict[str, torch.Tensor]}, saved, AVERAGED)
        within(found, "points", 0)
        decay = found["decay"]
        if found["kind"] not in KINDS or (found["kind"] == "ema") != (decay is not None and 0 < decay < 1):
            raise Damaged(f"{AVERAGED}.kind is {found['kind'][:40]!r} with decay {decay!r}")
        return cls(**found)

    def to_dict(self) -> dict[str, Any]:
        """In plain values, for trainer.pt."""
        return {**asdict(self), "dense": dict(self.dense)}

    def check_dense(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """``Damaged`` unless there are averages of just these ``parameters``."""
        if self.points:
            mine = {name: value.detach().cpu() for name, value in parameters.items()}
            like(mine, dict(self.dense), f"{AVERAGED}.dense")


def with_weights(trainer: dict[str, Any], weights: str | None, directory: Path) -> dict[str, Any]:
    """The content of trainer.pt whose dense part is that of ``weights``: ``last``, ``ema`` or ``swa``; None:
    the averages, if there are any. It keeps ``averaged`` if ``saved_tables`` is to read averages as well.

    ``UserError`` for averages that the checkpoint does not have.
    """
    saved = Averaged.of(trainer)
    if weights in KINDS and (saved is None or saved.kind != weights):
        has = "no averages" if saved is None else f"those of trainer.{saved.kind}"
        raise UserError(
            f"weights={weights}: {directory} has {has}: take weights={LAST}, or train with trainer.{weights}"
        )
    if saved is None:
        return trainer
    own = {key: value for key, value in trainer.items() if key != AVERAGED}
    if weights == LAST or not saved.points:
        return own
    dense = trainer["state_dict"]
    return {**trainer, "state_dict": {**dense, **{n: v for n, v in saved.dense.items() if n in dense}}}


def averaging(files: TensorFiles, trainer: Mapping[str, Any]) -> TensorFiles:
    """``files`` with averages in the place of weights, if ``trainer``, which ``with_weights`` gives, says
    so."""
    saved = Averaged.of(trainer)
    return files if saved is None else AveragedFiles(files, saved)


def saved_tables(directory: Path, trainer: Mapping[str, Any]) -> TensorFiles:
    """The tables of the checkpoint ``directory``, of the weights that ``trainer`` has chosen."""
    return averaging(open_tables(directory / TABLES), trainer)


class AveragedFiles(TensorFiles):
    """The tables in ``files``, whose weights are the averages."""

    def __init__(self, files: TensorFiles, saved: Averaged) -> None:
        super().__init__(piece for pieces in files.pieces.values() for piece in pieces)
        self._by, self._points = Averaging(saved.kind, saved.decay), saved.points

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start, stop); of a table without state, which was frozen, as they are."""
        found = super().rows(name, start, stop)
        state = state_name(name.removesuffix(weight_name("")))
        if not name.endswith(weight_name("")) or state not in self.pieces:
            return found
        own = torch.from_numpy(super().rows(state, start, stop))
        averages: NDArray[np.float32] = self._by.averages(torch.from_numpy(found), own, self._points).numpy()
        return averages
