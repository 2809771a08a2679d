"""Row servers: keep the rows of a served package, ``recpipe serve PACKAGE +plugin=NAME``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from recpipe.errors import UserError

if TYPE_CHECKING:
    import torch

    from recpipe.answers.score import Call, Lookup, Scorer
    from recpipe_serve.access.spans import Spans
    from recpipe_serve.fresh.versions import Versions


class LooksUp(Protocol):
    """Looks up rows of tables, as a ``Scorer`` does."""

    def lookup(self, found: dict[str, Any], features: list[str]) -> Lookup:
        """A lookup by its description in a manifest, whose ids are those of these ``features``."""

    def pooled(self, calls: list[Call]) -> list[torch.Tensor]:
        """What the lookups find, float32 [samples, W] each, or a row for each id, float32 [N, D]."""


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

    def trace(self, spans: Spans) -> None:  # noqa: B027  who calls nobody has nothing to tell
        """Tell the calls of other processes as ``spans`` of the requests that they are for."""

    def alone(self, directory: Path, tables: dict[str, Any]) -> LooksUp:
        """What looks up ``tables`` of a manifest, whose files are in ``directory``, with the bits of all rows
        in memory, and scores nothing: for a shard (``recpipe serve SHARD``). Once, in the place of
        ``scorer``; one thread calls it. ``UserError`` if they cannot be kept so."""
        raise UserError(f"{type(self).__name__} keeps the rows of whole packages, and this is a shard")

    @abstractmethod
    def counted(self) -> Mapping[str, float]:
        """Totals since the scorer was made, by name, for ``/metrics``."""

    @abstractmethod
    def close(self) -> None:
        """Release what the scorer holds; nothing is scored any more."""
