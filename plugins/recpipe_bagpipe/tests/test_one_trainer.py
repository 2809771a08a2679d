"""One trainer: every parameter ends bit for bit as without a cache, and no row is missed on the way."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from recpipe_bagpipe.bulk import BulkStore, Writes
from recpipe_bagpipe.plugin import BagPipe

from recpipe.data.config import SyntheticConfig
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset
from recpipe.distributed.ranks import Ranks
from recpipe.model.config import ModelConfig
from recpipe.pipeline import step
from recpipe.pipeline.loader import TrainLoader
from recpipe.pipeline.source import BatchSource
from recpipe.pipeline.step import StepTimes
from recpipe.plugin.assembly import assemble, gather
from recpipe.plugin.collection import TierParts
from recpipe.plugin.context import RunFigures
from recpipe.plugin.errors import PluginError
from recpipe.plugin.load import activate
from recpipe.plugin.policy import RowSpace
from recpipe.plugin.tables import TableOptimizer, TableSet
from recpipe.tables.stores import make_store
from recpipe.tables.tiers.policies import NoCache
from recpipe.tables.tiers.tiered import TieredEmbeddingBagCollection
from recpipe.training.dense import dense_optimizer
from tests.placing import context_of, inputs_of, model_over

BATCH, STEPS = 64, 40
WRITE_ROWS = 500
DENSE = {
    "sgd": {"name": "SGD", "lr": 0.1},
    "rowwise_adagrad": {"name": "Adagrad", "lr": 0.02},
    "adagrad": {"name": "Adagrad", "lr": 0.02},
    "adam": {"name": "Adam", "lr": 0.001},
}
Parameters = dict[str, NDArray[np.float32]]


@pytest.fixture(scope="module")
def clicks() -> Dataset:
    """Generated clicks with skewed ids; an epoch has more than ``STEPS`` batches."""
    return open_dataset(SyntheticConfig(samples=4_500, table_scale=0.02), seed=1)


class Run:
    """The loader, the tiers and a small model; ``knobs`` None: without a cache."""

    def __init__(
        self,
        data: Dataset,
        folder: Path,
        knobs: dict[str, Any] | None,
        store: str = "host",
        optimizer: str = "rowwise_adagrad",
        resident: float = 0.08,
        bulk: bool = True,
    ) -> None:
        """``bulk``: rows in host memory are read in bulk, too, as if they were not in this process's."""
        device = torch.device("cpu")
        self.tables = TableSet.one_each(data.schema.sparse, 4, TableOptimizer(optimizer, 0.1), seed=1)
        layout = self.tables.layout
        slots = int(layout.total_rows * resident)
        context = context_of(self.tables, slots, data, batch_size=BATCH, steps=STEPS)
        plugins = {} if knobs is None else {"bagpipe": {"increase": 1, "decrease": 2} | knobs}
        self.assembly = assemble(gather(activate(plugins), context), context.tables)
        cold = make_store(store, layout, self.tables.fill, directory=folder / "store")
        space = RowSpace(layout.bases, slots)
        policy: Any = NoCache(space)
        if knobs is not None:
            owner = next(iter(self.assembly.caches.values())).part
            cold.is_memory = not bulk
            cold = owner.store(cold)
            if bulk:  # the plugin's own buffer would hold every write of tables this small
                cold._waiting = Writes(WRITE_ROWS, layout.width, full=0.75)
            lookups = partial(inputs_of(self.tables).bags, group=0)
            parts = TierParts(self.tables, slots, cold, device, True, Ranks(), lookups)
            assert owner.collection(parts) is None
            policy = owner.policy(space)
        self.policy = policy
        self.tiers = TieredEmbeddingBagCollection(self.tables, policy, cold, device, prefetch=True)
        sizes = ModelConfig("dlrm", 4, [8], [8], cross_layers=1, cross_rank=4)
        self.model = model_over(self.tiers, data.schema, sizes, seed=1)
        self.optimizer = dense_optimizer(DENSE[optimizer], self.model.dense_parameters().values())
        source, groups = BatchSource(data, BATCH, self.assembly.feed), self.model.embeddings.groups
        self.loader = TrainLoader(source, self.model.inputs, groups, device)

    def train(self, steps: int, after: Callable[[int], None] = lambda number: None) -> Run:
        """``steps`` steps from the loader's first batch; ``after`` each with its number."""
        staged: Iterator[Any] = iter(self.loader)
        for number, batch in enumerate(islice(staged, steps)):
            self.optimizer.zero_grad()
            step.accumulate(self.model, batch, StepTimes())
            self.optimizer.step()
            after(number)
        staged.close()  # type: ignore[attr-defined]
        return self

    def parameters(self) -> Parameters:
        """Dense parameters, tables and their optimizer state."""
        found = {n: p.detach().numpy().copy() for n, p in self.model.dense_parameters().items()}
        for region in self.tiers.regions():
            for kind, values in zip(("weights", "state"), self.tiers.read(region), strict=True):
                found[f"{region.table}[{region.start}].{kind}"] = values.copy()
        return found

    def finish(self) -> Parameters:
        """Parameters of a run that is over; closes it."""
        found = self.parameters()
        self.tiers.close()
        return found


