"""A run with FAE without Lightning, step by step, and one over a single tier fed the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recpipe_fae.callback import ShuffleScheduler
from recpipe_fae.prepare import HotAndCold
from recpipe_hotline.tests.rig import DENSE, Replay, Rig

from recpipe.config.compose import active_plugins, compose
from recpipe.data.dataset import Dataset
from recpipe.model.config import ModelConfig
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.source import BatchSource
from recpipe.pipeline.step import StepTimes
from recpipe.plugin.assembly import Assembly, assemble, gather
from recpipe.plugin.batch import Batch
from recpipe.plugin.load import activate
from recpipe.plugin.policy import RowSpace
from recpipe.plugin.store import IoCounters
from recpipe.plugin.tables import TableOptimizer, TableSet
from recpipe.tables.stores import make_store
from recpipe.tables.tiers.policies import HotSet
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from recpipe.training.dense import dense_optimizer
from tests.placing import context_of, model_over

SIZE = 256


def never_read(first: int) -> Iterator[Batch]:
    """The evaluation part: reading it would be a leak into training."""
    raise AssertionError("FAE reads the evaluation part")


class Run(Rig):
    """A run with FAE, or (``resident``) all rows resident and the data's own order."""

    def __init__(
        self,
        dataset: Dataset,
        optimizer: str,
        share: float,
        folder: Path,
        *,
        resident: bool = False,
        **knobs: Any,
    ) -> None:
        self.device = torch.device("cpu")
        self.tables = TableSet.one_each(dataset.schema.sparse, 8, TableOptimizer(optimizer, 0.1), seed=1)
        total = self.tables.layout.total_rows
        slots = total if resident else max(1, int(total * share))
        self.ctx = context_of(
            self.tables,
            slots,
            dataset,
            batch_size=SIZE,
            epoch_samples=dataset.size("train"),
            cache_dir=folder,
            batches=lambda first: dataset.batches("train", SIZE, first),
            held_out=never_read,
        )
        plugins = {} if resident else active_plugins(compose(["+plugin=fae"]))
        if not resident:
            plugins["fae"] |= {"phases": "always", "loss_samples": 512} | knobs
        self.assembly: Assembly = assemble(gather(activate(plugins), self.ctx), self.ctx.tables)
        space = RowSpace(self.tables.layout.bases, slots)
        policy = (
            HotSet(space, np.arange(total), total)
            if resident
            else next(iter(self.assembly.caches.values())).part.policy(space)
        )
        store = make_store("host", self.tables.layout, self.tables.fill, directory=folder / "store")
        self.embeddings = TieredEmbeddingBagCollection(self.tables, policy, store, self.device, True)
        sizes = ModelConfig("dlrm", 8, [16], [16])
        self.model = model_over(self.embeddings, dataset.schema, sizes, seed=1)
        dense = DENSE["sgd" if optimizer == "sgd" else "rowwise_adagrad"]
        self.optimizer = dense_optimizer(dense, self.model.dense_parameters().values())
        source = BatchSource(dataset, SIZE, self.assembly.feed)
        groups = self.model.embeddings.groups
        self.loader = TrainLoader(source, self.model.inputs, groups, self.device)
        self.times, self.micro, self.evicted = StepTimes(), [], 0
        self.seen: list[Batch] = []
        self.cold_rows: list[int] = []
        self.io: list[IoCounters] = []
        """The store's own counters after each update, before the decision that may follow it."""

    @property
    def order(self) -> HotAndCold:
        order = self.assembly.feed.order
        assert order is not None
        assert isinstance(order.part, HotAndCold)
        return order.part

    def epoch(self) -> Run:
        callback = next((c.part for c in self.assembly.callbacks), None)
        for staged in self.staged(10_000):
            (plan,) = [rows.plan for rows in staged.moving]
            assert plan is not None
            self.seen.append(staged.batch)
            self.cold_rows.append(len(plan.slab) + int((plan.evicted >= 0).sum()))
            self.update(staged)
            self.tiers.cold.fetch_now(np.empty(0, np.int64))  # after all that is queued
            self.io.append(replace(self.tiers.store.io))
            if isinstance(callback, ShuffleScheduler):
                callback.batch_done(self.model)
        return self


def pair(dataset: Dataset, optimizer: str, folder: Path, share: float = 0.6, **knobs: Any) -> tuple[Run, Run]:
    """An epoch with FAE, and one of its batches over one table with all rows."""
    fae = Run(dataset, optimizer, share, folder / "fae", **knobs).epoch()
    return fae, Run(Replay(fae.seen, dataset), optimizer, 1.0, folder / "one", resident=True).epoch()
