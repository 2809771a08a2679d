"""A run without Lightning: loader, plugins, step and callback, open to inspection after every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from recpipe_slipstream.callback import StaleInputs

from recpipe.config.compose import active_plugins, compose
from recpipe.data.dataset import Dataset
from recpipe.data.select import select
from recpipe.distributed.ranks import Ranks
from recpipe.model.config import ModelConfig
from recpipe.pipeline import step
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.source import BatchSource, SampleFilter
from recpipe.pipeline.splitting import Splitting
from recpipe.pipeline.step import StepTimes
from recpipe.plugin.assembly import assemble, gather
from recpipe.plugin.batch import Batch
from recpipe.plugin.calls import Origin, Owned
from recpipe.plugin.context import Context
from recpipe.plugin.load import activate
from recpipe.plugin.policy import CachePolicy, RowSpace
from recpipe.plugin.skipper import RowView, Skipper, overrides
from recpipe.plugin.tables import TableOptimizer, TableSet, to_numpy
from recpipe.tables.skipping import Skipping
from recpipe.tables.stores import make_store
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from recpipe.training.dense import dense_optimizer
from tests.placing import context_of, model_over

BATCH = 200
DENSE = {"sgd": {"name": "SGD", "lr": 0.1}, "rowwise_adagrad": {"name": "Adagrad", "lr": 0.02}}
QUICK = {"window": 0.1, "sample": 0.2, "skip": "always"}
"""Knobs under which a run of 80 batches takes a window of 8 and samples 16."""


@dataclass(frozen=True)
class Setting:
    """What a run is made of; ``knobs`` None: without Slipstream. ``others``: plugins beside it."""

    knobs: Mapping[str, Any] | None = field(default_factory=lambda: dict(QUICK))
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    optimizer: str = "rowwise_adagrad"
    resident: float = 0.4
    prefetch: bool = True
    policy: Callable[[RowSpace], CachePolicy] | None = None
    """Instead of the plugins' policy."""


