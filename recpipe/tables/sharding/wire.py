"""Rows and gradients in fewer bits between ranks: TorchRec's codecs of its collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import CommOp

from recpipe.plugin.quantizer import Direction

WIRE_PRECISIONS = ("fp32", "fp16", "bf16", "int8")
POOLED = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
"""The collectives of pooled tables ..."""
SEQUENCES = (CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,)
"""... and of those whose rows are handed out one for each id."""


def wire_codecs(
    forward: str, backward: str, pooled: Iterable[bool] = (True,)
) -> Mapping[tuple[CommOp, Direction], Any]:
    """TorchRec's codecs of rows and their gradients, each of ``WIRE_PRECISIONS``; none for float32 both ways.

    ``pooled``: of each table, whether its rows are summed by bag, which have other collectives.

    A codec rounds each value once on its way: relative error at most 2^-11 (fp16), 2^-8 (bf16), and for
    int8 half of 1/255 of the row's range. A reduce-scatter adds in that precision too, rank by rank; TorchRec
    has none for int8, so that tables must not be split by rows then.
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
