"""Where answers are kept, and which one gives way when there is no room: a key is a request's approximate
key, an entry what the model gave for the request that was scored last under it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from recpipe.plugin import CachePolicy, PluginError, RowSpace
from recpipe_answer_cache.errors import Floats, Sizes

Key = bytes
ROWS_FOR_A_SLOT = 16
"""Keys that a ``CachePolicy`` can tell apart, for each entry that is kept."""


@dataclass(slots=True)
class Entry:
    """An answer that is kept."""

    scores: Floats
    """What the model gave, float32 [N] or [N, T]."""
    since: float
    """When, in seconds."""
    size: Sizes | None = None
    """The mean size of its predictions, by output."""
    hits: int = 0
    """Since the answer came, or since one was found to be wrong."""
    due: float = 1.0
    """The power of beta from which on a hit is inferred again."""
    looked: int = 0
    """The hit that was inferred again last."""
    version: int = 0
    """Of the package that gave the answer."""

    def is_due(self, beta: float) -> bool:
        """Whether this hit, which is counted already, is one to infer again; the next such hit is then put
        off to the next power of ``beta``, as if the answer will be found right. A smaller beta than before
        counts from the last such hit on."""
        if self.hits < min(self.due, max(1.0, self.looked * beta)):
            return False
        self.looked = self.hits
        while beta > 1 and self.due <= self.hits:
            self.due *= beta
        return True

    def refreshed(self, newer: Entry, wrong: bool) -> None:
        """Take a newer answer; one that was ``wrong`` is looked after closely again."""
        self.scores, self.since, self.size = newer.scores, newer.since, newer.size
        self.version = newer.version
        if wrong:
            self.hits, self.due, self.looked = 0, 1.0, 0


class Entries(ABC):
    """Entries by their keys, at most ``capacity`` of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evicted = 0

    @abstractmethod
    def find(self, key: Key) -> Entry | None:
        """The entry of a key that is asked for now; None if there is none. Each request asks once."""

    @abstractmethod
    def put(self, key: Key, entry: Entry) -> None:
        """Keep the entry of a key that was asked for and not found, if it is worth the room."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all entries."""

    @abstractmethod
    def __len__(self) -> int: ...


class Lru(Entries):
    """The one that was asked for longest ago gives way."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._kept: OrderedDict[Key, Entry] = OrderedDict()

    def find(self, key: Key) -> Entry | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: Key, entry: Entry) -> None:
        if len(self._kept) >= self.capacity and key not in self._kept:
            self._kept.popitem(last=False)
            self.evicted += 1
        self._kept[key] = entry

    def clear(self) -> None:
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


class Lfu(Entries):
    """The one that was asked for least often since it came gives way, of equal ones the oldest."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._kept: dict[Key, tuple[Entry, int]] = {}
        self._of_count: dict[int, OrderedDict[Key, None]] = {}
        self._least = 1

    def find(self, key: Key) -> Entry | None:
        found = self._kept.get(key)
        if found is None:
            return None
        entry, count = found
        self._kept[key] = entry, count + 1
        own = self._of_count[count]
        del own[key]
        if not own:
            del self._of_count[count]
            if self._least == count:
                self._least = count + 1
        self._of_count.setdefault(count + 1, OrderedDict())[key] = None
        return entry

    def put(self, key: Key, entry: Entry) -> None:
        before = self._kept.get(key)
        if before is not None:
            self._kept[key] = entry, before[1]
            return
        if len(self._kept) >= self.capacity:
            own = self._of_count[self._least]
            victim, _ = own.popitem(last=False)
            if not own:
                del self._of_count[self._least]
            del self._kept[victim]
            self.evicted += 1
        self._kept[key] = entry, 1
        self._of_count.setdefault(1, OrderedDict())[key] = None
        self._least = 1

    def clear(self) -> None:
        self._kept.clear()
        self._of_count.clear()

    def __len__(self) -> int:
        return len(self._kept)


class Popular(Entries):
    """The ideal cache of the paper: of a trace that is known beforehand, the keys that are asked for most
    often are kept for good."""

    def __init__(self, capacity: int, keys: Sequence[Key]) -> None:
        super().__init__(capacity)
        self._chosen = {key for key, _ in Counter(keys).most_common(capacity)}
        self._kept: dict[Key, Entry] = {}

    def find(self, key: Key) -> Entry | None:
        return self._kept.get(key)

    def put(self, key: Key, entry: Entry) -> None:
        if key in self._chosen:
            self._kept[key] = entry

    def clear(self) -> None:
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


