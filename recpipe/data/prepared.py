"""Prepared data: memory-mapped columns in a directory, written once and read by slicing.

A directory holds ``meta.json`` (format version, features, samples, rejected rows, digests), ``label.npy``
float32 [N], or [N, L] of several labels, ``weights.npy`` in the same shape if labels have weights,
``dense.npy`` float32 [N, D], ``ids.npy`` [N, one-hot features without text], ``text.npy`` [N, those with
text] and, for each multi-hot feature, ``<name>.values.npy`` and ``<name>.offsets.npy`` int64 [N + 1]. Ids
are as the source gives them (``IdMapper``), of 4 bytes where all in the file fit; where ids are missing,
``missing.npy`` uint8 [N, one-hot features / 8] and ``<name>.missing.npy`` have bits.
``digest-*.json`` has the digest of the rows that they become in tables of certain sizes, those of the run
that prepared them and of later ones; the latest of these have the rows themselves beside it (``TableRows``).
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from recpipe.common.meter import Meter
from recpipe.data.columns import Columns, Int64, MultiHot
from recpipe.data.files import map_npy
from recpipe.data.schema import IdRule, Schema
from recpipe.errors import DataError

FORMAT_VERSION = 4
META = "meta.json"
AT_A_TIME = 1 << 20
"""Ids that are in memory at a time, when all are read."""
IDS, WORDS, MISSING = "ids.npy", "text.npy", "missing.npy"
LABELS, WEIGHTS = "label.npy", "weights.npy"
BLOCK = 1 << 22
"""Bytes of a file that have a digest of their own."""
READERS = 8
"""Most threads that compare blocks with their digests."""


@dataclass(frozen=True)
class Meta:
    """The content of ``meta.json``: columns by name, those with bags (``multi_hot``) and with text, how the
    ids of each sparse feature are kept, how many samples have no value of each feature, and for each file its
    type, the digest of its values, and the CRC-32 of its header and of each block of what follows."""

    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    multi_hot: tuple[str, ...]
    text: tuple[str, ...]
    kept: tuple[str, ...]
    samples: int
    rejected_rows: int
    missing: Mapping[str, int]
    types: Mapping[str, str]
    digests: Mapping[str, str]
    blocks: Mapping[str, Sequence[int]]
    unseen: Mapping[str, int] = field(default_factory=dict)
    """How many ids the vocabulary of each feature lacks."""
    learned: Mapping[str, Any] | None = None
    """What was learned from the training part (``Learned.to_dict``)."""
    labels: tuple[str, ...] = ()
    """The names of the labels; (): there is one, without a name."""
    parts: tuple[int, ...] = ()
    """How many samples train, validate and test, which lie in this order; (): it is decided when the data are
    opened."""

    def to_json(self) -> str:
        """The text of ``meta.json``, whose last entry is a digest of the others."""
        values = {"format": FORMAT_VERSION, **json.loads(json.dumps(vars(self)))}
        return json.dumps({**values, "seal": seal(values)}, indent=1)

    @property
    def one_hot(self) -> list[str]:
        """The features without bags."""
        return [name for name in self.sparse if name not in self.multi_hot]

    def identity(self, schema: Schema, digest: str) -> str:
        """The text that tells these data, as rows of tables, from others; it does not change with the format.
        ``digest``: of all arrays."""
        features = [{"name": feature.name, "rows": feature.rows} for feature in schema.sparse]
        content = {
            "format": 1,
            "dense": list(schema.dense),
            "sparse": features,
            "multi_hot": list(self.multi_hot),
            "samples": self.samples,
            "rejected_rows": self.rejected_rows,
            "digest": digest,
        }
        if len(self.labels) > 1:
            content["labels"] = list(self.labels)
        return json.dumps(content, indent=1)

    @classmethod
    def read(cls, directory: Path) -> Meta:
        """Read ``directory/meta.json``; ``DataError`` if it is not in this format."""
        try:
            values: dict[str, Any] = json.loads((directory / META).read_text())
            known = values["format"] == FORMAT_VERSION
            found = values.pop("seal", None)
            if known:
                lists = {
                    name: tuple(map(str, values[name]))
                    for name in ("dense", "sparse", "multi_hot", "text", "kept")
                }
                meta = cls(
                    **lists,
                    samples=int(values["samples"]),
                    rejected_rows=int(values["rejected_rows"]),
                    missing={str(name): int(count) for name, count in values["missing"].items()},
                    types={str(name): str(kind) for name, kind in values["types"].items()},
                    digests={str(name): str(digest) for name, digest in values["digests"].items()},
                    blocks={str(name): list(map(int, own)) for name, own in values["blocks"].items()},
                    unseen={str(name): int(count) for name, count in values.get("unseen", {}).items()},
                    learned=values.get("learned"),
                    labels=tuple(map(str, values.get("labels", ()))),
                    parts=tuple(map(int, values.get("parts", ()))),
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{directory}: not a prepared data set ({error}); delete the directory"
            ) from error
        if not known:
            raise DataError(
                f"{directory}: prepared in format {values['format']}, not {FORMAT_VERSION}; delete it"
            )
        if found != seal(values):
            raise DataError(f"{directory}: meta.json is not as it was written; delete the directory")
        return meta


def seal(values: Mapping[str, Any]) -> str:
    """The digest of a file's entries, which is one of them."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def bag_file(directory: Path, name: str, part: str) -> Path:
    """The file of a multi-hot feature's ``values``, ``offsets`` or ``weights``; its name is safe for any
    feature name."""
    return directory / f"{quote(name, safe='')}.{part}.npy"


