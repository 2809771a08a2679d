"""The data set of a stream: batches of records as they arrive, with the position after each batch."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from recpipe.data.column_types import alike
from recpipe.data.columns import BatchMaker, Columns, Float32
from recpipe.data.config import StreamConfig
from recpipe.data.dataset import ENDLESS, Dataset, SplitName, WaitingStopped
from recpipe.data.encoding import Encoding, element_of
from recpipe.data.feature import Feature
from recpipe.data.features import Features
from recpipe.data.files import RowChecks
from recpipe.data.frequencies import Frequencies
from recpipe.data.joins import Beside, SideTable
from recpipe.data.learned import bit_at
from recpipe.data.preparation import Preparation
from recpipe.data.settled import require_labels, settled
from recpipe.data.stream.chunks import Buffer, Chunk, Offset, Position, Samples, StreamSource
from recpipe.data.stream.folder import Folder
from recpipe.data.stream.joined import Joined
from recpipe.data.stream.kafka import Kafka
from recpipe.data.stream.nats import Nats
from recpipe.data.stream.redis import Redis
from recpipe.data.values import whole_text
from recpipe.errors import DataError, UserError, shown
from recpipe.plugin.batch import Batch

log = logging.getLogger(__name__)
SOURCES: dict[str, Callable[[StreamConfig, list[str]], StreamSource]] = {
    "folder": Folder,
    "kafka": Kafka,
    "nats": Nats,
    "redis": Redis,
}
LOOKED_AT = 10_000
"""Of so many records, one must have a value in each column of ids."""
KEPT = 64
"""Positions that are kept beside those of batches read ahead."""


class _Batch(NamedTuple):
    columns: Columns
    position: dict[str, Offset]
    """After its last sample."""
    last: bool
    """Whether the stream ends with it."""


class Made(NamedTuple):
    """A batch with rows of tables in the place of keys; how likely the drawn feature's ids are to be drawn,
    if the recipe asks for it, float32 [n]; and whether the stream ends with it."""

    columns: Columns
    log_q: Float32 | None = None
    last: bool = False


class _Found:
    """What one pass over the stream has found so far."""

    def __init__(self) -> None:
        self.rejected = 0
        self.unseen: dict[str, int] = {}
        self.missing: dict[str, int] = {}


class Stream(Dataset):
    """The training samples are the records of a source as they arrive; none are held out.

    Batch n follows batch n - 1 of the same run: it begins at ``position_after(n)``, which a checkpoint keeps.
    With ``data.end=stop`` a full batch is given once it is known whether records follow it.
    """

    gives_parts = False
    rereads = False
    endless = True

    def __init__(self, config: StreamConfig) -> None:
        """Wait for the first records, whose columns settle what the recipe leaves open.

        ``DataError`` for features that would have to be learned.
        """
        stated = None if config.encoded_as is None else _stated(config.encoded_as)
        features = config.described() if stated is None else stated.features
        if stated is None:
            _require_stated(features)
        self.window = config.window
        self._skip, self._idle = config.on_bad_row == "skip", config.idle if config.end == "stop" else None
        self.source = _source(config, features.columns)
        self._found, self._told = _Found(), set[str]()
        self.stop_asked: Callable[[], bool] = lambda: False
        """Whether another process wants training to wait no more, as ``interrupt`` does."""
        self._types: dict[str, tuple[pa.DataType, str]] = {}
        self._looked_at = first = self._first(features)
        if stated is None:
            self.encoding = Encoding(settled(features, self._types, partial(_text_of, first)))
        else:
            inputs = dict.fromkeys(features.inputs)
            stated.require_types(first.where, pa.schema([(n, self._types[n][0]) for n in inputs]))
            self.encoding = stated
        self.schema = self.encoding.schema
        self.preparation = Preparation.of(self.encoding.features, self.encoding.learned)
        read = {"encoding": self.preparation.to_dict(), "skip": self._skip, **self.source.identity}
        if config.drawn is not None:
            read["negatives"] = config.drawn
        plain = json.dumps(read, default=asdict, sort_keys=True)
        self.fingerprint = hashlib.blake2b(plain.encode(), digest_size=16).hexdigest()
        self._make = BatchMaker(self.schema, self.encoding.multi_hot)
        self._positions: dict[int, Position] = {0: {}}
        single = [feature.name for feature in self.encoding.features.sparse if not feature.is_bag]
        self._drawn = None if config.drawn is None else config.drawn.place(single)
        """The place of the feature whose ids are counted."""
        self._frequencies = Frequencies()
        self._counts: dict[int, Mapping[str, torch.Tensor]] = {0: {}}
        """Those after the batches behind which the run begins, beside none."""

    @property
    def rejected_rows(self) -> int:  # type: ignore[override]
        """Of what was read so far, which may be ahead of training."""
        return self._found.rejected

    @property
    def missing(self) -> Mapping[str, int]:  # type: ignore[override]
        """Likewise."""
        return {name: absent for name, absent in self._found.missing.items() if absent}

    @property
    def unseen(self) -> Mapping[str, int]:  # type: ignore[override]
        """Likewise."""
        return {name: unseen for name, unseen in self._found.unseen.items() if unseen}

    def size(self, split: SplitName) -> int:
        """``ENDLESS`` to train; none held out."""
        return ENDLESS if split == "train" else 0

    def batches(
        self, split: SplitName, batch_size: int, first: int = 0, part: tuple[int, int] | None = None
    ) -> Iterator[Batch]:
        """Batches from ``first`` on, whole, as their records arrive; the position of the first one must be
        known. ``WaitingStopped`` after ``interrupt``, in place of one that is not whole yet."""
        if split == "train":
            for made in self.made(batch_size, first):
                yield with_log_q(self._make(made.columns), made.log_q)

    def made(self, batch_size: int, first: int) -> Iterator[Made]:
        """The same before they are put together."""
        self._found = found = _Found()
        self.last_batch, self.interrupted = None, False
        start = self._positions[first]
        counts = self._counts[first] if first in self._counts else self.counts_after(first)
        self._frequencies = Frequencies.resumed(first, counts)
        for number, batch in enumerate(self._cut(batch_size, start, found), first + 1):
            self._positions[number] = batch.position
            if (old := number - KEPT - self.read_ahead) > 0:
                self._positions.pop(old, None)
            if batch.last:
                self.last_batch = number
            log_q = None if self._drawn is None else self._log_q(batch.columns, self._drawn)
            yield Made(self.encoding.to_rows(batch.columns), log_q, batch.last)

    def _log_q(self, columns: Columns, drawn: int) -> Float32:
        keys, missing = columns.ids[:, drawn].astype(np.int64), bit_at(columns.missing, drawn, len(columns))
        return self._frequencies.log_q(keys, missing, self.read_ahead)

    @property
    def draws(self) -> bool:
        """Whether batches have ``log_q``."""
        return self._drawn is not None

    @property
    def first(self) -> Columns:
        """The samples of the first records that have come, with rows of tables, for looks before training."""
        return self.encoding.to_rows(self._encoded(self._looked_at, _Found()).columns)

    def position_after(self, batches: int) -> dict[str, Offset]:
        """Where the first ``batches`` batches end."""
        return dict(self._positions[batches])

    def counts_after(self, batches: int) -> dict[str, torch.Tensor]:
        """How frequent ids were in the first ``batches`` batches, if ``data.negatives`` asks for it."""
        return {} if self._drawn is None else self._frequencies.state_after(batches)

    def resume_at(
        self, batches: int, position: Position, counts: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> None:
        """Let batch ``batches`` begin at ``position``."""
        self._positions, self._counts = {0: {}, batches: position}, {0: {}, batches: counts}
        self._frequencies = Frequencies.resumed(batches, counts)

    def _first(self, features: Features) -> Chunk:
        """The first records; those after them are looked at until each column of ids has a value."""
        first, seen, unknown = None, 0, list[str]()
        for chunk in self._arriving({}):
            if not len(chunk.rows) or not self._is_alike(chunk, features):
                continue
            first, seen = first or chunk, seen + len(chunk.rows)
            ids = [f.source for f in features.sparse if f.type == "auto" and not (f.of or f.own_rows)]
            unknown = [name for name in ids if element_of(self._types[name][0]) is None]
            if not unknown:
                return first
            if seen >= LOOKED_AT:
                break
        if first is None:
            raise DataError(f"{self.source.name}: no record came within data.idle={self._idle} seconds")
        raise DataError(
            f"{self.source.name}, column {shown(unknown[0])}: the first {seen:,} records have no value there "
            "that would say what it holds; state type: text, or type: integer, in data.features"
        )

    def _is_alike(self, chunk: Chunk, features: Features) -> bool:
        """Whether its columns hold what they held before. ``DataError`` if not, unless they are of messages
        of which bad ones are left out."""
        kinds = {name: chunk.rows.schema.field(name).type for name in features.columns}
        for name, kind in kinds.items():
            known, where = self._types.get(name, (kind, ""))
            if not alike(kind, known):
                fault = f"{chunk.where}, column {shown(name)}: holds {kind} here and {known} in {where}"
                return self._is_left_out(chunk, DataError(fault))
        for name, kind in kinds.items():
            if element_of(self._types.get(name, (pa.null(), ""))[0]) is None:
                self._types[name] = kind, chunk.where
        return True

    def _is_readable(self, chunk: Chunk) -> bool:
        """Whether its columns can be the features and labels, likewise."""
        features, kinds = self.encoding.features, chunk.rows.schema
        try:
            require_labels(features, {kind.name: (kind.type, chunk.where) for kind in kinds})
            inputs = dict.fromkeys(features.inputs)
            self.encoding.require_types(chunk.where, pa.schema([kinds.field(name) for name in inputs]))
        except DataError as fault:
            return self._is_left_out(chunk, fault)
        return True

    def _is_left_out(self, chunk: Chunk, fault: DataError) -> Literal[False]:
        """Raise ``fault`` unless bad messages are left out; each column's first one is told."""
        if not (self._skip and chunk.names):
            raise fault
        if (what := str(fault).removeprefix(chunk.where)) not in self._told:
            self._told.add(what)
            log.warning("%s; such messages are left out", fault)
        return False

    def _cut(self, size: int, start: Position, found: _Found) -> Iterator[_Batch]:
        buffer, ends = Buffer(start, self.source.in_turn), self._idle is not None
        for chunk in self._arriving(start):
            found.rejected += chunk.rejected
            if not (self._is_alike(chunk, self.encoding.features) and self._is_readable(chunk)):
                found.rejected += len(chunk.rows)
            elif len(chunk.rows):
                buffer.add(self._encoded(chunk, found))
            while buffer.size > size or (buffer.size == size and not ends):
                yield _Batch(buffer.take(size), dict(buffer.position), last=False)
        if buffer.size:
            yield _Batch(buffer.take(buffer.size), dict(buffer.position), last=True)

    def _arriving(self, start: Position) -> Iterator[Chunk]:
        """Chunks with records as they arrive; they end after ``data.idle`` seconds without any."""
        since, told = monotonic(), False
        for chunk in self.source.chunks(start):
            if self.interrupted or self.stop_asked():
                raise WaitingStopped
            if chunk is not None:
                yield chunk
                since, told = monotonic(), False
                continue
            idle = monotonic() - since
            if self._idle is not None and idle >= self._idle:
                log.info("the stream has ended: no record for %g seconds (data.end=stop)", self._idle)
                return
            if idle >= 1 and not told:
                log.info("waiting for records")
                told = True

    def _encoded(self, chunk: Chunk, found: _Found) -> Samples:
        """The samples of a chunk, maybe none; ``DataError`` for a bad row."""
        checks = RowChecks(chunk.where, chunk.first_row, len(chunk.rows), chunk.names)
        columns, missing = self.encoding.columns(chunk.rows, checks)
        for name, absent in missing.items():
            found.missing[name] = found.missing.get(name, 0) + absent
        found.rejected += checks.finish(self._skip)
        offsets = chunk.offsets
        if not checks.good.all():
            columns = columns.where(checks.good)
            offsets = [chunk.offsets[row] for row in np.flatnonzero(checks.good).tolist()]
        for name, unseen in self.encoding.unseen(columns).items():
            found.unseen[name] = found.unseen.get(name, 0) + unseen
        return Samples(columns, chunk.partition, offsets)


