"""Prepared data: memory-mapped columns in a directory, written once and read by slicing.

A directory holds ``meta.json`` (format version, features and table rows, samples, rejected rows, digests),
``label.npy`` float32 [N], ``dense.npy`` float32 [N, D], ``ids.npy`` int32 [N, one-hot features] and, for each
multi-hot feature, ``<name>.values.npy`` int32 and ``<name>.offsets.npy`` int64 [N + 1].
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import DTypeLike, NDArray

from recpipe.common.console import Meter
from recpipe.data.batch import Batch
from recpipe.data.columns import BatchMaker, Columns, MultiHot
from recpipe.data.dataset import NumberedDataset, Schema, SparseFeature
from recpipe.data.files import map_npy
from recpipe.errors import DataError

FORMAT_VERSION = 2
META = "meta.json"
BLOCK = 1 << 22
"""Bytes of a file that have a digest of their own."""
READERS = 8
"""Most threads that compare blocks with their digests."""


@dataclass(frozen=True)
class Meta:
    """The content of ``meta.json``. ``digest`` is a hash of all arrays, ``multi_hot`` names the features with
    bags, ``blocks`` has for each file the CRC-32 of its header and of each block of what follows."""

    schema: Schema
    multi_hot: tuple[str, ...]
    samples: int
    rejected_rows: int
    digest: str
    blocks: Mapping[str, Sequence[int]]

    def to_json(self) -> str:
        """The text of ``meta.json``, whose last entry is a digest of the others."""
        values = {**self._content(), "format": FORMAT_VERSION, "blocks": dict(self.blocks)}
        return json.dumps({**values, "seal": _seal(values)}, indent=1)

    @property
    def identity(self) -> str:
        """What tells these data from others; it does not change with the format."""
        return json.dumps(self._content(), indent=1)

    def _content(self) -> dict[str, Any]:
        features = [{"name": feature.name, "rows": feature.rows} for feature in self.schema.sparse]
        return {
            "format": 1,
            "dense": list(self.schema.dense),
            "sparse": features,
            "multi_hot": list(self.multi_hot),
            "samples": self.samples,
            "rejected_rows": self.rejected_rows,
            "digest": self.digest,
        }

    @classmethod
    def read(cls, directory: Path) -> Meta:
        """Read ``directory/meta.json``; ``DataError`` if it is not in this format."""
        try:
            values: dict[str, Any] = json.loads((directory / META).read_text())
            sparse = tuple(SparseFeature(item["name"], int(item["rows"])) for item in values["sparse"])
            schema = Schema(tuple(values["dense"]), sparse)
            known = values["format"] == FORMAT_VERSION
            seal = values.pop("seal", None)
            meta = cls(
                schema,
                tuple(values["multi_hot"]),
                int(values["samples"]),
                int(values["rejected_rows"]),
                str(values["digest"]),
                {str(name): list(map(int, blocks)) for name, blocks in values.get("blocks", {}).items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{directory}: not a prepared data set ({error}); delete the directory"
            ) from error
        if not known:
            raise DataError(
                f"{directory}: prepared in format {values['format']}, not {FORMAT_VERSION}; delete it"
            )
        if seal != _seal(values):
            raise DataError(f"{directory}: meta.json is not as it was written; delete the directory")
        return meta


def _seal(values: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


class _NpyStream:
    """A .npy file that grows by blocks of rows; the header is rewritten with the final shape at the end."""

    def __init__(self, path: Path, dtype: DTypeLike, row: tuple[int, ...] = ()) -> None:
        self.dtype, self.row, self.rows = np.dtype(dtype), row, 0
        self.digest = hashlib.blake2b(digest_size=16)
        self.path, self.blocks, self._filled = path, [0], BLOCK
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
        data = np.ascontiguousarray(block, self.dtype)
        self.file.write(data.data)
        self.digest.update(data.data)
        self.rows += len(block)
        raw = data.data.cast("B") if data.size else memoryview(b"")
        while raw:
            if self._filled == BLOCK:
                self.blocks.append(0)
                self._filled = 0
            part = raw[: BLOCK - self._filled]
            self.blocks[-1] = zlib.crc32(part, self.blocks[-1])
            self._filled += len(part)
            raw = raw[len(part) :]

    def close(self) -> str:
        self.file.seek(0)
        assert self._header() == self.start, "numpy reserves room in the header for the first axis to grow"
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return self.digest.hexdigest()


class PreparedWriter:
    """Appends columns to a prepared data set in ``directory``; memory use does not grow with what is written.

    The directory is complete only after ``finish``: write under a temporary name and rename (see
    ``cache.prepare``).
    """

    def __init__(self, directory: Path, schema: Schema, multi_hot: Sequence[str] = ()) -> None:
        self.directory, self.schema, self.multi_hot = directory, schema, tuple(multi_hot)
        directory.mkdir(parents=True)
        one_hot = len(schema.sparse) - len(self.multi_hot)
        self._label = _NpyStream(directory / "label.npy", np.float32)
        self._dense = _NpyStream(directory / "dense.npy", np.float32, (len(schema.dense),))
        self._ids = _NpyStream(directory / "ids.npy", np.int32, (one_hot,))
        self._values = {name: _NpyStream(bag_file(directory, name, "values"), np.int32) for name in multi_hot}
        self._offsets = {
            name: _NpyStream(bag_file(directory, name, "offsets"), np.int64) for name in multi_hot
        }
        for stream in self._offsets.values():
            stream.append(np.zeros(1, np.int64))

    def __enter__(self) -> PreparedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams():
            stream.file.close()

    def _streams(self) -> list[_NpyStream]:
        return [self._label, self._dense, self._ids, *self._values.values(), *self._offsets.values()]

    @property
    def rows(self) -> int:
        """Samples written so far."""
        return self._label.rows

    def append(self, columns: Columns) -> None:
        """Write the samples of ``columns`` after those written before."""
        self._label.append(columns.labels)
        self._dense.append(columns.dense)
        self._ids.append(columns.ids)
        for name in self.multi_hot:
            own = columns.bags[name].trimmed()
            self._offsets[name].append(own.offsets[1:] + self._values[name].rows)
            self._values[name].append(own.values)

    def finish(self, rejected_rows: int) -> Meta:
        """Flush all to disk and write ``meta.json``, last of all."""
        digests = [stream.close() for stream in self._streams()]
        digest = hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()
        blocks = {stream.path.name: stream.blocks for stream in self._streams()}
        meta = Meta(self.schema, self.multi_hot, self._label.rows, rejected_rows, digest, blocks)
        with (self.directory / META).open("w") as file:
            file.write(meta.to_json())
            file.flush()
            os.fsync(file.fileno())
        return meta


def bag_file(directory: Path, name: str, part: str) -> Path:
    """The file of a multi-hot feature's ``values`` or ``offsets``; its name is safe for any feature name."""
    return directory / f"{quote(name, safe='')}.{part}.npy"


