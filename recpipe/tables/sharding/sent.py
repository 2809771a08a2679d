"""A batch's ids on their way to the ranks that hold their rows, and what the sharded groups of a run have in
common for that."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe import private_api
from recpipe.distributed.ranks import Channel, Ranks, join_group
from recpipe.errors import DataError
from recpipe.private_api import Fetched, FusedLookup, give_back, given_to_own, taken, unlock, unlocking
from recpipe.tables.sharding.own import ShardsLookup
from recpipe.tables.sharding.plan import ShardPlan
from recpipe.tables.sharding.planning import Sharding


class ShardEnv:
    """The plan, and the ranks' group, channel and stream, by which every group's rows are exchanged."""

    def __init__(self, sharding: Sharding, plan: ShardPlan, ranks: Ranks) -> None:
        self.sharding, self.plan, self.rank = sharding, plan, ranks.rank
        self.group = join_group(sharding.device, ranks)
        self.channel: Channel = ranks.channel()
        self.collectives = private_api.count_collectives()
        """TorchRec's collectives on this rank so far, by name."""
        on_gpu = sharding.device.type == "cuda"
        self.stream = torch.cuda.Stream(sharding.device) if on_gpu else None  # type: ignore[no-untyped-call]
        """The CUDA stream on which ids are sent, beside the training's kernels."""
        self.prefetches = sharding.kernel == "uvm_caching"
        """Whether rows are fetched into a GPU's cache before they are looked up."""

    def given(self, sparse: KeyedJaggedTensor, weighted: bool) -> KeyedJaggedTensor:
        """``sparse`` as the sharded modules take it: weights are dropped where they have no effect, and empty
        samples are appended so that all ranks send shares of one size.

        TorchRec's row-wise collectives need equal sizes under gloo. An empty sample's gradient is zero.
        """
        size, full = sparse.stride(), self.sharding.rank_batch
        weights = sparse.weights() if weighted else None
        if size == full or self.plan.world == 1:
            if weighted or sparse.weights_or_none() is None:
                return sparse
            return KeyedJaggedTensor(sparse.keys(), sparse.values(), lengths=sparse.lengths())
        if size > full:
            raise DataError(
                f"a share of {size} samples, but tables sharded over ranks were built for {full} "
                "(data.batch_size over the ranks): no plugin may make batches larger"
            )
        lengths = sparse.lengths().view(len(sparse.keys()), size)
        lengths = torch.nn.functional.pad(lengths, (0, full - size)).view(-1)
        return KeyedJaggedTensor(sparse.keys(), sparse.values(), weights, lengths=lengths)


class RowCache:
    """A GPU's cache of rows in host memory (``tiers.kernel=uvm_caching``) in front of some ``lookups``; none
    if there are none."""

    def __init__(self, lookups: Sequence[FusedLookup]) -> None:
        self.lookups = lookups
        self.fetched: Sent | None = None
        """The batch whose rows have been fetched into it, and are not looked up yet. It may be one that is
        never trained, because the epoch was left early."""


class Sent:
    """A share of a batch whose ids are being sent to the rows' ranks, by TorchRec's sharded ``module``.

    ``fetches``: whether rows of ids that have arrived here are fetched ahead, from tiers. On a GPU this runs
    on a separate stream, beside the training's.
    """

    def __init__(
        self,
        env: ShardEnv,
        module: Any,
        sparse: KeyedJaggedTensor,
        weighted: bool,
        fetches: bool,
        cache: RowCache,
    ) -> None:
        self.env, self.module, self.samples = env, module, sparse.stride()
        self._fetches, self._cache = fetches, cache
        self._fetched: Fetched = []
        self.context = self.module.create_context()
        self._ids: Any = None
        self._here: Any = None
        stream = env.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))  # which has the batch
            sparse.record_stream(stream)
        with torch.cuda.stream(stream):
            ids = env.given(sparse, weighted)
            self._lengths = self.module.input_dist(self.context, ids)

    def send_ids(self) -> None:
        """Wait for the numbers of ids, which were sent first, and send the ids themselves.

        With a GPU's cache (``tiers.kernel=uvm_caching``) it also fetches their rows into the cache, if they
        will be trained. There they are locked until they have been.
        """
        if self._ids is not None:
            return
        stream, cache = self.env.stream, self._cache
        training = None if stream is None else torch.cuda.current_stream(stream.device)
        with torch.cuda.stream(stream):
            self._ids = self._lengths.wait()
            if cache.lookups and torch.is_grad_enabled():
                self._here = self._ids.wait()
                if cache.fetched is not None:
                    unlock(cache.fetched._fetched)
                cache.fetched = self
                self.module.prefetch(self._here, training, self.context)
                self._fetched = taken(cache.lookups)

    def fetch_rows(self) -> None:
        """Wait for what the other ranks sent here and start to fetch its rows, where they lie in tiers.

        Waiting in a thread of its own was no faster: two threads that run Python hold each other up.
        """
        if self._fetches and self._here is None:
            self.send_ids()
            with torch.cuda.stream(self.env.stream):
                self._here = self._ids.wait()
                for lookup, features in given_to_own(self.module, self._here):
                    assert isinstance(lookup.look_up, ShardsLookup)
                    lookup.look_up.fetch_ahead(features)

    def looked_up(self) -> Any:
        """The rows for the ids, on their way to the ranks that asked for them; waits for the ids."""
        here = self.ids()
        if self._cache.fetched is self:
            self._cache.fetched = None
        give_back(self._fetched)
        with nullcontext() if torch.is_grad_enabled() else unlocking(self._cache.lookups):
            return self.module.compute_and_output_dist(self.context, here)

    def ids(self) -> Any:
        """The ids that the other ranks sent here; waits for them."""
        self.send_ids()
        stream = self.env.stream
        with torch.cuda.stream(stream):
            self._here = self._ids.wait() if self._here is None else self._here
        if stream is not None:
            current = torch.cuda.current_stream(stream.device)
            current.wait_stream(stream)
            self._here.record_stream(current)
            self.context.record_stream(current)
        return self._here
