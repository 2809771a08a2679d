"""What a model's tables take, and how skewed and how repetitive the ids are that it looks up."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from recpipe.access.sample import AccessSample
from recpipe.access.skew import skew_of
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError
from recpipe.pipeline.placed import PlacedModel
from recpipe.tables.groups import ModelTables
from recpipe.tasks import misses

FLOAT = 4


def tables_of(tables: ModelTables) -> list[dict[str, Any]]:
    """Memory by table, of its weights and of their optimizer's state."""
    found = []
    for group in tables.groups:
        own = group.tables
        for table in own.tables:
            record = own.record_bytes * table.rows
            weights = FLOAT * own.dim * table.rows
            found.append(
                {
                    "name": table.name,
                    "rows": table.rows,
                    "dim": own.dim,
                    "type": "fp32",
                    "bytes": weights,
                    "state_bytes": record - weights,
                }
            )
    return found


def accesses(cfg: Recipe, dataset: Dataset, model: PlacedModel, most: int) -> dict[str, Any]:
    """The skew of lookups, and how far apart those of a row are, from one reading of the first batches.

    ``skew``: for all tables and the largest ones the share of lookups that the most popular rows have.
    ``reuse``: the content of misses.json, whose LRU curve is the distribution of reuse distances: a lookup
    misses LRU of n rows if n other rows or more were looked up since its row was.
    """
    size, inputs = cfg.data.batch_size, model.inputs
    batches = min(most, dataset.num_batches("train", size))
    if batches < 2:
        raise UserError(
            f"task=characterize looks at the ids of 2 batches of data.batch_size={size} at least, and there "
            f"are {batches}: choose a smaller data.batch_size"
        )
    tables, sample = inputs.tables, AccessSample(inputs.tables)
    followed = misses.follow(cfg, dataset, inputs, batches)
    for _, batch in zip(range(batches), dataset.batches("train", size), strict=False):
        for number, group in enumerate(followed):
            group.add(inputs.bags(batch, number))
        sample.add(inputs.each(inputs.spread(batch)))
    rows = {table.name: table.rows for table in tables.tables}
    skew = skew_of(sample.counts(), rows, sample.lookups, sample.batches)
    return {
        "skew": None if skew is None else asdict(skew),
        "reuse": misses.told(cfg, inputs, followed) if skew is not None else None,
    }