def _load(path: Path, dtype: DTypeLike, shape: tuple[int, ...] | None) -> NDArray[Any]:
    array = map_npy(path)
    if array.dtype != dtype or (shape is not None and array.shape != shape):
        raise DataError(
            f"{path}: {array.dtype} {array.shape} is not what meta.json says; delete {path.parent}"
        )
    return np.asarray(array)


def check_prepared(directory: Path, schema: Schema, multi_hot: Sequence[str]) -> None:
    """``DataError`` unless ``directory`` holds complete prepared data of ``schema``, each block as it was
    written. All of it is read: about 2 GiB a second for each core, where the disk is not slower."""
    meta = Meta.read(directory)
    if meta.schema != schema or meta.multi_hot != tuple(multi_hot):
        raise DataError(f"{directory}: meta.json is of other features")
    _map(directory, meta)
    names = ["label.npy", "dense.npy", "ids.npy"]
    names += [
        bag_file(directory, name, part).name for name in meta.multi_hot for part in ("values", "offsets")
    ]
    blocks = [block for name in names for block in _blocks(directory / name, meta.blocks.get(name, ()))]
    # A few at a time, so that little is in memory, and a damaged block ends it soon.
    with ThreadPoolExecutor(min(READERS, len(os.sched_getaffinity(0)))) as pool, Meter() as meter:
        for done in range(0, len(blocks), 64):
            list(pool.map(_check_block, blocks[done : done + 64]))
            if meter.due:
                share = done / len(blocks)
                meter.show(share, f"checking prepared data  {share:.0%}")


def _blocks(file: Path, digests: Sequence[int]) -> Iterator[tuple[Path, int, int, int]]:
    """Of the header and each block: file, first byte, end, and CRC-32."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = 10 + int.from_bytes(stream.read(10)[8:], "little")  # as version 1 of the format has it
    bounds = [0, *range(start, size, BLOCK), size] if size > start else [0, size]
    if len(bounds) - 1 != len(digests):
        raise DataError(f"{file}: meta.json has no digest for each of its blocks; delete {file.parent}")
    yield from (
        (file, low, high, digest) for (low, high), digest in zip(pairwise(bounds), digests, strict=True)
    )


def _check_block(block: tuple[Path, int, int, int]) -> None:
    file, low, high, digest = block
    with file.open("rb") as stream:
        found = zlib.crc32(os.pread(stream.fileno(), high - low, low))
    if found != digest:
        raise DataError(
            f"{file}: bytes {low:,} to {high:,} are not as they were written; delete {file.parent}"
        )


def _map(directory: Path, meta: Meta) -> Columns:
    n, one_hot = meta.samples, len(meta.schema.sparse) - len(meta.multi_hot)
    bags = {}
    for name in meta.multi_hot:
        offsets = _load(bag_file(directory, name, "offsets"), np.int64, (n + 1,))
        values = _load(bag_file(directory, name, "values"), np.int32, (int(offsets[-1]),))
        bags[name] = MultiHot(values, offsets)
    return Columns(
        _load(directory / "label.npy", np.float32, (n,)),
        _load(directory / "dense.npy", np.float32, (n, len(meta.schema.dense))),
        _load(directory / "ids.npy", np.int32, (n, one_hot)),
        bags,
    )


class PreparedDataset(NumberedDataset):
    """A prepared directory as a data set; the operating system's page cache is the only cache.

    ``fingerprint`` covers the arrays' content, the schema and ``eval_fraction``, but not the files' location.
    """

    def __init__(self, directory: Path, eval_fraction: float) -> None:
        meta = Meta.read(directory)
        super().__init__(meta.samples, eval_fraction)
        self.schema, self.rejected_rows = meta.schema, meta.rejected_rows
        identity = f"{meta.identity} {eval_fraction!r}"
        self.fingerprint = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        self._make = BatchMaker(meta.schema, meta.multi_hot)
        self._columns = _map(directory, meta)

    def samples_between(self, low: int, high: int) -> Batch:
        """Samples ``low`` to ``high`` (excluded), cut out of the mapped files."""
        return self._make(self._columns[low:high])