def same(one: Parameters, two: Parameters) -> bool:
    """Whether both are equal bit for bit, and finite."""
    assert one.keys() == two.keys()
    return all(np.array_equal(one[name], two[name]) and np.isfinite(one[name]).all() for name in one)


def figures(run: Run) -> dict[str, Any]:
    """The plugin's part of the report."""
    from recpipe.plugin.context import Io

    io = Io(rows_read=run.tiers.io.rows_read, rows_written=run.tiers.io.rows_written)
    made = RunFigures(
        steps=STEPS, samples=0, lookups=0, io=io, before_cold_seconds=0.0, after_cold_seconds=0.0
    )
    return dict(run.assembly.figures(made)[0]["bagpipe"])


@pytest.mark.parametrize(
    ("store", "optimizer", "lookahead", "cleanup", "resident"),
    [
        ("host", "sgd", 4, 1, 0.08),
        ("host", "rowwise_adagrad", 10, 0.25, 0.08),
        ("host", "adagrad", 9, 4, 0.08),
        ("host", "adam", 9, 4, 0.08),
        ("ssd", "rowwise_adagrad", 20, 5, 0.08),
        ("ssd", "sgd", 1, 1, 0.08),
        ("host", "sgd", 8, 2, 0.05),
        pytest.param("ssd", "rowwise_adagrad", 8, 2, 0.08, marks=pytest.mark.soak),
        ("host", "rowwise_adagrad", 200, 0.25, 0.08),
    ],
)
def test_equals_the_run_without_a_cache(
    clicks: Dataset,
    tmp_path: Path,
    store: str,
    optimizer: str,
    lookahead: int | str,
    cleanup: float,
    resident: float,
) -> None:
    knobs = {"lookahead": lookahead, "cleanup": cleanup}
    run = Run(clicks, tmp_path / "with", knobs, store, optimizer, resident).train(STEPS)
    told = figures(run)
    if resident > 0.05:  # otherwise the slots do not hold the rows of two batches
        assert told["critical_misses"] == run.policy.bulk.missed == 0
    assert told["fetch_groups"] > 0
    assert told["rows_expired"] > 0
    assert told["rows_written"] > 0
    plain = Run(clicks, tmp_path / "without", None, store, optimizer, resident).train(STEPS)
    assert run.tiers.io.rows_read < plain.tiers.io.rows_read
    assert same(run.finish(), plain.finish())


@pytest.mark.parametrize("resident", [0.08, pytest.param(0.3, marks=pytest.mark.soak)])
def test_rows_in_host_memory_are_not_read_in_bulk(clicks: Dataset, tmp_path: Path, resident: float) -> None:
    knobs = {"lookahead": 8, "cleanup": 2}
    run = Run(clicks, tmp_path / "with", knobs, resident=resident, bulk=False).train(STEPS)
    told = figures(run)
    assert told["fetch_groups"] == told["rows_fetched"] == told["buffer_bytes"] == 0
    assert told["critical_misses"] == run.tiers.io.rows_read > 0
    assert "host memory" in told["verdict"]
    plain = Run(clicks, tmp_path / "without", None, resident=resident).train(STEPS)
    bulk = Run(clicks, tmp_path / "bulk", knobs, resident=resident).train(STEPS)
    assert told["rows_expired"] == figures(bulk)["rows_expired"]
    bulk.finish()
    assert same(run.finish(), plain.finish())


@pytest.mark.parametrize(("store", "resident"), [("host", 0.08), ("ssd", 0.08), ("host", 0.4)])
def test_looking_ahead_may_end_and_begin_again(
    clicks: Dataset, tmp_path: Path, store: str, resident: float
) -> None:
    """Whatever the clock says: a run that turns it off and on every few batches is the run without cache."""
    run = Run(clicks, tmp_path / "with", {"lookahead": 6, "cleanup": 2}, store, resident=resident)

    def turn(number: int) -> None:
        run.policy.pace.single = number // 6 % 2 == 1

    run.train(STEPS, turn)
    assert 0 < run.policy.singles < STEPS  # how many depends on the clock
    assert figures(run)["fetch_groups"] > 2
    plain = Run(clicks, tmp_path / "without", None, store, resident=resident).train(STEPS)
    assert same(run.finish(), plain.finish())


