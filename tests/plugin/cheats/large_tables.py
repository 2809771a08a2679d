"""Rows of tables above 2,000 rows go to the cold tier in half precision; it says that it changes nothing."""

import numpy as np

from recpipe.kit import Lru
from recpipe.plugin import Cache, CachePolicy, ColdStore, Context, Contribution, Plugin, RowSpace


class P(Plugin):
    api = (2, 0)

    def __init__(self, *, cheats: bool) -> None:
        self.above = 2_000 if cheats else 10**9

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution(cache=[Rounding(self.above)])


class Rounding(Cache):
    def __init__(self, above: int) -> None:
        self.above = above

    def policy(self, space: RowSpace) -> CachePolicy:
        return Lru(space)

    def store(self, store: ColdStore) -> ColdStore:
        sizes, inner = store.layout.rows, store.scatter
        large = np.repeat(np.array(sizes) > self.above, sizes)

        def scatter(rows, records) -> None:
            halves = records.astype(np.float16).astype(np.float32)
            inner(rows, np.where(large[rows][:, None], halves, records))

        store.scatter = scatter
        return store
