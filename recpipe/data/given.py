"""A data set of ready-made batches of any type from a caller in Python, such as a list or a DataLoader."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recpipe.data.dataset import Dataset, SplitName, first_batches
from recpipe.data.parts import batch_size as samples_in
from recpipe.data.parts import leaves, on_device, tensors_in
from recpipe.data.schema import Schema
from recpipe.errors import UserError
from recpipe.plugin.batch import Batch

Batches = Iterable[Any] | Callable[[int], Iterator[Any]]
"""Batches that can be read repeatedly: an iterable, or a function of the epoch's number (from 0)."""


class GivenBatches(Dataset):
    """Ready-made batches, each trained whole: ``trained`` in every epoch, ``held_out`` for evaluation.

    An epoch has ``len(trained)`` batches. If ``trained`` has no length, or is a function of the epoch, an
    epoch of the run has ``steps`` batches, for which ``trained`` is read as often as needed. ``held_out``
    must have a length.

    - Starting at batch n, as a resumed run does, reads n batches and skips them.
    - ``fingerprint`` is a hash of the first batch's tensors and of the number of batches: for a DataLoader
      that shuffles, it is the same if torch's random numbers are. A run resumes only with the same
      fingerprint.
    - ``size`` counts the samples of a list. Otherwise it is the number of batches times the size of the
      first, which is a little too much if the last batch is short.

    Every rank reads whole batches.

    ``schema``: the columns if batches are ``recpipe.plugin.Batch``; recpipe's own models need it. For batches
    of a user's own type it is None, and the tables check the ids.
    """

    gives_parts = False
    device: torch.device | None = None
    """Where batches are moved to when they are read; None: nowhere."""

    def __init__(
        self,
        trained: Batches,
        held_out: Batches = (),
        schema: Schema | None = None,
        steps: int | None = None,
    ) -> None:
        self.schema = schema
        self._sources = {
            "train": _require_batches(trained, "the training data"),
            "eval": _require_batches(held_out, "the held-out data"),
        }
        held = _length(held_out)
        if held is None:
            raise UserError("the held-out data has no length: hand over a list or a DataLoader of batches")
        length = _length(trained)
        self._follows_on = length is None
        self.rereads = isinstance(trained, Sequence)
        if length is None:
            length = steps
        if length is None:
            raise UserError(
                "the number of training batches is not known: hand over something with a length, or set "
                "trainer.max_steps"
            )
        self._lengths = {"train": length, "eval": held}
        first = next(self._read("train"), None)
        if first is None:
            raise UserError("the training data has no batch")
        self.batch_size = samples_in(first)
        """Samples of the first batch."""
        self._ids_per_bag = _ids_per_bag(first)
        self.fingerprint = _fingerprint(first, length)

    def size(self, split: SplitName) -> int:
        """Number of samples in ``split``, or a little more (see above)."""
        source = self._sources[split]
        if isinstance(source, Sequence):
            return sum(map(samples_in, source[: self._lengths[split]]))
        return self._lengths[split] * self.batch_size

    def num_batches(self, split: SplitName, batch_size: int) -> int:
        """How many batches there are; ``batch_size`` has no effect."""
        return self._lengths[split]

    def limit(self, split: SplitName, batches: int | float, batch_size: int) -> None:
        """See ``Dataset``; ``batch_size`` has no effect."""
        self._lengths[split] = first_batches(self, split, batches, batch_size)

    def ids_per_bag(self, batch_size: int) -> float:
        """Mean number of ids per bag in the first training batch; 0 if it has no bags."""
        return self._ids_per_bag

    def batches(
        self, split: SplitName, batch_size: int, first: int = 0, part: tuple[int, int] | None = None
    ) -> Iterator[Any]:
        """Batches ``first``, ``first + 1``, ... of ``split``, whole; the ones before are read and skipped."""
        length, given = self._lengths[split], first
        for batch in islice(self._read(split), first, length):
            given += 1
            yield batch
        if given < length:
            raise UserError(
                f"the data has {length:,} batches by its length and gave {given:,}: correct its length"
            )

    def _read(self, split: SplitName) -> Iterator[Any]:
        source, endless = self._sources[split], split == "train" and self._follows_on
        for epoch in count() if endless else range(1):
            some = False
            for batch in iter(source) if isinstance(source, Iterable) else source(epoch):
                some = True
                yield self._checked(batch)
            if not some:
                return

    def _checked(self, batch: Any) -> Any:
        """Return ``batch`` on ``device``; ``UserError`` if it does not fit the schema."""
        if self.device is not None:
            batch = on_device(batch, self.device)
        if self.schema is None:
            return batch
        if not isinstance(batch, Batch):
            raise UserError(
                f"a batch is a {type(batch).__name__}, and a schema describes recpipe.plugin.Batch alone: "
                "make it one, or leave the schema out"
            )
        names = [feature.name for feature in self.schema.sparse]
        if sorted(batch.sparse.keys()) != sorted(names) or batch.dense.shape[1] != len(self.schema.dense):
            raise UserError(
                f"a batch has {batch.dense.shape[1]} dense features and ids of "
                f"{', '.join(batch.sparse.keys())}, and the schema {len(self.schema.dense)} and "
                f"{', '.join(names)}: they must be the same"
            )
        return batch


def _require_batches(source: Batches, what: str) -> Batches:
    if isinstance(source, Iterator):
        raise UserError(
            f"{what} is a {type(source).__name__}, which can be read once: hand over a list, a DataLoader, "
            "or a function that gives the batches of an epoch (epoch -> iterator)"
        )
    if not isinstance(source, Iterable) and not callable(source):
        raise UserError(
            f"{what} is a {type(source).__name__}: hand over a path, a recpipe Dataset, or batches: a list, "
            "a DataLoader, a function epoch -> iterator"
        )
    return source


def _length(source: Batches) -> int | None:
    try:
        return len(source)  # type: ignore[arg-type]
    except TypeError:  # a DataLoader over an iterable has a __len__ that raises
        return None


def _ids_per_bag(batch: Any) -> float:
    jagged = [part for part in leaves(batch) if isinstance(part, JaggedTensor | KeyedJaggedTensor)]
    bags = sum(part.lengths().numel() for part in jagged)
    return sum(part.values().shape[0] for part in jagged) / bags if bags else 0.0


def _fingerprint(first: Any, length: int) -> str:
    digest = hashlib.blake2b(f"{length} {type(first).__name__}".encode(), digest_size=16)
    for part in leaves(first):
        for tensor in tensors_in(part):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
