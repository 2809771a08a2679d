"""Saves and loads sharded tables in the format of ``torch.distributed.checkpoint``. Every rank writes its own
shards; any number of ranks, under any plan, can read them.

The files are safetensors, so nothing is unpickled. Rows pass through memory in blocks; the library's own
writer and reader would hold up to two further copies of a rank's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from recpipe.common.files import sync
from recpipe.common.meter import counting
from recpipe.common.tensors import TensorFiles
from recpipe.plugin.tables import FILL_ROWS, Values, rows_in, state_name, weight_name
from recpipe.private_api import LocalShard as MemoryShard
from recpipe.private_api import Shard, ShardedTensor, ShardMetadata, init_from_local_shards
from recpipe.tables.capabilities import SavedByRanks
from recpipe.tables.saved_parts import Part, save_parts, saved_rows
from recpipe.tables.sharding.collection import ShardedCollection
from recpipe.tables.sharding.env import ShardEnv
from recpipe.tables.sharding.tiered import LocalShard, ShardTiers

Saved = dict[str, torch.Tensor | ShardedTensor]


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
        if saved is not None and fits_memory(self, TensorFiles.sharded(saved)):
            load_into_memory(self, saved)
            return
        dim, regions = self.tables.dim, [r for r in self.regions_here() if r.table not in self.in_tiers]
        with counting("filling the tables' rows", rows_in(regions)) as add:
            for region in regions:
                records = self.tables.fill(region.table, region.start, region.stop)
                self.write(region, (records[:, :dim], records[:, dim:]))
                add(region.stop - region.start)

    def save_tables(self, directory: Path) -> None:
        """Write this rank's part into ``directory``, which rank 0 makes; all ranks call it."""
        self.env.channel.barrier()  # for the directory
        save_shards(self, directory)
        self.env.channel.barrier()  # rank 0 writes the metadata after all ranks have written

    def load_tables(self, directory: Path) -> None:
        """Read this rank's part of tables that any number of ranks has saved."""
        load_shards(self, directory)


def save_shards(collection: ShardedCollection, directory: Path) -> None:
    """Write this rank's shards to ``directory``; they are on the disk on return.

    A rank with several shards of a table writes several files, since a tensor's name occurs once in a file.
    Each group of tables has its own files. Rank 0 writes tables that every rank has.
    """
    files: list[list[Part]] = []
    for part in _parts(collection):
        others = (parts for parts in files if all(other.table != part.table for other in parts))
        place = next(others, None)
        if place is None:
            files.append(place := [])
        place.append(part)
    prefix = f"group-{collection.number}-" if collection.number else ""
    rows = sum(part.rows for parts in files for part in parts)
    with counting("writing rows to the checkpoint", rows) as add:
        for number, parts in enumerate(files, 1):
            name = f"shard-{collection.env.rank + 1:05d}-model-{number:05d}-of-{len(files):05d}"
            file = directory / f"{prefix}{name}.safetensors"
            save_parts(file, parts, add)
            sync(file)


def _parts(collection: ShardedCollection) -> Iterator[Part]:
    """This rank's shards.

    Row-wise Adagrad has one value per row. If a shard does not have all columns, the value is repeated over
    its columns: other columns' shards have other values, and a plan with a different cut takes their mean.
    """
    collection.empty_cache(forget=False)
    for name, table in collection.shards.items():
        if table.replicated and collection.env.rank:
            continue
        for shard in collection.local(name):
            rows, columns = shard.shape
            if rows:
                width = min(columns, _state_columns(collection, name))
                yield Part(name, (shard.row, shard.column), rows, columns, width, _blocks(shard))


def _state_columns(collection: ShardedCollection, name: str) -> int:
    """The number of columns in the saved state of the whole table ``name``: one for each weight if rows are
    cut."""
    tables, table = collection.tables, collection.shards[name]
    width = tables.layout.width - tables.dim
    cut = any(shard.columns < table.dim for shard in table.shards)
    return table.dim if width and cut else width


