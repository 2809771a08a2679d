"""A stream of files that appear in a folder, in the order of their names."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from recpipe.data.config import StreamConfig
from recpipe.data.files import natural_key
from recpipe.data.listing import format_by_name
from recpipe.data.records import Format, InputFile
from recpipe.data.remote import is_elsewhere
from recpipe.data.stream.chunks import POLL, Chunk, Position
from recpipe.errors import DataError

log = logging.getLogger(__name__)


class Folder:
    """Files of known formats whose names begin with no point or underscore, in natural order (part_2 before
    part_10). A file that is not settled is waited for, also if later ones are.

    Offsets are the rows of a file that were read.
    """

    in_turn = True

    def __init__(self, config: StreamConfig, columns: list[str]) -> None:
        """``columns``: which are read. ``DataError`` if there is no such folder."""
        self.path, self._settle = Path(str(config.path)).expanduser(), config.settle
        self._format, self._rules, self._columns = cast(Format | None, config.format), config.rules(), columns
        self.name = str(self.path)
        self.identity: dict[str, object] = {
            "source": "folder",
            "format": config.format,
            "rules": config.rules(),
        }
        if is_elsewhere(config.path):
            raise DataError(
                f"{config.path}: a stream reads a folder of this machine; mount it, or take a source with "
                "messages (data.source=kafka, redis or nats)"
            )
        if not self.path.is_dir():
            raise DataError(f"{self.path}: no such folder (data.path, seen from {Path.cwd()})")

    def chunks(self, position: Position) -> Iterator[Chunk | None]:
        """The rows of the files from ``position`` on; ``DataError`` for one that cannot be read."""
        arrivals = _Arrivals(self._settle)
        for name, rows in position.items():
            arrivals.passed.update(file.name for file in self._files() if _order(file) <= _order(Path(name)))
            arrivals.latest = self.path / name
            yield from self._rest(self.path / name, int(rows))
        while True:
            file = arrivals.next_of(self._files())
            if file is None:
                time.sleep(POLL)
                yield None
            elif file.stat().st_size:
                yield from self._rows(file, 0)

    def _files(self) -> list[Path]:
        entries = (file for file in self.path.iterdir() if file.name[0] not in "._" and file.is_file())
        found = [file for file in entries if self._format_of(file)]
        return sorted(found, key=_order)

    def _format_of(self, file: Path) -> Format | None:
        known = format_by_name(file)
        return known if self._format in (None, known) else None

    def _rest(self, file: Path, start: int) -> Iterator[Chunk]:
        """The rows of a file of which ``start`` were trained."""
        if not file.exists():
            log.warning("%s is not there any more: the rows after its first %s are not trained", file, start)
            return
        yield from self._rows(file, start)

    def _rows(self, path: Path, start: int) -> Iterator[Chunk]:
        """The rows of a file after the first ``start``."""
        kind = self._format_of(path)
        assert kind is not None, "others are left out"
        file, end = InputFile(path, kind, rules=self._rules), 0
        for block in file.blocks(self._columns):
            end = block.first_row - 1 + len(block.rows)
            first = max(block.first_row, start + 1)
            if first <= end:
                rows = block.rows.slice(first - block.first_row)
                yield Chunk(str(path), path.name, rows, range(first, end + 1), first, kind == "csv")
        if end < start:
            raise DataError(
                f"{path}: has {end:,} rows, and {start:,} of it were trained; put it back as it was: files "
                "of a stream do not change"
            )


class _Arrivals:
    """Which file comes next."""

    def __init__(self, settle: float) -> None:
        self._settle = settle
        self.passed: set[str] = set()
        """The names of the files that were read, or told to be too late."""
        self.latest: Path | None = None
        """The latest file that was read."""
        self._seen: dict[str, tuple[tuple[int, int], float]] = {}

    def next_of(self, files: list[Path]) -> Path | None:
        """The first of ``files``, in their order, that was not read, if it is settled."""
        for file in files:
            if file.name in self.passed:
                continue
            if self.latest is not None and _order(file) < _order(self.latest):
                self.passed.add(file.name)
                log.warning(
                    "%s came when %s had been read, and is not trained: a stream's files are read in the "
                    "order of their names; give it a later one",
                    *(file, self.latest.name),
                )
                continue
            if not self._is_settled(file):
                return None
            self.passed.add(file.name)
            self._seen.pop(file.name, None)
            self.latest = file
            return file
        return None

    def _is_settled(self, file: Path) -> bool:
        """Whether it has not changed for so long, by its time or, where clocks differ, since it was seen."""
        try:
            found = file.stat()
        except FileNotFoundError:  # renamed since it was listed
            return False
        if time.time() - found.st_mtime >= self._settle:
            return True
        state, now = (found.st_size, found.st_mtime_ns), time.monotonic()
        before, since = self._seen.get(file.name, (None, now))
        if before != state:
            since = now
        self._seen[file.name] = state, since
        return now - since >= self._settle


def _order(file: Path) -> tuple[list[tuple[bool, int, str]], str]:
    return natural_key(file), file.name
