"""Sharded tables to files and back by ``torch.distributed.checkpoint``: every rank writes its own shards, and
any number of ranks, under any plan, reads what it needs of them.

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
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from recpipe.common.tensor_writer import write_tensors
from recpipe.seams import LocalShard, Shard, ShardedTensor, ShardMetadata, init_from_local_shards
from recpipe.tables.sharding.collection import ShardedCollection
from recpipe.tables.specs import FILL_ROWS, state_name, to_numpy, weight_name

Saved = dict[str, torch.Tensor | ShardedTensor]


def save_shards(collection: ShardedCollection, directory: Path) -> None:
    """Write this rank's shards to ``directory``; all ranks do so together."""
    writer = _Writer(directory, collection.number)
    group = collection.whole.group
    save(_Tensors(collection, loading=False).saved, storage_writer=writer, process_group=group)


def load_shards(collection: ShardedCollection, directory: Path) -> None:
    """Fill this rank's shards from what ``save_shards`` wrote on any ranks; all ranks do so together."""
    tensors = _Tensors(collection, loading=True)
    reader = _Reader(str(directory))
    load(tensors.saved, storage_reader=reader, process_group=collection.whole.group)
    tensors.keep_states()


class _Writer(HuggingFaceStorageWriter):
    """In the library's format and under its names.

    A rank with several shards of a table writes several files: a file has a tensor's name once, and the
    library's own writer would leave out all shards but one. Each group of tables has files of its own.
    """

    def __init__(self, directory: Path, group: int) -> None:
        super().__init__(str(directory), save_distributed=True)
        self.prefix = f"group-{group}-" if group else ""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the plan."""
        files: list[dict[str, Any]] = []
        for item in plan.items:
            name = item.index.fqn
            file = next((f for f in files if name not in f), None)
            if file is None:
                files.append(file := {})
            file[name] = item
        for number, items in enumerate(files, 1):
            rank = plan.storage_data["shard_index"]
            part = f"shard-{rank:05d}-model-{number:05d}-of-{len(files):05d}"
            path = Path(self.path, f"{self.prefix}{part}.safetensors")
            places = {name: {"saved_offsets": item.tensor_data.chunk.offsets} for name, item in items.items()}
            tensors: dict[str, Any] = {name: planner.resolve_data(item) for name, item in items.items()}
            write_tensors(
                path,
                {name: (tuple(tensor.shape), _blocks(tensor)) for name, tensor in tensors.items()},
                {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"},
            )
        return _done([WriteResult(item.index, 0, None) for item in plan.items])


def _blocks(tensor: torch.Tensor) -> Iterator[NDArray[np.float32]]:
    return (to_numpy(part) for part in torch.split(tensor, FILL_ROWS))


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
    """The collection's memory as tensors with a place in their tables.

    Row-wise Adagrad's one value of a row is repeated over the columns of a shard that has not all of them:
    shards of other columns have other values, and a plan with other columns takes their mean.
    """

    def __init__(self, collection: ShardedCollection, loading: bool) -> None:
        self.collection = collection
        self.loading = loading
        self.saved: Saved = {}
        self._repeated: list[tuple[torch.Tensor, torch.Tensor]] = []
        state_width = collection.tables.layout.width - collection.tables.dim
        for name, table in collection.shards.items():
            shards = [s for s in collection.local(name) if len(s.weights)]
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

    def _state(self, shard: LocalShard, repeat: bool) -> torch.Tensor:
        if not repeat:
            return shard.state
        wide = shard.state.expand(-1, shard.weights.shape[1])
        if self.loading:  # to be written to
            wide = wide.contiguous()
            self._repeated.append((shard.state, wide))
        return wide

    def _sharded(
        self, shards: list[LocalShard], values: list[torch.Tensor], rows: int, columns: int
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
