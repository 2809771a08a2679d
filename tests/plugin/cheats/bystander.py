"""Does nothing, beside another; what others change of it can be seen."""

import lightning as L

from recpipe.plugin import Context, Contribution, Plugin

LIMIT = 4


class P(Plugin):
    api = (2, 0)

    def __init__(self, *, size: int) -> None:
        self.size = size

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution(callbacks=[Stander(self)])


class Stander(L.Callback):
    def __init__(self, plugin: P) -> None:
        self.plugin = plugin
