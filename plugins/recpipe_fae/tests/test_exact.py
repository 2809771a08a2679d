"""FAE equals one resident table fed the same batches, and a hot phase moves no cold row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_fae.callback import ShuffleScheduler
from recpipe_fae.prepare import HotAndCold
from recpipe_fae.schedule import plan
from recpipe_hotline.tests.rig import DENSE, Fixed, Rig, difference

from recpipe.config import active_plugins, compose
from recpipe.data.batch import Batch
from recpipe.data.dataset import Dataset
from recpipe.embedding.policies import HotSet, RowSpace
from recpipe.embedding.profile import global_rows, table_bases
from recpipe.embedding.stores import make_store
from recpipe.embedding.tables import TableOptimizer, TableSet
from recpipe.embedding.tiered import TieredEmbeddingBagCollection
from recpipe.model.ranker import ModelConfig, Ranker
from recpipe.optim import dense_optimizer
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.step import StepTimes
from recpipe.plugin.api import Context, TableInfo
from recpipe.plugin.assembly import Assembly, assemble, gather
from recpipe.plugin.load import activate

SIZE = 256


class Run(Rig):
    """A run with FAE, or (``resident``) all rows resident and the data's own order."""

    def __init__(
        self, dataset: Dataset, optimizer: str, share: float, folder: Path, *, resident: bool = False
    ) -> None:
        self.device = torch.device("cpu")
        self.tables = TableSet(dataset.schema.sparse, 8, TableOptimizer(optimizer, 0.1), seed=1)
        total = self.tables.layout.total_rows
        slots = total if resident else max(1, int(total * share))
        self.ctx = Context(
            tables={f.name: TableInfo(f.name, f.rows, 8) for f in self.tables.features},
            device="cpu",
            batch_size=SIZE,
            resident_bytes=slots * self.tables.record_bytes,
            record_bytes=self.tables.record_bytes,
            seed=1,
            data_fingerprint=dataset.fingerprint,
            steps=60,
            epoch_samples=dataset.size("train"),
            cache_dir=folder,
            batches=lambda first: dataset.batches("train", SIZE, first),
            held_out=lambda first: dataset.batches("eval", SIZE, first),
        )
        knobs = active_plugins(compose(["+plugin=fae"]))
        knobs["fae"]["held_out_samples"] = 512
        plugins: dict[str, Any] = {} if resident else knobs
        self.assembly: Assembly = assemble(gather(activate(plugins), self.ctx), self.ctx.tables)
        space = RowSpace(self.tables.layout.bases, slots)
        policy = (
            HotSet(space, np.arange(total), total)
            if resident
            else self.assembly.policies("cache")[0][0].part.cache(space)
        )
        store = make_store(
            "host", self.tables.layout, self.tables.fill, directory=folder / "store", pinned=False
        )
        self.embeddings = TieredEmbeddingBagCollection(self.tables, policy, slots, store, self.device, True)
        torch.manual_seed(1)
        model = ModelConfig("dlrm", 8, [16], [16])
        self.ranker = Ranker(model, self.embeddings, len(dataset.schema.dense), self.device)
        dense = DENSE["sgd" if optimizer == "sgd" else "rowwise_adagrad"]
        self.optimizer = dense_optimizer(dense, self.ranker.dense_parameters().values())
        self.loader = TrainLoader(dataset, SIZE, self.assembly, self.embeddings, self.device)
        self.times, self.micro, self.evicted = StepTimes(), [], 0
        self.seen: list[Batch] = []
        self.cold_rows: list[int] = []

    @property
    def order(self) -> HotAndCold:
        assert self.assembly.order is not None
        assert isinstance(self.assembly.order.part, HotAndCold)
        return self.assembly.order.part

    def epoch(self) -> Run:
        callback = next((c.part for c in self.assembly.callbacks), None)
        for staged in self.staged(10_000):
            assert staged.plan is not None
            self.seen.append(staged.batch)
            self.cold_rows.append(len(staged.plan.slab) + int((staged.plan.evicted >= 0).sum()))
            self.update(staged)
            if isinstance(callback, ShuffleScheduler):
                callback.batch_done(self.ranker)
        return self


