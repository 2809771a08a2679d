"""What a chain of deltas has come to, as a run that publishes sees it: the base and what follows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.answers import score
from recpipe.answers.apply import require_replaceable
from recpipe.answers.delta import Delta, Version, following, with_ids
from recpipe.answers.manifest import read_manifest
from recpipe.answers.row_types import decode_rows
from recpipe.errors import UserError
from recpipe.pipeline.placed import PlacedModel
from recpipe.setup.training import Training
from recpipe.tables.changes import NO_ROW
from recpipe.tables.collection import ReadsRows, RowCollection
from recpipe.training.progressive import Progressive

MODULE = "model."
"""What stands before a parameter's name in the model, where the package has it."""


@dataclass(frozen=True)
class PublishedTable:
    """A table of a run: its ``name`` in packages, that in the run, the number of its group, and of its row 0
    there."""

    name: str
    table: str
    group: int
    first: int
    rows: int
    dim: int


def table_places(model: PlacedModel) -> list[PublishedTable]:
    """The model's tables, with the names that they have in packages."""
    groups = model.embeddings.tables.groups
    every = [own for group in groups for own in group.own_names.values()]
    found = []
    for number, group in enumerate(groups):
        for table, base in zip(group.tables.tables, group.tables.layout.bases.tolist(), strict=False):
            own = group.own_names[table.name]
            name = own if every.count(own) == 1 else f"{group.path}.{own}"
            found.append(PublishedTable(name, table.name, number, base, table.rows, group.tables.dim))
    return found


