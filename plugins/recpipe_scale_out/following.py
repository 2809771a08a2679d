"""The main server of shards that follow deltas: ``recpipe serve MAIN shards=... follow=DIRECTORY``.

It takes a delta's dense part, and rows of tables that it has itself, once all shards have its rows: then the
scorer that waits, with this version, takes the place of the one that answers between two batches. Each
question says the version of its batch, so no answer mixes two.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from recpipe_serve.fresh.reading import ReadDelta
from recpipe_serve.fresh.versions import Changing, Step, Versions

from recpipe.answers.delta import Version
from recpipe.answers.manifest import SHARDS
from recpipe_scale_out.calls import ShardCalls
from recpipe_scale_out.dense import ShardedScorer
from recpipe_scale_out.fresh import Replaceable
from recpipe_scale_out.versions import version_of

log = logging.getLogger("recpipe")
MOST_SECONDS = 5.0
"""That the thread that takes deltas waits for shards; then it looks for another one in its turn."""
GONE = "the shards have newer rows, and these no more"
"""Why a version does not answer."""


class FollowingScorer(ShardedScorer, Changing):
    """One of the two scorers."""

    keep = Replaceable
    at_shards = True
    """Whether the shards have the rows of the package itself."""

    def __init__(self, directory: Path, calls: ShardCalls, wait: float) -> None:
        super().__init__(directory, calls, wait)
        self.begin()

    def find_shards(self) -> None:
        """``UserError`` unless there are shards of this cut; they may have come to a later version."""
        self.at_shards = self.calls.reached(self.models, self.version, self.wait)

    def check_golden(self) -> float:
        """See ``Scorer``; scores are not compared once the shards have no rows any more of the package
        itself."""
        if self.at_shards:
            return super().check_golden()
        log.info("%s: golden scores are not compared, since the shards have later rows", self.directory)
        return 0.0

    def rows_of_table(self, name: str) -> torch.Tensor | None:
        """See ``Changing``; None for tables at the shards."""
        own = self.here.get(len(self.models))
        if own is None or name not in own.held:
            return None
        assert isinstance(own.kept, Replaceable)
        return own.kept.rows_of(name)

    def take(self, step: Step) -> None:
        """See ``Changing``."""
        super().take(step)
        for two in self.in_two.values() if step.dense else ():
            two.use(self.parameters)
        for name, (ids, rows) in step.rows.items():
            if self.hot is not None and name in self.hot.held:
                places = torch.from_numpy(self.hot.places(name, ids.numpy()))
                assert isinstance(self.hot.kept, Replaceable)
                self.hot.kept.replace(name, places[places >= 0], rows[places >= 0])


@dataclass
class ShardedVersions(Versions):
    """The versions of a cut, whose shards are asked by ``calls``; ``wait``: seconds for these."""

    calls: ShardCalls | None = None
    wait: float = 0.0

    def made_scorers(self) -> Sequence[Changing]:
        """Two, with one set of connections."""
        assert self.calls is not None
        return [FollowingScorer(self.directory, self.calls, self.wait) for _ in range(2)]

    def number(self, of: Version) -> str:
        """The shards' version of what the package has come to."""
        return version_of(of, self.answering.manifest[SHARDS]["plan"])

    def add(self, delta: ReadDelta) -> None:
        """See ``Versions``; ``UserError``, too, if the shards have not come to this version."""
        assert self.calls is not None
        self.kept[-1].of.require_next(delta.of)
        scorer = self.waiting
        assert isinstance(scorer, FollowingScorer)
        wanted = self.number(delta.of.version)
        there = self.calls.reached(scorer.models, wanted, min(self.wait, MOST_SECONDS))
        super().add(delta)
        if not there:
            self.kept[-1].refused = GONE

    def move(self, place: int) -> None:
        """See ``Versions``."""
        super().move(place)
        scorer = self.waiting
        assert isinstance(scorer, FollowingScorer)
        scorer.version = self.number(self.kept[place].of)
