"""Writes prepared data: columns appended to files in a directory, whose memory does not grow with them."""

from __future__ import annotations

import fcntl
import hashlib
import io
import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from recpipe.data import prepared
from recpipe.data.columns import Columns
from recpipe.data.prepared import AT_A_TIME, IDS, LABELS, META, MISSING, WEIGHTS, WORDS, Meta, bag_file
from recpipe.data.schema import IdRule, Schema

log = logging.getLogger(__name__)


@contextmanager
def locked(target: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock file of a directory, which is beside it, to write there. The system frees it when the
    process ends, even if it is killed."""
    with target.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            log.info("waiting for another process, which is preparing the same data")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class NpyStream:
    """A .npy file that grows by blocks of rows; the header is rewritten with the final shape at the end.

    ``hashed``: whether it has a digest of its values. What ids are in tables has one instead (``TableRows``).
    """

    def __init__(self, path: Path, dtype: DTypeLike, row: tuple[int, ...] = (), hashed: bool = True) -> None:
        self.hashed = hashed
        self.dtype, self.row, self.rows = np.dtype(dtype), row, 0
        self.digest = hashlib.blake2b(digest_size=16)
        self.path, self.blocks, self._filled = path, [0], prepared.BLOCK
        self.file = path.open("wb")
        self.start = self._header()

    def _header(self) -> int:
        """Write the header; returns how long it is."""
        shape = (self.rows, *self.row)
        written = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            written, {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        )
        self.blocks[0] = zlib.crc32(written.getvalue())
        return self.file.write(written.getvalue())

    def append(self, block: NDArray[Any]) -> None:
        """Write rows."""
        data = np.ascontiguousarray(block, self.dtype)
        self.file.write(data.data)
        if self.hashed:
            self.digest.update(data.data)
        self.rows += len(block)
        raw = data.data.cast("B") if data.size else memoryview(b"")
        while raw:
            if self._filled == prepared.BLOCK:
                self.blocks.append(0)
                self._filled = 0
            part = raw[: prepared.BLOCK - self._filled]
            self.blocks[-1] = zlib.crc32(part, self.blocks[-1])
            self._filled += len(part)
            raw = raw[len(part) :]

    def close(self, lasting: bool = True) -> str:
        """Flush it to disk, unless it is not ``lasting``: then it may be damaged once the machine has
        crashed. Returns the digest of the values."""
        self.file.seek(0)
        assert self._header() == self.start, "numpy reserves room in the header for the first axis to grow"
        self.file.flush()
        if lasting:
            os.fsync(self.file.fileno())
        self.file.close()
        return self.digest.hexdigest()


class _IdStream(NpyStream):
    """Whole numbers, of 4 bytes as long as these are enough; then what was written is written anew in 8."""

    def __init__(self, path: Path, row: tuple[int, ...] = (), wide: bool = False) -> None:
        super().__init__(path, np.int64 if wide else np.int32, row, hashed=False)
        self._given: np.dtype[Any] = np.dtype(np.int32)
        self._low = self._high = 0

    def append(self, block: NDArray[Any]) -> None:
        """Write rows."""
        if block.size:
            self._given = block.dtype
            signed = self._low < 0
            self._low = min(self._low, int(block.min())) if block.dtype.kind == "i" else self._low
            self._high = max(self._high, int(block.max()))
            if self.dtype.itemsize == 4 and not (self._fit(np.int32) or self._fit(np.uint32)):
                self._widen(np.int32 if signed else np.uint32)
        # Four bytes of a whole number are the same ones, signed or not.
        words = block.astype(f"{block.dtype.kind}{self.dtype.itemsize}", copy=False)
        super().append(words.view(self.dtype))

    def close(self, lasting: bool = True) -> str:
        """As of ``NpyStream``."""
        unsigned = self._given.kind == "u" or (self._given.itemsize == 8 and self._low >= 0)
        self.dtype = np.dtype(f"{'u' if unsigned else 'i'}{self.dtype.itemsize}")
        return super().close(lasting)

    def _fit(self, kind: type[np.integer]) -> bool:
        return np.iinfo(kind).min <= self._low and self._high <= np.iinfo(kind).max

    def _widen(self, narrow: type[np.integer]) -> None:
        rows, old = self.rows, self.path.with_suffix(".narrow")
        self.file.close()
        self.path.rename(old)
        super().__init__(self.path, np.int64, self.row, hashed=False)
        if rows:
            whole = np.memmap(old, narrow, "r", self.start, (rows, *self.row))
            step = max(1, AT_A_TIME // max((1, *self.row)))
            for low in range(0, rows, step):
                super().append(whole[low : low + step])
        old.unlink()


class _BitStream:
    """A file of bits that is there only if one of them is set; ``width``: bytes a row."""

    def __init__(self, path: Path, width: int) -> None:
        self.path, self.width, self.rows = path, width, 0
        self.stream: NpyStream | None = None

    def append(self, bits: NDArray[np.uint8] | None, rows: int) -> None:
        """Write those of ``rows`` rows; None: all 0."""
        if bits is not None and self.stream is None:
            self.stream = NpyStream(self.path, np.uint8, (self.width,), hashed=False)
            step = max(1, AT_A_TIME // max(1, self.width))
            for low in range(0, self.rows, step):
                self.stream.append(np.zeros((min(step, self.rows - low), self.width), np.uint8))
        if self.stream is not None:
            self.stream.append(np.zeros((rows, self.width), np.uint8) if bits is None else bits)
        self.rows += rows


class PreparedWriter:
    """Appends columns to a prepared data set in ``directory``; memory use does not grow with what is written.

    ``text``: features whose ids take 8 bytes. ``kept``: what the ids of each sparse feature are, a rule of
    ``IdMapper``; of all features ``unchanged`` if there are none. ``dense``: the type of numbers.

    The directory is complete only after ``finish``: write under a temporary name and rename (see
    ``cache.prepare``).
    """

    def __init__(
        self,
        directory: Path,
        schema: Schema,
        multi_hot: Sequence[str] = (),
        text: Sequence[str] = (),
        kept: Sequence[IdRule] = (),
        dense: DTypeLike = np.float32,
    ) -> None:
        self.directory, self.schema, self.multi_hot = directory, schema, tuple(multi_hot)
        self.text, self.kept = tuple(text), tuple(kept)
        directory.mkdir(parents=True)
        one_hot = [feature.name for feature in schema.sparse if feature.name not in self.multi_hot]
        self._of_text = np.array([name in self.text for name in one_hot], bool)
        columns = (len(schema.labels),) if len(schema.labels) > 1 else ()
        self._label = NpyStream(directory / LABELS, np.float32, columns)
        self._weights: NpyStream | None = None
        """Made with the first samples, if these have weights."""
        self._dense = NpyStream(directory / "dense.npy", dense, (len(schema.dense),))
        self._ids = _IdStream(directory / IDS, (int((~self._of_text).sum()),))
        words = int(self._of_text.sum())
        self._words = _IdStream(directory / WORDS, (words,), wide=True) if words else None
        self._missing = {"": _BitStream(directory / MISSING, -(-len(one_hot) // 8))}
        self._values = {
            name: _IdStream(bag_file(directory, name, "values"), wide=name in self.text) for name in multi_hot
        }
        self._missing |= {name: _BitStream(bag_file(directory, name, "missing"), 1) for name in multi_hot}
        self._offsets = {
            name: NpyStream(bag_file(directory, name, "offsets"), np.int64) for name in multi_hot
        }
        for stream in self._offsets.values():
            stream.append(np.zeros(1, np.int64))
        self._of_ids = {
            feature.name: NpyStream(bag_file(directory, feature.name, "weights"), np.float32)
            for feature in schema.sparse
            if feature.weighted
        }

    def __enter__(self) -> PreparedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams():
            stream.file.close()

    def _streams(self) -> list[NpyStream]:
        bits = [own.stream for own in self._missing.values()]
        found = [self._label, self._weights, self._dense, self._ids, self._words, *bits]
        return [*filter(None, found), *self._values.values(), *self._offsets.values(), *self._of_ids.values()]

    @property
    def rows(self) -> int:
        """Samples written so far."""
        return self._label.rows

    def append(self, columns: Columns) -> None:
        """Write the samples of ``columns`` after those written before."""
        if columns.weights is not None:
            if self._weights is None:
                self._weights = NpyStream(self.directory / WEIGHTS, np.float32, self._label.row)
            self._weights.append(columns.weights)
        self._label.append(columns.labels)
        self._dense.append(columns.dense)
        if self._words is not None:
            self._ids.append(columns.ids[:, ~self._of_text])
            self._words.append(columns.ids[:, self._of_text])
        else:
            self._ids.append(columns.ids)
        self._missing[""].append(columns.missing, len(columns))
        for name in self.multi_hot:
            own = columns.bags[name].trimmed()
            self._offsets[name].append(own.offsets[1:] + self._values[name].rows)
            self._values[name].append(own.values)
            self._missing[name].append(own.missing, len(own.values))
            if own.weights is not None:
                self._of_ids[name].append(own.weights)

    def finish(
        self,
        rejected_rows: int,
        missing: Mapping[str, int] | None = None,
        unseen: Mapping[str, int] | None = None,
        learned: Mapping[str, Any] | None = None,
        parts: Sequence[int] = (),
    ) -> Meta:
        """Flush all to disk and write ``meta.json``, last of all. ``missing``: how many samples have no value
        of each feature; ``unseen``, ``learned`` and ``parts``: as in ``Meta``."""
        streams = {stream.path.name: stream for stream in self._streams()}
        digests = {name: stream.close() for name, stream in streams.items()}
        digests = {name: digest for name, digest in digests.items() if streams[name].hashed}
        meta = Meta(
            self.schema.dense,
            tuple(feature.name for feature in self.schema.sparse),
            self.multi_hot,
            self.text,
            self.kept or ("unchanged",) * len(self.schema.sparse),
            self._label.rows,
            rejected_rows,
            dict(missing or {}),
            {name: stream.dtype.str for name, stream in streams.items()},
            digests,
            {name: stream.blocks for name, stream in streams.items()},
            dict(unseen or {}),
            learned,
            tuple(label.name for label in self.schema.labels),
            tuple(parts),
        )
        with (self.directory / META).open("w") as file:
            file.write(meta.to_json())
            file.flush()
            os.fsync(file.fileno())
        return meta
