"""Fills the rows of requests with values from a store, within a time, from a cache where it has them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

from recpipe_serve.errors import bad
from recpipe_serve.store.sources import FeatureSource, Key, StoreFault, Values

log = logging.getLogger("recpipe")
RESULTS = ("cached", "found", "unknown", "late", "failed")
QUIET = 10.0
"""Seconds between two lines of the log about faults of the store."""


class Filled(NamedTuple):
    """Rows with what the store has of them; ``lacking``: how many keys it could not be asked for in time, or
    has not."""

    rows: list[dict[str, Any]]
    lacking: int


@dataclass
class FeatureStore:
    """``source`` asked for what rows leave out, by their column ``key``.

    ``seconds``: how long a request waits for it; what comes later is for the next ones. ``fresh``: seconds
    that an answer is kept, of at most ``most`` keys. Keys that it does not have are kept as well.
    """

    source: FeatureSource
    key: str
    seconds: float
    fresh: float
    most: int

    def __post_init__(self) -> None:
        self._kept: OrderedDict[Key, tuple[float, Values | None]] = OrderedDict()
        self._asked: dict[Key, asyncio.Future[None]] = {}
        """Keys that are being asked for, so that nobody asks twice."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.results: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))
        """Keys of requests, by what became of them."""
        self._said = -QUIET

    async def fill(self, rows: Sequence[Mapping[str, Any]], columns: Iterable[str]) -> Filled:
        """``rows`` with all of these ``columns``: what a row has itself, what the store has of its key, and
        None, which is a missing value. ``Refused`` for a key that is none."""
        base = dict.fromkeys(columns)
        keys = list(
            dict.fromkeys(
                row[self.key] for row in rows if row.get(self.key) is not None and _is(row[self.key])
            )
        )
        found = await self._get(keys)
        made = []
        for row in rows:
            own = found.get(row.get(self.key)) or {}
            made.append({**base, **{name: value for name, value in own.items() if name in base}, **row})
        return Filled(made, sum(found.get(key) is None for key in keys))

    async def _get(self, keys: Sequence[Key]) -> dict[Any, Values | None]:
        """The values of these keys, as far as they come in time."""
        now = monotonic()
        cached = {key for key in keys if key in self._kept and now < self._kept[key][0] + self.fresh}
        wanted = [key for key in keys if key not in cached]
        self.results["cached"] += len(cached)
        anew = [key for key in wanted if key not in self._asked]
        if anew:
            asking = asyncio.get_running_loop().create_task(self._ask(anew))
            self._tasks.add(asking)
            asking.add_done_callback(self._tasks.discard)
            self._asked |= dict.fromkeys(anew, asking)
        late: set[Key] = set()
        if wanted:
            _, running = await asyncio.wait({self._asked[key] for key in wanted}, timeout=self.seconds)
            late = {key for key in wanted if self._asked.get(key) in running}
            self.results["late"] += len(late)
        found = {key: self._kept[key][1] for key in keys if key in self._kept and key not in late}
        self.results["found"] += sum(found.get(key) is not None for key in wanted)
        self.results["unknown"] += sum(key in found and found[key] is None for key in wanted)
        self.results["failed"] += sum(key not in found and key not in late for key in wanted)
        return found

    async def _ask(self, keys: Sequence[Key]) -> None:
        """Have the values of these keys in the cache."""
        try:
            values = await self.source.get(keys)
        except StoreFault as fault:
            for key in keys:  # what was known of them is old
                self._kept.pop(key, None)
            if monotonic() > self._said + QUIET:
                self._said = monotonic()
                log.warning(
                    "the feature store does not answer, so that defaults stand for its values: %s", fault
                )
            return
        finally:
            for key in keys:
                del self._asked[key]
        now = monotonic()
        for key, own in zip(keys, values, strict=True):
            self._kept[key] = now, own
            self._kept.move_to_end(key)
        while len(self._kept) > self.most:
            self._kept.popitem(last=False)

    def counted(self) -> dict[str, float]:
        """Keys of requests by what became of them, for ``/metrics``."""
        return {f"store_{name}": float(count) for name, count in self.results.items()}

    async def close(self) -> None:
        """Nothing is asked any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.source.close()


def _is(key: object) -> bool:
    """Whether a value is a key; ``Refused`` if not."""
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise bad("the key of the feature store is neither text nor a whole number")
    return True
