"""Models of which some tables are frozen, under every technique, against plain modules of TorchRec."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import recpipe
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.step import Cores, StepTimes, accumulate
from recpipe.pipeline.step_graph import BEFORE, StepGraph
from recpipe.plugin.tables import TableOptimizer
from recpipe.tables.proxy import CollectionProxy
from recpipe.training.optim import OptimConfig
from tests.any_model.by_hand import BATCHES, MORE, grid, in_a_loop, reference
from tests.any_model.runs import QUIET, all_on_two_ranks, furthest_left, left_by, train
from tests.any_model.zoo import OVERRIDES, TECHNIQUES, Events, events, furthest, make
from tests.pipeline.samples import placed
from tests.pretend_gpu.graph import FakeGraph

MODELS = ("two_tower_frozen", "din_frozen", "dlrm_part", "dlrm_frozen")
TRAINED = {**MORE, "lfu_host": ("tiers.policy=lfu", "tiers.store=host")}


@pytest.fixture(scope="module")
def batches(criteo: Dataset) -> list[Events]:
    return events(criteo, BATCHES)


def frozen_in(name: str) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in make(name).named_parameters() if not p.requires_grad}


@pytest.mark.parametrize(("name", "technique"), grid(MODELS, "two_tower_frozen", TRAINED))
def test_a_technique_trains_the_rest_as_by_hand(batches, name, technique) -> None:
    mine = train(make(name), batches, "rowwise_adagrad", *TRAINED[technique])
    assert furthest(mine, reference(name, batches)) < 1e-5
    for key, value in frozen_in(name).items():
        assert torch.equal(mine.parameters[key], value)
        assert mine.states[key].shape == (len(value), 0)


def test_the_frozen_tables_rows_are_never_written_back(batches) -> None:
    """Of tiers on ssd, and their records are the weights alone."""
    words = (*QUIET, *OVERRIDES["rowwise_adagrad"], *TECHNIQUES["lru_ssd"])
    with recpipe.train(make("two_tower_frozen"), batches, *words, quiet=True) as run:
        proxies = [module for module in run.model.modules() if isinstance(module, CollectionProxy)]
        written = {}
        for proxy in proxies:
            for group, collection in zip(proxy.groups, proxy.collections, strict=True):
                figures = collection.tier_figures()
                assert figures is not None
                key = (group.tables.layout.tables, group.tables.layout.width - group.tables.dim)
                written[key] = figures.io.bytes_written
                assert figures.io.bytes_read > 0
    assert written[("t_c1", "t_c2"), 0] == 0
    assert min(count for (_, state), count in written.items() if state) > 0


def test_frozen_rows_in_few_bits_are_rounded_once(batches) -> None:
    """As the cold tier keeps them, however often they come and go."""
    words = ("+plugin=quantize", "tiers.policy=lru", "tiers.store=host")
    for count in (1, BATCHES):
        mine = train(make("two_tower_frozen"), batches[:count], "rowwise_adagrad", *words)
        for key, value in frozen_in("two_tower_frozen").items():
            apart = (value.max(dim=1).values - value.min(dim=1).values) / 255
            assert bool(((mine.parameters[key] - value).abs() <= 0.51 * apart[:, None] + 1e-9).all())


def test_fae_trains_the_rest(batches) -> None:
    """In an order of its own."""
    mine = train(make("two_tower_frozen"), batches, "rowwise_adagrad", *TECHNIQUES["fae"])
    first = make("two_tower_frozen").state_dict()
    same = {key for key, value in first.items() if torch.equal(value, mine.parameters[key])}
    assert same == frozen_in("two_tower_frozen").keys()


def test_a_rate_of_0_freezes_a_table(batches) -> None:
    """As ``requires_grad`` does, and whatever its model has attached."""
    mine = train(
        make("two_tower"), batches, "rowwise_adagrad", "optim.by_table={t_c1: {lr: 0}, t_c2: {lr: 0.0}}"
    )
    assert furthest(mine, reference("two_tower_frozen", batches)) < 1e-5
    for key, value in frozen_in("two_tower_frozen").items():
        assert torch.equal(mine.parameters[key], value)


def test_all_tables_can_be_frozen_and_not_everything(batches) -> None:
    mine = train(make("two_tower"), batches, "rowwise_adagrad", "optim.tables.lr=0")
    first = make("two_tower").state_dict()
    same = {key for key, value in first.items() if torch.equal(value, mine.parameters[key])}
    assert same == {key for key in first if "embedding_bags" in key}
    nothing = make("two_tower").requires_grad_(False)
    with pytest.raises(
        UserError, match="nothing to train: all tables and all parameters of TwoTower are frozen"
    ):
        train(nothing, batches, "rowwise_adagrad")


# Resident tables: tests/checkpoint/test_read_once.py resumes them.
@pytest.mark.parametrize(
    "technique", [pytest.param("resident", marks=pytest.mark.soak), "lru_ssd", "hotline"]
)
def test_stopping_and_resuming_is_bitwise(batches, tmp_path, technique) -> None:
    words = (*QUIET, *OVERRIDES["rowwise_adagrad"], *TECHNIQUES[technique], "trainer.max_epochs=1")
    saving = (*words, "trainer.checkpoint_every=3", f"trainer.checkpoint_dir={tmp_path / 'saved'}")
    with recpipe.train(make("din_frozen"), batches, *saving, quiet=True) as run:
        whole = left_by(run.model)
    saved = sorted((tmp_path / "saved").glob("*.ckpt"))
    other = make("din_frozen")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 1.0
    with recpipe.train(other, batches, *words, f"resume='{saved[0]}'", quiet=True) as run:
        assert furthest(left_by(run.model), whole) == 0


# Loops of other models have the rest: test_weighing.py, test_loop.py.
@pytest.mark.parametrize(
    "technique", [*(pytest.param(t, marks=pytest.mark.soak) for t in ("resident", "lru_ssd")), "hotline"]
)
def test_a_loop_of_ones_own(batches, technique) -> None:
    mine = in_a_loop("two_tower_frozen", batches, technique)
    assert furthest(mine, reference("two_tower_frozen", batches)) < 1e-5


def cut_into(count: int) -> Cores:
    class Always(Cores):
        def shares(self, samples: int) -> list[int]:
            return [samples * (core + 1) // count for core in range(count)]

    return Always(count, lambda _: 1.0)


@pytest.mark.parametrize("name", MODELS)
def test_cores_that_share_a_batch(batches, name) -> None:
    config = OptimConfig(TableOptimizer("rowwise_adagrad", 0.05), {})
    model = placed(make(name), batches[0], optimizer_of=config.of_table)
    optimizer, cores = torch.optim.Adagrad(list(model.dense), lr=0.05), cut_into(3)
    for batch in batches:
        optimizer.zero_grad()
        accumulate(model, InFlight(batch), StepTimes(), cores)
        optimizer.step()
    cores.close()
    assert furthest(left_by(model.module), reference(name, batches)) < 1e-5


def test_a_graph_of_kernels(batches) -> None:
    config = OptimConfig(TableOptimizer("rowwise_adagrad", 0.05), {})
    model = placed(make("dlrm_part"), batches[0], optimizer_of=config.of_table)
    optimizer, graph = torch.optim.Adagrad(list(model.dense), lr=0.05), StepGraph(model, FakeGraph)
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        accumulate(model, InFlight(batch), StepTimes(), graph=graph)
        optimizer.step()
    assert graph.trained == BATCHES - BEFORE
    assert furthest(left_by(model.module), reference("dlrm_part", batches)) < 1e-5


RANKS = {
    "lru": ("tiers.policy=lru",),
    "resident": (),
    "holders": ("tiers.policy=lru", "tiers.store=holders"),
    "bagpipe": TECHNIQUES["bagpipe"],
    "neo": ("+plugin=neo", "plugins.neo.planner=karmarkar_karp"),
    "sharded_lru": ("tiers.sharded=true", "tiers.policy=lru"),
    "het": TECHNIQUES["het"],
}


@pytest.fixture(scope="module")
def together(batches: list[Events], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    all_on_two_ranks(folder, batches, {name: ("two_tower_frozen", words) for name, words in RANKS.items()})
    return folder


@pytest.mark.soak  # test_sharded.py trains on ranks, and the frozen rest is trained here
@pytest.mark.parametrize("technique", RANKS)
def test_two_ranks_train_the_rest_as_by_hand(batches, together, technique) -> None:
    theirs = reference("two_tower_frozen", batches)
    assert furthest_left(together / technique, theirs) < 1e-5
    for key, value in frozen_in("two_tower_frozen").items():
        (file,) = (together / technique / "parameters").glob(f"*{key.split('.')[-2]}.npy")
        assert np.array_equal(np.load(file), value.numpy())


def test_an_update_of_frozen_rows_is_found(batches, monkeypatch) -> None:
    """The negative control of all of the above."""
    monkeypatch.setattr(TableOptimizer, "frozen", property(lambda self: False))
    monkeypatch.setattr("recpipe.training.optim.FROZEN", TableOptimizer("rowwise_adagrad", 0.05))
    mine = train(make("two_tower_frozen"), batches, "rowwise_adagrad")
    assert furthest(mine, reference("two_tower_frozen", batches)) > 1e-3
