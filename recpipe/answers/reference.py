"""What a package says of the checkpoint's own data: the reference figures, which are its scores, ids and
quality on held-out samples, that a server compares what it sees with; and, for servers that cannot keep all
rows in memory, how often training's samples look up each row."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from recpipe.answers import figures
from recpipe.answers.score import DEFAULT_ROW, RowMap, Scorer
from recpipe.answers.trained import Trained
from recpipe.common.meter import Meter
from recpipe.common.tensors import save_tensors
from recpipe.data.dataset import chosen_batches
from recpipe.errors import UserError
from recpipe.model.call import Called
from recpipe.model.metrics import judge
from recpipe.model.scores import Scores
from recpipe.plugin.batch import Batch

log = logging.getLogger("recpipe")
FILE = "popularity.safetensors"
_LARGEST = np.iinfo(np.uint32).max
_ROWS, _COUNTS = ".rows", ".counts"
Lookups = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Rows that were looked up (distinct, ascending, int64 [n]), and how often (int64 [n])."""


def figures_of(
    trained: Trained, tasks: Mapping[str, Called], scorer: Scorer, most: int
) -> dict[str, Any] | None:
    """The figures of ``scorer``, a package of ``trained``, on the first ``most`` held-out samples of the
    checkpoint's own data, in whole batches. None if there are no such data here; the log then says why.

    ``tasks``: how the model is called for each of its outputs, by name.
    """
    if not most:
        return None
    try:
        dataset = trained.dataset
        size = dataset.size("eval")
        if not size:
            raise UserError("the checkpoint's data hold nothing out (data.eval_fraction=0)")
        log.info("scoring %s held-out samples for the reference figures", f"{min(most, size):,}")
        sparse = trained.schema.sparse
        ids, first, unknown = np.zeros((3, len(sparse)))
        found: list[torch.Tensor] = []
        known: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        samples = 0
        for batch in dataset.batches("eval", trained.cfg.data.batch_size):
            values, lengths = batch.sparse.values().long(), batch.sparse.lengths().long()
            of_ids = batch.sparse.weights_or_none()
            found.append(scorer(batch.dense, values, lengths, of_ids).reshape(len(batch.dense), -1))
            known.append(torch.stack([task.labels_of(batch) for task in tasks.values()], dim=1).float())
            own = [task.weights_of(batch) for task in tasks.values()]
            if there := [each for each in own if each is not None]:
                weights.append(torch.stack(there, dim=1))
            each = lengths.view(len(sparse), -1).sum(1).numpy()
            ids += each
            rows = scorer.rows_of(values, lengths).numpy()
            first += figures.ids_with_row(0, rows, 1, each)
            unknown += figures.ids_with_row(DEFAULT_ROW, rows, 1, each)
            samples += len(batch.dense)
            if samples >= most:
                break
        scores, labels = torch.cat(found), torch.cat(known)
        weight = torch.cat(weights) if weights else torch.ones_like(labels)
        return {
            "samples": samples,
            "data": {"name": trained.cfg.data.name, "fingerprint": dataset.fingerprint},
            "tasks": {
                name: _of_task(task, *(part[:, n].contiguous() for part in (scores, labels, weight)))
                for n, (name, task) in enumerate(tasks.items())
            },
            "features": {
                feature.name: {
                    "ids_per_sample": float(ids[n] / samples),
                    "row_0": float(first[n] / ids[n]) if ids[n] else None,
                    **({"unknown": float(unknown[n] / ids[n])} if feature.growth and ids[n] else {}),
                }
                for n, feature in enumerate(sparse)
            },
        }
    except (UserError, OSError, ValueError) as fault:
        log.warning(
            "the package has no reference figures, which a server would compare its scores with: %s",
            str(fault).partition("\n")[0],
        )
        return None


def _of_task(
    task: Called, scores: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> dict[str, Any]:
    raw = scores.numpy()
    inner, finite = figures.edges(raw), raw[np.isfinite(raw)]
    means = {
        "prediction": float(figures.predictions(task.kind, raw).mean()),
        "label": float((labels * weights).double().sum() / weights.double().sum()),
    }
    return {
        "kind": task.kind,
        "edges": inner,
        "counts": figures.histogram(raw, inner).tolist(),
        "lowest": float(finite.min()) if len(finite) else None,
        "highest": float(finite.max()) if len(finite) else None,
        "mean": {name: mean if math.isfinite(mean) else None for name, mean in means.items()},
        "saturated": figures.saturated(raw) / len(raw) if task.kind == "clicks" else None,
        "figures": judge(Scores(task.kind, labels, scores, weights)).to_dict()["figures"],
    }


def lookups_in(
    trained: Trained,
    tables: Mapping[str, int],
    parts: Sequence[tuple[str, str]],
    samples: int,
    maps: Mapping[str, RowMap],
) -> tuple[dict[str, Lookups], int]:
    """For each table how often ``samples`` training samples (0: all), batches chosen at random, look up its
    rows; and how many samples were read. ``tables``: how many ids each has. ``parts``: the features and
    tables that the model looks up, a pair for each lookup. ``maps``: of features whose ids got rows as they
    came."""
    dataset, size = trained.dataset, trained.cfg.data.batch_size
    total = dataset.num_batches("train", size)
    wanted = min(total, ceil(samples / size)) if samples else total
    batches = chosen_batches(partial(dataset.batches, "train", size), total, wanted, trained.cfg.seed)
    counts = {table: np.zeros(ids, np.uint32) for table, ids in tables.items()}
    added, read = 0, 0
    with Meter() as meter:
        for number, batch in enumerate(batches, 1):
            if not isinstance(batch, Batch):
                raise UserError("lookups can be counted in recpipe.plugin.Batch alone: leave out popularity=")
            for feature, table in parts:
                ids = batch.sparse[feature].values()
                ids = maps[feature](ids) if feature in maps else ids
                added += len(ids)
                if added > _LARGEST and counts[table].dtype == np.uint32:  # one row's count might be
                    counts = {name: own.astype(np.int64) for name, own in counts.items()}
                seen, times = torch.unique(ids, return_counts=True)
                counts[table][seen.cpu().numpy()] += times.cpu().numpy().astype(counts[table].dtype)
            read += batch.size
            if meter.due:
                meter.show(number / wanted, f"counting lookups: batch {number:,} of {wanted:,}")
    found = {}
    for table, own in counts.items():
        rows = np.flatnonzero(own)
        found[table] = rows, own[rows].astype(np.int64)
    return found, read


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
