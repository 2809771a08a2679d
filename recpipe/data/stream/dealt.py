"""A stream for several processes: rank 0 reads it, and leaves each batch to the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from types import MappingProxyType
from typing import Any

import torch

from recpipe.common.saved import typed_as
from recpipe.data.columns import BatchMaker
from recpipe.data.dataset import ENDLESS, Dataset, SplitName, WaitingStopped
from recpipe.data.frequencies import Frequencies
from recpipe.data.preparation import Preparation
from recpipe.data.sent import Sent, arrays_of, columns_of, packed, unpacked
from recpipe.data.stream.chunks import Offset, Position
from recpipe.data.stream.stream import Made, Stream, with_log_q
from recpipe.distributed.launch import ProcessRank
from recpipe.distributed.mail import Mail
from recpipe.distributed.ranks import part_of
from recpipe.errors import UserError
from recpipe.plugin.batch import Batch, BatchShare, total_weight

KEPT = 16
"""Messages that are kept beside those of batches read ahead: ranks train at one pace."""
PATIENCE = 10.0
"""Seconds that a rank that is to stop waits for what rank 0 says of it."""


@dataclass(frozen=True)
class _Known:
    """What rank 0 tells the others of its stream."""

    encoding: dict[str, Any]
    fingerprint: str
    window: int
    drawn: bool
    """Whether batches have ``log_q``."""


@dataclass(frozen=True)
class _Said:
    """What rank 0 says in the place of each batch."""

    last: bool = False
    """Whether the stream ends with it."""
    ended: bool = False
    stopped: bool = False
    fault: tuple[str, ...] = ()


class Dealt(Dataset):
    """Rank 0 cuts the batches, of which every trainer has its part, so that all that depends on when records
    arrive (how partitions take turns, when the stream ends) is the same for all, and positions are those of
    the stream of one process.

    Batches that are looked at before training are of the first records alone, which all ranks have.
    """

    rereads = False
    endless = True

    def __init__(self, opened: Callable[[], Stream]) -> None:
        """``opened``: the stream, which rank 0 opens."""
        self._mail, self._epochs = Mail("stream"), 0
        self.stream: Stream | None = None
        if ProcessRank.current().rank == 0:
            try:
                self.stream = opened()
            except UserError as fault:
                self._mail.leave("known", _packed(_Said(fault=fault.args)))
                raise
            self.stream.stop_asked = lambda: self._mail.has(self._stop)
            self._mail.leave("known", _about(self.stream))
        known = unpacked(self._mail.read("known") or b"")
        _raise_fault(known)
        about = typed_as(_Known, known.head, "the stream")
        self.preparation = Preparation.read(about.encoding)
        assert self.preparation.encoding is not None
        encoding = self.preparation.encoding
        self.schema, self.fingerprint, self.window = encoding.schema, about.fingerprint, about.window
        self._first, self._drawn = columns_of(known.arrays), about.drawn
        self._make = BatchMaker(self.schema, encoding.multi_hot)

    @property
    def rejected_rows(self) -> int:  # type: ignore[override]
        """Those of the stream, on rank 0."""
        return 0 if self.stream is None else self.stream.rejected_rows

    @property
    def missing(self) -> Mapping[str, int]:  # type: ignore[override]
        """Likewise."""
        return {} if self.stream is None else self.stream.missing

    @property
    def unseen(self) -> Mapping[str, int]:  # type: ignore[override]
        """Likewise."""
        return {} if self.stream is None else self.stream.unseen

    def size(self, split: SplitName) -> int:
        """``ENDLESS`` to train; none held out."""
        return ENDLESS if split == "train" else 0

    def batches(
        self, split: SplitName, batch_size: int, first: int = 0, part: tuple[int, int] | None = None
    ) -> Iterator[Batch]:
        """Batches of the first records, for looks; those for training are of ``of_epoch``."""
        low = first * batch_size
        for start in range(low, len(self._first) if split == "train" else 0, batch_size):
            yield self._batch(Made(self._first[start : start + batch_size]), part)

    def of_epoch(self, number: int) -> Dataset:
        """The batches for training, in the order of the calls the same on all ranks."""
        self._epochs += 1
        return _Training(self, f"{self._epochs}")

    def interrupt(self) -> None:
        """As of a stream; all ranks stop at one batch."""
        super().interrupt()
        if self.stream is None:
            self._mail.leave(self._stop)
        else:
            self.stream.interrupt()

    @property
    def _stop(self) -> str:
        """The message by which a rank asks rank 0 to wait for no further records."""
        return f"{self._epochs}/stop"

    def position_after(self, batches: int) -> dict[str, Offset]:
        """Where the first ``batches`` batches end, on rank 0."""
        return {} if self.stream is None else self.stream.position_after(batches)

    def counts_after(self, batches: int) -> dict[str, torch.Tensor]:
        """How frequent ids were then, on rank 0; on others of its form."""
        if self.stream is not None:
            return self.stream.counts_after(batches)
        return Frequencies().state_after(0) if self._drawn else {}

    def resume_at(
        self, batches: int, position: Position, counts: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> None:
        """Let batch ``batches`` begin at ``position``."""
        if self.stream is not None:
            self.stream.resume_at(batches, position, counts)

    def trained(
        self, epoch: str, batch_size: int, first: int, part: tuple[int, int] | None
    ) -> Iterator[Batch]:
        """Batches for training, or their ``part``; the same calls on all ranks."""
        self.last_batch, self.interrupted = None, False
        if self.stream is None:
            made = self._read(epoch, first)
        else:
            made = self._dealt(self.stream, epoch, batch_size, first)
        for number, own in enumerate(made, first + 1):
            if own.last:
                self.last_batch = number
            yield self._batch(own, part)

    def _dealt(self, stream: Stream, epoch: str, batch_size: int, first: int) -> Iterator[Made]:
        """The batches of rank 0's stream, each of which is left to the others, and why there are no more."""
        number, said, stream.read_ahead = first, _Said(stopped=True), self.read_ahead
        try:
            for made in stream.made(batch_size, first):
                self._mail.leave(f"{epoch}/{number}", _left(made))
                if (old := number - KEPT - self.read_ahead) >= first:
                    self._mail.remove(f"{epoch}/{old}")
                number += 1
                yield made
            said = _Said(ended=True)
        except UserError as fault:
            said = _Said(fault=fault.args)
            raise
        finally:
            self._mail.leave(f"{epoch}/{number}", _packed(said))

    def _read(self, epoch: str, first: int) -> Iterator[Made]:
        """The batches that rank 0 leaves. ``WaitingStopped`` where it stopped."""
        for number in count(first):
            content = self._mail.read(f"{epoch}/{number}", self._gives_up())
            if content is None:
                raise WaitingStopped
            sent = unpacked(content)
            _raise_fault(sent)
            said = typed_as(_Said, sent.head, "a batch")
            if said.stopped:
                raise WaitingStopped
            if said.ended:
                return
            log_q = sent.arrays.pop("log_q", None)
            yield Made(columns_of(sent.arrays), log_q, said.last)

    def _gives_up(self) -> Callable[[], bool]:
        asked = None

        def gives_up() -> bool:
            nonlocal asked
            if self.interrupted and asked is None:
                asked = time.monotonic()
            return asked is not None and time.monotonic() - asked > PATIENCE

        return gives_up

    def _batch(self, made: Made, part: tuple[int, int] | None) -> Batch:
        columns, log_q, size = made.columns, made.log_q, len(made.columns)
        if part is None:
            return with_log_q(self._make(columns), log_q)
        own, weight = part_of(0, size, part), tuple[float, ...]()
        if columns.weights is not None:
            weight = total_weight(torch.from_numpy(columns.weights))
        batch = with_log_q(self._make(columns[own]), None if log_q is None else log_q[own])
        return BatchShare.of(batch, size, weight)


