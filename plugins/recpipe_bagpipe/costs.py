"""What BagPipe costs and saves: rows read in bulk, for a window of batches ahead of training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from recpipe_perf_model import Facts, KeptLookups, Moved, Phase, Statement, Work

from recpipe.plugin import Bags, Placement, RowIds, RowSpace, distinct
from recpipe_bagpipe.policy import Lookahead, NoBulk
from recpipe_bagpipe.window import MOST, ROW_BYTES, Pace


def statement(facts: Facts, lookahead: int | None, *, slots: float, waiting: float) -> Statement:
    """``lookahead``: the batches of two groups, or None where the run decides. ``slots`` and ``waiting``: the
    shares of the budget that the slots have, and that batches and rows on their way may take.

    Rows that known batches need stay, then those looked up most often. Where too many lookups were read to
    try that on them, it is taken to miss what the better of lru and lfu misses. Reading ahead ends where a
    trial shows that batches are trained sooner without.
    """
    share = facts.share * (slots if facts.share < 1 else 1.0)
    both = zip(facts.cached("lru", share), facts.cached("lfu", share), strict=True)
    about = tuple(min(each, key=lambda m: m.read) for each in both)
    size = window(facts, about, share, waiting) if lookahead is None else max(1, lookahead // 2)

    def ahead(space: RowSpace) -> Replayed:
        kept = facts.groups[space.group].kept
        assert kept is not None, "replays have what was read"
        return Replayed(space, kept, size)

    if all(group.kept is not None for group in facts.groups):
        moved = facts.replayed(("bagpipe", size), ahead, "lfu", share).moved
    else:  # every row that is read gets a slot
        moved = tuple(Moved(read=m.read, evicted=m.written, placed=m.read, missed=m.missed) for m in about)
    rows = sum(m.read for m in moved)
    alone = Statement(
        why=f"batches read their {rows:,.0f} cold rows themselves, as with lru",
        phases=(Phase(moved=moved),),
    )
    if facts.trainers > 1 or not rows:
        return alone
    # A batch's rows are made distinct and put in order in the oracle's thread, which takes about as long as
    # planning it without a cache.
    works = tuple(
        Work(
            name=f"look ahead {number}",
            place="oracle",
            kind="plan nocache",
            at={"lookups": group.lookups, "missed": group.distinct, "slots": 0.0, "rows": float(group.rows)},
        )
        for number, group in enumerate(facts.groups)
    )
    if facts.store == "host" and not facts.emulation.active:
        return Statement(
            why=f"batches read their {rows:,.0f} cold rows from host memory; those needed soon stay",
            phases=(Phase(moved=moved),),
            works=works,
            instead=alone if lookahead is None else None,
        )
    memory = int(size * (3 * facts.batch_bytes + 2 * rows * 4 * max(group.width for group in facts.groups)))
    return Statement(
        why=(
            f"the {rows:,.0f} cold rows of a batch are read {size} batches at a time, before they are "
            "needed, and written back beside the reads"
        ),
        phases=(Phase(moved=moved),),
        works=works,
        ahead=2 * size,
        together=float(size),
        memory=max(0, memory - int((1 - slots) * facts.budget)),
        unsure="the window is as long as memory allows; where nothing is waited for it shrinks",
        instead=alone if lookahead is None else None,
    )


def window(facts: Facts, moved: tuple[Moved, ...], share: float, waiting: float) -> int:
    """The batches of a group that memory and slots allow, as ``Pace`` and ``Window`` decide."""
    sizes = [MOST]
    for group, each in zip(facts.groups, moved, strict=True):
        budget = waiting * facts.share * group.rows * group.record_bytes
        batch = facts.batch_bytes / 2 + ROW_BYTES * group.distinct
        sizes.append(int(budget // (3 * batch + 2 * each.read * (4 * group.width + 17) + 1)))
        fits = 1
        while fits < MOST and group.window(fits + 1) <= share * group.rows / 2:
            fits += 1
        sizes.append(fits)
    return max(1, min(sizes))


class Replayed(Lookahead):
    """The lookahead policy on ids that were read before, in groups of at most ``batches``, to see what it
    moves; nothing is read for it."""

    def __init__(self, space: RowSpace, kept: KeptLookups, batches: int) -> None:
        pace = Pace(batches, memory=0, record_bytes=0, waited=lambda: 0.0)
        super().__init__(space, _rows_of, NoBulk(), pace)
        # The policy asks nothing of batches but their lookups, so that these stand for them.
        source: Iterator[Any] = map(kept.bags, range(len(kept.batches)))
        self._replay = self.stream(source)

    def migrate(self, rows: RowIds) -> Placement:
        """Let the policy read the batch, which it is told now."""
        next(self._replay)
        return super().migrate(rows)


def _rows_of(bags: Bags) -> RowIds:
    return distinct(bags.indices)
