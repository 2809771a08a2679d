"""Fewer bits: between ranks (Neo, section 5.3) and in the tables; what does not work is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import CommOp

from recpipe.kit import POOLED, SEQUENCES
from recpipe.plugin import Direction, PluginError

WIRE_PRECISIONS = ("fp32", "fp16", "bf16", "int8")
TABLE_PRECISIONS = ("fp32", "fp16", "bf16")


def codecs(
    forward: str, backward: str, pooled: Iterable[bool] = (True,)
) -> Mapping[tuple[CommOp, Direction], Any]:
    """TorchRec's codecs of rows and their gradients; none for float32 both ways.

    ``pooled``: of each table, whether its rows are summed by bag, which have other collectives.

    A codec rounds each value once on its way: relative error at most 2^-11 (fp16), 2^-8 (bf16), and for
    int8 half of 1/255 of the row's range. A reduce-scatter adds in that precision too, rank by rank.
    """
    if (forward, backward) == ("fp32", "fp32"):
        return {}
    made: dict[tuple[CommOp, Direction], Any] = {}
    kinds = set(pooled)
    used = [op for kind, ops in ((True, POOLED), (False, SEQUENCES)) if kind in kinds for op in ops]
    for collective in used:
        if "int8" in (forward, backward) and collective is CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER:
            continue
        config = QCommsConfig(
            forward_precision=CommType[forward.upper()], backward_precision=CommType[backward.upper()]
        )
        pair = get_qcomm_codecs(config)
        made[collective, "forward"] = pair.forward
        made[collective, "backward"] = pair.backward
    return made


def refuse_unsupported(device: str, wire: tuple[str, str], table: str, stochastic_rounding: bool) -> None:
    """``PluginError`` on what FBGEMM would ignore or fail at on ``device``."""
    if device.startswith("cuda"):
        return
    if table == "bf16":
        raise PluginError(
            "plugins.neo.table_precision=bf16: FBGEMM trains bf16 tables on GPUs alone; use fp16 or fp32"
        )
    if stochastic_rounding:
        raise PluginError(
            "plugins.neo.stochastic_rounding=true: FBGEMM rounds at random on GPUs alone and ignores the "
            "wish on a CPU; set it to false"
        )
