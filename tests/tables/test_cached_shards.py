"""``tiers.kernel=uvm_caching``: rows fetched ahead are those of the lookup that gets them, and stay in their
places until it has come.

FBGEMM has such a cache on a GPU alone. Here its TBE on a CPU has a stand-in for it, which keeps the account
of FBGEMM's kernels (lru_cache_find.cu, lru_cache_populate.cu, lxu_cache.cu): which row is in which place, how
often the place is locked, and which places a lookup takes rows from. Rows themselves stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from recpipe.config.compose import compose
from recpipe.distributed.ranks import Ranks
from recpipe.run import run
from recpipe.setup import planned
from recpipe.tables.sharding import sent
from recpipe.tables.sharding.collection import ShardedCollection
from recpipe.tables.sharding.tables import shard_tables
from tests.tables import sharded

WORDS = (
    "data.samples=1200",
    "data.batch_size=64",
    "data.tables={a: 50, b: 300}",
    "model.embedding_dim=8",
    "model.bottom=[8]",
    "model.top=[8]",
    "tiers.sharded=true",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.eval_every=3",
    "trainer.checkpoint_every=4",
    "trainer.max_steps=10",
    "trainer.device=cpu",
    "task.page=false",
)
PLACES = 160
"""Rows that a TBE's cache has room for: more than a batch has, fewer than two."""
NO_ROW, NO_PLACE = -1, -1


class TbeCache:
    """What is in the cache of one TBE."""

    def __init__(self, tbe: Any) -> None:
        self.rows = torch.full((PLACES,), NO_ROW)
        self.used = torch.zeros(PLACES, dtype=torch.int64)
        tbe.lxu_cache_locking_counter = torch.zeros((1, PLACES), dtype=torch.int32)
        self.locks = tbe.lxu_cache_locking_counter.view(-1)
        self.now = 1

    def populate(self, rows: torch.Tensor, locks: bool) -> None:
        """Put distinct ``rows`` into the places that have not been used for longest. Only a lookup that locks
        its rows minds that others have."""
        self.now += 1
        there = torch.isin(self.rows, rows)
        self.used[there] = self.now
        self.locks[there] += locks
        missing = rows[~torch.isin(rows, self.rows)].tolist()
        for place in torch.argsort(self.used, stable=True).tolist():
            taken = locks and self.locks[place] > 0
            if missing and not taken and self.used[place] < self.now:
                self.rows[place], self.used[place] = missing.pop(0), self.now
                self.locks[place] += locks

    def places(self, rows: torch.Tensor) -> torch.Tensor:
        """Where each of ``rows`` is, int32."""
        found = self.rows == rows[:, None]
        return torch.where(found.any(1), found.int().argmax(1), NO_PLACE).int()


@dataclass
class Cache:
    """What the TBEs were asked for."""

    trained: int = 0
    evaluated: int = 0
    wrong: list[str] = field(default_factory=list)
    tbes: dict[Any, TbeCache] = field(default_factory=dict)

    @property
    def locked(self) -> list[int]:
        """How many places are locked in each TBE's cache."""
        assert all((cache.locks >= 0).all() for cache in self.tbes.values()), "unlocked what was not locked"
        return [int((cache.locks > 0).sum()) for cache in self.tbes.values()]

    def of(self, tbe: Any) -> TbeCache:
        if tbe not in self.tbes:
            self.tbes[tbe] = TbeCache(tbe)
        return self.tbes[tbe]

    def fetch(self, tbe: Any, rows: torch.Tensor) -> None:
        cache = self.of(tbe)
        cache.populate(rows.unique(), tbe.lock_cache_line)
        tbe.lxu_cache_locations_list.append(cache.places(rows))
        tbe.timesteps_prefetched.append(cache.now)

    def look_up(self, tbe: Any, rows: torch.Tensor) -> torch.Tensor:
        """The places that FBGEMM would take ``rows`` from."""
        training = torch.is_grad_enabled()
        self.trained += training
        self.evaluated += not training
        if not tbe.timesteps_prefetched:
            if training:
                self.wrong.append("a batch was trained without what was fetched for it")
            self.fetch(tbe, rows)
        tbe.timesteps_prefetched.pop(0)
        places: torch.Tensor = tbe.lxu_cache_locations_list.pop(0)
        if len(places) != len(rows):
            self.wrong.append("a lookup got what was fetched for another")
        elif not torch.equal(self.of(tbe).rows[places[places >= 0]], rows[places >= 0]):
            self.wrong.append("a lookup took other rows from its places")
        return places


