"""A run without Lightning: the loader, the plugin, the step and the optimizers, open to inspection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from recpipe_hotline.policy import PopularRows
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.config.compose import active_plugins, compose
from recpipe.data.dataset import Dataset, SplitName
from recpipe.data.schema import Schema
from recpipe.distributed.ranks import Ranks
from recpipe.model.config import ModelConfig
from recpipe.pipeline import step
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.source import BatchSource
from recpipe.pipeline.splitting import Splitting
from recpipe.pipeline.step import StepTimes
from recpipe.plugin.api import Figure
from recpipe.plugin.assembly import assemble, gather
from recpipe.plugin.batch import Batch
from recpipe.plugin.context import Io, RunFigures
from recpipe.plugin.load import activate
from recpipe.plugin.policy import RowSpace
from recpipe.plugin.tables import SparseFeature, TableOptimizer, TableSet, to_numpy
from recpipe.tables.resident import ResidentCollection
from recpipe.tables.stores import make_store
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from recpipe.training.dense import dense_optimizer
from tests.placing import context_of, model_over

TOLERANCE = {"sgd": 1e-6, "rowwise_adagrad": 1e-5, "adagrad": 1e-5}
DENSE = {"sgd": {"name": "SGD", "lr": 0.1}, "rowwise_adagrad": {"name": "Adagrad", "lr": 0.02}}
QUICK = {
    "learn_batches": 5,
    "growth": 2.0,
    "relearn_every": 20,
    "sample": 1.0,
    "min_micro_batch": 4,
}
"""Knobs under which a run of 60 steps learns several times."""

ROOM: tuple[str, ...] = (
    "data.samples=20000",
    "data.batch_size=256",
    "data.table_scale=1",
    "data.tables={a: 50, b: 500, c: 2000}",
    "trainer.max_steps=40",
    "trainer.split=always",
    "tiers.resident_bytes=30%",
)
"""Enough steps to learn, and few enough lookups for popular samples."""


@dataclass(frozen=True)
class Setting:
    """What a run is made of; ``knobs`` None: without the plugin, all rows resident."""

    knobs: Mapping[str, Any] | None = field(default_factory=lambda: dict(QUICK))
    optimizer: str = "rowwise_adagrad"
    model: str = "dlrm"
    store: str = "host"
    resident: float = 0.4
    prefetch: bool = True
    batch_size: int = 256
    device: str = "cpu"


class Rig:
    """One run, step by step.

    ``micro`` has the ends of every batch's micro-batches; ``evicted`` counts rows that left their slots.
    """

    def __init__(self, dataset: Dataset, setting: Setting, folder: Path) -> None:
        self.device = torch.device(setting.device)
        self.tables = TableSet.one_each(
            dataset.schema.sparse, 8, TableOptimizer(setting.optimizer, 0.1), seed=1
        )
        slots = int(self.tables.layout.total_rows * setting.resident)
        context = context_of(
            self.tables, slots, dataset, device=setting.device, batch_size=setting.batch_size
        )
        plugins = {} if setting.knobs is None else {"hotline": default_knobs() | setting.knobs}
        self.assembly = assemble(gather(activate(plugins), context), context.tables)
        self.embeddings = self._embeddings(setting, slots, folder)
        sizes = ModelConfig(setting.model, 8, [16], [16], cross_layers=2, cross_rank=8)
        self.model = model_over(self.embeddings, dataset.schema, sizes, seed=1, device=setting.device)
        parameters = self.model.dense_parameters().values()
        self.optimizer = dense_optimizer(DENSE[setting.optimizer], parameters)
        self.loader = TrainLoader(
            BatchSource(dataset, setting.batch_size, self.assembly.feed),
            self.model.inputs,
            self.model.embeddings.groups,
            self.device,
            splitting=Splitting.of(
                self.assembly.splitter, "always", setting.batch_size, (), Ranks().channel()
            ),
        )
        self.times = StepTimes()
        self.micro: list[tuple[int, ...]] = []
        self.evicted = 0

    def _embeddings(
        self, setting: Setting, slots: int, folder: Path
    ) -> ResidentCollection | TieredEmbeddingBagCollection:
        if setting.knobs is None:
            return ResidentCollection(self.tables, self.device)
        policy = next(iter(self.assembly.caches.values())).part.policy(
            RowSpace(self.tables.layout.bases, slots)
        )
        store = make_store(
            setting.store,
            self.tables.layout,
            self.tables.fill,
            directory=folder / "store",
        )
        return TieredEmbeddingBagCollection(self.tables, policy, store, self.device, setting.prefetch)

    @property
    def tiers(self) -> TieredEmbeddingBagCollection:
        assert isinstance(self.embeddings, TieredEmbeddingBagCollection)
        return self.embeddings

    @property
    def policy(self) -> PopularRows:
        policy = self.tiers.planner.policy
        assert isinstance(policy, PopularRows)
        return policy

    @property
    def split_batches(self) -> int:
        return sum(len(bounds) > 1 for bounds in self.micro)

    def staged(self, steps: int) -> Iterator[InFlight]:
        """The first ``steps`` batches, each to be trained before the next one is asked for."""
        for _, staged in zip(range(steps), self.loader, strict=False):
            self.micro.append(staged.bounds)
            plans = [rows.plan for rows in staged.moving if rows.plan is not None]
            self.evicted += sum(int((plan.evicted >= 0).sum()) for plan in plans)
            yield staged

    def update(self, staged: InFlight) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        step.accumulate(self.model, staged, self.times)
        self.optimizer.step()

    def train(self, steps: int) -> Rig:
        """``steps`` training steps from the first batch."""
        for staged in self.staged(steps):
            self.update(staged)
        return self

    def parameters(self) -> dict[str, NDArray[np.float32]]:
        """Every parameter there is: dense ones and their optimizer's state, tables and theirs."""
        found = {}
        for name, parameter in self.model.dense_parameters().items():
            found[name] = to_numpy(parameter).copy()
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = to_numpy(torch.as_tensor(value)).copy()
        for region in self.embeddings.regions():
            weights, state = self.embeddings.read(region)
            found[f"{region.table}[{region.start}]"] = weights.copy()
            found[f"{region.table}[{region.start}].state"] = state.copy()
        return found

    def figures(self) -> Mapping[str, Figure]:
        """The plugin's part of the report."""
        times, io = self.tiers.times, self.tiers.io
        run = RunFigures(
            steps=len(self.micro),
            samples=sum(bounds[-1] for bounds in self.micro),
            lookups=self.loader.lookups,
            io=Io(
                rows_read=io.rows_read,
                bytes_read=io.bytes_read,
                wait_seconds=times.wait,
                fetch_seconds=times.fetch,
            ),
            before_cold_seconds=self.times.before_cold.total(),
            after_cold_seconds=self.times.after_cold.total(),
            split_batches=self.split_batches,
        )
        return self.assembly.figures(run)[0]["hotline"]

    def close(self) -> None:
        """Close the cold store, where there is one."""
        if isinstance(self.embeddings, TieredEmbeddingBagCollection):
            self.embeddings.close()


