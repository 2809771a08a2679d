"""Files that lie elsewhere: in object stores and on servers, read by fsspec, in parts and with patience.

An object store fails now and then. Each request is made again a few times, after longer and longer waits;
what then still fails is one line that names the file.
"""

from __future__ import annotations

import io
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from recpipe.errors import DataError, UserError, shown

if TYPE_CHECKING:  # imported where they are used: prepared data need neither
    import pyarrow as pa
    from fsspec import AbstractFileSystem

log = logging.getLogger(__name__)
T = TypeVar("T")
WAITS = (0.1, 0.5, 2.0, 8.0)
"""Seconds before a request is made again, for the first time, the second ..."""
AT_ONCE = 4 << 20
"""Bytes of the smallest request for a part of a file."""
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, ValueError)
"""Answers that are the same however often one asks; a ``ValueError`` is about what was asked."""
GONE = (401, 403, 404, 410)
"""Answers of web servers that are as final."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hf": "hf"}
"""The extra of recpipe that brings what reads paths with such a beginning."""
VERSIONS = (
    *("ETag", "etag", "blob_id", "sha256", "md5Hash", "Content-MD5"),
    *("Last-Modified", "LastModified", "last_modified", "updated", "mtime", "created"),
)
"""Under one of these a store says which content a file has, those first that change with nothing else."""


@dataclass(frozen=True)
class RemotePath:
    """A file or folder of ``store``, a file system of fsspec, with those methods of ``pathlib.Path`` that
    finding and reading files takes. ``listed``: what its folder's listing says of it."""

    url: str
    store: AbstractFileSystem = field(repr=False, compare=False)
    listed: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return self.url

    @property
    def _path(self) -> str:
        return str(self.store._strip_protocol(self.url))

    @cached_property
    def _pure(self) -> PurePosixPath:
        web = urlsplit(self.url)
        return PurePosixPath(unquote(web.path) if web.scheme in ("http", "https") else self.url)

    @property
    def name(self) -> str:
        """Its last part."""
        return self._pure.name

    @property
    def suffix(self) -> str:
        """Its last suffix."""
        return self._pure.suffix

    @property
    def suffixes(self) -> list[str]:
        """All of them."""
        return self._pure.suffixes

    @property
    def stem(self) -> str:
        """Its name without the last suffix."""
        return self._pure.stem

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the folders that it is in, and its own."""
        return self._pure.parts

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """What the store says of it; ``FileNotFoundError`` if there is nothing."""
        # Web servers' listings are pages with links, which say nothing of sizes.
        if self.listed is not None and (self.listed["type"] != "file" or self.listed.get("size") is not None):
            return self.listed
        found: Mapping[str, Any] = self._patiently(lambda: self.store.info(self._path))
        return found

    def exists(self) -> bool:
        """Whether there is such a file or folder."""
        try:
            return bool(self.info)
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Whether it is a folder."""
        return self.exists() and self.info["type"] == "directory"

    def is_file(self) -> bool:
        """Whether it is a file."""
        return self.exists() and self.info["type"] == "file"

    @property
    def size(self) -> int:
        """In bytes; ``DataError`` if the store does not say it."""
        if (size := self.info.get("size")) is None:
            raise DataError(f"{self}: its server does not say how long it is; download it, and name the copy")
        return int(size)

    def iterdir(self) -> Iterator[RemotePath]:
        """What is in a folder."""
        own = self._path.rstrip("/")
        for entry in self._patiently(lambda: self.store.ls(self._path, detail=True)):
            if entry["name"].rstrip("/") != own:
                yield self._entry(entry)

    def glob(self) -> list[RemotePath]:
        """What it means as a pattern."""
        try:
            found = self._patiently(lambda: self.store.glob(self._path, detail=True))
        except FileNotFoundError as error:  # as HuggingFace's hub says of a whole data set, with the reason
            raise DataError(f"{self}: is not there ({shown(error, 200)})") from error
        return [self._entry(entry) for entry in found.values()]

    def _entry(self, info: Mapping[str, Any]) -> RemotePath:
        return RemotePath(str(self.store.unstrip_protocol(info["name"])), self.store, info)

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """It as a binary file, of which parts are fetched when they are read."""
        return io.BufferedReader(_Parts(self), AT_ONCE)

    def between(self, low: int, high: int) -> bytes:
        """Its bytes from ``low`` to ``high`` (excluded); ``DataError`` if they do not come."""
        if low >= high:
            return b""

        def fetch() -> bytes:
            data: bytes = self.store.cat_file(self._path, start=low, end=high, **self._unbuffered)
            if len(data) < high - low:
                raise OSError(f"{len(data):,} bytes came instead of {high - low:,}")
            return data

        try:
            data = self._patiently(fetch)
        except FileNotFoundError as error:
            raise DataError(f"{self}: is no longer there") from error
        if len(data) > high - low:
            raise DataError(f"{self}: its server sends no parts of files; download it, and name the copy")
        return data

    @property
    def _unbuffered(self) -> dict[str, str]:
        """What keeps a store that has buffered files alone from reading beyond the part that is asked for."""
        from fsspec import AbstractFileSystem

        own = getattr(self.store.cat_file, "__func__", None)
        return {"cache_type": "none"} if own is AbstractFileSystem.cat_file else {}

    def _patiently(self, request: Callable[[], T]) -> T:
        """What ``request`` gives at last. ``FileNotFoundError`` at once; ``DataError`` for another error that
        comes each time, be it of a type that only its store has."""
        waits = iter(WAITS)
        while True:
            try:
                return request()
            except Exception as error:
                fault = _fault(error)
                wait = None if isinstance(fault, FINAL) else next(waits, None)
                if isinstance(fault, FileNotFoundError):
                    raise
                if wait is None:
                    why = shown(str(fault) or type(fault).__name__, 200)
                    raise DataError(f"{self}: cannot be read ({why})") from error
                log.debug("%s: %s; asked again after %g s", self, fault, wait)
            time.sleep(wait)

    def identity(self) -> list[Any]:
        """Its address, its size and what tells this content from others, for JSON."""
        version = next((str(self.info[key]) for key in VERSIONS if self.info.get(key) is not None), "")
        return [self.url, self.size, version]


