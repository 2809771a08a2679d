"""Tables cut into parts over the ranks by a plan, and run by TorchRec's ``DistributedModelParallel``.

Every rank looks up its share of each batch: ids go to the ranks that hold their rows (``start``), pooled
rows come back (``finish``), and the backward pass sends gradients the other way and makes the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recpipe.embedding import seams
from recpipe.embedding.capabilities import SavedByRanks, SendsAhead
from recpipe.embedding.collection import TORCHREC_OPTIMIZERS, TableCollection
from recpipe.embedding.shard_plan import Shard, ShardPlan
from recpipe.embedding.sharding import Sharding
from recpipe.embedding.tables import Region, Values, module_name, row_chunks, to_numpy
from recpipe.errors import DataError
from recpipe.ranks import Channel, Ranks


class Sent:
    """A share of a batch whose ids are on their way to the rows' ranks.

    On a GPU this runs on a stream of its own, beside the training's.
    """

    def __init__(self, collection: ShardedCollection, sparse: KeyedJaggedTensor) -> None:
        self.collection = collection
        self.samples = sparse.stride()
        self.context = collection.sharded.create_context()
        self._ids: Any = None
        self._here: Any = None
        if collection.stream is not None:
            collection.stream.wait_stream(torch.cuda.current_stream())  # which copies the batch
        with torch.cuda.stream(collection.stream):
            self._lengths = collection.sharded.input_dist(self.context, collection.padded(sparse))

    def send_ids(self) -> None:
        """Wait for the numbers of ids, which went first, and send the ids themselves.

        Behind a GPU's cache (``tiers.kernel=uvm_caching``) it also fetches their rows into it.
        """
        if self._ids is not None:
            return
        with torch.cuda.stream(self.collection.stream):
            self._ids = self._lengths.wait()
            if self.collection.prefetches:
                self._here = self._ids.wait()
                self.collection.sharded.prefetch(self._here, torch.cuda.default_stream(), self.context)

    def ids(self) -> Any:
        """What the other ranks sent here; waits for it."""
        self.send_ids()
        stream = self.collection.stream
        with torch.cuda.stream(stream):
            self._here = self._ids.wait() if self._here is None else self._here
        if stream is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(stream)
            self._here.record_stream(current)
            self.context.record_stream(current)
        return self._here


class ShardedCollection(TableCollection, SendsAhead, SavedByRanks):
    """TorchRec's ``ShardedEmbeddingBagCollection`` with fused optimizers, placed by ``plan``.

    Gradients are sums over the ranks, not means: each rank's loss is its addend of the whole batch's.
    """

    def __init__(self, sharding: Sharding, plan: ShardPlan, ranks: Ranks) -> None:
        super().__init__()
        self.sharding, self.shards = sharding, plan
        self.tables = tables = sharding.tables
        self.group = join_group(sharding.device, ranks)
        set_gradient_division(False)
        self._collectives = seams.count_collectives()
        topology = sharding.topology()
        self.parallel = DistributedModelParallel(
            sharding.module(),
            env=ShardingEnv.from_process_group(self.group),
            device=sharding.device,
            plan=plan.torchrec(sharding.device.type, topology.local_world_size, sharding.constraints()),
            sharders=sharding.sharders(),
        )
        on_gpu = sharding.device.type == "cuda"
        self.stream = torch.cuda.Stream(sharding.device) if on_gpu else None  # type: ignore[no-untyped-call]
        """Where ids travel on a GPU, beside the training's kernels."""
        self.prefetches = sharding.kernel == "uvm_caching"
        self._channel: Channel = ranks.channel()
        self._gradients: Channel = ranks.channel()
        for lookup in seams.replicated_lookups(self.parallel):
            lookup.register_comm_hook(self._gradients, lambda channel, bucket: _summed(channel, bucket))
        self.rank = ranks.rank
        self._replicated = self._dense_optimizer()
        self._local = {t.name: self._shards_here(t.name) for t in tables.tables}
        for region in row_chunks(tables):
            if self._pieces(region, self.rank):
                records = tables.fill(region.table, region.start, region.stop)
                self.write(region, (records[:, : tables.dim], records[:, tables.dim :]))

    @property
    def sharded(self) -> Any:
        """TorchRec's sharded module."""
        return self.parallel.module.tables

    @property
    def collectives(self) -> Mapping[str, seams.Collective]:
        """TorchRec's collectives on this rank so far, by name."""
        return self._collectives

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """As TorchRec's collection."""
        return self.tables.configs()

    # -- lookups -----------------------------------------------------------------------------

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows of this rank's share, by feature name."""
        return self.finish(Sent(self, sparse))

    def start(self, sparse: KeyedJaggedTensor) -> Sent:
        """Begin to send the ids of a batch that will be looked up later; all ranks do so together."""
        return Sent(self, sparse)

    def finish(self, sent: Sent) -> KeyedTensor:
        """Pooled rows of what ``start`` sent, float32 [B, F * D] in the order of the result's keys."""
        pooled: KeyedTensor = self.sharded.compute_and_output_dist(sent.context, sent.ids()).wait()
        if pooled.values().shape[0] == sent.samples:
            return pooled
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), pooled.values()[: sent.samples])

    def padded(self, sparse: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``sparse`` with samples without ids at its end, so that all ranks send shares of one size.

        TorchRec's row-wise collectives need that under gloo; such a sample's gradient is zero.
        """
        size, full = sparse.stride(), self.sharding.rank_batch
        if size == full or self.shards.world == 1:
            return sparse
        if size > full:
            raise DataError(
                f"a share of {size} samples, but tables sharded over ranks were built for {full} "
                "(data.batch_size over the ranks): no plugin may make batches larger"
            )
        lengths = sparse.lengths().view(len(sparse.keys()), size)
        lengths = torch.nn.functional.pad(lengths, (0, full - size)).view(-1)
        return KeyedJaggedTensor(sparse.keys(), sparse.values(), lengths=lengths)

    def _dense_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of data-parallel tables, whose gradients are whole tables."""
        copied = {module_name(name) for name, table in self.shards.tables.items() if table.replicated}
        weights = [p for name, p in self.parallel.named_parameters() if name.split(".")[-2] in copied]
        if not weights:
            return None
        optimizer = self.tables.optimizer
        made: torch.optim.Optimizer = TORCHREC_OPTIMIZERS[optimizer.name](weights, **optimizer.knobs)
        return made

    def _shards_here(self, table: str) -> list[seams.LocalShard]:
        found = seams.local_shards(self.parallel, table)
        if self._replicated is None or not self.shards.tables[table].replicated:
            return found
        weight = self.parallel.get_parameter(f"module.tables.embedding_bags.{module_name(table)}.weight")
        state = self._replicated.state[weight].get("sum")
        return found if state is None else [replace(found[0], state=state.view(len(weight), -1))]

    def local(self, table: str) -> list[seams.LocalShard]:
        """The table's shards on this rank, sharing their memory."""
        return self._local[table]

    def wait_for_ranks(self) -> None:
        """Return once every rank is here."""
        self._channel.barrier()

    def update(self) -> None:
        """The data-parallel tables' part of the step, after the backward pass."""
        if self._replicated is None:
            return
        self._replicated.step()
        self._replicated.zero_grad()

    # -- rows, for checkpoints ---------------------------------------------------------------

    def save_tables(self, directory: Path) -> None:
        """Write this rank's part into ``directory``, which rank 0 makes; all ranks call it."""
        from recpipe.embedding.shard_files import save_shards

        self.wait_for_ranks()  # for the directory
        save_shards(self, directory)

    def load_tables(self, directory: Path) -> None:
        """Read this rank's part of tables that any number of ranks has saved."""
        from recpipe.embedding.shard_files import load_shards

        load_shards(self, directory)

    def regions(self) -> Iterator[Region]:
        """All rows of all tables, in chunks, on every rank."""
        yield from row_chunks(self.tables)

    def _pieces(self, region: Region, rank: int) -> list[tuple[Shard, slice]]:
        """The shards of ``rank`` that have rows of ``region``, each with those rows' numbers in the table."""
        plan = self.shards.tables[region.table]
        found = []
        for shard in plan.shards:
            low, high = max(shard.row, region.start), min(shard.row + shard.rows, region.stop)
            if shard.rank == rank and low < high:
                found.append((shard, slice(low, high)))
        return found

    def _views(self, table: str, shard: Shard, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and optimizer state of ``rows`` (as numbered in the table) of a shard on this rank."""
        local = next(
            s for s in self._local[table] if (s.row, s.column) == (shard.row, shard.column) and len(s.weights)
        )
        part = slice(rows.start - shard.row, rows.stop - shard.row)
        return local.weights[part], local.state[part]

    def read(self, region: Region) -> Values:
        """Current weights and optimizer state of ``region``, on every rank; all ranks ask together.

        Row-wise Adagrad's state of columns on different ranks is their mean, weighted by columns: what
        the state of the whole row would be.
        """
        replicated = self.shards.tables[region.table].replicated
        readers = (self.rank,) if replicated else tuple(range(self.shards.world))
        mine = [
            to_numpy(view).reshape(-1)
            for shard, rows in self._pieces(region, self.rank)
            for view in self._views(region.table, shard, rows)
        ]
        flat = np.concatenate([*mine, np.empty(0, np.float32)])
        received = [flat] if replicated else self._channel.gather(flat)
        return self._joined(region, dict(zip(readers, received, strict=True)))

    def _joined(self, region: Region, received: dict[int, Any]) -> Values:
        width = self.tables.layout.width - self.tables.dim
        rows = region.stop - region.start
        weights = np.empty((rows, self.tables.dim), np.float32)
        state = np.zeros((rows, width), np.float32)
        row_wise = self.tables.optimizer.name == "rowwise_adagrad"
        for rank, flat in received.items():
            at = 0
            for shard, part in self._pieces(region, rank):
                count = part.stop - part.start
                here = slice(part.start - region.start, part.stop - region.start)
                columns = slice(shard.column, shard.column + shard.columns)
                weights[here, columns] = flat[at : at + count * shard.columns].reshape(count, -1)
                at += count * shard.columns
                wide = width if row_wise else shard.columns if width else 0
                value = flat[at : at + count * wide].reshape(count, wide)
                at += count * wide
                if row_wise and shard.columns < self.tables.dim:
                    state[here] += value * np.float32(shard.columns / self.tables.dim)
                elif row_wise:
                    state[here] = value
                elif width:
                    state[here, columns] = value
        return weights, state

    def write(self, region: Region, values: Values) -> None:
        """Replace this rank's part of the weights and optimizer state of ``region``."""
        row_wise = self.tables.optimizer.name == "rowwise_adagrad"
        with torch.no_grad():
            for shard, rows in self._pieces(region, self.rank):
                here = slice(rows.start - region.start, rows.stop - region.start)
                columns = slice(shard.column, shard.column + shard.columns)
                weights, state = self._views(region.table, shard, rows)
                weights.copy_(torch.from_numpy(values[0][here, columns]))
                if state.numel():
                    state.copy_(torch.from_numpy(values[1][here] if row_wise else values[1][here, columns]))


def _summed(gradients: Channel, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Data-parallel tables' gradients, added in the order of the ranks.

    DistributedDataParallel's own all-reduce adds in an order that depends on its buckets, and those on how
    long the process has run: a restarted run would not have the bits of an undisturbed one.
    """
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients.ordered_sum(bucket.buffer()))
    return done


def join_group(device: torch.device, ranks: Ranks) -> dist.ProcessGroup:
    """A group for TorchRec's collectives alone; of one process where there is but one."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    made: dist.ProcessGroup = dist.new_group(list(range(ranks.world)), backend=backend)
    return made
