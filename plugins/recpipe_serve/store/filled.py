"""Fills the rows of requests with values from a store, within a time, from a cache where it has them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeVar

from recpipe.errors import shown
from recpipe_serve.errors import Refused, bad
from recpipe_serve.store.sources import FeatureSource, Key, StoreFault, Values

log = logging.getLogger("recpipe")
RESULTS = ("cached", "found", "unknown", "late", "failed", "refused")
CALLS = 64
"""Calls to the store at a time: of a request that would be another one the values are missing, at once."""
QUIET = 10.0
"""Seconds between two lines of the log about faults of the store."""


Row = Mapping[str, Any]
Inputs = TypeVar("Inputs")


class Filled(NamedTuple, Generic[Inputs]):
    """What was made of rows with what the store has of them; ``lacking``: how many keys have no values: it
    could not be asked for them in time, has none, or has some that are refused."""

    inputs: Inputs
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

    async def fill(
        self, rows: Sequence[Row], columns: Iterable[str], encode: Callable[[list[Row]], Inputs]
    ) -> Filled[Inputs]:
        """What ``encode`` makes of ``rows`` with all of these ``columns``: what a row has itself, what the
        store has of its key, and None, which is a missing value. ``Refused`` for a key that is none, and what
        ``encode`` says of the rows' own values; values of the store that it refuses are left out."""
        base = dict.fromkeys(columns)
        keys = list(
            dict.fromkeys(
                row[self.key] for row in rows if row.get(self.key) is not None and _is(row[self.key])
            )
        )
        found = await self._get(keys)
        try:
            inputs = encode(self._beside(rows, base, found))
        except Refused:
            inputs = encode(self._beside(rows, base, {}))  # the fault is not of the rows themselves
            found = self._usable(rows, base, found, encode)
            with suppress(Refused):  # values of one key may be of other types than those of another one
                inputs = encode(self._beside(rows, base, found))
        return Filled(inputs, sum(found.get(key) is None for key in keys))

    def _beside(
        self, rows: Sequence[Row], base: Mapping[str, None], found: Mapping[Any, Values | None]
    ) -> list[Row]:
        """``rows``, with what is ``found`` of their keys in the place of what they leave out."""
        made: list[Row] = []
        for row in rows:
            own = found.get(row.get(self.key)) or {}
            made.append({**base, **{name: value for name, value in own.items() if name in base}, **row})
        return made

    def _usable(
        self,
        rows: Sequence[Row],
        base: Mapping[str, None],
        found: Mapping[Any, Values | None],
        encode: Callable[[list[Row]], object],
    ) -> dict[Any, Values | None]:
        """What is ``found`` of keys whose values ``encode`` takes. The others have none for as long as
        answers are kept."""
        usable: dict[Any, Values | None] = {}
        for key, own in found.items():
            row = next(row for row in rows if row.get(self.key) == key)
            try:
                encode(self._beside([row], base, {key: own}))
                usable[key] = own
            except Refused as fault:
                self.results["refused"] += 1
                self._kept[key] = monotonic(), None
                self._warn(f"its values of {shown(key)} are refused ({fault})")
        return usable

    def _warn(self, what: str) -> None:
        """Say what is wrong with the store, now and then."""
        if monotonic() > self._said + QUIET:
            self._said = monotonic()
            log.warning("the feature store: %s; defaults stand for its values", what)

    async def _get(self, keys: Sequence[Key]) -> dict[Any, Values | None]:
        """The values of these keys, as far as they come in time."""
        now = monotonic()
        cached = {key for key in keys if key in self._kept and now < self._kept[key][0] + self.fresh}
        wanted = [key for key in keys if key not in cached]
        self.results["cached"] += len(cached)
        anew = [key for key in wanted if key not in self._asked]
        if anew and len(self._tasks) < CALLS:
            asking = asyncio.get_running_loop().create_task(self._ask(anew))
            self._tasks.add(asking)
            asking.add_done_callback(self._tasks.discard)
            self._asked |= dict.fromkeys(anew, asking)
        elif anew:
            self._warn(f"{CALLS} calls wait for its answers already")
        asked = {self._asked[key] for key in wanted if key in self._asked}
        late: set[Key] = set()
        if asked:
            _, running = await asyncio.wait(asked, timeout=self.seconds)
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
            values = [fault for _ in keys]
        finally:
            for key in keys:
                del self._asked[key]
        now = monotonic()
        for key, own in zip(keys, values, strict=True):
            if isinstance(own, StoreFault):
                self._kept.pop(key, None)  # what was known of it is old
                self._warn(str(own))
                continue
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
