"""Ids sent ahead on a stream of their own, from whatever stream training uses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.tables.sharding.sent import RowCache, Sent
from tests.pretend_gpu.late import FakeGpu, Stream, gpu

__all__ = ["gpu"]


class Module:
    """Notes the stream of each call, and the one that rows are fetched for."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.ran: list[Stream] = []
        self.fetched_for: list[Any] = []
        self.kept: list[Any] = []

    def _note(self) -> Any:
        self.ran.append(self.gpu.current())
        return SimpleNamespace(wait=self._note, record_stream=self.kept.append)

    def create_context(self) -> Any:
        return SimpleNamespace(record_stream=self.kept.append)

    def input_dist(self, context: Any, ids: Any) -> Any:
        return self._note()

    def prefetch(self, here: Any, stream: Any, context: Any) -> None:
        self.ran.append(self.gpu.current())
        self.fetched_for.append(stream)


@pytest.mark.parametrize("own", [True, False], ids=["a stream of the user's", "the default stream"])
def test_the_trainings_stream_is_the_one_that_waits(gpu: FakeGpu, own: bool) -> None:
    module, aside = Module(gpu), Stream()
    env: Any = SimpleNamespace(stream=aside, given=lambda sparse, weighted: sparse)
    tbe = SimpleNamespace(lxu_cache_locations_list=["here"], timesteps_prefetched=[1])
    cache = RowCache([SimpleNamespace(tbe=tbe)])  # type: ignore[list-item]
    ids = KeyedJaggedTensor(["a"], torch.arange(2), lengths=torch.ones(2, dtype=torch.int64))
    training = Stream() if own else gpu.default
    with gpu.stream(training):
        training.late.append(lambda: None)  # the batch, still being copied
        sent = Sent(env, module, ids, weighted=False, fetches=False, cache=cache)
        assert not training.late, "the ids' stream waits for the batch"
        sent.send_ids()
        sent.ids()
    assert set(module.ran) == {aside}
    assert module.fetched_for == [training]
    assert module.kept == [training, training], "the ids and what belongs to them"
    assert {stream for _, stream in gpu.lent} == {aside}, "the batch's ids"
