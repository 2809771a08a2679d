"""Models of several collections, sharded over two processes by plans of all kinds, against loops by hand."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.answers.plain import unshard
from recpipe.common.tensors import TensorFiles
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError
from recpipe.plugin.tables import TableOptimizer, state_name
from recpipe.report.record import write_json
from recpipe.tables.groups import collections_of, group_tables
from recpipe.tables.sharding import tables as shard
from recpipe.tables.sharding.own import ShardsLookup
from recpipe.tables.sharding.plan import Shard, ShardPlan, TablePlan
from tests.any_model.runs import QUIET, train
from tests.any_model.zoo import (
    OVERRIDES,
    Events,
    Trained,
    TwoTower,
    by_hand,
    events,
    furthest,
    is_table,
    make,
)
from tests.plugin.samples import write_package
from tests.processes import start_ranks

BATCHES = 6
BOUND = {"sgd": 1e-6, "rowwise_adagrad": 1e-5}


ALONE = "alone"


@dataclass(frozen=True)
class Run:
    """Of one model by one plan, on two ranks; ``resume``: from a checkpoint of half the way, another run's or
    one process's (``ALONE``)."""

    model: str
    kind: str
    optimizer: str
    resume: str = ""
    deaf: bool = False
    """Whether the gradients of replicated tables are not summed over the ranks."""
    lru: bool = False
    """Whether rows lie in tiers."""
    leaves: bool = False
    """Whether the plugin ``LEAVES`` leaves samples and rows out."""

    @property
    def name(self) -> str:
        extra = "-deaf" * self.deaf + "-leaves" * self.leaves + "-lru" * self.lru
        if self.resume:
            extra += "-resumed-alone" if self.resume == ALONE else "-resumed"
        return f"{self.model}-{self.kind}-{self.optimizer}{extra}"


RUNS = (
    Run("two_tower", "row_wise", "rowwise_adagrad"),
    Run("two_tower", "row_wise", "rowwise_adagrad", resume="two_tower-row_wise-rowwise_adagrad"),
    Run("two_tower", "mixed", "rowwise_adagrad", resume=ALONE),
    Run("two_tower", "table_wise", "sgd"),
    Run("two_tower", "data_parallel", "rowwise_adagrad"),
    Run("two_tower", "data_parallel", "rowwise_adagrad", deaf=True),
    Run("din", "row_wise", "sgd"),
    Run("din", "table_wise", "rowwise_adagrad"),
    Run("din", "data_parallel", "sgd"),
    Run("din", "mixed", "rowwise_adagrad"),
    Run("din", "mixed", "rowwise_adagrad", resume="din-mixed-rowwise_adagrad"),
    Run("din", "mixed", "rowwise_adagrad", lru=True),
    Run("din", "mixed", "rowwise_adagrad", resume="din-mixed-rowwise_adagrad-lru", lru=True),
    Run("two_tower", "mixed", "rowwise_adagrad", resume=ALONE, lru=True),
    Run("two_tower", "mixed", "sgd", leaves=True),
    Run("two_tower", "mixed", "sgd", leaves=True, lru=True),
)
LRU = ("tiers.policy=lru", "trainer.eval_every=2")
"""With an evaluation in the middle of what is trained between two checkpoints."""
LEAVES = """
import numpy as np
import torch
from recpipe.plugin import Contribution, Invariant, Plugin, Skipper

class P(Plugin):
    api = (2, 0)
    alters = frozenset({Invariant.EXACT_GRADIENT, Invariant.SAMPLE_SET, Invariant.BATCH_SIZE})

    def __init__(self, *, leaves_knob):
        pass

    def contribute(self, ctx):
        return Contribution(skipper=Leaves())

class Leaves(Skipper):
    def keep(self, batch, number):
        return np.arange(len(batch.labels)) % 4 != number % 4

    def update(self, rows, gradients):
        return torch.from_numpy(rows % 5 != 2)
"""
MIXED = ("row_wise", "table_wise", "data_parallel")


def plan(name: str, kind: str) -> ShardPlan:
    """Every table of a model so; ``mixed``: in turn."""
    tables = group_tables(collections_of(make(name)), lambda *_: TableOptimizer("sgd", 0.1), seed=1).shapes()
    made = {}
    for number, (table, (rows, dim, _)) in enumerate(tables.items()):
        mine = MIXED[number % len(MIXED)] if kind == "mixed" else kind
        half, rank = rows // 2, number % 2
        shards = {
            "row_wise": (Shard(0, 0, 0, half, dim), Shard(1, half, 0, half, dim)),
            "table_wise": (Shard(rank, 0, 0, rows, dim),),
            "data_parallel": (Shard(0, 0, 0, rows, dim), Shard(1, 0, 0, rows, dim)),
        }[mine]
        ranks = tuple(shard.rank for shard in shards)
        kernel = "dense" if mine == "data_parallel" else "fused"
        made[table] = TablePlan(mine, kernel, rows, dim, ranks, shards)
    return ShardPlan(2, made)


def rows_of(dataset: Dataset) -> list[Events]:
    return events(dataset, BATCHES)