def _fault(error: BaseException) -> BaseException:
    """What went wrong; of a web server that is busy or does not answer, fsspec says that there is no file.
    Errors of HuggingFace's hub are of its own types, and have the server's answer."""
    if getattr(getattr(error, "response", None), "status_code", None) in GONE:
        return PermissionError(str(error).splitlines()[0])
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and type(cause).__module__.startswith("aiohttp"):
        return error if getattr(cause, "status", None) in GONE else cause or error
    return error


class _Parts(io.RawIOBase):
    """A remote file that is read in parts."""

    def __init__(self, path: RemotePath) -> None:
        self._remote, self._size, self._at = path, path.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._remote.between(self._at, min(self._at + len(buffer), self._size))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


AnyPath = Path | RemotePath


def is_elsewhere(path: object) -> bool:
    """Whether a path is an address, such as ``s3://bucket/clicks.csv``."""
    return re.match(r"[a-z][a-z0-9+.-]*://", str(path)) is not None


def whole_path(path: str | Path) -> str:
    """``path`` so that it means the same from every folder."""
    return str(path) if is_elsewhere(path) else str(Path(path).expanduser().absolute())


def located(path: str) -> AnyPath:
    """What ``path`` names: on this machine, or with ``s3://``, ``gs://``, ``hf://``, ``https://`` and others
    elsewhere. ``UserError`` where a library for it is missing, or does not take it."""
    if not is_elsewhere(path):
        return Path(path).expanduser()
    import fsspec.core

    kind = path.partition("://")[0]
    try:
        store, own = fsspec.core.url_to_fs(path)
    except ImportError as error:
        remedy = f"pip install 'recpipe[{EXTRAS[kind]}]'" if kind in EXTRAS else shown(error, 200)
        raise UserError(f"{path}: what reads {kind}:// is not installed: {remedy}") from error
    except Exception as error:  # of any type, for each library checks its own settings
        raise UserError(f"{path}: cannot be opened ({shown(error, 200)})") from error
    store.invalidate_cache()  # what an earlier run of this process has listed may have changed
    return RemotePath(str(store.unstrip_protocol(own)), store)


def size_of(path: AnyPath) -> int:
    """Bytes of a file."""
    return path.size if isinstance(path, RemotePath) else path.stat().st_size


def identity(path: AnyPath) -> list[Any]:
    """What changes when the content of a file does, for JSON."""
    if isinstance(path, RemotePath):
        return path.identity()
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


def opened(path: AnyPath, mapped: bool = False) -> pa.NativeFile:
    """A file for pyarrow; ``mapped`` into memory if it is on this machine."""
    import pyarrow as pa

    if isinstance(path, RemotePath):
        return pa.PythonFile(path.open(), "r")
    return pa.memory_map(os.fspath(path)) if mapped else pa.OSFile(os.fspath(path), "rb")
