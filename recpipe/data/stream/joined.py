"""A stream whose records have the columns of side tables beside their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recpipe.data.derivations import Join
from recpipe.data.joins import Beside
from recpipe.data.stream.chunks import Chunk, Position, StreamSource


class Joined:
    """The records of ``source`` with what is ``beside`` them by ``joins``.

    Side tables are read once. A run that goes on reads them again, and may find newer ones.
    """

    def __init__(self, source: StreamSource, beside: Beside, joins: Sequence[Join]) -> None:
        self._source, self._beside = source, beside
        self.name, self.in_turn = source.name, source.in_turn
        self.identity = {**source.identity, "joins": joins}

    def chunks(self, position: Position) -> Iterator[Chunk | None]:
        """Those of the source."""
        for chunk in self._source.chunks(position):
            yield None if chunk is None else chunk._replace(rows=self._beside(chunk.rows))