def _blocks(shard: LocalShard) -> Iterator[Values]:
    rows = shard.shape[0]
    return (shard.read(low, min(low + FILL_ROWS, rows)) for low in range(0, rows, FILL_ROWS))


def load_shards(collection: ShardedCollection, directory: Path) -> None:
    """Fill this rank's shards from what any ranks wrote under any plan; all ranks call it together."""
    files, tables = TensorFiles.sharded(directory), collection.tables
    if fits_memory(collection, files):
        load_into_memory(collection, directory)
        return
    width = tables.layout.width - tables.dim
    rows = {name: saved_rows(files, name, width) for name in collection.shards}
    regions = collection.regions_here()
    with counting("loading rows", rows_in(regions)) as add:
        for region in regions:
            collection.write(region, rows[region.table](region.start, region.stop))
            add(region.stop - region.start)


def fits_memory(collection: ShardedCollection, files: TensorFiles) -> bool:
    """Whether all shards are in memory that has the layout of ``files``. Other rows pass through regions."""
    tables = collection.tables
    states = collection.shards if tables.layout.width > tables.dim else ()
    same = all(files.shape(state_name(n))[1] == _state_columns(collection, n) for n in states)
    return not collection.in_tiers and same


def load_into_memory(collection: ShardedCollection, directory: Path) -> None:
    """``load_shards`` where ``fits_memory``: the library reads directly into the shards' memory."""
    collection.empty_cache(forget=True)
    tensors = _Tensors(collection)
    load(tensors.saved, storage_reader=_Reader(str(directory)), process_group=collection.env.group)
    tensors.keep_states()


class _Reader(HuggingFaceStorageReader):
    """Reads a plan, opening a file anew for each block of rows: what is read stays in memory until it is
    closed."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's part of the plan."""
        with counting("loading rows", sum(item.lengths[0] for item in plan.items)) as add:
            self._read(plan, planner, add)
        return _done(None)

    def _read(self, plan: LoadPlan, planner: LoadPlanner, add: Callable[[int], None]) -> None:
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


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class _Tensors:
    """The collection's memory to load into, as tensors with their places in the tables."""

    def __init__(self, collection: ShardedCollection) -> None:
        self.collection = collection
        self.saved: Saved = {}
        self._repeated: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, table in collection.shards.items():
            here = collection.local(name)
            shards = [s for s in here if isinstance(s, MemoryShard) and len(s.weights)]
            width = _state_columns(collection, name)
            states = [self._state(s, min(width, s.weights.shape[1])) for s in shards]
            if table.replicated:
                self.saved[weight_name(name)] = shards[0].weights
                if width:
                    self.saved[state_name(name)] = states[0]
                continue
            weights = [s.weights for s in shards]
            self.saved[weight_name(name)] = self._sharded(shards, weights, table.rows, table.dim)
            if width:
                self.saved[state_name(name)] = self._sharded(shards, states, table.rows, width)

    def _state(self, shard: MemoryShard, columns: int) -> torch.Tensor:
        if shard.state.shape[1] == columns:
            return shard.state
        wide = shard.state.expand(-1, columns).contiguous()
        self._repeated.append((shard.state, wide))
        return wide

    def _sharded(
        self, shards: list[MemoryShard], values: list[torch.Tensor], rows: int, columns: int
    ) -> ShardedTensor:
        env = self.collection.env
        placement = f"rank:{env.rank}/{env.sharding.device}"
        parts = [
            Shard(value, ShardMetadata([s.row, s.column], list(value.shape), placement))
            for s, value in zip(shards, values, strict=True)
        ]
        return init_from_local_shards(parts, rows, columns, process_group=env.group)

    def keep_states(self) -> None:
        """Reduce repeated states to one value per row after loading: the mean if columns differ."""
        for state, wide in self._repeated:
            equal = (wide == wide[:, :1]).all(dim=1, keepdim=True)
            state.copy_(torch.where(equal, wide[:, :1], wide.mean(dim=1, keepdim=True)))