class Replay(Fixed):
    """The batches that another run has trained, over that run's tables."""

    def __init__(self, batches: list[Batch], like: Dataset) -> None:
        super().__init__(batches)
        self.schema = like.schema


@pytest.fixture
def small(synthetic: Dataset) -> Dataset:
    return synthetic


def pair(dataset: Dataset, optimizer: str, folder: Path) -> Iterator[Run]:
    fae = Run(dataset, optimizer, 0.6, folder / "fae").epoch()
    yield fae
    yield Run(Replay(fae.seen, dataset), optimizer, 1.0, folder / "one", resident=True).epoch()


@pytest.mark.parametrize("source", ["synthetic", pytest.param("criteo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad"])
def test_equals_one_table_fed_the_same_order_bitwise(
    source: str, optimizer: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fae, one = pair(request.getfixturevalue(source), optimizer, tmp_path)
    assert sum(fae.cold_rows) > 0
    assert difference(fae.parameters(), one.parameters()) == 0


def test_rows_that_move_without_their_state_are_noticed(
    small: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = TieredEmbeddingBagCollection._slab_records

    def stateless(self: TieredEmbeddingBagCollection) -> Any:
        records = read(self).clone()
        records[:, self.tables.dim :] = 0
        return records

    monkeypatch.setattr(TieredEmbeddingBagCollection, "_slab_records", stateless)
    fae, one = pair(small, "rowwise_adagrad", tmp_path)
    assert difference(fae.parameters(), one.parameters()) > 0


def test_partition_order_and_no_cold_row_in_a_hot_phase(small: Dataset, tmp_path: Path) -> None:
    run = Run(small, "sgd", 0.6, tmp_path).epoch()
    classes, scheduler = run.order.prepared.classes, run.order.scheduler
    hot, cold = classes.batches(True), classes.batches(False)
    assert hot > 1, "nothing is tested without hot batches"
    assert cold > 1
    bases, resident = table_bases(run.ctx), run.order.prepared.hot_rows
    is_hot = [bool(np.isin(global_rows(batch, bases), resident).all()) for batch in run.seen]
    assert sum(is_hot) == hot
    assert all(rows == 0 for rows, h in zip(run.cold_rows, is_hot, strict=True) if h)
    labels = np.concatenate([b.dense.numpy() for b in run.seen])
    source = np.concatenate([b.dense.numpy() for b in run.ctx.batches(0)])
    assert sorted(map(tuple, labels.tolist())) == sorted(map(tuple, source.tolist()))
    assert len(scheduler.losses) >= 4


def test_reading_from_the_middle_is_reading_from_the_start(small: Dataset, tmp_path: Path) -> None:
    run = Run(small, "sgd", 0.6, tmp_path)
    order = run.order
    classes = order.prepared.classes
    order.scheduler.rates = [30.0] * len(plan([], classes.batches(False), classes.batches(True), 30))
    whole = list(order.batches(0))
    assert len(whole) == len(order)
    for first in (1, len(whole) // 2, len(whole) - 1):
        part = list(order.batches(first))
        assert len(part) == len(whole) - first
        for one, two in zip(part, whole[first:], strict=True):
            assert torch.equal(one.dense, two.dense)
            assert torch.equal(one.sparse.values(), two.sparse.values())


def test_the_same_seed_gives_the_same_hot_set_and_a_larger_one_serves_more(
    small: Dataset, tmp_path: Path
) -> None:
    runs = [Run(small, "sgd", share, tmp_path / str(n)) for n, share in enumerate((0.3, 0.3, 0.6, 0.0))]
    rows = [run.order.prepared.hot_rows for run in runs]
    hot = [run.order.prepared.classes.samples(True) for run in runs]
    assert np.array_equal(rows[0], rows[1])
    assert len(rows[3]) == 1, "a budget of one row"
    assert hot[3] <= hot[0] <= hot[2]