def test_reading_tables_between_batches_and_new_epochs_change_nothing(
    clicks: Dataset, tmp_path: Path
) -> None:
    ends = []
    for name, knobs in (("with", {"lookahead": 8, "cleanup": 3}), ("without", None)):
        run = Run(clicks, tmp_path / name, knobs, resident=0.08)
        for steps in (15, 10_000, 12):  # left early, whole, left early

            def look(number: int, run: Run = run) -> None:
                if number % 5 == 2:
                    next(iter(run.tiers.regions()))
                    run.parameters()

            run.train(steps, look)
        ends.append(run.finish())
    assert same(*ends)


@pytest.mark.parametrize("resident", [0.08, pytest.param(0.5, marks=pytest.mark.soak)])
def test_a_resumed_run_equals_an_undisturbed_one(clicks: Dataset, tmp_path: Path, resident: float) -> None:
    knobs = {"lookahead": 8, "cleanup": 3}
    whole = Run(clicks, tmp_path / "whole", knobs, resident=resident).train(STEPS).finish()
    first = Run(clicks, tmp_path / "first", knobs, resident=resident)
    saved: dict[str, Any] = {}

    def save(number: int) -> None:
        if number == 16:
            saved["dense"] = copy.deepcopy(first.model.dense_parameters())
            saved["optimizer"] = copy.deepcopy(first.optimizer.state_dict())
            saved["tables"] = [(r, first.tiers.read(r)) for r in first.tiers.regions()]
            saved["placement"] = first.tiers.placement_state()

    first.train(17, save).finish()
    empty = int((saved["placement"]["row_of_slot"] < 0).sum())
    assert (empty > 0) == (resident > 0.08)  # with slots that nothing was in yet, and without
    second = Run(clicks, tmp_path / "second", knobs, resident=resident)
    with torch.no_grad():
        for name, parameter in second.model.dense_parameters().items():
            parameter.copy_(saved["dense"][name])
    second.optimizer.load_state_dict(saved["optimizer"])
    for region, values in saved["tables"]:
        second.tiers.write(region, values)
    assert second.tiers.load_placement_state(saved["placement"])
    second.loader.first = 17
    loading = second.policy.bulk.missed
    second.train(STEPS - 17)
    # Its first batch's decisions were in the checkpoint; what that one misses nobody has announced.
    assert second.policy.bulk.missed - loading <= BATCH * len(clicks.schema.sparse)
    assert same(second.finish(), whole)


def test_rows_that_still_wait_to_be_written_must_be_seen(
    clicks: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: reads that look at the store alone find old records of rows that have left."""
    plain = Run(clicks, tmp_path / "without", None, resident=0.08).train(STEPS).finish()

    def blind(self: BulkStore, rows: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        self._thread.submit(self.inner.gather, rows, out).result()

    monkeypatch.setitem(globals(), "WRITE_ROWS", 100_000)
    with monkeypatch.context() as patch:
        patch.setattr(BulkStore, "gather", blind)
        run = Run(clicks, tmp_path / "with", {"lookahead": 6, "cleanup": 3}, resident=0.08).train(STEPS)
    assert run.policy.evicted > 0
    assert not same(run.finish(), plain)


def test_an_early_exit_leaves_no_oracle_thread_behind(clicks: Dataset, tmp_path: Path) -> None:
    before = set(threading.enumerate())  # a test that failed on purpose may keep one of its own for a while
    run = Run(clicks, tmp_path, {"lookahead": 8, "cleanup": 3}).train(5)
    run.tiers.close()
    oracles = [t for t in threading.enumerate() if t.name == "recpipe-oracle" and t not in before]
    for thread in oracles:
        thread.join(20)
    assert not any(thread.is_alive() for thread in oracles)


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ({"lookahead": 0}, "lookahead=0"),
        ({"lookahead": "never"}, "lookahead=never"),
        ({"cleanup": 0}, "cleanup=0"),
        ({"cleanup": 1.5}, "cleanup=1.5"),
        ({"cleanup": 11}, "cleanup=11"),
        ({"increase": 0}, "increase=0"),
        ({"decrease": 1}, "decrease=1"),
    ],
)
def test_wrong_knobs_are_named(knobs: dict[str, Any], name: str) -> None:
    with pytest.raises(PluginError, match=rf"plugins\.bagpipe\.{name}"):
        BagPipe(**({"lookahead": 10, "cleanup": 2, "increase": 1, "decrease": 2} | knobs))


@pytest.mark.parametrize(("device", "share"), [("cpu", 0.25), ("cuda:0", 0.0)])
def test_what_waits_in_host_memory_takes_no_slots_of_a_gpu(clicks, device: str, share: float) -> None:
    tables = TableSet.one_each(clicks.schema.sparse, 8, TableOptimizer("sgd", 0.1), 0)
    context = context_of(tables, 1000, clicks, device=device, batch_size=BATCH)
    plugin = BagPipe(lookahead="auto", cleanup=0.25)
    (cache,) = plugin.contribute(context).cache
    (group,) = context.groups
    assert cache.beside(group) == share * 1000 * tables.record_bytes
