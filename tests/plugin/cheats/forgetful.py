"""LRU that saves nothing: a resumed run takes other decisions."""

from typing import Any

from recpipe.kit import Lru
from recpipe.plugin import Cache, CachePolicy, Context, Contribution, Plugin, RowSpace


class P(Plugin):
    api = (2, 0)

    def __init__(self, *, cheats: bool) -> None:
        self.kind = Forgetful if cheats else Lru

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution(cache=[Everything(self.kind)])


class Everything(Cache):
    def __init__(self, kind: type[CachePolicy]) -> None:
        self.kind = kind

    def policy(self, space: RowSpace) -> CachePolicy:
        return self.kind(space)


class Forgetful(Lru):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def check_state(self, state) -> None:
        pass

    def load_state_dict(self, state) -> None:
        # The slots that are taken it can see.
        self.used = len(self.space.residents.rows)
