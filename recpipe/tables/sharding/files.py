"""Sharded tables to files and back in the format of ``torch.distributed.checkpoint``: every rank writes its
own shards, and any number of ranks, under any plan, reads what it needs of them.

The files are safetensors: nothing is unpickled from disk. Rows pass through memory in blocks, where the
library's own reader and writer would hold one and two further copies of a rank's tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from recpipe.common.tensor_files import TensorFiles
from recpipe.common.tensor_writer import Streamed, write_tensors
from recpipe.seams import LocalShard as MemoryShard
from recpipe.seams import Shard, ShardedTensor, ShardMetadata, init_from_local_shards
from recpipe.tables.saved_regions import region_values
from recpipe.tables.sharding.collection import LocalShard, ShardedCollection
from recpipe.tables.specs import FILL_ROWS, state_name, weight_name

Saved = dict[str, torch.Tensor | ShardedTensor]


def save_shards(collection: ShardedCollection, directory: Path) -> None:
    """Write this rank's shards to ``directory``, in the library's format and under its names.

    A rank with several shards of a table writes several files, since a file has a tensor's name once. Each
    group of tables has files of its own. Of a table that every rank has, rank 0 writes all.
    """
    files: list[dict[str, tuple[tuple[int, int], Streamed]]] = []
    for name, offsets, tensor in _tensors(collection):
        file = next((f for f in files if name not in f), None)
        if file is None:
            files.append(file := {})
        file[name] = offsets, tensor
    prefix = f"group-{collection.number}-" if collection.number else ""
    for number, content in enumerate(files, 1):
        part = f"shard-{collection.whole.rank + 1:05d}-model-{number:05d}-of-{len(files):05d}"
        places = {name: {"saved_offsets": offsets} for name, (offsets, _) in content.items()}
        write_tensors(
            directory / f"{prefix}{part}.safetensors",
            {name: tensor for name, (_, tensor) in content.items()},
            {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"},
        )


def _tensors(collection: ShardedCollection) -> Iterator[tuple[str, tuple[int, int], Streamed]]:
    """Weights and states of this rank's shards: name, place in their table, shape, rows in blocks.

    Row-wise Adagrad's one value of a row is repeated over the columns of a shard that has not all of them:
    shards of other columns have other values, and a plan with other columns takes their mean.
    """
    state_width = collection.tables.layout.width - collection.tables.dim
    for name, table in collection.shards.items():
        shards = [s for s in collection.local(name) if s.shape[0]]
        if table.replicated and collection.whole.rank:
            continue
        narrow = any(s.columns < table.dim for s in table.shards)
        for shard in shards:
            rows, columns = shard.shape
            offsets, width = (shard.row, shard.column), columns if narrow else state_width
            yield weight_name(name), offsets, ((rows, columns), _blocks(shard, 0, columns))
            if state_width:
                yield state_name(name), offsets, ((rows, width), _blocks(shard, 1, width))


def _blocks(shard: LocalShard, part: int, columns: int) -> Iterator[NDArray[np.float32]]:
    """Weights (``part`` 0) or state (1) of so many columns."""
    rows = shard.shape[0]
    for low in range(0, rows, FILL_ROWS):
        values = shard.read(low, min(low + FILL_ROWS, rows))[part]
        yield np.broadcast_to(values, (len(values), columns))


def load_shards(collection: ShardedCollection, directory: Path) -> None:
    """Fill this rank's shards from what ``save_shards`` wrote on any ranks; all ranks do so together."""
    if collection.in_tiers:
        files, rank = TensorFiles.sharded(directory), collection.whole.rank
        width = collection.tables.layout.width - collection.tables.dim
        for region in collection.regions():
            if collection.pieces(region, rank):
                collection.write(region, region_values(files, region, width))
        return
    tensors = _Tensors(collection)
    reader = _Reader(str(directory))
    load(tensors.saved, storage_reader=reader, process_group=collection.whole.group)
    tensors.keep_states()


class _Reader(HuggingFaceStorageReader):
    """Opens a file for a block of rows at a time: what is read stays in memory until it is closed."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's part of the plan."""
        for item in plan.items:
            file = self.storage_data[item.storage_index].relative_path
            target = planner.resolve_tensor(item).detach()
            (row, column), columns = item.storage_offsets, item.lengths[1]
            for part in torch.split(target, FILL_ROWS):
                with safe_open(file, framework="pt") as opened:
                    saved = opened.get_slice(item.storage_index.fqn)
                    part.copy_(saved[row : row + len(part), column : column + columns])
                row += len(part)
            planner.commit_tensor(item, target)
        return _done(None)


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class _Tensors:
    """The collection's memory as tensors with a place in their tables, to be written to."""

    def __init__(self, collection: ShardedCollection) -> None:
        self.collection = collection
        self.saved: Saved = {}
        self._repeated: list[tuple[torch.Tensor, torch.Tensor]] = []
        state_width = collection.tables.layout.width - collection.tables.dim
        for name, table in collection.shards.items():
            here = collection.local(name)
            shards = [s for s in here if isinstance(s, MemoryShard) and len(s.weights)]
            narrow = any(s.columns < table.dim for s in table.shards)
            states = [self._state(s, narrow and state_width == 1) for s in shards]
            if table.replicated:
                self.saved[weight_name(name)] = shards[0].weights
                if state_width:
                    self.saved[state_name(name)] = states[0]
                continue
            weights = [s.weights for s in shards]
            self.saved[weight_name(name)] = self._sharded(shards, weights, table.rows, table.dim)
            if state_width:
                width = table.dim if narrow else state_width
                self.saved[state_name(name)] = self._sharded(shards, states, table.rows, width)

    def _state(self, shard: MemoryShard, repeat: bool) -> torch.Tensor:
        if not repeat:
            return shard.state
        wide = shard.state.expand(-1, shard.weights.shape[1]).contiguous()
        self._repeated.append((shard.state, wide))
        return wide

    def _sharded(
        self, shards: list[MemoryShard], values: list[torch.Tensor], rows: int, columns: int
    ) -> ShardedTensor:
        whole = self.collection.whole
        placement = f"rank:{whole.rank}/{whole.sharding.device}"
        parts = [
            Shard(value, ShardMetadata([s.row, s.column], list(value.shape), placement))
            for s, value in zip(shards, values, strict=True)
        ]
        return init_from_local_shards(parts, rows, columns, process_group=whole.group)

    def keep_states(self) -> None:
        """Take repeated states back after loading: where columns differ, their mean."""
        for state, wide in self._repeated:
            equal = (wide == wide[:, :1]).all(dim=1, keepdim=True)
            state.copy_(torch.where(equal, wide[:, :1], wide.mean(dim=1, keepdim=True)))
