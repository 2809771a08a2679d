"""``trainer.accumulate_grad_batches``: several batches make one step of the dense part and of the tables.

A step's batches are read as one and trained as its micro-batches, each with its forward and backward pass.
Dense gradients add up; rows are looked up once, and what several micro-batches send to a row makes its one
update.
"""

from __future__ import annotations

from dataclasses import replace

from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.data.given import GivenBatches
from recpipe.errors import UserError
from recpipe.pipeline.splitting import EqualParts
from recpipe.plugin.assembly import Assembly
from recpipe.plugin.calls import Origin, Owned

KEY = "trainer.accumulate_grad_batches"


def accumulating(cfg: Recipe, dataset: Dataset) -> Recipe:
    """``cfg`` with the batches of a whole step; ``UserError`` for batches that are made already."""
    count = cfg.trainer.accumulate_grad_batches
    if count == 1:
        return cfg
    if isinstance(dataset, GivenBatches):
        raise UserError(
            f"{KEY}={count}: the batches handed over are made already and trained one by one; hand over "
            "batches of a whole step, or a recpipe.kit.Dataset"
        )
    return replace(cfg, data=replace(cfg.data, batch_size=count * cfg.data.batch_size))


def accumulating_in(assembly: Assembly, size: int) -> Assembly:
    """``assembly`` with micro-batches of ``size`` samples; ``UserError`` where a plugin makes some."""
    if assembly.splitter is not None:
        raise UserError(
            f"{KEY}: {assembly.splitter}, cuts batches by itself, and only one can: leave "
            "one of them out, or set a larger data.batch_size"
        )
    return replace(assembly, splitter=Owned(KEY, Origin(KEY), EqualParts(size)))