class Rig:
    """One run, batch by batch: ``read`` and ``kept`` hold every batch before and after the plugins."""

    def __init__(self, dataset: Dataset, setting: Setting, folder: Path) -> None:
        self.tables = TableSet.one_each(
            dataset.schema.sparse, 8, TableOptimizer(setting.optimizer, 0.1), seed=1
        )
        slots = int(self.tables.layout.total_rows * setting.resident)
        self.context = self._context(dataset, slots)
        plugins = {name: defaults(name) | dict(knobs) for name, knobs in setting.others.items()}
        if setting.knobs is not None:
            plugins["slipstream"] = defaults("slipstream") | {"skip": "always"} | dict(setting.knobs)
        assembly = assemble(gather(activate(plugins), self.context), self.context.tables)
        space = RowSpace(self.tables.layout.bases, slots)
        make = setting.policy or next(iter(assembly.caches.values())).part.policy
        store = make_store("host", self.tables.layout, self.tables.fill, directory=folder)
        self.tiers = TieredEmbeddingBagCollection(
            self.tables, make(space), store, torch.device("cpu"), setting.prefetch
        )
        sizes = ModelConfig("dlrm", 8, [16], [16], cross_layers=2, cross_rank=8)
        self.model = model_over(self.tiers, dataset.schema, sizes, seed=1)
        self.optimizer = dense_optimizer(DENSE[setting.optimizer], self.model.dense_parameters().values())
        self.read: list[Batch] = []
        self.kept: list[Batch] = []
        feed = replace(assembly.feed, batch=[recorder(self.read), *assembly.feed.batch])
        skipper = watched(assembly.skipper, self.kept)
        if assembly.skipper is not None and overrides(assembly.skipper.part, Skipper.update):
            self.tiers.filter_updates(Skipping(assembly.skipper).of_group(0))
        inputs, device = self.model.inputs, torch.device("cpu")
        self.loader = TrainLoader(
            BatchSource(dataset, BATCH, feed),
            inputs,
            self.model.embeddings.groups,
            device,
            sample_filter=SampleFilter.of(skipper, self.view),
            splitting=Splitting.of(assembly.splitter, "always", BATCH, (), Ranks().channel()),
        )
        parts = [owned.part for owned in assembly.callbacks]
        self.callback = next((part for part in parts if isinstance(part, StaleInputs)), None)
        self.consumed: list[int] = []

    def _context(self, dataset: Dataset, slots: int) -> Context:
        return context_of(
            self.tables,
            slots,
            dataset,
            batch_size=BATCH,
            steps=80,
            epoch_samples=dataset.size("train"),
            batches=lambda first: dataset.batches("train", BATCH, first),
        )

    @property
    def slipstream(self) -> StaleInputs:
        assert self.callback is not None
        return self.callback

    @property
    def view(self) -> RowView:
        """The rows as Slipstream looks at them."""
        return self.model.rows

    def steps(self, count: int) -> Iterator[int]:
        """Train ``count`` batches; yields each one's number after it was trained."""
        for number, staged in zip(range(count), self.loader, strict=False):
            self.consumed.append(staged.consumed)
            self._update(staged)
            if self.callback is not None:
                self.callback.after_batch()
            yield number

    def _update(self, staged: InFlight) -> None:
        self.optimizer.zero_grad()
        step.accumulate(self.model, staged, StepTimes())
        self.optimizer.step()

    def train(self, count: int) -> Rig:
        """Train ``count`` batches."""
        for _ in self.steps(count):
            pass
        return self

    def records(self) -> NDArray[np.float32]:
        """Every row with its optimizer state, float32 [rows, width]."""
        with self.tiers.quiesced():
            rows = np.arange(self.tables.layout.total_rows)
            return to_numpy(self.tiers.read_rows(rows)).copy()

    def parameters(self) -> dict[str, NDArray[np.float32]]:
        """Rows, dense parameters and the dense optimizer's state."""
        found = {"rows": self.records()}
        for name, parameter in self.model.dense_parameters().items():
            found[name] = to_numpy(parameter).copy()
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = to_numpy(torch.as_tensor(value)).copy()
        return found

    def rows_of(self, batches: Sequence[Batch]) -> NDArray[np.int64]:
        """Distinct global rows that ``batches`` look up."""
        return np.unique(np.concatenate([self.context.lookups(batch).rows for batch in batches]))


def recorder(into: list[Batch]) -> Owned[Callable[[Batch], Batch]]:
    """A link of the batch chain that keeps what passes."""

    def keep(batch: Batch) -> Batch:
        into.append(batch)
        return batch

    return Owned("test.keep", Origin("test"), keep)


class Keeps(Skipper):
    """Keeps what ``inner`` keeps, if there is one; what is kept comes ``into`` a list."""

    def __init__(self, inner: Skipper | None, into: list[Batch]) -> None:
        self.inner, self.into = inner, into

    def begin(self, view: RowView) -> None:
        if self.inner is not None:
            self.inner.begin(view)

    def keep(self, batch: Batch, number: int) -> NDArray[np.bool_] | None:
        kept = None if self.inner is None else self.inner.keep(batch, number)
        self.into.append(batch if kept is None else select(batch, np.flatnonzero(kept)))
        return kept


def watched(skipper: Owned[Skipper] | None, into: list[Batch]) -> Owned[Skipper]:
    """``skipper``, or none, whose kept batches come ``into`` a list."""
    inner = None if skipper is None else skipper.part
    return Owned("test.skipper", Origin("test"), Keeps(inner, into))


def defaults(plugin: str) -> dict[str, Any]:
    """The values of the plugin's yaml."""
    return active_plugins(compose([f"+plugin={plugin}"]))[plugin]


def equal(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Whether all parameters are the same bits."""
    assert one.keys() == two.keys()
    return all(np.array_equal(one[name], two[name]) for name in one)