def two_ranks(rank: int, folder: str, port: int) -> None:
    """One of two processes, which train all of ``RUNS``, one after the other, and save twice."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    top = Path(folder)
    sys.path.insert(0, str(top / "packages"))
    batches = torch.load(top / "rows.pt", weights_only=False)
    for number, run in enumerate(RUNS):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # so that they do not meet the run before
        saving = (f"trainer.checkpoint_dir={top / run.name}", f"trainer.checkpoint_every={BATCHES // 2}")
        words = (*QUIET, *OVERRIDES[run.optimizer], *saving, f"tiers.plan={top / run.model}-{run.kind}.json")
        if run.resume:
            words += (f"resume='{saved(top / run.resume)[0]}'",)
        words += ("+plugin=leaves",) * run.leaves + LRU * run.lru
        held_out = batches[:1] if run.lru else None
        words += ("trainer.max_epochs=1",)
        with pytest.MonkeyPatch.context() as patch:
            ahead = fetched_ahead(patch)
            if run.deaf:
                patch.setattr(shard, "_summed", own_sum)
            with recpipe.train(make(run.model), batches, *words, held_out=held_out, quiet=True) as trained:
                moved = trained.report["io"]
            assert bool(ahead) == run.lru, "rows of the next batch are fetched while this one trains"
            assert not run.lru or min(moved["rows_read"], moved["rows_written"]) > 0, (run, moved)


def fetched_ahead(patch: pytest.MonkeyPatch) -> list[KeyedJaggedTensor]:
    """Ids whose rows in tiers are fetched before they are looked up, from now on until ``patch`` ends."""
    found: list[KeyedJaggedTensor] = []
    before = ShardsLookup.fetch_ahead

    def fetch(lookup: ShardsLookup, ids: KeyedJaggedTensor) -> None:
        found.append(ids)
        before(lookup, ids)

    patch.setattr(ShardsLookup, "fetch_ahead", fetch)
    return found


def own_sum(channel: object, bucket: object) -> torch.futures.Future[torch.Tensor]:
    """Of this rank alone."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())  # type: ignore[attr-defined]
    return done


def saved(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.ckpt"))


@pytest.fixture(scope="module")
def batches(criteo: Dataset) -> list[Events]:
    return rows_of(criteo)


@pytest.fixture(scope="module")
def trained(batches: list[Events], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every run's checkpoints are."""
    folder = tmp_path_factory.mktemp("sharded")
    torch.save(batches, folder / "rows.pt")
    write_package(folder / "packages", "leaves", code=LEAVES)
    for run in RUNS:
        write_json(folder / f"{run.model}-{run.kind}.json", plan(run.model, run.kind).to_dict())
    words = (f"trainer.checkpoint_dir={folder / ALONE}", f"trainer.checkpoint_every={BATCHES // 2}")
    train(make("two_tower"), batches, "rowwise_adagrad", *words, "trainer.max_epochs=1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start_ranks(two_ranks, (str(folder), port), 2)
    return folder


def left_by(checkpoint: Path, name: str, folder: Path) -> Trained:
    """What ``recpipe unshard`` and the tables' files have, by the names of the model's own parameters."""
    file = folder / "whole.safetensors"
    unshard(checkpoint, file, overwrite=True)
    tensors, files = load_file(file), TensorFiles.sharded(checkpoint / "tables")
    parameters, states = {}, {}
    for key, value in make(name).named_parameters():
        table = key.split(".")[-2]
        parameters[key] = tensors[table if is_table(key) else key]
        if is_table(key):
            state, rows = state_name(table), len(value)
            kept = state in files.pieces
            states[key] = torch.from_numpy(files.rows(state, 0, rows)) if kept else torch.empty(rows, 0)
    return Trained(parameters, states, [])


@pytest.mark.parametrize("run", [r for r in RUNS if not r.leaves], ids=lambda run: run.name)
def test_two_ranks_train_as_by_hand(batches, trained, tmp_path, run) -> None:
    """Tables, optimizer states and dense part; with lost gradients the comparison fails."""
    mine = left_by(saved(trained / run.name)[-1], run.model, tmp_path)
    distance = furthest(mine, by_hand(make(run.model), batches, run.optimizer))
    assert distance > 1e-3 if run.deaf else distance < BOUND[run.optimizer]


@pytest.mark.parametrize("run", [r for r in RUNS if r.resume not in ("", ALONE)], ids=lambda run: run.name)
def test_stopping_and_resuming_is_bitwise(trained, tmp_path, run) -> None:
    mine, whole = (left_by(saved(trained / n)[-1], run.model, tmp_path) for n in (run.name, run.resume))
    assert furthest(mine, whole) == 0


@pytest.mark.parametrize("run", [r for r in RUNS if r.resume not in ("", ALONE)], ids=lambda run: run.name)
def test_one_process_goes_on_from_what_two_have_saved(batches, trained, run) -> None:
    half = saved(trained / run.resume)[0]
    mine = train(make(run.model), batches, run.optimizer, f"resume='{half}'", "trainer.max_epochs=1")
    assert furthest(mine, by_hand(make(run.model), batches, run.optimizer)) < BOUND[run.optimizer]


def test_samples_and_rows_are_left_out_in_tiers_as_in_memory(batches, trained, tmp_path) -> None:
    """Of uneven batches; without the plugin it is another result."""
    name = "two_tower-mixed-sgd-leaves"
    ours, theirs = (left_by(saved(trained / n)[-1], "two_tower", tmp_path) for n in (f"{name}-lru", name))
    assert furthest(ours, theirs) < BOUND["sgd"]
    assert furthest(ours, by_hand(make("two_tower"), batches, "sgd")) > 1e-3


class Hashing(TwoTower):
    """Looks up ids that it has computed."""

    def forward(self, batch: Events) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch.lists
        computed = KeyedJaggedTensor(ids.keys(), ids.values() // 2, lengths=ids.lengths())
        return super().forward(replace(batch, lists=computed))


def test_ids_that_the_model_computes_are_refused(batches) -> None:
    with pytest.raises(UserError, match="'user' with ids that are not the batch's own, which Sharded"):
        train(Hashing(), batches, "sgd", "tiers.sharded=true")
