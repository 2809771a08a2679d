"""Sharded tables to files and back by ``torch.distributed.checkpoint``: every rank writes its own shards, and
any number of ranks, under any plan, reads what it needs of them.

The files are safetensors: nothing is unpickled from disk.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from recpipe.embedding.seams import LocalShard
from recpipe.embedding.shard import ShardedCollection
from recpipe.table_files import state_name, weight_name

Saved = dict[str, torch.Tensor | ShardedTensor]


def save_shards(collection: ShardedCollection, directory: Path) -> None:
    """Write this rank's shards to ``directory``; all ranks do so together."""
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    save(_Tensors(collection).saved, storage_writer=writer, process_group=collection.group)


def load_shards(collection: ShardedCollection, directory: Path) -> None:
    """Fill this rank's shards from what ``save_shards`` wrote on any ranks; all ranks do so together."""
    tensors = _Tensors(collection)
    reader = HuggingFaceStorageReader(str(directory))
    load(tensors.saved, storage_reader=reader, process_group=collection.group)
    tensors.keep_states()


class _Tensors:
    """The collection's memory as tensors with a place in their tables.

    Row-wise Adagrad's one value of a row is repeated over the columns of a shard that has not all of them:
    shards of other columns have other values, and a plan with other columns takes their mean.
    """

    def __init__(self, collection: ShardedCollection) -> None:
        self.collection = collection
        self.saved: Saved = {}
        self._repeated: list[tuple[torch.Tensor, torch.Tensor]] = []
        state_width = collection.tables.layout.width - collection.tables.dim
        for name, table in collection.shards.tables.items():
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
        wide = shard.state.expand(-1, shard.weights.shape[1]).contiguous()
        self._repeated.append((shard.state, wide))
        return wide

    def _sharded(
        self, shards: list[LocalShard], values: list[torch.Tensor], rows: int, columns: int
    ) -> ShardedTensor:
        collection = self.collection
        placement = f"rank:{collection.rank}/{collection.sharding.device}"
        parts = [
            Shard(value, ShardMetadata([s.row, s.column], list(value.shape), placement))
            for s, value in zip(shards, values, strict=True)
        ]
        return init_from_local_shards(parts, rows, columns, process_group=collection.group)

    def keep_states(self) -> None:
        """Take repeated states back after loading: where columns differ, their mean."""
        for state, wide in self._repeated:
            equal = (wide == wide[:, :1]).all(dim=1, keepdim=True)
            state.copy_(torch.where(equal, wide[:, :1], wide.mean(dim=1, keepdim=True)))