class _Training(Dataset):
    """The training batches of ``whole``."""

    def __init__(self, whole: Dealt, epoch: str) -> None:
        self._whole, self._epoch = whole, epoch
        self.schema, self.fingerprint = whole.schema, whole.fingerprint

    def size(self, split: SplitName) -> int:
        """As of the whole."""
        return self._whole.size(split)

    def batches(
        self, split: SplitName, batch_size: int, first: int = 0, part: tuple[int, int] | None = None
    ) -> Iterator[Batch]:
        """Those of the stream."""
        return self._whole.trained(self._epoch, batch_size, first, part)


def _about(stream: Stream) -> bytes:
    """What the others know of a stream, and its first samples."""
    assert stream.preparation is not None
    encoding = stream.preparation.to_dict()
    assert encoding is not None
    known = _Known(encoding, stream.fingerprint, stream.window, stream.draws)
    return packed(Sent(asdict(known), arrays_of(stream.first)))


def _left(made: Made) -> bytes:
    log_q = {} if made.log_q is None else {"log_q": made.log_q}
    return packed(Sent(asdict(_Said(made.last)), arrays_of(made.columns) | log_q))


def _packed(said: _Said) -> bytes:
    return packed(Sent(asdict(said), {}))


def _raise_fault(sent: Sent) -> None:
    """Raise the error that rank 0 has told; the message is printed once."""
    if isinstance(sent.head, dict) and (lines := sent.head.get("fault")):
        raise UserError(*lines)
