"""Fewer bits between ranks (Neo, section 5.3) and in the tables; combinations that do not work are
refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchrec.distributed.types import CommOp

from recpipe.kit import wire_codecs
from recpipe.plugin import Direction, PluginError, Quantizer, TableInfo

TABLE_PRECISIONS = ("fp32", "fp16")
"""FBGEMM trains no rows of bfloat16, neither on a CPU nor on a GPU."""


class LowPrecision(Quantizer):
    """Stores all tables in one type, and sends rows and gradients in others.

    ``wire``: the precisions of rows and of their gradients; ``pooled``: for each table, whether its rows are
    summed by bag.
    """

    def __init__(self, table: str, wire: tuple[str, str], pooled: Iterable[bool] = (True,)) -> None:
        self.table, self.wire, self.pooled = table, wire, tuple(pooled)

    def storage(self, table: TableInfo) -> str | None:
        """None for float32, so that other plugins may decide."""
        return None if self.table == "fp32" else self.table

    def codecs(self) -> Mapping[tuple[CommOp, Direction], Any]:
        """TorchRec's."""
        return wire_codecs(*self.wire, self.pooled)


def refuse_ignored(device: str, stochastic_rounding: bool) -> None:
    """``PluginError`` for what FBGEMM would ignore on ``device``."""
    if stochastic_rounding and not device.startswith("cuda"):
        raise PluginError(
            "plugins.neo.stochastic_rounding=true: FBGEMM rounds at random on GPUs alone and ignores the "
            "wish on a CPU; set it to false"
        )
