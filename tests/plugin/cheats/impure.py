"""Does in ``contribute`` what a contribution must not do."""

import os
import tempfile
from pathlib import Path

import numpy as np

from recpipe.plugin import Context, Contribution, Plugin


class P(Plugin):
    api = (2, 0)

    def __init__(self, *, deed: str) -> None:
        self.deed = deed

    def contribute(self, ctx: Context) -> Contribution:
        if self.deed == "file":
            Path(tempfile.gettempdir(), "impure.txt").write_text("here", encoding="utf-8")
        if self.deed == "library":  # which Python does not see
            np.arange(3).tofile("impure.bin")
        if self.deed == "environment":
            os.environ["IMPURE"] = "1"
        if self.deed == "random":
            np.random.rand()
        if self.deed == "data":
            next(ctx.batches(0), None)
        return Contribution()
