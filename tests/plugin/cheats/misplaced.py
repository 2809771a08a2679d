"""A cache policy whose placements cannot be."""

from dataclasses import replace

import numpy as np

from recpipe.kit import Lru
from recpipe.plugin import Cache, CachePolicy, Context, Contribution, Plugin, RowSpace


class P(Plugin):
    api = (2, 0)

    def __init__(self, *, how: str) -> None:
        self.how = how

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution(cache=[Everything(self.how)])


class Everything(Cache):
    def __init__(self, how: str) -> None:
        self.how = how

    def policy(self, space: RowSpace) -> CachePolicy:
        return Misplaced(space, self.how)


class Misplaced(Lru):
    def __init__(self, space: RowSpace, how: str) -> None:
        super().__init__(space)
        self.how = how

    def admit(self, hits, misses, looked_up):
        placement = super().admit(hits, misses, looked_up)
        slots, rows = placement.slots, placement.rows
        if len(hits) == 0 or len(slots) < 2:
            return placement
        if self.how == "hit":
            slots = np.concatenate((hits[:1], slots[1:]))
        if self.how == "unmissed":
            rows = np.concatenate((self.space.residents.rows[:1], rows[1:]))
        if self.how == "twice":
            slots = np.concatenate((slots[:1], slots[:-1]))
        if self.how == "beyond":
            slots = slots + self.space.slots
        return replace(placement, slots=slots, rows=rows)
