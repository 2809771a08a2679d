"""All of a model's tables, cut into parts over the ranks by a plan and run by TorchRec's
``DistributedModelParallel``; saved and loaded in the format of ``torch.distributed.checkpoint``.

Every rank writes its own shards; any number of ranks, under any plan, can read them. The files are
safetensors, so nothing is unpickled. Rows pass through memory in blocks; the library's own writer and reader
would hold up to two further copies of a rank's tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

from recpipe import private_api
from recpipe.common.files import sync
from recpipe.common.meter import counting
from recpipe.common.tensors import TensorFiles
from recpipe.distributed.ranks import Channel, Ranks
from recpipe.plugin.tables import FILL_ROWS, Values, rows_in, state_name, weight_name
from recpipe.private_api import LocalShard as MemoryShard
from recpipe.private_api import Shard, ShardedTensor, ShardMetadata, init_from_local_shards
from recpipe.tables.collection import SavedByRanks
from recpipe.tables.saved_parts import Part, save_parts, saved_rows
from recpipe.tables.sharding.collection import ShardedCollection
from recpipe.tables.sharding.own import LocalShard, ShardTiers
from recpipe.tables.sharding.plan import ShardPlan, groups_in, module_paths, skeleton
from recpipe.tables.sharding.planning import Sharding
from recpipe.tables.sharding.sent import ShardEnv


def shard_tables(
    sharding: Sharding,
    plan: ShardPlan,
    ranks: Ranks,
    model: nn.Module | None = None,
    tiers: ShardTiers | None = None,
    saved: Path | None = None,
) -> tuple[ShardedGroup, ...]:
    """Shard all tables of a model, and return the collection of each group.

    One ``DistributedModelParallel`` shards all groups' modules at their places in the model, by one plan.
    Gradients are summed over the ranks, not averaged, since each rank's loss is its part of the whole batch's
    loss.

    ``model`` holds the collections and is unchanged afterwards; None: only the tables are needed. ``tiers``:
    the tiers that hold the rows of the tables in ``sharding.tiered``. ``saved``: a checkpoint's tables, whose
    rows all tables start with; None: first values.
    """
    env, tables, on_gpu = ShardEnv(sharding, plan, ranks), sharding.tables, sharding.device.type == "cuda"
    set_gradient_division(False)
    # How many random numbers the shards' first values take depends on the plan; what follows must not.
    with torch.random.fork_rng(devices=[sharding.device] if on_gpu else []):
        whole = skeleton(tables) if model is None else model
        local_world, limits = sharding.topology().local_world_size, sharding.constraints()
        with nullcontext() if model is None else groups_in(whole, tables), private_api.own_lookups():
            # DistributedModelParallel must leave the dense part alone: recpipe sums its gradients in the
            # ranks' order.
            DistributedModelParallel(
                whole,
                env=ShardingEnv.from_process_group(env.group),
                device=sharding.device,
                plan=plan.torchrec(sharding.device, local_world, limits, tables, sharding.own),
                sharders=sharding.sharders(),
                init_data_parallel=False,
                init_parameters=False,
            )
            modules = [whole.get_submodule(path) for path in module_paths(tables)]
    gradients = ranks.channel()
    for module, group in zip(modules, tables.groups, strict=True):
        for lookup in private_api.replicated_lookups(module):
            lookup.register_comm_hook(gradients, lambda channel, bucket: _summed(channel, bucket))
            if not group.tables.pooled and not on_gpu:
                private_api.look_up_each_id(lookup)
    return tuple(ShardedGroup(env, number, module, tiers, saved) for number, module in enumerate(modules))


def _summed(gradients: Channel, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Sum data-parallel tables' gradients in the order of the ranks.

    DistributedDataParallel's own all-reduce adds in an order that depends on its buckets, which depend on how
    long the process has run. A restarted run would then not have the bits of an undisturbed one.
    """
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients.ordered_sum(bucket.buffer()))
    return done


