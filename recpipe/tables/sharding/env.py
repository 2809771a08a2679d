"""What the sharded groups of a run have in common: the plan, and the ranks' group, channel and stream."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe import private_api
from recpipe.distributed.ranks import Channel, Ranks, join_group
from recpipe.errors import DataError
from recpipe.tables.sharding.plan import ShardPlan
from recpipe.tables.sharding.planning import Sharding


class ShardEnv:
    """The environment in which every group's rows are exchanged between ranks."""

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
