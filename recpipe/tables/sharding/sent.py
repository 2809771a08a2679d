"""A batch's ids on their way to the ranks that hold their rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.private_api import Fetched, FusedLookup, give_back, taken, unlock, unlocking
from recpipe.tables.sharding.env import ShardEnv
from recpipe.tables.sharding.tiered import fetch_ahead


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
        will be trained.
        """
        if self._ids is not None:
            return
        stream = self.env.stream
        training = None if stream is None else torch.cuda.current_stream(stream.device)
        with torch.cuda.stream(stream):
            self._ids = self._lengths.wait()
            if self._cache.lookups and torch.is_grad_enabled():
                self._here = self._ids.wait()
                self._fetch(training)

    def _fetch(self, training: torch.cuda.Stream | None) -> None:
        """Fetch the rows into the cache, where they are locked until they have been trained."""
        left = self._cache.fetched
        if left is not None:
            unlock(left._fetched)
        self._cache.fetched = self
        self.module.prefetch(self._here, training, self.context)
        self._fetched = taken(self._cache.lookups)

    def fetch_rows(self) -> None:
        """Wait for what the other ranks sent here and start to fetch its rows, where they lie in tiers.

        Waiting in a thread of its own was no faster: two threads that run Python hold each other up.
        """
        if self._fetches and self._here is None:
            self.send_ids()
            with torch.cuda.stream(self.env.stream):
                self._here = self._ids.wait()
                fetch_ahead(self.module, self._here)

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