class Clairvoyant(Entries):
    """The bound of all policies (Belady's): of a trace that is known beforehand, what is asked for latest
    gives way, the new one included. Requests must come as in ``keys``, one ``find`` for each."""

    def __init__(self, capacity: int, keys: Sequence[Key]) -> None:
        super().__init__(capacity)
        never, last = len(keys), dict[Key, int]()
        self._next = [0] * never
        for at in range(never - 1, -1, -1):
            self._next[at] = last.get(keys[at], never)
            last[keys[at]] = at
        self._never, self._at = never, -1
        self._kept: dict[Key, tuple[Entry, int]] = {}
        self._latest: list[tuple[int, Key]] = []
        """A heap of the next uses, the latest first; some are out of date."""

    def find(self, key: Key) -> Entry | None:
        self._at += 1
        found = self._kept.get(key)
        if found is None:
            return None
        self._keep(key, found[0])
        return found[0]

    def put(self, key: Key, entry: Entry) -> None:
        if key not in self._kept and len(self._kept) >= self.capacity:
            while True:
                use, victim = self._latest[0]
                if victim in self._kept and self._kept[victim][1] == -use:
                    break
                heappop(self._latest)
            if self._next[self._at] >= -use:
                return
            heappop(self._latest)
            del self._kept[victim]
            self.evicted += 1
        self._keep(key, entry)

    def _keep(self, key: Key, entry: Entry) -> None:
        use = self._next[self._at]
        self._kept[key] = entry, use
        heappush(self._latest, (-use, key))
        if len(self._latest) > 8 * self.capacity + 64:
            self._latest = [(-use, key) for key, (_, use) in self._kept.items()]
            heapify(self._latest)

    def clear(self) -> None:
        self._kept.clear()
        self._latest.clear()

    def __len__(self) -> int:
        return len(self._kept)


class ByCachePolicy(Entries):
    """A policy that was written for rows of tables decides: a key is a row, and each request a batch of one.

    Rows are given to keys as they come. There are ``ROWS_FOR_A_SLOT`` for each entry; then the row that was
    given out longest ago and has no entry is another key's, with what the policy has counted of it.
    """

    def __init__(self, capacity: int, make: Callable[[RowSpace], CachePolicy]) -> None:
        super().__init__(capacity)
        self._make = make
        self.clear()

    def clear(self) -> None:
        rows = ROWS_FOR_A_SLOT * self.capacity
        self._space = RowSpace(np.array([0, rows]), self.capacity)
        self._policy = self._make(self._space)
        self._row_of: OrderedDict[Key, int] = OrderedDict()
        self._fresh = iter(range(rows))
        self._entries: dict[int, Entry] = {}
        self._asked: tuple[Key, int] | None = None

    def find(self, key: Key) -> Entry | None:
        row = self._row(key)
        rows = np.array([row])
        migrated = self._policy.migrate(rows)
        self._carry_out(migrated.slots, migrated.rows, migrated.freed)
        slots = self._space.residents.slot_of(rows)
        self._asked = key, row
        there = row in self._entries and slots[0] >= 0
        hits, misses = (slots, rows[:0]) if slots[0] >= 0 else (slots[:0], rows)
        placed = self._policy.admit(hits, misses, rows)
        self._carry_out(placed.slots, placed.rows, placed.freed)
        return self._entries[row] if there else None

    def put(self, key: Key, entry: Entry) -> None:
        row = self._row(key)
        if self._space.residents.slot_of(np.array([row]))[0] >= 0:
            self._entries[row] = entry

    def _carry_out(self, slots: NDArray[np.int32], rows: NDArray[np.int64], freed: NDArray[np.int32]) -> None:
        for left in (self._space.residents.empty(freed), self._space.residents.put(slots, rows)):
            for row in left[left >= 0].tolist():
                self.evicted += self._entries.pop(row, None) is not None

    def _row(self, key: Key) -> int:
        row = self._row_of.get(key)
        if row is None:
            row = next(self._fresh, None)
            if row is None:
                oldest = next(key for key, row in self._row_of.items() if row not in self._entries)
                row = self._row_of.pop(oldest)
            self._row_of[key] = row
        return row

    def __len__(self) -> int:
        return len(self._entries)


def entries_of(policy: str, capacity: int) -> Entries:
    """The entries that ``policy`` (``CacheConfig.policy``) looks after; ``PluginError`` for one that is
    none."""
    if policy in ("lru", "lfu"):
        return Lru(capacity) if policy == "lru" else Lfu(capacity)
    made = _imported(policy)
    try:
        return ByCachePolicy(capacity, made)
    except TypeError as fault:
        raise PluginError(
            f"plugins.answer_cache.policy={policy} cannot be made of a RowSpace alone ({fault})"
        ) from fault


def _imported(policy: str) -> type[CachePolicy]:
    module, _, name = policy.partition(":")
    try:
        made = getattr(__import__(module, fromlist=[name]), name)
    except (ImportError, AttributeError, ValueError) as fault:
        raise PluginError(f"plugins.answer_cache.policy={policy} cannot be imported: {fault}") from fault
    if not (isinstance(made, type) and issubclass(made, CachePolicy)):
        raise PluginError(f"plugins.answer_cache.policy={policy} is no recpipe.plugin.CachePolicy")
    return made
