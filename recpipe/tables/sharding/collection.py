"""Tables cut into parts over the ranks by a plan, and run by TorchRec's ``DistributedModelParallel``.

Every rank looks up its share of each batch: ids go to the ranks that hold their rows (``start``), rows come
back (``finish``), and the backward pass sends gradients the other way and makes the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recpipe import seams
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.errors import DataError, UserError
from recpipe.seams import module_name
from recpipe.tables.capabilities import Rows, SavedByRanks, SendsAhead
from recpipe.tables.collection import TORCHREC_OPTIMIZERS, TableCollection
from recpipe.tables.sharding.modules import groups_in, module_paths, skeleton
from recpipe.tables.sharding.plan import Shard, ShardPlan
from recpipe.tables.sharding.planning import Sharding
from recpipe.tables.skipping import RowFilter, by_feature, filter_lookups
from recpipe.tables.specs import Region, Values, row_chunks, to_numpy


class Sent:
    """A share of a batch whose ids are on their way to the rows' ranks.

    On a GPU this runs on a stream of its own, beside the training's.
    """

    def __init__(self, collection: ShardedCollection, sparse: KeyedJaggedTensor) -> None:
        self.whole, self.module = collection.whole, collection.sharded
        self.samples = sparse.stride()
        self.context = self.module.create_context()
        self._ids: Any = None
        self._here: Any = None
        if self.whole.stream is not None:
            self.whole.stream.wait_stream(torch.cuda.current_stream())  # which copies the batch
        with torch.cuda.stream(self.whole.stream):
            ids = self.whole.given(sparse, collection.tables.weighted)
            self._lengths = self.module.input_dist(self.context, ids)

    def send_ids(self) -> None:
        """Wait for the numbers of ids, which went first, and send the ids themselves.

        Behind a GPU's cache (``tiers.kernel=uvm_caching``) it also fetches their rows into it.
        """
        if self._ids is not None:
            return
        with torch.cuda.stream(self.whole.stream):
            self._ids = self._lengths.wait()
            if self.whole.prefetches:
                self._here = self._ids.wait()
                self.module.prefetch(self._here, torch.cuda.default_stream(), self.context)

    def ids(self) -> Any:
        """What the other ranks sent here; waits for it."""
        self.send_ids()
        stream = self.whole.stream
        with torch.cuda.stream(stream):
            self._here = self._ids.wait() if self._here is None else self._here
        if stream is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(stream)
            self._here.record_stream(current)
            self.context.record_stream(current)
        return self._here


class ShardedTables:
    """All sharded tables of a model, a collection for each of its groups, and what these share.

    One ``DistributedModelParallel`` shards the groups' modules where they stand in the model, by one plan.
    Gradients are sums over the ranks, not means: each rank's loss is its addend of the whole batch's.
    """

    def __init__(
        self, sharding: Sharding, plan: ShardPlan, ranks: Ranks, model: nn.Module | None = None
    ) -> None:
        """``model`` holds the collections, and is as it was afterwards; None: there are but the tables."""
        self.sharding, self.plan, self.rank = sharding, plan, ranks.rank
        self.group = join_group(sharding.device, ranks)
        set_gradient_division(False)
        self.collectives = seams.count_collectives()
        """TorchRec's collectives on this rank so far, by name."""
        on_gpu = sharding.device.type == "cuda"
        self.stream = torch.cuda.Stream(sharding.device) if on_gpu else None  # type: ignore[no-untyped-call]
        """Where ids travel on a GPU, beside the training's kernels."""
        self.prefetches = sharding.kernel == "uvm_caching"
        modules = self._sharded(model)
        self.channel: Channel = ranks.channel()
        self._gradients: Channel = ranks.channel()
        for module, group in zip(modules, sharding.tables.groups, strict=True):
            for lookup in seams.replicated_lookups(module):
                lookup.register_comm_hook(self._gradients, lambda channel, bucket: _summed(channel, bucket))
                if not group.tables.pooled and not on_gpu:
                    seams.look_up_each_id(lookup)
        self.collections = tuple(
            ShardedCollection(self, number, module) for number, module in enumerate(modules)
        )
        """Of each group."""

    def _sharded(self, model: nn.Module | None) -> list[Any]:
        """TorchRec's sharded module of each group."""
        sharding, tables = self.sharding, self.sharding.tables
        whole = skeleton(tables) if model is None else model
        local_world = sharding.topology().local_world_size
        limits = sharding.constraints()
        with nullcontext() if model is None else groups_in(whole, tables):
            # The dense part is not its concern: recpipe sums those gradients in the order of the ranks.
            DistributedModelParallel(
                whole,
                env=ShardingEnv.from_process_group(self.group),
                device=sharding.device,
                plan=self.plan.torchrec(sharding.device.type, local_world, limits, tables),
                sharders=sharding.sharders(),
                init_data_parallel=False,
                init_parameters=False,
            )
            return [whole.get_submodule(path) for path in module_paths(tables)]

    def given(self, sparse: KeyedJaggedTensor, weighted: bool) -> KeyedJaggedTensor:
        """``sparse`` as the sharded modules take it: with weights only where they count, and with samples
        without ids at its end, so that all ranks send shares of one size.

        TorchRec's row-wise collectives need that under gloo; such a sample's gradient is zero.
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


class ShardedCollection(TableCollection, SendsAhead, SavedByRanks):
    """One group of ``whole``, run by TorchRec's sharded module with its fused optimizer."""

    def __init__(self, whole: ShardedTables, number: int, module: Any) -> None:
        super().__init__()
        self.whole, self.number = whole, number
        self.tables = tables = whole.sharding.tables.groups[number].tables
        self.shards = {name: whole.plan.tables[name] for name in tables.layout.tables}
        """Where each of its tables lies."""
        self.sharded = module
        """TorchRec's sharded module."""
        self._under = "embedding_bags" if tables.pooled else "embeddings"
        self._replicated = self._dense_optimizer()
        self._rows: RowFilter | None = None
        self._local = {t.name: self._shards_here(t.name) for t in tables.tables}
        for region in row_chunks(tables):
            if self._pieces(region, whole.rank):
                records = tables.fill(region.table, region.start, region.stop)
                self.write(region, (records[:, : tables.dim], records[:, tables.dim :]))

    @property
    def collectives(self) -> Mapping[str, seams.Collective]:
        """TorchRec's collectives on this rank so far, by name; of all groups."""
        return self.whole.collectives

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """As TorchRec's collection."""
        return self.tables.configs()

    # -- lookups -----------------------------------------------------------------------------

    def forward(self, sparse: KeyedJaggedTensor) -> Rows:
        """Rows of this rank's share, by feature name."""
        return self.finish(self.start(sparse))

    def start(self, sparse: KeyedJaggedTensor) -> Sent:
        """Begin to send the ids of a batch that will be looked up later; all ranks do so together."""
        return Sent(self, sparse)

    def finish(self, sent: Sent) -> Rows:
        """Rows of what ``start`` sent: pooled, float32 [B, F * D] in the order of the result's keys, or by
        feature one for each id."""
        found: Rows = self.sharded.compute_and_output_dist(sent.context, sent.ids()).wait()
        size = sent.samples
        if not isinstance(found, KeyedTensor):  # samples beyond ours have no ids
            return {
                n: JaggedTensor(rows.values(), lengths=rows.lengths()[:size]) for n, rows in found.items()
            }
        if found.values().shape[0] == size:
            return found
        return KeyedTensor(found.keys(), found.length_per_key(), found.values()[:size])

    def _weight(self, table: str) -> torch.nn.Parameter:
        """Of a data-parallel table."""
        weight: torch.nn.Parameter = self.sharded.get_parameter(f"{self._under}.{module_name(table)}.weight")
        return weight

    def _dense_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of data-parallel tables, whose gradients are whole tables."""
        weights = [self._weight(name) for name, table in self.shards.items() if table.replicated]
        if not weights:
            return None
        optimizer = self.tables.optimizer
        made: torch.optim.Optimizer = TORCHREC_OPTIMIZERS[optimizer.name](weights, **optimizer.knobs)
        return made

    def _shards_here(self, table: str) -> list[seams.LocalShard]:
        found = seams.local_shards(self.sharded, table, self._under)
        if self._replicated is None or not self.shards[table].replicated:
            return found
        weight = self._weight(table)
        state = self._replicated.state[weight].get("sum")
        return found if state is None else [replace(found[0], state=state.view(len(weight), -1))]

    def local(self, table: str) -> list[seams.LocalShard]:
        """The table's shards on this rank, sharing their memory."""
        return self._local[table]

    def filter_updates(self, rows: RowFilter) -> None:
        """Leave rows out where they lie; each rank decides about its own, data-parallel tables' all ranks.

        ``UserError`` where a row's gradient is in parts, or rows come ahead of their lookups.
        """
        if self.whole.prefetches:
            raise UserError(
                "a plugin leaves rows out of updates, which looks them up once more, and "
                "tiers.kernel=uvm_caching fetches them ahead for one lookup: use tiers.kernel=uvm, or drop it"
            )
        self._rows = rows
        layout = self.tables.layout
        base = dict(zip(map(module_name, layout.tables), layout.bases.tolist(), strict=False))
        for lookup in seams.fused_lookups(self.sharded):
            firsts = np.array([base[table] + row for table, row in lookup.features], np.int64)
            filter_lookups(lookup.tbe, rows, by_feature(firsts), len(firsts), self.tables.pooled)

    def _leave_out(self, table: str, rows: RowFilter) -> None:
        """Gradients of zero change nothing, in weights and states, by every optimizer that there is."""
        gradient = self._weight(table).grad
        if gradient is None:
            return
        layout = self.tables.layout
        base = int(layout.bases[layout.tables.index(table)])
        here = torch.nonzero(gradient.any(dim=1)).view(-1)
        stay = rows.stay(here.cpu().numpy() + base, gradient[here])
        if stay is not None:
            gradient[here[~stay]] = 0.0

    def update(self) -> None:
        """The data-parallel tables' part of the step, after the backward pass."""
        if self._replicated is None:
            return
        for name, table in self.shards.items():
            if self._rows is not None and table.replicated:
                self._leave_out(name, self._rows)
        self._replicated.step()
        self._replicated.zero_grad()

    # -- rows, for checkpoints ---------------------------------------------------------------

    def save_tables(self, directory: Path) -> None:
        """Write this rank's part into ``directory``, which rank 0 makes; all ranks call it."""
        from recpipe.tables.sharding.files import save_shards

        self.whole.channel.barrier()  # for the directory
        save_shards(self, directory)

    def load_tables(self, directory: Path) -> None:
        """Read this rank's part of tables that any number of ranks has saved."""
        from recpipe.tables.sharding.files import load_shards

        load_shards(self, directory)

    def regions(self) -> Iterator[Region]:
        """All rows of all tables, in chunks, on every rank."""
        yield from row_chunks(self.tables)

    def _pieces(self, region: Region, rank: int) -> list[tuple[Shard, slice]]:
        """The shards of ``rank`` that have rows of ``region``, each with those rows' numbers in the table."""
        found = []
        for shard in self.shards[region.table].shards:
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
        replicated, rank = self.shards[region.table].replicated, self.whole.rank
        readers = (rank,) if replicated else tuple(range(self.whole.plan.world))
        mine = [
            to_numpy(view).reshape(-1)
            for shard, rows in self._pieces(region, rank)
            for view in self._views(region.table, shard, rows)
        ]
        flat = np.concatenate([*mine, np.empty(0, np.float32)])
        received = [flat] if replicated else self.whole.channel.gather(flat)
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
            for shard, rows in self._pieces(region, self.whole.rank):
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
