"""Row servers: keep the rows of a served package, ``recpipe serve PACKAGE +plugin=NAME``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from recpipe.errors import UserError

if TYPE_CHECKING:
    from recpipe.answers.score import Scorer
    from recpipe_serve.fresh.versions import Versions


class RowServer(ABC):
    """A plugin that also derives from this class decides where a served package's rows are. It has no part
    in training: its ``contribute`` should refuse with a ``PluginError`` that says so."""

    recpipe_command = "serve"
    sharded = False
    """Whether it serves packages whose tables are held by shards, and no others."""

    @abstractmethod
    def scorer(self, package: Path) -> Scorer:
        """What scores the package, with the bits of ``Scorer`` itself; one thread calls it. It may have
        ``ahead(calls)``, which another thread calls with what waiting requests look up, to read rows.

        Called again, in another thread, for a newer package while the earlier one's scorer is in use: that
        one may then find rows of either package, but each row as a whole. ``UserError`` if the rows cannot be
        kept as asked for."""

    def followed(self, package: Path, most: int, goes_back: bool) -> Versions:
        """The package and what deltas make of it, of which at most so many versions are kept; once, in the
        place of ``scorer``. ``UserError`` if it keeps rows of one version alone, as one that does not have
        this method does."""
        raise UserError(
            f"follow= and {type(self).__name__}, which keeps rows of one version: they would be mixed; leave "
            "one of the two out"
        )

    @abstractmethod
    def counted(self) -> Mapping[str, float]:
        """Totals since the scorer was made, by name, for ``/metrics``."""

    @abstractmethod
    def close(self) -> None:
        """Release what the scorer holds; nothing is scored any more."""
