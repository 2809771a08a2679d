"""The reference figures of a package: what its scores, ids and quality are on the checkpoint's held-out data.

They stand in the manifest. A server compares what it sees with them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from recpipe.answers import drift
from recpipe.answers.figures import judge
from recpipe.answers.score import Scorer
from recpipe.answers.trained import Trained
from recpipe.answers.words import asked_samples
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError, shown
from recpipe.model.call import Called

log = logging.getLogger("recpipe")
MOST_SAMPLES = 200_000
"""Held-out samples that are scored unless the user says how many."""


def wanted_samples(word: str | bool | int) -> int:
    """How many samples ``reference=WORD`` asks for: true, false, or their number; 0: none."""
    asked = asked_samples(word)
    if asked is None:
        raise UserError(f"reference={shown(word)}: say true, false, or how many held-out samples to score")
    return MOST_SAMPLES if asked is True else int(asked)


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
        return _figures(trained, dataset, tasks, scorer, most)
    except (UserError, OSError, ValueError) as fault:
        log.warning(
            "the package has no reference figures, which a server would compare its scores with: %s",
            str(fault).partition("\n")[0],
        )
        return None


def _figures(
    trained: Trained, dataset: Dataset, tasks: Mapping[str, Called], scorer: Scorer, most: int
) -> dict[str, Any]:
    features = len(trained.schema.sparse)
    ids, first = np.zeros(features), np.zeros(features)
    scores: list[torch.Tensor] = []
    labels: list[torch.Tensor] = []
    samples = 0
    for batch in dataset.batches("eval", trained.cfg.data.batch_size):
        values, lengths = batch.sparse.values().long(), batch.sparse.lengths().long()
        found = scorer(batch.dense, values, lengths).reshape(len(batch.dense), -1)
        each = lengths.view(features, -1).sum(1).numpy()
        ids += each
        first += drift.first_rows(values.numpy(), 1, each)
        scores.append(found)
        labels.append(torch.stack([task.labels_of(batch) for task in tasks.values()], dim=1).float())
        samples += len(found)
        if samples >= most:
            break
    all_scores, all_labels = torch.cat(scores), torch.cat(labels)
    return {
        "samples": samples,
        "data": {"name": trained.cfg.data.name, "fingerprint": dataset.fingerprint},
        "tasks": {
            name: _of_task(task, all_scores[:, n].contiguous(), all_labels[:, n].contiguous())
            for n, (name, task) in enumerate(tasks.items())
        },
        "features": {
            feature.name: {
                "ids_per_sample": float(ids[n] / samples),
                "row_0": float(first[n] / ids[n]) if ids[n] else None,
            }
            for n, feature in enumerate(trained.schema.sparse)
        },
    }


def _of_task(task: Called, scores: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    raw = scores.numpy()
    inner = drift.edges(raw)
    finite = raw[np.isfinite(raw)]
    judged = judge(task.kind, labels, scores)
    means = {
        "prediction": float(drift.predictions(task.kind, raw).mean()),
        "label": float(labels.double().mean()),
    }
    return {
        "kind": task.kind,
        "edges": inner,
        "counts": drift.histogram(raw, inner).tolist(),
        "lowest": float(finite.min()) if len(finite) else None,
        "highest": float(finite.max()) if len(finite) else None,
        "mean": {name: mean if math.isfinite(mean) else None for name, mean in means.items()},
        "saturated": drift.saturated(raw) / len(raw) if task.kind == "clicks" else None,
        "figures": judged.to_dict()["figures"],
    }
