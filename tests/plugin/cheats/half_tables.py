"""Stores tables in 16 bits; it says that updates are not exact, and not that tables have another type."""

from recpipe.plugin import Context, Contribution, Invariant, Plugin, Quantizer, TableInfo


class P(Plugin):
    api = (2, 0)
    alters = frozenset({Invariant.EXACT_GRADIENT})

    def __init__(self, *, cheats: bool) -> None:
        self.stored = "fp16" if cheats else "fp32"

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution(quantizer=Half(self.stored))


class Half(Quantizer):
    def __init__(self, stored: str) -> None:
        self.stored = stored

    def storage(self, table: TableInfo) -> str:
        return self.stored
