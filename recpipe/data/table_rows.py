"""The rows of tables that the ids of prepared data are, made once for tables of certain sizes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.meter import Meter
from recpipe.common.own_cache import private_files
from recpipe.data.columns import Columns
from recpipe.data.files import map_npy
from recpipe.data.id_mapper import IdMapper
from recpipe.data.prepared import AT_A_TIME, LABELS, WEIGHTS, Mapped, Meta, bag_file, check_blocks, seal
from recpipe.data.schema import IdRule, Schema
from recpipe.data.writer import NpyStream, locked
from recpipe.errors import DataError

log = logging.getLogger(__name__)
IN_CACHE = 1 << 13
"""Samples whose ids are made rows of at a time: some megabytes, which a core has at hand."""
_OF_ROWS = re.compile(r"(.*\.)?rows-([0-9a-f]{32})\.(npy|[0-9]+)")


class TableRows:
    """The rows of a ``schema``'s tables that the ids of prepared data in ``directory`` are: their digest, and
    files of them, from which batches are cut without hashing any id.

    ``rows-*.npy`` int32 [N, one-hot features] and for each multi-hot feature ``<name>.rows-*.npy`` hold them,
    of one ``schema`` at a time: the latest with which data were opened. There are none of ids that are rows
    already, and none if a table grows, for what is in it depends on the order of ids. ``multi_hot`` and
    ``kept``: as of a ``Source``.
    """

    def __init__(
        self, schema: Schema, multi_hot: Sequence[str], kept: Sequence[IdRule], directory: Path
    ) -> None:
        self.directory, self._sizes = directory, [feature.rows for feature in schema.sparse]
        self._to_rows = IdMapper(schema, multi_hot, kept)
        self._key = seal({"rows": self._sizes})
        self._hashes = {name: hashlib.blake2b(digest_size=16) for name in ("", *multi_hot)}
        self._streams: dict[str, NpyStream] | None = {}
        """Files that are being written, by feature; None: there are none for these tables, or none can be."""
        if self._to_rows.unchanged or self._to_rows.keeps_keys:
            self._streams = None

    def add(self, columns: Columns) -> None:
        """Add samples, as the source gives them; ``BeyondTable`` if one has an id that is in no table."""
        self._to_rows.require_rows(columns)
        kind = np.int64 if self._to_rows.keeps_keys else np.int32
        for low in range(0, len(columns), IN_CACHE):
            for name, rows in self._to_rows.by_column(columns[low : low + IN_CACHE]).items():
                own = np.ascontiguousarray(rows, kind)
                self._hashes[name].update(own.data)
                self._append(name, own)

    def _add_all(self, mapped: Mapped) -> None:
        """Add all samples of prepared data."""
        samples, columns = mapped.meta.samples, mapped.columns
        every = samples * len(mapped.meta.one_hot) + sum(len(bag.values) for bag in columns.bags.values())
        step = max(1, AT_A_TIME * samples // max(every, samples, 1))
        with Meter() as meter:
            for low in range(0, samples, step):
                self.add(mapped.between(low, min(low + step, samples)))
                if meter.due:
                    share = low / samples
                    meter.show(share, f"hashing rows of tables  {share:.0%}")

    def _append(self, name: str, rows: NDArray[Any]) -> None:
        if self._streams is None:
            return
        try:
            if name not in self._streams:
                path = self._file(name).with_suffix(f".{os.getpid()}")
                self._streams[name] = NpyStream(path, np.int32, rows.shape[1:], hashed=False)
            self._streams[name].append(rows)
        except OSError as fault:  # the disk is full: what has been prepared serves without them
            self._discard(fault)

    def _discard(self, fault: OSError) -> None:
        """Go on without files of rows, which cannot be written."""
        if self._streams is None:
            return
        log.warning(
            "%s: rows of tables cannot be kept beside the ids (%s), which are hashed as batches are read, "
            "about half as fast: free space there, or pass data.cache_dir=DIR",
            self.directory,
            fault.strerror or fault,
        )
        self.drop()

    def drop(self) -> None:
        """Remove the files that have been written, and write no more."""
        for stream in (self._streams or {}).values():
            with contextlib.suppress(OSError):
                stream.file.close()
            with contextlib.suppress(OSError):
                stream.path.unlink(missing_ok=True)
        self._streams = None

    def of(self, meta: Meta) -> str:
        """The digest of all arrays of prepared data, whose samples were added."""
        names = [LABELS, "dense.npy", WEIGHTS]
        names += [bag_file(Path(), name, "weights").name for name in meta.multi_hot]
        found = [meta.digests[name] for name in names if name in meta.digests]
        found += [own.hexdigest() for own in self._hashes.values()]
        found += [meta.digests[bag_file(Path(), name, "offsets").name] for name in meta.multi_hot]
        return hashlib.blake2b("".join(found).encode(), digest_size=16).hexdigest()

    def _file(self, name: str) -> Path:
        """The file of a multi-hot feature's rows, or, of "", of those of all others."""
        part = f"rows-{self._key}"
        return bag_file(self.directory, name, part) if name else self.directory / f"{part}.npy"

    @property
    def _digest_file(self) -> Path:
        return self.directory / f"digest-{self._key}.json"

    def write(self, meta: Meta) -> None:
        """Keep the digest for later runs with tables of these rows, and the rows, in place of those of tables
        of other sizes, which running jobs have open, and go on with. ``OSError`` if it cannot be written."""
        for path in [*self._others()] if self._streams is not None else ():
            path.unlink(missing_ok=True)
        blocks = {}
        try:
            for name, stream in (self._streams or {}).items():
                stream.close(lasting=False)  # they are checked whenever they are opened, and made again
                stream.path.replace(self._file(name))
                blocks[self._file(name).name] = list(stream.blocks)
        except OSError as fault:
            self._discard(fault)
            blocks = {}
        values = {"rows": self._sizes, "digest": self.of(meta), "blocks": blocks}
        self._digest_file.write_text(json.dumps({**values, "seal": seal(values)}))

    def _others(self) -> Iterator[Path]:
        """The files of rows of other tables, and what killed runs have left of them."""
        own = {stream.path.name for stream in (self._streams or {}).values()}
        for path in self.directory.iterdir():
            if path.name not in own and _OF_ROWS.fullmatch(path.name):
                yield path

    def open(self, mapped: Mapped) -> tuple[str, Columns | None]:
        """The digest of prepared data, and all samples with rows in place of ids, mapped into memory; None if
        their ids become rows as they are read. One process makes what is not there, and others wait for it.
        """
        digest, columns = self._read(mapped)
        if digest is not None and (columns is not None or self._streams is None):
            return digest, columns
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(private_files())
                stack.enter_context(locked(self.directory.resolve()))
            except OSError as fault:  # a cache that cannot be written serves as well
                self._discard(fault)
            return self._made(mapped)

    def _made(self, mapped: Mapped) -> tuple[str, Columns | None]:
        digest, columns = self._read(mapped)  # another process may have made them meanwhile
        if digest is not None and (columns is not None or self._streams is None):
            return digest, columns
        try:
            self._add_all(mapped)
        except BaseException:
            self.drop()
            raise
        with contextlib.suppress(OSError):
            self.write(mapped.meta)
        return self.of(mapped.meta), self._read(mapped)[1]

    def _read(self, mapped: Mapped) -> tuple[str | None, Columns | None]:
        """The digest that was written, if one was, and the samples, if their rows are there."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            values = json.loads(self._digest_file.read_text())
            if values.pop("seal") == seal(values):
                blocks = values.get("blocks", {}) if self._streams is not None else {}
                return str(values["digest"]), self._columns(mapped, blocks) if blocks else None
        return None, None

    def _columns(self, mapped: Mapped, blocks: Mapping[str, Sequence[int]]) -> Columns | None:
        """The samples with their rows; None if these are not as they were written, or have made room for
        those of other tables."""
        if not all((self.directory / name).exists() for name in blocks):
            return None
        try:
            check_blocks(self.directory, blocks)
            bags = {
                name: replace(bag, values=np.asarray(map_npy(self._file(name))), missing=None)
                for name, bag in mapped.columns.bags.items()
            }
            ids = np.asarray(map_npy(self._file("")))
        except DataError as fault:
            log.warning("making rows of tables again, for the cache is damaged: %s", fault)
            return None
        return replace(mapped.columns, ids=ids, bags=bags, missing=None)
