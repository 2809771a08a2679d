"""The pipeline in front of Lightning: a sized iterable of batches that are ready to train.

While batch b trains, one worker thread reads batch b + 1, runs it through the plugins' chains, plans
its tiers and starts fetching its rows. Nothing is drained and nothing is lost at the epoch's end.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.data.batch import Batch
from recpipe.data.dataset import Dataset, Split
from recpipe.embedding.planner import Bags, reorder
from recpipe.embedding.tiered import TieredEmbeddingBagCollection
from recpipe.pipeline.step import StagedBatch
from recpipe.plugin.assembly import Assembly


class TrainLoader:
    """One epoch of staged training batches; ``first`` is where a resumed epoch goes on."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        assembly: Assembly,
        tiers: TieredEmbeddingBagCollection | None,
        device: torch.device,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.assembly = assembly
        self.tiers = tiers
        self.device = device
        self.first = 0
        self.lookups = 0
        """Ids handed to training since this loader was made."""

    def __len__(self) -> int:
        if self.assembly.order is not None:
            return len(self.assembly.order.part)
        return self.dataset.num_batches("train", self.batch_size)

    def _batches(self, first: int) -> Iterator[Batch]:
        """The epoch's batches from ``first`` on, in the data module's order or a plugin's."""
        if self.assembly.order is not None:
            return self.assembly.order.part.batches(first)
        return self.dataset.batches("train", self.batch_size, first)

    def __iter__(self) -> Iterator[StagedBatch]:
        first, self.first = self.first, 0
        source = self.assembly.wrap_stream(self._batches(first))
        try:
            with ThreadPoolExecutor(1, "recpipe-loader") as worker:
                pending = worker.submit(self._stage, source)
                while (staged := pending.result()) is not None:
                    if self.tiers is not None and staged.plan is not None:
                        self.tiers.advance(staged.plan)
                    pending = worker.submit(self._stage, source)
                    self.lookups += staged.batch.sparse.values().numel()
                    yield staged
        finally:
            if self.tiers is not None:
                self.tiers.forget()

    def _stage(self, source: Iterator[Batch]) -> StagedBatch | None:
        """The next batch, ready to train; None at the epoch's end. Runs in the worker thread."""
        batch = next(source, None)
        if batch is None:
            return None
        batch = self.assembly.transform(batch)
        plan = self.tiers.plan(batch.sparse) if self.tiers is not None else None
        bounds: tuple[int, ...] = ()
        if self.assembly.splitter is not None:
            needs_cold = plan.needs_cold if plan is not None else np.zeros(batch.size, bool)
            split = self.assembly.splitter.part(batch, needs_cold)
            batch, bounds = permuted(batch, split.order), split.bounds
            if plan is not None:
                plan = reorder(plan, split.order, first_cold(needs_cold[split.order], bounds))
        if self.tiers is not None and self.tiers.prefetches and plan is not None:
            self.tiers.prefetch(plan)
        return StagedBatch(on_device(batch, self.device), plan, bounds)


class EvalLoader:
    """The held-out split, in order, on the device."""

    def __init__(self, dataset: Dataset, batch_size: int, device: torch.device) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.device = device

    def __len__(self) -> int:
        return self.dataset.num_batches("eval", self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        split: Split = "eval"
        for batch in self.dataset.batches(split, self.batch_size):
            yield on_device(batch, self.device)


def first_cold(needs_cold: NDArray[np.bool_], bounds: tuple[int, ...]) -> int:
    """Start of the first micro-batch that holds a sample that needs cold rows; B when none does."""
    low = 0
    for high in bounds:
        if needs_cold[low:high].any():
            return low
        low = high
    return low


def permuted(batch: Batch, order: NDArray[np.int64]) -> Batch:
    """The batch with its samples in ``order`` (int64 [B])."""
    index = torch.from_numpy(order)
    sparse = batch.sparse
    bags = Bags(sparse.values().numpy(), sparse.offsets().numpy().astype(np.int64), batch.size).permuted(
        order
    )
    jagged = type(sparse)(sparse.keys(), torch.from_numpy(bags.rows), offsets=torch.from_numpy(bags.offsets))
    return Batch(batch.dense[index], jagged, batch.labels[index])


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on ``device``; to a GPU through page-locked memory, without waiting for the copy."""
    return batch if device.type == "cpu" else batch.pin_memory().to(device, non_blocking=True)
