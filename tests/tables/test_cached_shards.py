"""``tiers.kernel=uvm_caching``: rows fetched ahead are those of the lookup that gets them.

FBGEMM has such a cache on a GPU alone. Here its TBE on a CPU notes at each prefetch which ids it was for, in
place of the places of their rows in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from recpipe import run as whole
from recpipe.config.compose import compose
from recpipe.tables.sharding import sent

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


@dataclass
class Cache:
    """What the TBEs were asked for."""

    trained: int = 0
    evaluated: int = 0
    wrong: list[str] = field(default_factory=list)
    locks: set[bool] = field(default_factory=set)
    """``lock_cache_line`` in evaluations."""

    def lookup(self, tbe: Any, indices: torch.Tensor) -> None:
        training = torch.is_grad_enabled()
        known = tbe.lxu_cache_locations_list
        self.trained += training
        self.evaluated += not training
        if not training:
            self.locks.add(tbe.lock_cache_line)
        if known and not torch.equal(known[0], indices):
            self.wrong.append("a lookup got what was fetched for another")
        if training and not known:
            self.wrong.append("a batch was trained without what was fetched for it")


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    seen = Cache()
    before: Callable[..., torch.Tensor] = SplitTableBatchedEmbeddingBagsCodegen.forward

    def prefetch(tbe: Any, indices: torch.Tensor, *_: Any, **__: Any) -> None:
        assert tbe.prefetch_pipeline
        tbe.lxu_cache_locations_list.append(indices.clone())
        tbe.timesteps_prefetched.append(len(tbe.timesteps_prefetched))

    def forward(tbe: Any, indices: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        seen.lookup(tbe, indices)
        return before(tbe, indices, *given, **named)

    def cached(*arguments: Any, real: Callable[..., Any] = whole.plan_shards) -> Any:
        sharding, plan = real(*arguments)
        tables = {name: replace(table, kernel="fused_uvm_caching") for name, table in plan.tables.items()}
        return replace(sharding, kernel="uvm_caching"), replace(plan, tables=tables)

    monkeypatch.setattr(SplitTableBatchedEmbeddingBagsCodegen, "prefetch", prefetch)
    monkeypatch.setattr(SplitTableBatchedEmbeddingBagsCodegen, "forward", forward)
    monkeypatch.setattr(whole, "plan_shards", cached)
    return seen


def train(folder: Path, *words: str) -> None:
    whole.run(compose([*WORDS, *words]), folder)


@pytest.mark.parametrize("prefetch", ["true", "false"])
def test_an_evaluation_between_batches_does_not_take_their_rows(
    cache: Cache, tmp_path: Path, prefetch: str
) -> None:
    train(tmp_path, f"tiers.prefetch={prefetch}")
    assert cache.trained >= 10
    assert cache.evaluated >= 3
    assert not cache.wrong
    assert cache.locks == {False}, "the backward pass unlocks rows, and an evaluation has none"


def test_the_control_left_alone_fbgemm_mixes_them_up(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sent, "taken", lambda lookups: [])
    train(tmp_path)
    assert cache.wrong
