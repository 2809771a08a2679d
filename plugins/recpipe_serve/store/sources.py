"""Where values of features are kept: by a key, the values of columns."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recpipe.errors import UserError, shown

log = logging.getLogger("recpipe")
AGAIN = 5.0
"""Seconds after which a file that could not be read is tried again."""
Key = str | int
Values = Mapping[str, Any]


PATIENCE = 5.0
"""Seconds after which a Redis server that says nothing is taken for gone. Requests wait for ``store_ms``."""
CONNECTIONS = 64
"""Most connections to a Redis server."""


class StoreFault(Exception):
    """The store cannot say, at all or of one key; the message is for the log."""


class FeatureSource(ABC):
    """Values by key. All calls come from the event loop's thread."""

    @abstractmethod
    async def get(self, keys: Sequence[Key]) -> list[Values | StoreFault | None]:
        """The values of each key; None where there are none, a fault where what is there cannot be read.
        ``StoreFault`` if nothing can be said of any."""

    @abstractmethod
    async def close(self) -> None:
        """Nothing is asked any more."""


class RedisSource(FeatureSource):
    """JSON objects by ``prefix`` and key, as ``SET user:17 '{"age": 31}'`` writes them."""

    def __init__(self, url: str, prefix: str) -> None:
        try:
            from redis import asyncio as client
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError as fault:
            raise UserError(
                "store=redis:// needs the package redis: pip install 'recpipe[serve,redis]'"
            ) from fault
        from redis.exceptions import RedisError

        self._faults: tuple[type[Exception], ...] = (RedisError, OSError)
        try:
            # It connects when it is first asked. One try more is for connections of a server that was
            # started anew.
            self._client: Any = client.from_url(
                url,
                socket_timeout=PATIENCE,
                socket_connect_timeout=PATIENCE,
                max_connections=CONNECTIONS,
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError as fault:
            raise UserError(f"store={shown(url.rpartition('@')[2])} is no address: {fault}") from fault
        self._prefix = prefix

    async def get(self, keys: Sequence[Key]) -> list[Values | StoreFault | None]:
        """See ``FeatureSource``: one call for all."""
        # JSON may have halves of characters, which UTF-8 has not.
        named = [f"{self._prefix}{key}".encode(errors="surrogatepass") for key in keys]
        try:
            texts = await self._client.mget(named)
        except self._faults as fault:
            raise StoreFault(str(fault) or type(fault).__name__) from fault
        return [
            None if text is None else self._read(key, text) for key, text in zip(keys, texts, strict=True)
        ]

    def _read(self, key: Key, text: bytes) -> Values | StoreFault:
        named = shown(f"{self._prefix}{key}")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as fault:
            return StoreFault(f"{named} is no JSON ({shown(fault, 100)})")
        return found if isinstance(found, dict) else StoreFault(f"{named} is no JSON object")

    async def close(self) -> None:
        """See ``FeatureSource``."""
        await self._client.aclose()


class ParquetSource(FeatureSource):
    """A row for each key in the file ``path``, by its column ``key``, all in memory. A file that is replaced
    is read anew. ``UserError`` if it cannot be used at first."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._seen: os.stat_result | None = None
        self._reading: asyncio.Task[None] | None = None
        try:
            self._read()
        except StoreFault as fault:
            raise UserError(str(fault)) from fault

    def _read(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            seen = self._path.stat()
            table = pq.read_table(self._path)
        except (OSError, pa.ArrowException) as fault:
            raise StoreFault(f"store={self._path} cannot be read: {shown(fault, 200)}") from fault
        if self._key not in table.column_names:
            there = ", ".join(table.column_names[:20])
            raise StoreFault(f"store={self._path} has no column store_key={shown(self._key)}; it has {there}")
        keys = table[self._key].to_pylist()
        places = {key: place for place, key in enumerate(keys)}
        if len(places) < len(keys):
            raise StoreFault(f"store={self._path}: {len(keys) - len(places)} rows have a key of another row")
        self._rows, self._places, self._seen = table.drop([self._key]), places, seen

    def _replaced(self) -> bool:
        try:
            now = self._path.stat()
        except OSError:
            return False  # it is being replaced
        then = self._seen
        return then is None or (now.st_ino, now.st_mtime_ns) != (then.st_ino, then.st_mtime_ns)

    async def _read_anew(self) -> None:
        try:
            await asyncio.to_thread(self._read)
        except StoreFault as fault:
            log.warning("%s; what was read before still answers", fault)
            await asyncio.sleep(AGAIN)
        finally:
            self._reading = None

    async def get(self, keys: Sequence[Key]) -> list[Values | StoreFault | None]:
        """See ``FeatureSource``: what was read answers until the new file is read."""
        if self._reading is None and self._replaced():
            self._reading = asyncio.create_task(self._read_anew())
        rows, places = self._rows, [self._places.get(key) for key in keys]
        there = iter(rows.take([place for place in places if place is not None]).to_pylist())
        return [None if place is None else next(there) for place in places]

    async def close(self) -> None:
        """See ``FeatureSource``."""
        if self._reading is not None:
            self._reading.cancel()


def opened(place: str, key: str, prefix: str) -> FeatureSource:
    """What is at ``place``: the address of a Redis server, or a parquet file. ``UserError`` if it cannot be
    used."""
    if "://" in place:
        return RedisSource(place, prefix)
    return ParquetSource(Path(place).expanduser(), key)
