"""Puts a function of its own in the place of torch's when it is imported, if it cheats."""

import functools
import os

import torch

from recpipe.plugin import Context, Contribution, Plugin

if os.environ.get("IMPURE") == "import":
    real = torch.optim.SGD.step

    @functools.wraps(real)
    def step(self, closure=None):
        return real(self, closure)

    torch.optim.SGD.step = step


class P(Plugin):
    api = (2, 0)

    def __init__(self, *, cheats: bool) -> None:
        self.cheats = cheats

    def contribute(self, ctx: Context) -> Contribution:
        return Contribution()