class ShardedGroup(ShardedCollection, SavedByRanks):
    """A sharded group that its ranks save and load together.

    ``saved``: a checkpoint's tables, whose rows all tables start with; None: first values.
    """

    def __init__(
        self,
        env: ShardEnv,
        number: int,
        module: Any,
        tiers: ShardTiers | None = None,
        saved: Path | None = None,
    ) -> None:
        super().__init__(env, number, module, tiers)
        if saved is not None and self._fits_memory(TensorFiles.sharded(saved)):
            self._load_into_memory(saved)
            return
        dim, regions = self.tables.dim, [r for r in self.regions_here() if r.table not in self.own]
        with counting("filling the tables' rows", rows_in(regions)) as add:
            for region in regions:
                records = self.tables.fill(region.table, region.start, region.stop)
                self.write(region, (records[:, :dim], records[:, dim:]))
                add(region.stop - region.start)

    def save_tables(self, directory: Path) -> None:
        """Write this rank's part into ``directory``, which rank 0 makes; all ranks call it. The files are on
        the disk on return.

        A rank with several shards of a table writes several files, since a tensor's name occurs once in a
        file. Each group of tables has its own files. Rank 0 writes tables that every rank has.
        """
        self.env.channel.barrier()  # for the directory
        files: list[list[Part]] = []
        for part in self._parts():
            others = (parts for parts in files if all(other.table != part.table for other in parts))
            place = next(others, None)
            if place is None:
                files.append(place := [])
            place.append(part)
        prefix = f"group-{self.number}-" if self.number else ""
        rows = sum(part.rows for parts in files for part in parts)
        with counting("writing rows to the checkpoint", rows) as add:
            for number, parts in enumerate(files, 1):
                name = f"shard-{self.env.rank + 1:05d}-model-{number:05d}-of-{len(files):05d}"
                file = directory / f"{prefix}{name}.safetensors"
                save_parts(file, parts, add)
                sync(file)
        self.env.channel.barrier()  # rank 0 writes the metadata after all ranks have written

    def load_tables(self, directory: Path) -> None:
        """Fill this rank's shards from what any ranks wrote under any plan; all ranks call it together."""
        files = TensorFiles.sharded(directory)
        if self._fits_memory(files):
            self._load_into_memory(directory)
            return
        width = self.tables.layout.width - self.tables.dim
        rows = {name: saved_rows(files, name, width) for name in self.shards}
        regions = self.regions_here()
        with counting("loading rows", rows_in(regions)) as add:
            for region in regions:
                self.write(region, rows[region.table](region.start, region.stop))
                add(region.stop - region.start)

    def _parts(self) -> Iterator[Part]:
        """This rank's shards.

        Row-wise Adagrad has one value per row. If a shard does not have all columns, the value is repeated
        over its columns: other columns' shards have other values, and a plan with a different cut takes their
        mean.
        """
        self.empty_cache(forget=False)
        for name, table in self.shards.items():
            if table.replicated and self.env.rank:
                continue
            for shard in self.local[name]:
                rows, columns = shard.shape
                if rows:
                    width = self._state_columns(name)
                    width = min(columns, width) if columns < table.dim else width
                    yield Part(name, (shard.row, shard.column), rows, columns, width, _blocks(shard))

    def _state_columns(self, name: str) -> int:
        """The number of columns in the saved state of the whole table ``name``: one for each weight if rows
        are cut."""
        table, width = self.shards[name], self.tables.layout.width - self.tables.dim
        cut = any(shard.columns < table.dim for shard in table.shards)
        return table.dim if width and cut else width

    def _fits_memory(self, files: TensorFiles) -> bool:
        """Whether all shards are in memory that has the layout of ``files``. Other rows pass through
        regions."""
        states = self.shards if self.tables.layout.width > self.tables.dim else ()
        same = all(files.shape(state_name(n))[1] == self._state_columns(n) for n in states)
        return not self.own and same

    def _load_into_memory(self, directory: Path) -> None:
        """Load all shards where they fit their memory: the library reads directly into it."""
        self.empty_cache(forget=True)
        placement = f"rank:{self.env.rank}/{self.env.sharding.device}"
        saved: dict[str, torch.Tensor | ShardedTensor] = {}
        repeated: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, table in self.shards.items():
            shards = [s for s in self.local[name] if isinstance(s, MemoryShard) and len(s.weights)]
            width = self._state_columns(name)
            tensors = {weight_name(name): (table.dim, [shard.weights for shard in shards])}
            if width:
                states = []
                for shard in shards:
                    columns, state = min(width, shard.weights.shape[1]), shard.state
                    if state.shape[1] != columns:
                        state = state.expand(-1, columns).contiguous()
                        repeated.append((shard.state, state))
                    states.append(state)
                tensors[state_name(name)] = width, states
            for key, (columns, values) in tensors.items():
                if table.replicated:
                    saved[key] = values[0]
                    continue
                parts = [
                    Shard(value, ShardMetadata([s.row, s.column], list(value.shape), placement))
                    for s, value in zip(shards, values, strict=True)
                ]
                group = self.env.group
                saved[key] = init_from_local_shards(parts, table.rows, columns, process_group=group)
        load(saved, storage_reader=_Reader(str(directory)), process_group=self.env.group)
        for state, wide in repeated:  # one value for a row: the mean if columns differ
            equal = (wide == wide[:, :1]).all(dim=1, keepdim=True)
            state.copy_(torch.where(equal, wide[:, :1], wide.mean(dim=1, keepdim=True)))


def _blocks(shard: LocalShard) -> Iterator[Values]:
    rows = shard.shape[0]
    return (shard.read(low, min(low + FILL_ROWS, rows)) for low in range(0, rows, FILL_ROWS))


class _Reader(HuggingFaceStorageReader):
    """Reads a plan, opening a file anew for each block of rows: what is read stays in memory until it is
    closed."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's part of the plan."""
        with counting("loading rows", sum(item.lengths[0] for item in plan.items)) as add:
            for item in plan.items:
                file = self.storage_data[item.storage_index].relative_path
                target = planner.resolve_tensor(item).detach()
                (row, column), columns = item.storage_offsets, item.lengths[1]
                for part in torch.split(target, FILL_ROWS):
                    with safe_open(file, framework="pt") as opened:
                        saved = opened.get_slice(item.storage_index.fqn)
                        part.copy_(saved[row : row + len(part), column : column + columns])
                    row += len(part)
                    add(len(part))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
