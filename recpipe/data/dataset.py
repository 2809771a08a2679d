"""The interface of a data set: a schema, its splits, and batches from any position."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Literal, Self, TypeVar

import numpy as np
import torch

from recpipe.data.columns import Int64
from recpipe.data.preparation import Preparation
from recpipe.data.row_words import RowWords
from recpipe.data.schema import Schema
from recpipe.data.select import join, select
from recpipe.data.shuffle import Shuffled
from recpipe.data.split import Parts
from recpipe.distributed.ranks import part_of
from recpipe.errors import DataError, Interruption, UserError
from recpipe.plugin.batch import Batch, BatchShare, total_weight

SplitName = Literal["train", "eval", "test"]
ENDLESS = 2**50
"""Stands for the number of samples of a stream."""


class WaitingStopped(Interruption):
    """Raised in place of the next batch of a stream that was interrupted while it waited for records."""


class Dataset(ABC):
    """Samples in time order; ``eval`` is the later ``data.eval_fraction`` of them.

    Those of ``eval`` judge a model while it trains, and those of ``test``, where there are ``splits`` of that
    name, once it is finished.

    ``fingerprint`` identifies content and preparation (equal fingerprints, equal batches);
    ``rejected_rows`` counts input rows that ``data.on_bad_row=skip`` left out.

    Threads: ``batches`` is called in the training thread. Its iterator of training batches is drawn from in
    the loader's thread, or with ``data.read_ahead`` in a thread of its own; under sharded tables the training
    thread draws an epoch's first batch. Iterators of held-out batches, and of batches that recpipe or a
    plugin looks at before training, are drawn from in the training thread. One iterator serves one thread at
    a time, but several may be in use at once: guard what they share.
    """

    schema: Schema | None
    """The columns; None if they are not known, as for batches of a user's own type."""
    fingerprint: str
    rejected_rows: int = 0
    missing: Mapping[str, int] = MappingProxyType({})
    """How many samples have no value of each feature, where that is known and there are some."""
    unseen: Mapping[str, int] = MappingProxyType({})
    """How many ids of each feature its vocabulary lacks, where it has one and there are some."""
    dropped_samples: int = 0
    """How many training samples ``data.last_batch=drop`` leaves out of every epoch."""
    gives_parts: bool = True
    """Whether ``batches`` can read just a ``part``; otherwise it ignores ``part`` and gives whole batches."""
    splits: tuple[SplitName, ...] = ("train", "eval")
    """What ``size`` and ``batches`` may be asked for."""
    rereads: bool = True
    """Whether reading the training samples again gives the same samples and draws no random numbers."""
    preparation: Preparation | None = None
    """How values of files became what batches have; None: not known."""
    read_ahead: int = 0
    """How many training batches a separate thread reads in advance (``data.read_ahead``)."""
    endless: bool = False
    """Whether it is a stream: it has ``ENDLESS`` training samples, which may end before, and a run resumes by
    its position instead of the number of its batches."""
    last_batch: int | None = None
    """Of a stream that has ended: how many batches it had in the run; set before the last one is given."""
    interrupted: bool = False
    """Whether the latest iterator of training batches is not to wait for records any more."""
    window: int = 0
    """Samples of each window of progressive validation; 0: there is none."""
    words: RowWords | None = None
    """What rows of tables are called in the input's files; None: there are none to look into."""

    def known_schema(self) -> Schema:
        """``schema`` for callers that need one; ``UserError`` if it is not known."""
        if self.schema is None:
            raise UserError(
                "the data does not say its columns and the rows of their tables, which recpipe's own models "
                "are made by: hand over a recpipe.kit.GivenBatches(batches, schema=...), a path, or "
                "batches together with a model of your own"
            )
        return self.schema

    @abstractmethod
    def size(self, split: SplitName) -> int:
        """Number of samples in ``split``."""

    @abstractmethod
    def batches(
        self, split: SplitName, batch_size: int, first: int = 0, part: tuple[int, int] | None = None
    ) -> Iterator[Batch]:
        """Batches ``first``, ``first + 1``, ... of ``split``; the last one may be short, none is lost.

        ``part`` (index, count): yields a ``BatchShare`` of each batch, the samples that trainer ``index`` of
        ``count`` trains (``part_of``). They have the same bits as in the whole batch, and there are as many
        shares as batches. Starting at ``first`` must cost no more than starting at 0, so that a resumed run
        does not read again.
        """

    def position_after(self, batches: int) -> Mapping[str, int | str] | None:
        """Where a stream stands after the run's first ``batches`` batches, the latest ones that were trained,
        in plain values; None for data that are no stream."""
        return None

    def counts_after(self, batches: int) -> dict[str, torch.Tensor]:
        """What a stream has counted in the batches of which ``position_after`` says the end; {}: nothing."""
        return {}

    def resume_at(
        self,
        batches: int,
        position: Mapping[str, int | str],
        counts: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Go on with a stream at ``position``, where that many batches of the run ended, whose ``counts`` are
        those of ``counts_after``."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """Let the training batches that are being read end by ``WaitingStopped`` where they would wait for
        records of a stream; from any thread, also in a signal's handler."""
        self.interrupted = True

    def limit(self, split: SplitName, batches: int | float, batch_size: int) -> None:
        """Let ``split`` end after its first ``batches`` of ``batch_size`` samples, a whole number or a share
        of them. ``DataError`` if it has less than a batch then, or cannot end early, as a stream."""
        raise DataError(
            f"trainer.limit_*_batches: {type(self).__name__} cannot end early; set trainer.max_steps, or "
            "leave the limit out"
        )

    def of_epoch(self, number: int) -> Dataset:
        """The same data, whose training batches are those of epoch ``number``, from 0; those of the first one
        are the data's own. Here all epochs are alike."""
        return self

    def num_batches(self, split: SplitName, batch_size: int) -> int:
        """How many batches of ``batch_size`` the split holds, a short last one included."""
        return -(-self.size(split) // batch_size)

    def ids_per_bag(self, batch_size: int) -> float:
        """Mean number of ids per sample and feature (pooling factor) in the first training batch."""
        sparse = next(self.batches("train", batch_size)).sparse
        return float(sparse.values().numel() / (sparse.stride() * len(sparse.keys())))


def first_batches(dataset: Dataset, split: SplitName, batches: int | float, batch_size: int) -> int:
    """How many whole or short batches ``Dataset.limit`` leaves; ``DataError`` if there are none."""
    there = dataset.num_batches(split, batch_size)
    left = min(batches, there) if isinstance(batches, int) else int(batches * there)
    if there and not left:
        raise DataError(
            f"{batches} of the {there:,} batches of {split} are none: raise the trainer.limit_*_batches of it"
        )
    return left


class NumberedDataset(Dataset):
    """A data set whose samples are made by number: 0 to N - 1 in time order, training samples first."""

    schema: Schema
    splits = ("train", "eval", "test")

    def __init__(self, samples: int, eval_fraction: float) -> None:
        self.samples = samples
        self._part(Parts(samples, 0, 0).held_out(eval_fraction, 0.0))
        self._shuffle: tuple[int, int | None] | None = None
        self._epoch = 0
        self._epochs_differ = False

    @property
    def parts(self) -> Parts:
        """How many samples each part has."""
        return Parts(self.train_samples, self.size("eval"), self.size("test"))

    def _part(self, parts: Parts) -> None:
        """Let the samples be of these ``parts``, in this order."""
        self.train_samples = parts.train
        self._held_out: dict[SplitName, tuple[int, int]] = {
            "eval": (parts.train, parts.train + parts.valid),
            "test": (parts.train + parts.valid, sum(parts)),
        }

    def hold_out(self, eval_fraction: float, test_fraction: float) -> None:
        """Let the last ``test_fraction`` of all samples be for testing, and the ``eval_fraction`` before it
        for validation; ``DataError`` if none is left for training."""
        self._part(Parts(self.samples, 0, 0).held_out(eval_fraction, test_fraction))
        self._changed(f"test {test_fraction!r}")

    def training_on(self, more: int) -> Self:
        """The same samples, where the first ``more`` of those held out for validation are trained as well.
        ``DataError`` if there are not so many."""
        other, parts = copy.copy(self), self.parts
        if more > parts.valid:
            raise DataError(
                f"{more:,} of the samples held out for validation are to be trained as well, and there are "
                f"{parts.valid:,}: leave trainer.limit_val_batches out, or hold out more"
            )
        other._part(Parts(parts.train + more, parts.valid - more, parts.test))
        other._changed(f"training on {more}")
        return other

    def limit(self, split: SplitName, batches: int | float, batch_size: int) -> None:
        """See ``Dataset``; with ``shuffle``, the same samples are taken in each epoch."""
        samples = min(self.size(split), first_batches(self, split, batches, batch_size) * batch_size)
        if split == "train":
            self.train_samples = samples
        else:
            start, _ = self._held_out[split]
            self._held_out[split] = start, start + samples
        self._changed(f"{samples} samples of {split}")

    def shuffle(self, seed: int, within: int | None = None) -> None:
        """Train in the order of ``Shuffled``, another one in each epoch."""
        self._shuffle, self._epochs_differ = (seed, within), True
        self._changed(f"shuffled {seed} {within}")

    def _changed(self, how: str) -> None:
        self.fingerprint = hashlib.blake2b(f"{self.fingerprint} {how}".encode(), digest_size=16).hexdigest()

    def of_epoch(self, number: int) -> Self:
        """The same data as epoch ``number`` trains them; all that is read is shared."""
        if not self._epochs_differ or number == self._epoch:
            return self
        other = copy.copy(self)
        other._epoch = number
        return other

    @abstractmethod
    def samples_between(self, low: int, high: int) -> Batch:
        """Samples ``low`` to ``high`` (excluded), numbered over all splits; none if the two are equal.

        Called in the thread that draws the batch (see ``Dataset``), for several iterators at the same time.
        """

    def samples_at(self, numbers: Int64) -> Batch:
        """The samples with these ``numbers`` int64 [n], all different, in this order. Here they are made by
        ``samples_between``, neighbours at once."""
        if not len(numbers):
            return self.samples_between(0, 0)
        ordered = np.sort(numbers)
        runs = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
        made = join([self.samples_between(int(run[0]), int(run[-1]) + 1) for run in runs])
        return select(made, np.searchsorted(ordered, numbers))

    def size(self, split: SplitName) -> int:
        """Number of samples in ``split``."""
        low, high = (0, self.train_samples) if split == "train" else self._held_out[split]
        return high - low

    def batches(
        self, split: SplitName, batch_size: int, first: int = 0, part: tuple[int, int] | None = None
    ) -> Iterator[Batch]:
        """Batches from ``first`` on; with ``part``, the samples of other parts are not read."""
        start, order = 0 if split == "train" else self._held_out[split][0], self._order(split)
        end = start + self.size(split)
        for low in range(start + first * batch_size, end, batch_size):
            high = min(low + batch_size, end)
            rows = range(low, high) if order is None else order.between(low, high)
            if part is None:
                yield self._read(rows)
                continue
            share = self._read(rows[part_of(0, high - low, part)])
            weight: tuple[float, ...] = ()
            if share.weights is not None:
                weight = self.weight_between(low, high) if isinstance(rows, range) else self.weight_at(rows)
            yield BatchShare.of(share, high - low, weight)

    def _order(self, split: SplitName) -> Shuffled | None:
        """In which order the samples of ``split`` are; None: in their own."""
        if self._shuffle is None or split != "train":
            return None
        seed, within = self._shuffle
        return Shuffled(self.train_samples, seed, self._epoch, within)

    def _read(self, rows: range | Int64) -> Batch:
        if isinstance(rows, range):
            return self.samples_between(rows.start, rows.stop)
        return self.samples_at(rows)

    def weight_between(self, low: int, high: int) -> tuple[float, ...]:
        """The ``total_weight`` of the batch of samples ``low`` to ``high`` (excluded)."""
        return total_weight(self.samples_between(low, high).weights)

    def weight_at(self, numbers: Int64) -> tuple[float, ...]:
        """The ``total_weight`` of the batch of samples with these ``numbers`` int64 [n], all different."""
        return total_weight(self.samples_at(numbers).weights)

    def drop_short_batch(self, batch_size: int) -> None:
        """Leave a short last batch out of every training epoch; the held-out part stays whole.

        ``DataError`` if no batch would be left.
        """
        self.dropped_samples = self.train_samples % batch_size
        self.train_samples -= self.dropped_samples
        if not self.train_samples:
            raise DataError(
                f"data.last_batch=drop leaves no batch of data.batch_size={batch_size}: there are "
                f"{self.dropped_samples} training samples. Lower data.batch_size or pass data.last_batch=keep"
            )
        if self.dropped_samples:
            self._changed(str(self.train_samples))


T = TypeVar("T")


def chosen_batches(batches: Callable[[int], Iterable[T]], total: int, count: int, seed: int) -> Iterator[T]:
    """``count`` of ``total`` batches, chosen at random without replacement, in the data's order. Adjacent
    ones are read together.

    ``batches(n)`` reads from batch n on. ``count`` is at most ``total``; 0: there are none.
    """
    chosen = np.sort(np.random.default_rng(seed).choice(total, count, replace=False))
    for run in np.split(chosen, np.flatnonzero(np.diff(chosen) > 1) + 1):
        if len(run):
            yield from islice(batches(int(run[0])), len(run))
