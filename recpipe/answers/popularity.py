"""How often training's samples look up each row: a file of a package, for servers that cannot keep all rows
in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from recpipe.answers.trained import Trained
from recpipe.answers.words import asked_samples
from recpipe.common.meter import Meter
from recpipe.common.tensors import save_tensors
from recpipe.data.dataset import chosen_batches
from recpipe.errors import UserError, shown
from recpipe.plugin.batch import Batch

FILE = "popularity.safetensors"
_LARGEST = np.iinfo(np.uint32).max
_ROWS, _COUNTS = ".rows", ".counts"
Lookups = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Rows that were looked up (distinct, ascending, int64 [n]), and how often (int64 [n])."""


def wanted(word: str | bool | int) -> int | None:
    """The number of samples that ``popularity=`` asks for; 0: all of them, None: no counts."""
    asked = asked_samples(word)
    if isinstance(asked, bool):
        return 0 if asked else None
    if not asked:
        raise UserError(f"popularity={shown(word)}: give true, or how many training samples to read")
    return asked


def write_popularity(
    trained: Trained, tables: Mapping[str, int], parts: Sequence[tuple[str, str]], folder: Path, samples: int
) -> dict[str, Any]:
    """Count (``lookups_in``) and write the file of a package in ``folder``; what its manifest says of it."""
    lookups, read = lookups_in(trained, tables, parts, samples)
    write_lookups(folder / FILE, lookups)
    return {"file": FILE, "samples": read}


def lookups_in(
    trained: Trained, tables: Mapping[str, int], parts: Sequence[tuple[str, str]], samples: int
) -> tuple[dict[str, Lookups], int]:
    """For each table how often ``samples`` training samples (0: all), batches chosen at random, look up its
    rows; and how many samples were read. ``tables``: how many ids each has. ``parts``: the features and
    tables that the model looks up, a pair for each lookup."""
    counts = {table: np.zeros(ids, np.uint32) for table, ids in tables.items()}
    added, read = 0, 0
    for batch in _batches(trained, samples):
        if not isinstance(batch, Batch):
            raise UserError("lookups can be counted in recpipe.plugin.Batch alone: leave out popularity=")
        for feature, table in parts:
            ids = batch.sparse[feature].values()
            added += len(ids)
            if added > _LARGEST and counts[table].dtype == np.uint32:  # one row's count might be
                counts = {name: own.astype(np.int64) for name, own in counts.items()}
            seen, times = torch.unique(ids, return_counts=True)
            counts[table][seen.cpu().numpy()] += times.cpu().numpy().astype(counts[table].dtype)
        read += batch.size
    found = {}
    for table, own in counts.items():
        seen_rows = np.flatnonzero(own)
        found[table] = seen_rows, own[seen_rows].astype(np.int64)
    return found, read


def _batches(trained: Trained, samples: int) -> Iterator[object]:
    dataset, size = trained.dataset, trained.cfg.data.batch_size
    total = dataset.num_batches("train", size)
    count = min(total, ceil(samples / size)) if samples else total
    read = partial(dataset.batches, "train", size)
    with Meter() as meter:
        for done, batch in enumerate(chosen_batches(read, total, count, trained.cfg.seed), 1):
            yield batch
            if meter.due:
                meter.show(done / count, f"counting lookups: batch {done:,} of {count:,}")


def write_lookups(file: Path, lookups: Mapping[str, Lookups]) -> None:
    """Write them, two int64 tensors for each table."""
    found = {name + _ROWS: torch.from_numpy(rows) for name, (rows, _) in lookups.items()}
    found |= {name + _COUNTS: torch.from_numpy(counts) for name, (_, counts) in lookups.items()}
    save_tensors(file, found)


def read_lookups(package: Path) -> dict[str, Lookups]:
    """The lookups in the whole package ``package``, by table; none if it was made without."""
    if not (package / FILE).is_file():
        return {}
    found = load_file(package / FILE)
    names = [name.removesuffix(_ROWS) for name in found if name.endswith(_ROWS)]
    return {name: (found[name + _ROWS].numpy(), found[name + _COUNTS].numpy()) for name in names}