def check_prepared(
    directory: Path,
    schema: Schema,
    multi_hot: Sequence[str],
    text: Sequence[str] = (),
    kept: Sequence[IdRule] = (),
) -> None:
    """``DataError`` unless ``directory`` holds complete prepared data of the columns of ``schema``, each
    block as it was written. All of it is read: about 2 GiB a second for each core, where the disk is not
    slower."""
    meta = Meta.read(directory)
    names = schema.dense, tuple(feature.name for feature in schema.sparse), tuple(multi_hot), tuple(text)
    if (meta.dense, meta.sparse, meta.multi_hot, meta.text) != names or meta.kept != (
        tuple(kept) or ("unchanged",) * len(schema.sparse)
    ):
        raise DataError(f"{directory}: meta.json is of other features")
    Mapped(directory, meta)
    check_blocks(directory, meta.blocks)


def check_blocks(directory: Path, files: Mapping[str, Sequence[int]]) -> None:
    """``DataError`` unless each of ``files`` has blocks of these CRC-32 (``Meta.blocks``)."""
    blocks = [block for name, digests in files.items() for block in _blocks(directory / name, digests)]
    # A few at a time, so that little is in memory, and a damaged block ends it soon.
    with ThreadPoolExecutor(min(READERS, len(os.sched_getaffinity(0)))) as pool, Meter() as meter:
        for done in range(0, len(blocks), 64):
            list(pool.map(_check_block, blocks[done : done + 64]))
            if meter.due:
                share = done / len(blocks)
                meter.show(share, f"checking prepared data  {share:.0%}")


def _blocks(file: Path, digests: Sequence[int]) -> Iterator[tuple[Path, int, int, int]]:
    """The header and the blocks of a file: file, first byte, end, and CRC-32 of each."""
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


class Mapped:
    """The files of prepared data in memory, read when they are looked at; ``DataError`` if they are not what
    meta.json says."""

    def __init__(self, directory: Path, meta: Meta) -> None:
        self.directory, self.meta, n = directory, meta, meta.samples
        one_hot = meta.one_hot
        labels = (n, len(meta.labels)) if len(meta.labels) > 1 else (n,)
        self._of_text = np.array([name in meta.text for name in one_hot], bool)
        words = int(self._of_text.sum())
        self._words = self._load(directory / WORDS, (n, words)) if words else None
        self.columns = Columns(
            self._load(directory / LABELS, labels),
            self._load(directory / "dense.npy", (n, len(meta.dense))),
            self._load(directory / IDS, (n, len(one_hot) - words)),
            {name: self._bags(name) for name in meta.multi_hot},
            self._bits(directory / MISSING, (n, -(-len(one_hot) // 8))),
            self._load(directory / WEIGHTS, labels) if WEIGHTS in meta.types else None,
        )
        """All samples, whose ids with 8 bytes lie apart."""

    def _bags(self, name: str) -> MultiHot:
        offsets = self._load(bag_file(self.directory, name, "offsets"), (self.meta.samples + 1,))
        size = int(offsets[-1])
        values = self._load(bag_file(self.directory, name, "values"), (size,))
        missing = self._bits(bag_file(self.directory, name, "missing"), (size, 1))
        file = bag_file(self.directory, name, "weights")
        weights = self._load(file, (size,)) if file.name in self.meta.types else None
        return MultiHot(values, offsets, missing, weights)

    def _bits(self, path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
        return self._load(path, shape) if path.name in self.meta.types else None

    def _load(self, path: Path, shape: tuple[int, ...]) -> NDArray[Any]:
        array = map_npy(path)
        if array.dtype.str != self.meta.types.get(path.name) or array.shape != shape:
            raise DataError(
                f"{path}: {array.dtype} {array.shape} is not what meta.json says; delete {path.parent}"
            )
        return np.asarray(array)

    def weights(self, rows: slice | Int64) -> NDArray[np.float32] | None:
        """The weights alone of these samples, if they have any."""
        return None if self.columns.weights is None else self.columns.weights[rows]

    def between(self, low: int, high: int) -> Columns:
        """Samples ``low`` to ``high`` (excluded), as the source gave them."""
        return self._with_words(self.columns[low:high], slice(low, high))

    def at(self, rows: Int64) -> Columns:
        """The samples with these numbers int64 [n], in this order, as the source gave them."""
        return self._with_words(self.columns.take(rows), rows)

    def _with_words(self, found: Columns, rows: slice | Int64) -> Columns:
        """``found``, the samples ``rows``, with the ids that lie in a file of their own."""
        if self._words is not None:
            ids = np.empty((len(found), len(self._of_text)), np.int64)
            ids[:, ~self._of_text] = found.ids
            ids[:, self._of_text] = self._words[rows]
            found.ids = ids
        return found
