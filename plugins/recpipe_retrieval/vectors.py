"""Vectors of a retrieval model, query or candidate, for the rows of any data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from recpipe.answers.trained import Trained
from recpipe.common.files import RunDir
from recpipe.common.meter import Meter
from recpipe.data.config import FileConfig
from recpipe.data.file_columns import Beside, has_columns, read_columns
from recpipe.data.make import StreamedDataset, open_source
from recpipe.errors import UserError
from recpipe.model.losses.ranking import Ranking
from recpipe.tables.proxy import handing_out

Vectors = NDArray[np.float32]
"""float32 [B, D]."""


def loss_of(trained: Trained) -> Ranking:
    """The loss by which the model's vectors are found and compared; ``UserError`` for a model without."""
    loss = trained.make_called().loss
    if not isinstance(loss, Ranking):
        raise UserError(
            f"{trained.directory}: its model gives scores, not vectors of queries and candidates: train "
            "model=two_tower, or another with model.retrieval=true, by model.loss=in_batch_softmax"
        )
    return loss


def columns_of_items(trained: Trained) -> list[str]:
    """The columns of the candidate's features: those of side: item in the data, and those that
    ``model.candidate`` names."""
    preparation = trained.trained_on.preparation
    features = None if preparation is None else preparation.features
    if features is None:
        return []
    named = {*features.of_side("item"), *getattr(trained.cfg.model, "arguments", {}).get("candidate", ())}
    own = [f for f in (*features.dense, *features.sparse) if named & {f.name, *f.names}]
    return sorted(set().union(*(features.columns_of(feature) for feature in own)))


def vectors_of(
    trained: Trained, part: Literal["query", "candidate"], columns: Sequence[str], run_dir: RunDir
) -> Iterator[tuple[pa.Table, Vectors]]:
    """The vectors of all rows of the data of ``trained``, in their order, batch by batch, beside the
    ``columns`` of these rows as they are in the files."""
    config, loss = trained.cfg.data, loss_of(trained)
    if not isinstance(config, FileConfig) or not has_columns(config):
        raise UserError(
            f"data={config.name} has no columns that could be copied: take data=files data.path=..."
        )
    source = open_source(config, labelled=False, trained_by=trained.trained_on.preparation)
    dataset = StreamedDataset(source)
    trained.require_columns(dataset)
    beside, rows = Beside(read_columns(config, columns)), 0
    with trained.scoring(dataset, run_dir) as scoring, Meter() as meter:
        called = scoring.model.called
        for batch in scoring.checked(dataset.batches("train", scoring.batch_size)):
            with handing_out(scoring.model.look_up(batch)), torch.no_grad():
                towers = loss.towers(called.output(batch)[1])
            found = towers[part == "candidate"].float().cpu().numpy()
            rows += len(found)
            if meter.due:
                meter.show(dataset.share, f"vectors of {rows:,} rows")
            yield beside.take(len(found)), found