def rows_of(indices: torch.Tensor, offsets: torch.Tensor, features: int) -> torch.Tensor:
    """``indices`` numbered over all features."""
    each = offsets[:: (len(offsets) - 1) // features].diff()
    return indices + torch.repeat_interleave(torch.arange(features) * 10_000, each)


def unlock(counter: torch.Tensor, places: torch.Tensor) -> None:
    """As FBGEMM's operator, which has no kernel for a CPU."""
    counter.view(-1)[places[places >= 0].unique().long()] -= 1


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    seen = Cache()
    before: Callable[..., torch.Tensor] = SplitTableBatchedEmbeddingBagsCodegen.forward

    def prefetch(tbe: Any, indices: torch.Tensor, offsets: torch.Tensor, *_: Any, **__: Any) -> None:
        assert tbe.prefetch_pipeline
        seen.fetch(tbe, rows_of(indices, offsets, len(tbe.feature_table_map)))

    def forward(
        tbe: Any, indices: torch.Tensor, offsets: torch.Tensor, *given: Any, **named: Any
    ) -> torch.Tensor:
        places = seen.look_up(tbe, rows_of(indices, offsets, len(tbe.feature_table_map)))
        pooled = before(tbe, indices, offsets, *given, **named)
        tbe.lxu_cache_locations = places
        if pooled.requires_grad:
            pooled.register_hook(
                lambda _: unlock(tbe.lxu_cache_locking_counter, tbe.lxu_cache_locations)  # type: ignore[no-untyped-call]
            )
        return pooled

    def cached(*arguments: Any, real: Callable[..., Any] = planned.plan_shards) -> Any:
        return behind_a_cache(*real(*arguments))

    monkeypatch.setattr(SplitTableBatchedEmbeddingBagsCodegen, "prefetch", prefetch)
    monkeypatch.setattr(SplitTableBatchedEmbeddingBagsCodegen, "forward", forward)
    monkeypatch.setattr(torch.ops.fbgemm, "lxu_cache_locking_counter_decrement", unlock)
    monkeypatch.setattr(planned, "plan_shards", cached)
    return seen


def behind_a_cache(sharding: Any, plan: Any) -> Any:
    tables = {name: replace(table, kernel="fused_uvm_caching") for name, table in plan.tables.items()}
    return replace(sharding, kernel="uvm_caching"), replace(plan, tables=tables)


def train(folder: Path, *words: str) -> None:
    run(compose([*WORDS, *words]), folder)


@pytest.mark.parametrize("prefetch", ["true", "false"])
def test_an_evaluation_between_batches_does_not_take_their_rows(
    cache: Cache, tmp_path: Path, prefetch: str
) -> None:
    train(tmp_path, f"tiers.prefetch={prefetch}", "trainer.max_steps=15")
    assert cache.trained >= 10
    assert cache.evaluated >= 3
    assert not cache.wrong
    assert not any(cache.locked), "each batch and each evaluation has unlocked its rows"


def test_the_control_left_alone_fbgemm_mixes_them_up(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sent, "taken", lambda lookups: [])
    train(tmp_path)
    assert cache.wrong


def test_the_control_an_evaluation_that_does_not_lock_takes_their_places(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def without_locks(lookups: Any) -> Iterator[None]:
        for lookup in lookups:
            lookup.tbe.lock_cache_line = False
        yield
        for lookup in lookups:
            lookup.tbe.lock_cache_line = True

    monkeypatch.setattr(sent, "unlocking", without_locks)
    train(tmp_path)
    assert "a lookup took other rows from its places" in cache.wrong


# -- an epoch that is left early ---------------------------------------------------------------------


@pytest.fixture
def tables(cache: Cache) -> ShardedCollection:
    planned = sharded.planned(sharded.Case("sgd", {"*": "table_wise"}), Ranks())
    (collection,) = shard_tables(*behind_a_cache(*planned), Ranks())
    return collection


def step(tables: ShardedCollection, ids: Any) -> None:
    sharded.train(tables, ids, 0, ids.stride())


def test_rows_of_a_batch_that_is_never_trained_are_unlocked(cache: Cache, tables: ShardedCollection) -> None:
    first, left, second, third = sharded.batches(5)[:4]
    step(tables, first)
    assert not any(cache.locked)
    tables.start(left).send_ids()
    assert all(cache.locked), "locked by the fetch; and the epoch ends here"
    with torch.no_grad():
        tables(third)
    assert all(cache.locked)
    for ids in (second, third):
        step(tables, ids)
        assert not any(cache.locked)
    assert not cache.wrong


def test_the_control_otherwise_they_stay_locked(
    cache: Cache, tables: ShardedCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache then has less room in each later epoch."""
    monkeypatch.setattr(sent, "unlock", lambda fetched: None)
    first, left, second, third = sharded.batches(5)[:4]
    step(tables, first)
    tables.start(left).send_ids()
    before = cache.locked
    for ids in (second, third):
        step(tables, ids)
    assert cache.locked == before
