"""Prepared data: memory-mapped columns in a directory, written once and read by slicing.

A directory holds ``meta.json`` (format version, features and table rows, samples, rejected rows, digest),
``label.npy`` float32 [N], ``dense.npy`` float32 [N, D], ``ids.npy`` int32 [N, one-hot features] and, for each
multi-hot feature, ``<name>.values.npy`` int32 and ``<name>.offsets.npy`` int64 [N + 1].
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import DTypeLike, NDArray

from recpipe.data.batch import Batch
from recpipe.data.columns import BatchMaker, Columns, MultiHot
from recpipe.data.dataset import NumberedDataset, Schema, SparseFeature
from recpipe.data.files import map_npy
from recpipe.errors import DataError

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Meta:
    """The content of ``meta.json``. ``digest`` is a hash of all arrays, ``multi_hot`` names the features with
    bags."""

    schema: Schema
    multi_hot: tuple[str, ...]
    samples: int
    rejected_rows: int
    digest: str

    def to_json(self) -> str:
        """The text of ``meta.json``."""
        features = [{"name": feature.name, "rows": feature.rows} for feature in self.schema.sparse]
        values = {
            "format": FORMAT_VERSION,
            "dense": list(self.schema.dense),
            "sparse": features,
            "multi_hot": list(self.multi_hot),
            "samples": self.samples,
            "rejected_rows": self.rejected_rows,
            "digest": self.digest,
        }
        return json.dumps(values, indent=1)

    @classmethod
    def read(cls, directory: Path) -> Meta:
        """Read ``directory/meta.json``; ``DataError`` if it is not in this format."""
        try:
            values: dict[str, Any] = json.loads((directory / "meta.json").read_text())
            sparse = tuple(SparseFeature(item["name"], int(item["rows"])) for item in values["sparse"])
            schema = Schema(tuple(values["dense"]), sparse)
            known = values["format"] == FORMAT_VERSION
            meta = cls(
                schema,
                tuple(values["multi_hot"]),
                int(values["samples"]),
                int(values["rejected_rows"]),
                str(values["digest"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{directory}: not a prepared data set ({error}); delete the directory"
            ) from error
        if not known:
            raise DataError(
                f"{directory}: prepared in format {values['format']}, not {FORMAT_VERSION}; delete it"
            )
        return meta


class _NpyStream:
    """A .npy file that grows by blocks of rows; the header is rewritten with the final shape at the end."""

    def __init__(self, path: Path, dtype: DTypeLike, row: tuple[int, ...] = ()) -> None:
        self.dtype, self.row, self.rows = np.dtype(dtype), row, 0
        self.digest = hashlib.blake2b(digest_size=16)
        self.file = path.open("wb")
        self._header()
        self.start = self.file.tell()

    def _header(self) -> None:
        shape = (self.rows, *self.row)
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, header)

    def append(self, block: NDArray[Any]) -> None:
        data = np.ascontiguousarray(block, self.dtype)
        self.file.write(data.data)
        self.digest.update(data.data)
        self.rows += len(block)

    def close(self) -> str:
        self.file.seek(0)
        self._header()
        assert self.file.tell() == self.start, "numpy reserves room in the header for the first axis to grow"
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
        meta = Meta(self.schema, self.multi_hot, self._label.rows, rejected_rows, digest)
        with (self.directory / "meta.json").open("w") as file:
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
    """``DataError`` unless ``directory`` holds complete prepared data of ``schema``."""
    meta = Meta.read(directory)
    if meta.schema != schema or meta.multi_hot != tuple(multi_hot):
        raise DataError(f"{directory}: meta.json is of other features")
    _map(directory, meta)


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
        identity = f"{meta.to_json()} {eval_fraction!r}"
        self.fingerprint = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        self._make = BatchMaker(meta.schema, meta.multi_hot)
        self._columns = _map(directory, meta)

    def samples_between(self, low: int, high: int) -> Batch:
        """Samples ``low`` to ``high`` (excluded), cut out of the mapped files."""
        return self._make(self._columns[low:high])
