"""What the oracles of one and of several trainers share: a thread that reads batches ahead of training, and
the form in which these wait."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe.kit import leaves, tensors_in
from recpipe.plugin import Batch

LARGEST = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Waiting:
    """A batch that waits to be trained."""

    batch: Callable[[], Batch]
    """Makes the batch, with the values and types that it had."""
    nbytes: int


def waiting(batch: Batch, small: bool = True) -> Waiting:
    """``batch`` as it waits. If ``small``, half of the memory and less: ids of recpipe's own ``Batch`` are
    kept in 32 bits, if they allow it, and lengths that are all 1 are not kept."""
    if not small or type(batch) is not Batch:
        return Waiting(lambda: batch, size_of(batch))
    sparse = batch.sparse
    ids, lengths = sparse.values(), sparse.lengths()
    plain = sparse.weights_or_none() is None and not sparse.variable_stride_per_key()
    fits = not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) <= LARGEST
    if not plain or ids.dtype != torch.int64 or not fits:
        return Waiting(lambda: batch, size_of(batch))
    keys, dense, labels, stride = sparse.keys(), batch.dense, batch.labels, sparse.stride()
    weights, log_q = batch.weights, batch.log_q
    narrow, kind, bags = ids.to(torch.int32), lengths.dtype, lengths.numel()
    kept = None if bool((lengths == 1).all()) else lengths

    def restore() -> Batch:
        again = torch.ones(bags, dtype=kind) if kept is None else kept
        jagged = KeyedJaggedTensor(keys, narrow.to(torch.int64), lengths=again, stride=stride)
        return Batch(dense, jagged, labels, weights=weights, log_q=log_q)

    held = [narrow, dense, labels, *(part for part in (kept, weights, log_q) if part is not None)]
    return Waiting(restore, sum(part.nbytes for part in held))


def size_of(batch: Batch) -> int:
    """Bytes of a batch's tensors."""
    return sum(part.nbytes for leaf in leaves(batch) for part in tensors_in(leaf))


class ReadAhead(ABC):
    """One stream of batches, which ``batches`` yields to training and ``_read`` reads in a thread of its own.

    Reading starts when the first batch is asked for. ``_changed`` guards everything that both threads use.
    """

    def __init__(self, source: Iterator[Batch]) -> None:
        self.peak_bytes = 0
        """The most bytes that have waited here at the same time."""
        self._source = source
        self._changed = threading.Condition()
        self._batches: deque[Waiting] = deque()
        """Batches that training may take."""
        self._bytes = 0
        self._done = self._stopped = False
        self._fault: BaseException | None = None

    def batches(self) -> Iterator[Batch]:
        """The batches of the source, in order; raises the errors of reading and planning them."""
        thread = threading.Thread(target=self._run, name="recpipe-oracle", daemon=True)
        thread.start()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._batches or self._done)
                    if not self._batches:
                        self._check()
                        return
                    coming = self._batches.popleft()
                    self._bytes -= coming.nbytes
                    self._changed.notify_all()
                yield coming.batch()
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            if thread is not threading.current_thread():  # which may collect this generator as garbage
                thread.join()

    @abstractmethod
    def _read(self) -> None:
        """Read the source to its end, or until ``_stopped``; fill ``_batches``."""

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as fault:
            self._fault = fault
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _waits(self, batch: Batch, small: bool = True) -> Waiting:
        """``batch`` in the form in which it waits, ``small`` or as it is."""
        made = waiting(batch, small)
        with self._changed:
            self._take(made.nbytes)
        return made

    def _take(self, size: int) -> None:
        """Note that ``size`` more bytes wait."""
        self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _check(self) -> None:
        """Raise the thread's error, if it had one."""
        if self._fault is not None:
            raise self._fault