class Published:
    """The latest version of the chain of the package ``base`` with the deltas in ``folder``; ``UserError`` if
    they are damaged or do not fit together."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base = base
        self.manifest: dict[str, Any] = read_manifest(base)
        try:
            score.verified(base)
            files = {program["constants"] for program in self.manifest["programs"]} - {None}
            held = [score.tensors(base / file) for file in sorted(files)]
            self.rows = {
                name: score.tensors(base / about["file"]) for name, about in self.manifest["tables"].items()
            }
        except score.PackageError as fault:
            raise UserError(str(fault)) from fault
        self.constants = {name: value for own in held for name, value in own.items()}
        self.version = Version.of_package(base, self.manifest)
        self.deltas: list[Delta] = []
        for delta in following(folder, self.version):
            self.deltas.append(delta)
            self.version = delta.version

    def kind(self, table: str) -> str:
        """The type of the rows of ``table``."""
        found: str = self.manifest["tables"][table]["type"]
        return found

    def require(self, places: Sequence[PublishedTable], model: PlacedModel) -> None:
        """``UserError`` unless the base is a package of a model with these tables and parameters."""
        tables = self.manifest["tables"]
        for place in places:
            about = tables.get(place.name)
            if about is None or (about["rows"], about["dimension"]) != (place.rows, place.dim):
                raise UserError(
                    f"{self.base} is of another model: it has no table '{place.name}' of {place.rows:,} rows "
                    f"of {place.dim}; package a checkpoint of this one, or leave trainer.publish.base out"
                )
            if "places" in self.rows[place.name]:
                raise UserError(
                    f"{self.base}: rows of table '{place.name}' that training never looked up were left out "
                    "(pruned), and cannot get their values later: quantize it without pruning"
                )
        more = sorted(tables.keys() - {place.name for place in places})
        dense = self.dense_of(model)
        wrong = [name for name, value in dense.items() if value.shape != self.constants[name].shape]
        if more or wrong or not dense:
            what = f"table '{more[0]}'" if more else f"'{wrong[0]}'" if wrong else "none of its parameters"
            raise UserError(
                f"{self.base} is of another model, which has {what} otherwise: package a checkpoint of this "
                "one, or leave trainer.publish.base out"
            )
        # Which of them are numbers in the compiled code is known before anything is trained.
        require_replaceable(self.manifest, self.base, dense)

    def dense_of(self, model: PlacedModel) -> dict[str, torch.Tensor]:
        """A copy of the parameters and buffers of ``model`` that the package has, by its names."""
        module = model.module
        named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        named |= dict(module.named_buffers(remove_duplicate=False))
        return {
            key: value.detach().to("cpu", self.constants[key].dtype, copy=True)
            for name, value in named.items()
            if (key := f"{MODULE}{name}") in self.constants
        }

    def shown(self) -> dict[str, NDArray[np.float32]]:
        """By table the weights that servers have, float32 [rows, D]: all rows, in memory."""
        found = {}
        for table, held in self.rows.items():
            there = held["rows"].clone()
            for delta in self._changing(table):
                ids, rows = delta.rows_of(self.manifest, table)
                there[ids] = rows
            dim = self.manifest["tables"][table]["dimension"]
            found[table] = decode_rows(there, self.kind(table), dim).numpy()
        return found

    def differing(self, table: str, start: int, now: torch.Tensor) -> NDArray[np.int64]:
        """The ids of the rows from ``start`` on that differ from ``now`` uint8 [n, bytes]."""
        there = self.rows[table]["rows"][start : start + len(now)].clone()
        for delta in self._changing(table):
            ids, rows = delta.rows_of(self.manifest, table)
            low, high = torch.searchsorted(ids, torch.tensor([start, start + len(now)])).tolist()
            there[ids[low:high] - start] = rows[low:high]
        found: NDArray[np.int64] = (there != now).any(1).nonzero().view(-1).numpy() + start
        return found

    def _changing(self, table: str) -> list[Delta]:
        """The deltas that have rows of ``table``; the files of the others need not be read."""
        return [delta for delta in self.deltas if table in delta.content["tables"]]

    def differing_ids(
        self, name: str, keys_of_rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Keys whose rows have changed, and the rows that they have now, ``NO_ROW`` for none, by the keys of
        the rows of the run's map."""
        held = score.tensors(self.base / self.manifest["maps"][name]["file"])
        keys, rows = held["keys"], held["rows"]
        for delta in self.deltas:
            for own, changed, new in delta.ids(self.manifest):
                if own == name:
                    keys, rows = with_ids(keys, rows, changed, new)
        before = dict(zip(keys.tolist(), rows.tolist(), strict=True))
        before.pop(score.MISSING_KEY, None)
        first = score.DEFAULT_ROW + 1
        now = dict(zip(keys_of_rows[first:].tolist(), range(first, len(keys_of_rows)), strict=True))
        changed_now = {key: row for key, row in now.items() if before.get(key) != row}
        changed_now |= dict.fromkeys(before.keys() - now.keys(), NO_ROW)
        return (
            np.fromiter(changed_now.keys(), np.int64, len(changed_now)),
            np.fromiter(changed_now.values(), np.int64, len(changed_now)),
        )


def figures_of_latest(progressive: Progressive | None) -> dict[str, dict[str, float | None]] | None:
    """The figures of the latest window that training has judged, by output."""
    if progressive is None or not progressive.windows:
        return None
    window = progressive.windows[-1]
    found = dict(window.quality_by_label) or {"": window.quality}
    return {
        name: {key: value if math.isfinite(value) else None for key, value in own.items()}
        for name, own in found.items()
    }


def require_readable(training: Training) -> None:
    """``UserError`` for a run whose deltas could not be exact."""
    config = training.run.recipe.trainer
    if config.average is not None:
        raise UserError(
            f"trainer.publish and trainer.{config.average.kind}: averages of all rows move after each step, "
            "so that a delta would have all of them: leave one of the two out"
        )
    embeddings = training.model.embeddings
    for group, collection in zip(embeddings.tables.groups, embeddings.collections, strict=True):
        if group.tables.codec is not None:
            raise UserError(
                f"trainer.publish: {group.tables.codec.label} rounds the rows of table "
                f"'{group.tables.layout.tables[0]}' when they leave for the cold tier, after their update: "
                "leave one of the two out"
            )
        reader = collection.offers(ReadsRows)
        if reader is None or getattr(type(reader), "records_of", None) is RowCollection.records_of:
            raise UserError(
                f"trainer.publish: {type(collection).__name__} does not read single rows of table "
                f"'{group.tables.layout.tables[0]}': leave out what keeps them, or trainer.publish.dir"
            )