def _source(config: StreamConfig, columns: Sequence[str]) -> StreamSource:
    """Where records with these ``columns`` come from."""
    beside = Beside([SideTable(join) for join in config.joined], columns)
    source = SOURCES[config.source](config, beside.own)
    return Joined(source, beside, config.joined) if config.joins else source


def _stated(saved: object) -> Encoding:
    """The encoding of another run; ``DataError`` if it is none, or lacks what was learned."""
    try:
        found = Preparation.read(saved).encoding
        if found is None or not found.is_complete:
            raise ValueError("it lacks what was learned")
    except (ValueError, UserError) as fault:
        raise DataError(f"data.encoded_as cannot be used: {shown(fault, 200)}") from fault
    return found


def _require_stated(features: Features) -> None:
    """``DataError`` for a feature with something that preparation would learn from a training part."""
    for feature in (*features.dense, *features.sparse):
        remedy = None
        if feature.ids == "vocabulary":
            remedy = "ids: vocabulary is learned from it; take ids: hash, or rows: dynamic"
        elif feature.buckets is not None:
            remedy = "its buckets are learned from it; state their edges"
        elif feature.scale == "standard":
            remedy = "scale: standard is learned from it; take scale: log"
        elif feature.is_exact and feature.now is None:
            remedy = "an age counts from its latest time; state now, a date"
        if remedy:
            raise DataError(
                f"data.features, {shown(feature.name)}: a stream has no training part, and {remedy}; or give "
                "data.encoded_as=CHECKPOINT of a run on files, which learned it"
            )


def _text_of(first: Chunk, feature: Feature) -> str:
    """What text of ids is: in files where all is text, whole numbers if the first rows are written so."""
    return "integer" if first.is_text and whole_text(first.rows[feature.source], feature) else "text"


def with_log_q(batch: Batch, log_q: Float32 | None) -> Batch:
    """``batch`` with ``log_q``, if there is one."""
    return batch if log_q is None else replace(batch, log_q=torch.from_numpy(log_q))
