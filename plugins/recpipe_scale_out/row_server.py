"""``ShardedRows``: a served package's rows at its shards, ``recpipe serve MAIN shards=HOST:PORT,...``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from recpipe_serve import RowServer
from recpipe_serve.config import ServeConfig
from recpipe_serve.errors import Refused

from recpipe.errors import UserError
from recpipe_scale_out.calls import ShardCalls, addresses
from recpipe_scale_out.dense import ShardedScorer
from recpipe_scale_out.following import FollowingScorer, ShardedVersions

if TYPE_CHECKING:
    from recpipe_serve.access.spans import Spans

log = logging.getLogger("recpipe")


class ShardedRows(RowServer):
    """Looks up a package's rows in shards, as ``config`` says. Nothing is kept here: each of several workers
    has its own connections."""

    sharded = True

    def __init__(self, config: ServeConfig) -> None:
        assert config.shards is not None
        hedge = None if config.shards_hedge_ms is None else config.shards_hedge_ms / 1e3
        self.config = config
        self.calls = ShardCalls(addresses(config.shards), config.shards_ms / 1e3, hedge)

    def scorer(self, package: Path) -> ShardedScorer:
        """See ``RowServer``."""
        try:
            made = ShardedScorer(package, self.calls, self.config.shards_wait)
            self._as_told(made)
        except Refused as fault:
            raise UserError(f"{package}: {fault}") from fault
        return made

    def _as_told(self, made: ShardedScorer, says: bool = True) -> None:
        """Begin with what alters scores, once the golden batch has been scored without."""
        made.stands_in, made.wire = self.config.shards_lost == "default_row", self.config.shards_wire
        if made.wire != "FP32" and says:
            said = made.golden_difference()
            log.info("sums are sent as %s: golden scores differ by up to %.1e", made.wire, said)

    def followed(self, package: Path, most: int, goes_back: bool) -> ShardedVersions:
        """See ``RowServer``."""
        if goes_back:
            raise UserError(
                "rollback=true and shards=: shards keep the latest versions alone; leave one of the two out"
            )
        try:
            made = ShardedVersions(package, most, False, self.calls, self.config.shards_wait)
            for number, scorer in enumerate(made.scorers):
                assert isinstance(scorer, FollowingScorer)
                self._as_told(scorer, number == 0 and scorer.at_shards)
        except Refused as fault:
            raise UserError(f"{package}: {fault}") from fault
        return made

    def trace(self, spans: Spans) -> None:
        """See ``RowServer``."""
        self.calls.spans = spans

    def counted(self) -> Mapping[str, float]:
        """Calls, failures and bytes since the start."""
        return {f"shards_{name}": float(value) for name, value in asdict(self.calls.counts).items()}

    def close(self) -> None:
        """Ask nothing more."""
        self.calls.close()
