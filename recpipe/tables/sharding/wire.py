"""Rows and gradients in fewer bits between ranks: TorchRec's codecs of its collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.types import CommOp

from recpipe.plugin.quantizer import Direction

WIRE_PRECISIONS = ("fp32", "fp16", "bf16", "int8")
POOLED = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
"""The collectives of pooled tables."""
SEQUENCES = (CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,)
"""The collectives of tables that give one row for each id."""


def wire_codecs(
    forward: str, backward: str, pooled: Iterable[bool] = (True,)
) -> Mapping[tuple[CommOp, Direction], Any]:
    """TorchRec's codecs for rows and for their gradients, each one of ``WIRE_PRECISIONS``; empty if both are
    float32.

    ``pooled``: for each table, whether its rows are summed by bag; this decides which collectives it uses.

    A codec rounds each value once: the relative error is at most 2^-11 (fp16) or 2^-8 (bf16), and for int8
    the error is half of 1/255 of the row's range. A reduce-scatter also adds in that precision, rank by rank.
    TorchRec has no reduce-scatter for int8, so tables must not be split by rows then.
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
