"""What plugins ask of sharded tables: limits; and rows and gradients in fewer bits between ranks, by codecs
of TorchRec's collectives.

A request that TorchRec or FBGEMM would silently ignore is refused here, with the plugin's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CommOp, QuantizedCommCodec, QuantizedCommCodecs
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recpipe.plugin.assembly import Assembly
from recpipe.plugin.calls import Owned
from recpipe.plugin.errors import PluginError
from recpipe.plugin.planner import Planner
from recpipe.plugin.quantizer import Direction
from recpipe.plugin.skipper import Skipper

WIRE_PRECISIONS = ("fp32", "fp16", "bf16", "int8")
POOLED = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
"""The collectives of pooled tables."""
SEQUENCES = (CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,)
"""The collectives of tables that give one row for each id."""
Codecs = Mapping[tuple[CommOp, Direction], Owned[QuantizedCommCodec[Any]]]
"""The codec for each collective and direction."""
CPU_KERNELS = frozenset({EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value})
IGNORED = ("device_group", "key_value_params", "use_virtual_table")
"""Constraints that recpipe's plans cannot express."""
GPU_ONLY = ("cache_params", "enforce_hbm", "stochastic_rounding")
"""Constraints that FBGEMM's CPU kernels ignore."""
COLLECTIVES: dict[type[nn.Module], tuple[CommOp, ...]] = {
    EmbeddingBagCollection: POOLED,
    EmbeddingCollection: SEQUENCES,
}


@dataclass(frozen=True)
class ShardClaims:
    """The plugins' parts that have a say in how tables are sharded."""

    planner: Owned[Planner] | None = None
    codecs: Codecs = field(default_factory=dict)
    skipper: Owned[Skipper] | None = None
    """The skipper; if it decides about updates, it needs a whole row's gradient."""

    @classmethod
    def of(cls, assembly: Assembly) -> ShardClaims:
        """The claims of a run."""
        return cls(assembly.planner, assembly.quantizing.codecs, assembly.skipper)


def refuse_limit(
    table: str, owner: Owned[Planner], limit: ParameterConstraints, device: torch.device
) -> None:
    """``PluginError`` if constraints would have no effect on ``device``."""
    on_cpu = device.type == "cpu"
    for name in (*IGNORED, *GPU_ONLY) if on_cpu else IGNORED:
        value = getattr(limit, name)
        if value and value != device.type:
            why = "recpipe's plans do not carry it" if name in IGNORED else "FBGEMM ignores it on a CPU"
            raise PluginError(
                f"{owner}: constrain() of table '{table}' sets {name}={value}, but {why}; leave it out"
            )
    kernels = limit.compute_kernels or ()
    if on_cpu and kernels and CPU_KERNELS.isdisjoint(kernels):
        raise PluginError(
            f"{owner}: constrain() of table '{table}' asks for the kernel "
            f"{' or '.join(kernels)}, which needs a GPU; use {' or '.join(sorted(CPU_KERNELS))}"
        )


def codec_registry(codecs: Codecs, kinds: Set[type[nn.Module]]) -> dict[str, QuantizedCommCodecs]:
    """TorchRec's registry of codecs for collections of ``kinds``: for each collective's name, a codec per
    direction. ``PluginError`` on a codec that these never use."""
    registry: dict[str, QuantizedCommCodecs] = {}
    used = [op for kind, ops in COLLECTIVES.items() if kind in kinds for op in ops]
    for (collective, direction), owned in codecs.items():
        if collective not in used or direction not in get_args(Direction):
            which = "pooled tables" if SEQUENCES[0] not in used else "this model's tables"
            raise PluginError(
                f"{owned}: brings a codec of {getattr(collective, 'name', collective)} "
                f"({direction}), which {which} never use; they use "
                f"{' and '.join(op.name for op in used)}, {' and '.join(get_args(Direction))}"
            )
        setattr(registry.setdefault(collective.name, QuantizedCommCodecs()), direction, owned.part)
    return registry


def wire_codecs(
    forward: str, backward: str, pooled: Iterable[bool] = (True,)
) -> Mapping[tuple[CommOp, Direction], Any]:
    """TorchRec's codecs for rows and for their gradients, each one of fp32, fp16, bf16 and int8; empty if
    both are float32.

    ``pooled``: for each table, whether its rows are summed by bag; this decides which collectives it uses.

    A codec rounds each value once: the relative error is at most 2^-11 (fp16) or 2^-8 (bf16), and for int8
    the error is half of 1/255 of the row's range. A reduce-scatter also adds in that precision, rank by rank.
    TorchRec has no reduce-scatter for int8, so tables must not be split by rows then.
    """
    if (forward, backward) == ("fp32", "fp32"):
        return {}
    made: dict[tuple[CommOp, Direction], Any] = {}
    kinds = set(pooled)
    config = QCommsConfig(
        forward_precision=CommType[forward.upper()], backward_precision=CommType[backward.upper()]
    )
    for collective in (*(POOLED if True in kinds else ()), *(SEQUENCES if False in kinds else ())):
        if "int8" in (forward, backward) and collective is CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER:
            continue
        pair = get_qcomm_codecs(config)
        made[collective, "forward"] = pair.forward
        made[collective, "backward"] = pair.backward
    return made
