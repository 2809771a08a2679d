"""A splitter that says one thing here and another there, or nothing that cuts a batch."""

import os

import numpy as np

from recpipe.plugin import Context, Contribution, Plugin, Split, Splitter


class P(Plugin):
    api = (2, 0)

    def __init__(self, *, how: str) -> None:
        self.how = how

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution(splitter=Wrong(self.how))


class Wrong(Splitter):
    def __init__(self, how: str) -> None:
        self.how = how

    def split(self, batch, needs_cold) -> Split:
        samples = len(needs_cold)
        order, bounds = np.argsort(needs_cold, kind="stable"), (samples // 2, samples)
        if self.how == "repeats":
            order = np.concatenate((order[:1], order[:-1]))
        if self.how == "short":
            bounds = (samples // 2,)
        if self.how == "whole":
            bounds = (samples,)
        if self.how == "by rank" and os.environ.get("RANK", "0") == "1":
            order = order[::-1].copy()
        return Split(order, bounds)