def default_knobs() -> dict[str, Any]:
    """The values of the plugin's yaml."""
    return active_plugins(compose(["+plugin=hotline"]))["hotline"]


def train(dataset: Dataset, setting: Setting, folder: Path, steps: int) -> tuple[Rig, dict[str, Any]]:
    """A finished run (closed) and its parameters."""
    rig = Rig(dataset, setting, folder)
    try:
        rig.train(steps)
        return rig, rig.parameters()
    finally:
        rig.close()


def difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> float:
    """Largest absolute difference of any parameter; infinite where one is not finite."""
    assert one.keys() == two.keys()
    largest = max(float(np.abs(one[name] - two[name]).max(initial=0.0)) for name in one)
    return largest if np.isfinite(largest) else float("inf")


class Random:
    """Batches over two small tables, ids skewed towards 0."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def batch(
        self, size: int, *, lengths: tuple[int, int] = (1, 1), rows: int = 200, skew: float = 4.0
    ) -> Batch:
        """Bags of ``lengths[0]`` to ``lengths[1]`` ids below ``rows``."""
        counts = self.rng.integers(lengths[0], lengths[1] + 1, 2 * size)
        ids = (self.rng.random(counts.sum()) ** skew * rows).astype(np.int64)
        return make_batch(self.rng, size, ids, counts)


def make_batch(
    rng: np.random.Generator, size: int, ids: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Batch:
    """``ids`` cut by ``lengths`` into 2 x ``size`` bags; random dense features and labels."""
    sparse = KeyedJaggedTensor(
        ["a", "b"], torch.from_numpy(ids), lengths=torch.from_numpy(lengths.astype(np.int64))
    )
    dense = torch.from_numpy(rng.standard_normal((size, 3)).astype(np.float32))
    labels = torch.from_numpy((rng.random(size) < 0.3).astype(np.float32))
    return Batch(dense, sparse, labels)


class Fixed(Dataset):
    """These training batches, in order."""

    def __init__(self, batches: Sequence[Batch], rows: int = 200) -> None:
        self.schema = Schema(("x", "y", "z"), (SparseFeature("a", rows), SparseFeature("b", rows)))
        self.fingerprint = f"fixed {hash(tuple(batch.dense.numpy().tobytes() for batch in batches))}"
        self.rejected_rows = 0
        self._batches = batches

    def size(self, split: SplitName) -> int:
        return sum(batch.size for batch in self._batches) if split == "train" else 0

    def num_batches(self, split: SplitName, batch_size: int) -> int:
        return len(self._batches) if split == "train" else 0

    def batches(
        self, split: SplitName, batch_size: int, first: int = 0, part: tuple[int, int] | None = None
    ) -> Iterator[Batch]:
        assert part is None
        yield from self._batches[first:]


class Replay(Fixed):
    """The batches that another run has trained, over that run's tables."""

    def __init__(self, batches: Sequence[Batch], like: Dataset) -> None:
        super().__init__(batches)
        self.schema = like.schema
