"""An access log of JSON lines, written some tenths of a second after the answers."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from recpipe.errors import UserError, shown
from recpipe_serve.access.record import Record

log = logging.getLogger("recpipe")
EVERY = 0.2
"""Seconds from one time that lines are written to the next one."""
MOST = 100_000
"""Lines that wait to be written; what comes beyond them is counted and left out."""


class AccessLog:
    """Writes a line for each request to the file ``place``, or for ``-`` to standard output. A file that was
    moved away is begun anew, as tools that rotate logs do it. ``UserError`` if it cannot be written to."""

    def __init__(self, place: str) -> None:
        self._path = None if place == "-" else Path(place).expanduser()
        self._lines: list[str] = []
        self._lost = 0
        self._file: TextIO = sys.stdout
        try:
            self._reopen()
        except OSError as fault:
            raise UserError(
                f"access_log={shown(place)} cannot be written: {fault.strerror}; name a file in a "
                "directory that is there"
            ) from fault

    def saw(self, record: Record) -> None:
        """Note a request."""
        if len(self._lines) >= MOST:
            self._lost += 1
            return
        told = {
            "time": datetime.fromtimestamp(record.ended / 1e9, UTC).isoformat(timespec="milliseconds"),
            "protocol": record.protocol,
            "method": record.method,
            "path": record.path,
            "status": record.status,
            "ms": round(1e3 * record.seconds, 3),
            "received": record.received,
            "sent": record.sent,
            "address": record.address,
        }
        if record.trace is not None:
            told["trace"] = record.trace
        self._lines.append(json.dumps(told, ensure_ascii=False))

    async def keep_writing(self) -> None:
        """Write what is noted, again and again."""
        while True:
            await asyncio.sleep(EVERY)
            await asyncio.to_thread(self.write)

    def write(self) -> None:
        """Write what is noted."""
        lines, self._lines = self._lines, []
        lost, self._lost = self._lost, 0
        if lost:
            log.warning("%d lines of the access log are left out: it is written too slowly", lost)
        if not lines:
            return
        try:
            self._reopen()
            self._file.write("\n".join(lines) + "\n")
            self._file.flush()
        except OSError as fault:
            log.warning("%d lines of the access log are lost: %s", len(lines), fault.strerror)

    def _reopen(self) -> None:
        """Open the file if it is not the one that is there."""
        if self._path is None:
            return
        if self._file is not sys.stdout:
            if self._path.exists() and self._path.samefile(f"/dev/fd/{self._file.fileno()}"):
                return
            self._file.close()
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Write what is left."""
        self.write()
        if self._file is not sys.stdout:
            self._file.close()
