"""Modules on the meta device have no values to draw, and PyTorch takes 2 ms to draw none for each table."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

RESET = {kind: kind.reset_parameters for kind in (nn.Embedding, nn.EmbeddingBag)}


def leave_undrawn(patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` ends."""
    for kind, reset in RESET.items():

        def where_there_are(self: Any, reset: Any = reset) -> None:
            if not self.weight.is_meta:
                reset(self)

        patch.setattr(kind, "reset_parameters", where_there_are)
