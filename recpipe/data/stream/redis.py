"""A stream of the entries of a Redis stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from recpipe.data.config import StreamConfig
from recpipe.data.stream.chunks import POLL, Chunk, Position
from recpipe.data.stream.messages import Message, chunks_of
from recpipe.errors import DataError, UserError, shown

AT_ONCE = 10_000
"""Most entries that are taken at a time."""


Entries = Sequence[tuple[bytes, dict[bytes, bytes]]]


class _Place(NamedTuple):
    """Behind the entry ``id``, before which, and with which, ``entries`` were ever added."""

    id: str
    entries: int

    def __str__(self) -> str:
        return f"{self.id} {self.entries}"

    @classmethod
    def read(cls, offset: str) -> _Place:
        """The inverse of ``str``."""
        identity, _, entries = offset.partition(" ")
        return cls(identity, int(entries))


class Redis:
    """The stream at a key, from its first entry on. An entry has one field, whose value is the record.

    An offset is an entry's id and its number among all that were ever added, so that entries that were
    trimmed before they were trained are noticed (Redis 7 counts them). No group of consumers is used, and
    nothing is acknowledged.
    """

    in_turn = False

    def __init__(self, config: StreamConfig, columns: list[str]) -> None:
        """``UserError`` if the client's package is not installed."""
        try:
            import redis
        except ImportError as fault:
            raise UserError(
                "data.source=redis needs the package redis: pip install 'recpipe[redis]'"
            ) from fault
        self._client = redis
        self._key, self._servers, self._settings = str(config.topic), str(config.servers), config.client
        self._columns, self._skip = columns, config.on_bad_row == "skip"
        self.name = f"stream {self._key} at {self._servers.rpartition('@')[2]}"  # without a password
        self.identity: dict[str, object] = {"source": "redis", "topic": self._key}

    def chunks(self, position: Position) -> Iterator[Chunk | None]:
        """Its entries from ``position`` on; ``DataError`` if they are not there any more, or no server is."""
        try:
            with closing(self._connected()) as server:
                place = _Place.read(str(position[self._key])) if self._key in position else None
                while True:
                    place, entries = self._next(server, place)
                    if not entries:
                        time.sleep(POLL)
                        yield None
                        continue
                    messages = self._messages(entries, place.entries)
                    place = _Place.read(str(messages[-1].after))
                    yield from chunks_of(messages, self._key, self._columns, self._skip)
        except self._client.RedisError as fault:
            raise DataError(f"{self.name}: {shown(fault, 200)}") from fault

    def _connected(self) -> Any:
        try:
            server = self._client.Redis.from_url(self._servers, **{"protocol": 2, **self._settings})
            server.ping()
        except (ValueError, TypeError) as fault:
            raise UserError(f"data.servers or data.client: {shown(fault, 200)}") from fault
        return server

    def _next(self, server: Any, place: _Place | None) -> tuple[_Place, Entries]:
        """The entries behind ``place``, or from the first one on, and the place before them. ``DataError`` if
        some are not there any more; these are counted in the same transaction, so that none is trimmed
        unseen."""
        both = server.pipeline(transaction=True)
        both.xinfo_stream(self._key)
        both.xread({self._key: "0-0" if place is None else place.id}, AT_ONCE)
        known, found = both.execute(raise_on_error=False)
        if isinstance(found, Exception):
            raise found
        if isinstance(known, Exception):  # there is no such key yet
            return place or _Place("0-0", 0), ()
        if "entries-added" not in known:
            raise DataError(f"{self.name}: is older than Redis 7, which counts the entries that are trimmed")
        gone = int(known["entries-added"]) - int(known["length"])
        place = place or _Place("0-0", gone)
        if gone > place.entries:
            raise DataError(
                f"{self.name}: {gone - place.entries:,} entries behind {place.id} were trimmed before they "
                "were trained; let it grow longer (XADD MAXLEN), and start anew"
            )
        return place, found[0][1] if found else ()

    def _messages(self, entries: Entries, before: int) -> list[Message]:
        found = []
        for number, (identity, fields) in enumerate(entries, before + 1):
            own = identity.decode()
            content = next(iter(fields.values())) if len(fields) == 1 else None
            found.append(Message(content, str(_Place(own, number)), f"{self._key}, entry {own}"))
        return found
