"""A small form for batches that wait to be trained: half of the memory and less."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.kit import leaves, tensors_in
from recpipe.plugin import Batch

LARGEST = np.iinfo(np.int32).max


class Waiting:
    """A batch that waits. Ids of recpipe's own ``Batch`` are kept in 32 bits, and lengths that are all 1 are
    not kept; a batch of another type is kept as it is. ``small`` False: kept as it is in any case."""

    def __init__(self, batch: Batch, small: bool = True) -> None:
        self._restore: Callable[[], Batch]
        packed = _packed(batch) if small and type(batch) is Batch else None
        if packed is None:
            self._restore, self.nbytes = lambda: batch, size_of(batch)
        else:
            self._restore, self.nbytes = packed

    def batch(self) -> Batch:
        """The batch, with the values and types that it had."""
        return self._restore()


def _packed(batch: Batch) -> tuple[Callable[[], Batch], int] | None:
    """What makes ``batch`` again, and the bytes that it holds; None if its ids do not allow it."""
    sparse = batch.sparse
    ids, lengths = sparse.values(), sparse.lengths()
    plain = sparse.weights_or_none() is None and not sparse.variable_stride_per_key()
    if not plain or ids.dtype != torch.int64:
        return None
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= LARGEST:
        return None
    keys, dense, labels, stride = sparse.keys(), batch.dense, batch.labels, sparse.stride()
    small, kind, bags = ids.to(torch.int32), lengths.dtype, lengths.numel()
    kept = None if bool((lengths == 1).all()) else lengths

    def restore() -> Batch:
        again = torch.ones(bags, dtype=kind) if kept is None else kept
        jagged = KeyedJaggedTensor(keys, small.to(torch.int64), lengths=again, stride=stride)
        return Batch(dense, jagged, labels)

    held = [small, dense, labels, *([] if kept is None else [kept])]
    return restore, sum(part.numel() * part.element_size() for part in held)


def size_of(batch: Batch) -> int:
    """Bytes of a batch's tensors."""
    parts = (part for leaf in leaves(batch) for part in tensors_in(leaf))
    return sum(part.numel() * part.element_size() for part in parts)
